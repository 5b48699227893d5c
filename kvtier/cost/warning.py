"""What is said before work gets slow: one record for a person and for a program.

A record says how loud it is, why (which bytes over which link), the rate before and after, and what
would be better, each remedy with the rate predicted for it. ``kvtier plan``, ``kvtier stress``,
``kvtier run``, a store, a cache and the run-time monitor all say it with this record, so the same
load gives the same words everywhere.

Kinds:

* ``slowdown``: decoding would be slower than with everything in VRAM.
* ``needless``: something is kept off the card that would fit on it.
* ``ttft``: a tier would raise the time to first token, though it may raise throughput.
* ``measured``: decoding is slower than predicted, or than with everything in VRAM; said at run time.
* ``event``: something happened that has no prediction (``kvtier.announce.plain_record``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtier.announce import announce
from kvtier.cost.cliff import LEVELS, Level, level
from kvtier.errors import ConfigError

Kind = Literal["slowdown", "needless", "ttft", "measured"]

_LOUDNESS = {name: rank for rank, (name, _) in enumerate(reversed(LEVELS), start=1)} | {"none": 0}


@dataclass(frozen=True)
class Remedy:
    """Something to do instead.

    Attributes:
        what: in words. how: the options or arguments that do it.
        predicted_tps: tokens/s of all sequences with it.
    """

    what: str
    how: str
    predicted_tps: float

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        return f"{self.what}{how}: {rate(self.predicted_tps)} tokens/s"

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "how": self.how, "predicted_tps": self.predicted_tps}


@dataclass(frozen=True)
class CostWarning:
    """One warning. Rates are tokens/s of all sequences together.

    Attributes:
        level: ``notice``, ``warning`` or ``severe``.
        cause: which bytes come over which link, or what else it is.
        link: class of the slow link: ``pinned``, ``pageable``, ``fallback``, ``cpu`` or ``disk``.
        before_tps: with everything in VRAM. after_tps: as asked for, with its band.
        remedies: the best first; never empty.
        before_ttft_s, after_ttft_s: time to first token without and with the tier (kind ``ttft``).
        note: a last sentence.
    """

    kind: Kind
    level: Level
    cause: str
    link: str
    before_tps: float
    after_tps: float
    after_low_tps: float
    after_high_tps: float
    remedies: tuple[Remedy, ...]
    before_ttft_s: float | None = None
    after_ttft_s: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.level not in _LOUDNESS or self.level == "none":
            raise ConfigError(
                f"level is {self.level!r}; use {', '.join(name for name, _ in LEVELS)}"
            )
        if not self.remedies:
            raise ConfigError("a warning has no remedy; give at least one with its predicted rate")

    @property
    def factor(self) -> float:
        """How many times slower; of a ``ttft`` warning, how many times later the first token is."""
        if self.before_ttft_s is not None and self.after_ttft_s is not None:
            return self.after_ttft_s / self.before_ttft_s
        return self.before_tps / self.after_tps

    @property
    def loudness(self) -> int:
        """1 for a notice, 3 for severe."""
        return _LOUDNESS[self.level]

    @property
    def text(self) -> str:
        """One paragraph."""
        words = _WORDS[self.kind](self)
        note = f" {self.note}" if self.note else ""
        return f"{self.level}: {words}{note} Instead: {'; '.join(map(str, self.remedies))}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, the entry of every ``warnings`` list."""
        return {
            "kind": self.kind,
            "level": self.level,
            "cause": self.cause,
            "link": self.link,
            "before_tps": self.before_tps,
            "after_tps": self.after_tps,
            "after_low_tps": self.after_low_tps,
            "after_high_tps": self.after_high_tps,
            "before_ttft_s": self.before_ttft_s,
            "after_ttft_s": self.after_ttft_s,
            "remedies": [remedy.to_json() for remedy in self.remedies],
            "text": self.text,
        }

    def announce(self, stacklevel: int = 1) -> None:
        """Say it: an ``OffloadWarning`` and a log event, both with the record.

        Args:
            stacklevel: as for ``warnings.warn``, seen from the caller.
        """
        announce(self.text, self.to_json(), stacklevel=stacklevel + 1)


def _slowdown(one: CostWarning) -> str:
    return (
        f"decoding would be about {one.factor:.1f}x slower than with everything in VRAM "
        f"({rate(one.before_tps)} -> {rate(one.after_tps)} tokens/s, "
        f"{rate(one.after_low_tps)} to {rate(one.after_high_tps)}; predicted, not measured), "
        f"because {one.cause}."
    )


def _needless(one: CostWarning) -> str:
    return (
        f"{one.cause}, so nothing needs to be off the card; keeping it there costs "
        f"{one.factor:.1f}x ({rate(one.before_tps)} -> {rate(one.after_tps)} tokens/s, predicted)."
    )


def _ttft(one: CostWarning) -> str:
    assert one.before_ttft_s is not None
    assert one.after_ttft_s is not None
    return (
        f"the first token would come about {one.factor:.1f}x later ({one.before_ttft_s:.2f} s "
        f"computed -> {one.after_ttft_s:.2f} s loaded, predicted), because {one.cause}."
    )


def _measured(one: CostWarning) -> str:
    return (
        f"decoding runs at {rate(one.after_tps)} tokens/s, {one.factor:.1f}x slower than "
        f"{rate(one.before_tps)}, because {one.cause}."
    )


_WORDS = {
    "slowdown": _slowdown,
    "needless": _needless,
    "ttft": _ttft,
    "measured": _measured,
}


def rate(tps: float) -> str:
    """Tokens/s with three digits at most: ``42.2``, ``3.98``, ``2,434``."""
    if tps >= 100:
        return f"{tps:,.0f}"
    return f"{tps:.1f}" if tps >= 10 else f"{tps:.2f}"


def worst(warnings: Sequence[CostWarning]) -> list[CostWarning]:
    """The loudest warning of each kind and link, the loudest first; of equals the larger factor."""
    chosen: dict[tuple[str, str], CostWarning] = {}
    for one in warnings:
        key = (one.kind, one.link)
        best = chosen.get(key)
        if best is None or (one.loudness, one.factor) > (best.loudness, best.factor):
            chosen[key] = one
    order = list(_WORDS)
    return sorted(chosen.values(), key=lambda one: (-one.loudness, order.index(one.kind)))


def at_least(factor: float, least: Level) -> Level:
    """Level of a slowdown that is to be told in any case, as ``least`` or louder."""
    found = level(factor)
    return found if _LOUDNESS[found] >= _LOUDNESS[least] else least
