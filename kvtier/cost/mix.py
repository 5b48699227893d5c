"""Mixes of caching, prefix reuse and retrieval, and the figures of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.cost.demand import Demand
from kvtier.cost.first_token import Place
from kvtier.errors import ConfigError

#: A tier has to make the first token so much sooner, or sustain so much more, to be worth having.
MIN_GAIN = 1.05

TIERS = ("vram", "host", "disk")
_NAMES = {"vram": "VRAM", "host": "RAM", "disk": "disk"}


@dataclass(frozen=True)
class Mix:
    """What is done.

    Attributes:
        tiers: in which sessions are kept: none, ``vram``, that and ``host``, these and ``disk``.
        reuse: the prefix that sessions share is kept once, for all.
        retrieval: prompts hold the prefix and what was retrieved.
    """

    tiers: tuple[str, ...]
    reuse: bool
    retrieval: bool

    @property
    def name(self) -> str:
        """``prefix + sessions in VRAM, RAM``."""
        parts = []
        if self.reuse:
            parts.append("prefix reuse")
        if self.tiers:
            parts.append("sessions in " + ", ".join(_NAMES[tier] for tier in self.tiers))
        if self.retrieval:
            parts.append("retrieval")
        return " + ".join(parts) or "no cache"

    def simpler(self) -> Mix | None:
        """The same without its last tier, or without reuse; None of the simplest."""
        if self.tiers:
            return replace(self, tiers=self.tiers[:-1])
        return replace(self, reuse=False) if self.reuse else None


def mixes(demand: Demand, host: bool, disk: bool) -> Iterator[Mix]:
    """All mixes that differ for this demand and these tiers."""
    tiers: list[tuple[str, ...]] = [(), ("vram",)]
    if host:
        tiers.append(("vram", "host"))
    if disk:
        tiers.append((*tiers[-1], "disk"))
    for reuse in (False, True) if demand.shared else (False,):
        yield from (Mix(chosen, reuse, False) for chosen in tiers)
        if demand.own > 1:
            yield Mix((), reuse, True)


@dataclass(frozen=True)
class TierUse:
    """Bytes of a tier: that there are, that are used, that are needed so that nothing is lost; of a tier
    with another below it, those are the same."""

    limit: float
    used: float
    needed: float

    @property
    def met(self) -> bool:
        """Whether nothing is lost for want of room."""
        return self.needed <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {
            "limit_bytes": round(self.limit),
            "used_bytes": round(self.used),
            "needed_bytes": round(self.needed),
            "met": self.met,
        }


@dataclass(frozen=True)
class Option:
    """A mix and its figures.

    Attributes:
        ttft_s: mean time to first token under the demand; None if requests come faster than they are
            served, so that the queue grows. alone_s: with nothing else going on. last_s: of the last
            turn, alone.
        tps: tokens/s of one request under the demand.
        rate: requests a minute that can be sustained.
        batch: requests for which there is room beside the cache.
        found: share of prompt tokens by where they were, ``nowhere`` for the computed ones.
        tiers: bytes by tier.
        gain: of decoding against whole prompts: ``matched_batch`` at as many sequences, ``from_batch``
            by more of them; empty if whole prompts do not fit.
        unmet: goals that are missed, in words. notes: what else to know. worth: its tiers are.
    """

    mix: Mix
    ttft_s: float | None = None
    alone_s: float = math.inf
    last_s: float = math.inf
    tps: float = 0.0
    rate: float = 0.0
    batch: int = 0
    found: dict[Place, float] = field(default_factory=dict)
    tiers: dict[str, TierUse] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    worth: bool = True

    @classmethod
    def impossible(cls, mix: Mix, why: str) -> Option:
        """A mix that cannot run."""
        return cls(mix, unmet=(why,))

    @property
    def possible(self) -> bool:
        return self.batch > 0

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that are not computed."""
        return sum(share for place, share in self.found.items() if place != "nowhere")

    @property
    def met(self) -> bool:
        """Whether every goal is met."""
        return not self.unmet

    @property
    def rank(self) -> tuple[object, ...]:
        """The best sorts first."""
        ttft = math.inf if self.ttft_s is None else self.ttft_s
        return (
            not self.possible, len(self.unmet), not self.worth, self.mix.retrieval, ttft, -self.rate,
            len(self.mix.tiers),
        )  # fmt: skip

    def gains_over(self, simpler: Option) -> bool:
        """Whether it is better by ``MIN_GAIN`` in first token or in sustained requests."""
        if not simpler.possible:
            return self.possible
        sooner = simpler.alone_s / self.alone_s if self.alone_s else 1.0
        return max(sooner, self.rate / simpler.rate) >= MIN_GAIN

    def not_worth(self, simpler: Option) -> Option:
        """This option, with the remark that the simpler one does as well."""
        note = f"gains less than {MIN_GAIN - 1:.0%} over '{simpler.mix.name}'"
        return replace(self, worth=False, notes=(*self.notes, note))

    def to_json(self) -> dict[str, Any]:
        """Plain values; times null where there is none."""
        return {
            "name": self.mix.name,
            "tiers": list(self.mix.tiers),
            "prefix_reuse": self.mix.reuse,
            "retrieval": self.mix.retrieval,
            "exact": not self.mix.retrieval,
            "possible": self.possible,
            "met": self.met,
            "worth": self.worth,
            "ttft_s": self.ttft_s,
            "ttft_alone_s": self.alone_s if self.possible else None,
            "ttft_last_turn_s": self.last_s if self.possible else None,
            "tps": self.tps,
            "requests_per_minute": self.rate,
            "batch": self.batch,
            "hit_share": self.hit_share,
            "found": dict(self.found),
            "bytes": {name: use.to_json() for name, use in self.tiers.items()},
            "decode_gain": dict(self.gain) or None,
            "unmet": list(self.unmet),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Goals:
    """What is to be reached besides the demand itself: seconds to the first token at most, tokens/s of a
    request at least."""

    ttft_s: float | None = None
    tps: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"goal {name} is {value}; give a number above 0")

    def unmet(self, option: Option, demand: Demand) -> tuple[str, ...]:
        """What an option misses, in words."""
        missed = []
        if option.rate < demand.requests:
            missed.append(f"sustains {option.rate:.3g} of {demand.requests:g} requests a minute")
        if self.ttft_s is not None:
            if option.ttft_s is None:
                missed.append(f"first token: the queue grows (goal {self.ttft_s:g} s)")
            elif option.ttft_s > self.ttft_s:
                missed.append(f"first token after {option.ttft_s:.3g} s (goal {self.ttft_s:g} s)")
        if self.tps is not None and option.tps < self.tps:
            missed.append(f"{option.tps:.3g} tokens/s a request (goal {self.tps:g})")
        return tuple(missed)


def decode_gain(reference: float, matched: float, largest: float) -> dict[str, float]:
    """A gain in tokens/s, split: ``matched_batch`` is what reading less does at the same number of
    sequences, ``from_batch`` what more sequences do; never one number for both."""
    return {"matched_batch": matched / reference, "from_batch": largest / matched}
