"""Measure which layers of a model may choose pages for those behind them."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from typing import Any

import torch

from kvtier.attention.budget import Budget
from kvtier.attention.filters import Filters, RecallMeter, choose_filters
from kvtier.attention.mode import Mode, Selection
from kvtier.errors import ConfigError
from kvtier.integrations.transformers.cache import TieredCache
from kvtier.integrations.transformers.layout import layout_of
from kvtier.selector import Query, Selector
from kvtier.store.store import TieredStore


class _Watch(Selector):
    """Reads everything and keeps each layer's shares of attention."""

    name = "watch"

    def __init__(self) -> None:
        self.shares: dict[int, torch.Tensor] = {}

    def observe(self, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        self.shares[layer] = (page_lse - lse[:, None]).exp()

    def scores(self, query: Query) -> torch.Tensor:
        raise AssertionError("every layer is dense")


def calibrate_filters(
    model: torch.nn.Module,
    ids: torch.Tensor,
    *,
    prefill: int,
    count: int,
    share: float = 0.1,
    wait: int = 1,
    page_tokens: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Filters:
    """Decode a text, teacher-forced, and choose the filter layers that recall most.

    Args:
        model: a transformers model, layers of full attention only.
        ids: int64 ``[1, N]``, the text.
        prefill: tokens that go before the first measured one; the others, up to N, are measured.
        count: filters, at most.
        share: of the pages that a layer may read.
        progress: called with steps done and steps in all.

    Raises:
        ConfigError: the text is too short, or a layer has no full attention.
    """
    layout = layout_of(model, page_tokens, summaries=True)
    if any(layer.kind != "full" for layer in layout.layers):
        raise ConfigError(
            "the model has layers without full attention; omnikv cannot choose for it"
        )
    steps = ids.shape[1] - prefill
    if steps < 1 or prefill < 16 * page_tokens:
        raise ConfigError(
            f"{ids.shape[1]} tokens with {prefill} of prefill leave {steps} steps; give a text of at "
            f"least {16 * page_tokens} tokens of prefill and one more"
        )
    watch = _Watch()
    everything = frozenset(range(len(layout.layers)))
    selection = Selection("watch", lambda: watch, Budget(1.0, "share"), dense=everything)
    meter = RecallMeter(len(layout.layers), share)
    need = layout.pages(ids.shape[1] + 1) + 2
    room = need * (layout.page_bytes + 2 * layout.summary_range[1])
    forward: Any = model
    keyword = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )
    with (
        TieredStore(layout, device="emulated", vram=room) as store,
        TieredCache(model, store, mode=Mode("select", "watch", selection)) as cache,
        torch.inference_mode(),
    ):
        forward(ids[:, :prefill], **{keyword: cache})
        for n in range(steps):
            forward(ids[:, prefill + n : prefill + n + 1], **{keyword: cache})
            meter.step([watch.shares[layer].cpu() for layer in sorted(watch.shares)])
            if progress is not None:
                progress(n + 1, steps)
        name = cache.identity.model
    layers, worst, mean = choose_filters(meter.recall(), count, wait=wait)
    today = datetime.date.today().isoformat()
    return Filters(name, layers, wait, worst, mean, share, meter.pages, meter.steps, today)
