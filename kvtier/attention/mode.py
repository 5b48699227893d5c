"""How attention reads pages: by name, as users write it.

``exact-stream`` gathers all pages of a layer in VRAM, ``exact-split`` reads each page where it is, ``select:...`` reads
some of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvtier.attention.budget import Budget
from kvtier.errors import ConfigError
from kvtier.plugins import meant
from kvtier.selector import Selector, load_selector

Kind = Literal["exact-stream", "exact-split", "select"]
Scope = Literal["head", "layer"]
Prefetch = Literal["none", "last", "hidden", "random"]

_OWN = ("budget", "recent", "sinks", "dense", "scope", "prefetch")


@dataclass(frozen=True)
class Selection:
    """What ``select:NAME,budget=...`` asks for.

    Attributes:
        spec: the selector, as ``kvtier.selector.load_selector`` reads it.
        make: makes one selector a sequence.
        budget: pages read in a layer and step.
        recent: what is always read right before the tail, in whole pages: so many tokens (int), or a share of
            the budget (float).
        sinks: first pages that are always read.
        dense: layers that read every page.
        scope: one list of pages for each KV head, or one a layer (the mean over the heads).
        prefetch: what guesses the pages of the next layer, so that their copies start early: nothing, the last step's
            query, the current hidden state, or chance (for tests). A guess never changes a result.
    """

    spec: str
    make: Callable[[], Selector] = field(compare=False)
    budget: Budget
    recent: int | float = 0.125
    sinks: int = 1
    dense: frozenset[int] = frozenset({0, 1})
    scope: Scope = "head"
    prefetch: Prefetch = "last"

    def always(self, budget: int, page_tokens: int) -> tuple[int, int]:
        """Of ``budget`` sealed pages those that are read whatever the query: so many first and so many recent ones."""
        sinks = max(0, min(self.sinks, budget - 1))
        if isinstance(self.recent, float):
            recent = max(1, math.floor(budget * self.recent))
        else:
            recent = -(-self.recent // page_tokens)
        return sinks, max(0, min(recent, budget - sinks))


@dataclass(frozen=True)
class Mode:
    """A mode of attention.

    Attributes:
        text: as it was asked for.
        selection: for ``select`` only.
    """

    kind: Kind
    text: str
    selection: Selection | None = None

    @property
    def exact(self) -> bool:
        """Whether every page is read."""
        return self.selection is None


def parse_mode(text: str) -> Mode:
    """``exact-stream``, ``exact-split`` or ``select:NAME,budget=B[,recent=TOKENS|SHARE%][,sinks=PAGES]
    [,dense=0+1|none][,scope=head|layer][,prefetch=last|hidden|none|random][,PARAMETER=VALUE...]``; other parameters are
    the selector's.

    Raises:
        ConfigError: unknown mode, selector or parameter, or a value that cannot be.
    """
    if text in ("exact-stream", "exact-split"):
        return Mode(text, text)  # type: ignore[arg-type]
    if not text.startswith("select:"):
        raise ConfigError(
            f"mode {text!r} is unknown; use exact-stream, exact-split or select:NAME,budget=..."
        )
    name, *items = text[len("select:") :].split(",")
    own: dict[str, str] = {}
    others: list[str] = []
    seen: set[str] = set()
    for item in items:
        key, sep, value = item.partition("=")
        if not sep or not key.strip() or not value.strip():
            raise ConfigError(f"mode {text!r}: {item!r} is not of the form key=value")
        if key.strip() in seen:
            raise ConfigError(f"mode {text!r} gives {key.strip()} twice; give it once")
        seen.add(key.strip())
        if key.strip() in _OWN:
            own[key.strip()] = value.strip()
        else:
            others.append(item.strip())
    if "budget" not in own:
        raise ConfigError(f"mode {text!r} has no budget; add budget=10%, 64pages or 2048tokens")
    spec = ":".join([name.strip(), ",".join(others)]) if others else name.strip()
    try:
        return Mode("select", text, _selection(text, spec, own))
    except ConfigError as error:
        # What is none of ours is taken for the selector's.
        near = [meant(item.partition("=")[0].strip(), _OWN) for item in others]
        if "no parameter" not in str(error) or not any(near) or "did you mean" in str(error):
            raise
        raise ConfigError(f"{error}{max(near)}") from error


def _selection(text: str, spec: str, own: dict[str, str]) -> Selection:
    selection: dict[str, object] = {}
    if own.get("recent", "").endswith("%"):
        share = own.pop("recent").removesuffix("%")
        if not share.isdigit() or not 0 <= int(share) <= 100:
            raise ConfigError(f"mode {text!r}: recent={share}%; give 0% to 100% of the budget")
        selection["recent"] = int(share) / 100
    for key in ("recent", "sinks"):
        if key in own:
            if not own[key].isdigit():
                raise ConfigError(f"mode {text!r}: {key}={own[key]!r}; give a whole number >= 0")
            selection[key] = int(own[key])
    if "dense" in own:
        selection["dense"] = _layers(text, own["dense"])
    choices: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("scope", ("head", "layer")),
        ("prefetch", ("none", "last", "hidden", "random")),
    )
    for key, known in choices:
        if key in own:
            if own[key] not in known:
                raise ConfigError(f"mode {text!r}: {key}={own[key]!r}; use {', '.join(known)}")
            selection[key] = own[key]
    budget = Budget.parse(own["budget"])
    return Selection(spec, load_selector(spec), budget, **selection)  # type: ignore[arg-type]


def _layers(text: str, value: str) -> frozenset[int]:
    if value == "none":
        return frozenset()
    if not re.fullmatch(r"\d+(\+\d+)*", value):
        raise ConfigError(
            f"mode {text!r}: dense={value!r}; give layers joined by '+' (dense=0+1), or none"
        )
    return frozenset(int(x) for x in value.split("+"))
