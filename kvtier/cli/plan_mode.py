"""``--mode`` of ``kvtier plan``: the cost model's own names, and the modes of a cache as ``kvtier run`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.plugins import meant

if TYPE_CHECKING:
    from kvtier.attention.mode import Selection as Asked
    from kvtier.cost.workload import Mode, Selection
    from kvtier.layout import PageLayout

#: Modes of the cost model.
MODES: tuple[Mode, ...] = ("kv-stream", "kv-cpu", "select")

#: Modes of a cache that read every page, as the cost model calls them.
_EXACT: dict[str, Mode] = {"exact-stream": "kv-stream", "exact-split": "kv-cpu"}

Selects = Callable[[int], "Selection"]


def plan_mode(
    text: str | None, layout: Callable[[], PageLayout], kv_heads: int
) -> tuple[Mode | None, Selects | None]:
    """The cost model's mode, and what it selects at a context; None where that is not said.

    Args:
        layout: makes the layout of the model's pages.
        kv_heads: of a layer; 0 where there is only a latent.

    Raises:
        ConfigError: no such mode, selector or parameter, or a value that cannot be.
    """
    if text is None:
        return None, None
    for mode in MODES:
        if text == mode:
            return mode, None
    if text in _EXACT:
        return _EXACT[text], None
    if not text.startswith("select:"):
        known = ", ".join((*MODES, *_EXACT, "select:NAME,budget=..."))
        raise ConfigError(f"--mode is {text!r}; use {known}{meant(text, (*MODES, *_EXACT))}")
    from kvtier.attention.mode import parse_mode

    try:
        asked = parse_mode(text).selection
        assert asked is not None
        pages = layout()
        return "select", _selects(asked, pages, kv_heads)
    except ConfigError as error:
        raise ConfigError(f"--mode: {error}") from error


def _selects(asked: Asked, layout: PageLayout, kv_heads: int) -> Selects:
    from kvtier.cost.workload import Selection

    selector = asked.make()
    total = len(layout.layers)
    over = [layer for layer in sorted(asked.dense) if layer >= total]
    if over:
        raise ConfigError(f"dense={over[0]}: the model has layers 0 to {total - 1}")
    full = {n for n, layer in enumerate(layout.layers) if layer.kind == "full"}
    if not full:
        raise ConfigError("select needs layers of full attention, and the model has none")
    dense = full & (asked.dense | selector.dense_layers(total))
    size = layout.page_tokens

    def at(context: int) -> Selection:
        budget = asked.budget.pages(max(1, -(-context // size)), layout)
        return Selection(
            tokens=max(1, budget * size),
            page_tokens=size,
            summaries=float(selector.summary_rows),
            dense=len(dense) / len(full),
            always=sum(asked.always(budget, size)) / budget,
            heads=max(1, kv_heads) if asked.scope == "head" else 1,
            gathered=asked.scope == "head",
            guessed=asked.prefetch in ("last", "hidden"),
        )

    return at
