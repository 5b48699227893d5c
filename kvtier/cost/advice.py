"""Which mix of caching, prefix reuse and retrieval meets a workload with a card, RAM and disk.

Every mix is judged by the same figures at the same demand: time to first token, tokens/s of a request,
requests a minute that can be sustained, what each tier must hold, and what share of the prompt tokens is
found. Rules:

* Tiers are inclusive, as they are with write-through: what is in VRAM is in host RAM too. So a host tier
  no larger than the VRAM tier adds nothing but copies (Dynamo PR 6506), and the same of a disk tier.
* Sessions come in random order, so the share that is found is the share that a tier holds. Sessions that
  come round in one order find less under LRU.
* What is known is loaded or computed again, whichever is sooner (``first_token``). A disk tier can make
  the first token later in an engine that always loads: that has its own warning.
* A tier that makes the first token less than 5 % sooner and sustains less than 5 % more requests is not
  worth having (LMCache issues 1109 and 2334: three tokens loaded, pure overhead).
* A request that waits finds the card busy with the prefills of others: mean wait of an M/D/1 queue,
  ``rho s / (2 (1 - rho))``. The scheduler is a good one: decoding takes the time of full batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.demand import Demand
from kvtier.cost.first_token import PLACES, FirstToken, Place
from kvtier.cost.mix import Goals, Mix, Option, TierUse, decode_gain, mixes
from kvtier.cost.outlook import Load
from kvtier.cost.shape import ModelShape
from kvtier.cost.warning import CostWarning
from kvtier.devices.cards import Card
from kvtier.errors import ConfigError
from kvtier.units import format_size


@dataclass(frozen=True)
class Means:
    """What there is to run on.

    Attributes:
        host, disk: bytes for KV. vram: bytes that may be used in all; None: what the card leaves.
    """

    card: Card
    host: int = 0
    disk: int = 0
    vram: int | None = None

    def __post_init__(self) -> None:
        for name in ("host", "disk"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give bytes of at least 0")


@dataclass(frozen=True)
class Averages:
    """Means over the requests of a session at given residencies."""

    seconds: float
    compute_s: float
    link_s: float
    disk_s: float
    last_s: float
    found: dict[Place, float]


@dataclass(frozen=True)
class Advice:
    """The question; ``options`` is the answer, the best first."""

    model: ModelShape
    means: Means
    demand: Demand
    goals: Goals = field(default_factory=Goals)
    kv_dtype: str = "bf16"
    weight_bits: float | None = None
    constants: Constants = field(default_factory=lambda: DEFAULTS, repr=False)

    @cached_property
    def options(self) -> list[Option]:
        """Every mix with its figures, the best first: fewest goals missed, tiers that are worth having,
        exact before inexact, the soonest first token."""
        means = self.means
        found = {
            mix: self._option(mix) for mix in mixes(self.demand, bool(means.host), bool(means.disk))
        }
        for mix, option in found.items():
            less = mix.simpler()
            simpler = None if less is None else found.get(less)
            if simpler is not None and not option.gains_over(simpler):
                found[mix] = option.not_worth(simpler)
        return sorted(found.values(), key=lambda option: option.rank)

    @cached_property
    def warnings(self) -> list[CostWarning]:
        """That restoring a prompt from disk takes longer than computing it, if it does."""
        if not self.means.disk:
            return []
        load = replace(self._load(self.demand.prompt, 1), disk_prefix=True)
        return [one for one in load.warnings() if one.kind == "ttft"]

    @property
    def working_set(self) -> float:
        """Bytes of all sessions' KV, the shared prefix once."""
        shared, own = self._sizes(Mix(("vram",), bool(self.demand.shared), False))
        return shared + own

    # one mix

    def _option(self, mix: Mix) -> Option:
        demand = self.demand
        context = demand.output + (demand.short if mix.retrieval else demand.prompt)
        one = self._load(context, 1)
        placed = one.placed()
        off = 0.0 if placed is None else self._off_bytes(placed)
        if placed is None or off > self.means.host:
            need = "" if placed is None else f": {format_size(off)} of it must be in host RAM"
            return Option.impossible(mix, f"a request of {context:,} tokens does not fit{need}")
        runs = [
            self._run(mix, context, n, placed if off else None, off)
            for n in self._batches(context, off)
        ]
        ready = [run for run in runs if run.ttft_s is not None]
        best = (
            min(ready, key=lambda run: (run.ttft_s, -run.rate))
            if ready
            else max(runs, key=lambda run: run.rate)
        )
        # Alone, no room is kept for others; and most is sustained with another room than is soonest.
        best = replace(
            best,
            alone_s=min(run.alone_s for run in runs),
            last_s=min(run.last_s for run in runs),
            rate=max(run.rate for run in runs),
        )
        return replace(best, unmet=self.goals.unmet(best, demand))

    def _most(self, context: int) -> int:
        """Requests of that many tokens that fit together, as many as there are sessions at most."""
        fits = self._load(context, 1).budget.max_sequences()
        sessions = self.demand.sessions
        return max(1, sessions if fits is None else min(fits, sessions))

    def _batches(self, context: int, off: float) -> list[int]:
        """Requests decoded together, to choose from: steps of a quarter at most, and all sessions. They
        are the same whatever the context, so that a shorter one has more to choose from, never other
        ones."""
        most = 1 if off else self._most(context)
        steps = {n << k for n in (4, 5, 6, 7) for k in range(most.bit_length())}
        return sorted({n for n in {1, 2, 3, self.demand.sessions} | steps if n <= most})

    def _run(self, mix: Mix, context: int, batch: int, placed: Load | None, off: float) -> Option:
        """The mix with so many requests decoded together."""
        demand = self.demand
        load = placed or self._load(context, batch)
        free = max(0.0, load.budget.free)
        limits = {"vram": free, "host": self.means.host - off, "disk": float(self.means.disk)}
        shared, own = self._sizes(mix)
        held = {
            name: limits[name] if name in mix.tiers else 0.0 for name in ("vram", "host", "disk")
        }
        if not mix.tiers and mix.reuse:
            held["vram"] = min(free, shared)
        prefix, session = _residency(held, shared), _residency(held, own, after=shared)
        means = self._averages(mix, prefix, session)
        if "disk" in mix.tiers:
            written = means.found["nowhere"] * self._mean_prompt(mix) + demand.output
            means = replace(
                means,
                disk_s=means.disk_s
                + written * self.model.token_bytes(self.kv_dtype) / self.constants["disk_bw"],
            )
        step = self._step(context, batch, placed)
        decode_s = demand.output * step / batch
        busy = max(means.compute_s + decode_s, means.link_s, means.disk_s)
        rate = 60 / busy
        arrivals = demand.requests / 60
        ttft = None
        if arrivals * busy < 1:
            service = means.compute_s / (1 - arrivals * decode_s)
            ttft = means.seconds - means.compute_s + service
            ttft += sum(_wait(arrivals, s) for s in (service, means.link_s, means.disk_s))
        return Option(
            mix=mix,
            ttft_s=ttft,
            alone_s=means.seconds,
            last_s=means.last_s,
            tps=self._tps(context, batch, placed, means.compute_s, min(arrivals, 1 / busy)),
            rate=rate,
            batch=batch,
            found={place: means.found[place] for place in PLACES},
            tiers=self._uses(mix, load, off, held, shared + own),
            gain=self._decode_gain(context),
            notes=tuple(self._notes(mix, held, shared + own, placed)),
        )

    def _averages(
        self, mix: Mix, prefix: dict[Place, float], session: dict[Place, float]
    ) -> Averages:
        turns = self.demand.sample(mix.retrieval)
        if not mix.reuse:
            turns = [replace(turn, shared=0.0) for turn in turns]
        seconds = compute = link = disk = last = 0.0
        found = dict.fromkeys(PLACES, 0.0)
        prompts = sum(turn.prompt for turn in turns)
        for turn in turns:
            whole = 0.0
            for at in PLACES:
                for there in PLACES:
                    weight = prefix[at] * session[there]
                    if not weight:
                        continue
                    way = self._first.way(turn, at, there)
                    whole += weight * way.seconds
                    compute += weight * way.compute_s / len(turns)
                    link += weight * way.link_s / len(turns)
                    disk += weight * way.disk_s / len(turns)
                    known = 0.0
                    for place, tokens in way.found:
                        found[place] += weight * tokens / prompts
                        known += tokens
                    found["nowhere"] += weight * (turn.prompt - known) / prompts
            seconds += whole / len(turns)
            last = whole
        return Averages(seconds, compute, link, disk, last, found)

    def _mean_prompt(self, mix: Mix) -> float:
        turns = self.demand.sample(mix.retrieval)
        return sum(turn.prompt for turn in turns) / len(turns)

    def _sizes(self, mix: Mix) -> tuple[float, float]:
        """Bytes of the shared prefix, and of all else that would be kept."""
        demand, size = self.demand, self.model.sequence_bytes
        shared = size(demand.shared, self.kv_dtype) if mix.reuse else 0.0
        if mix.retrieval or not mix.tiers:
            return shared, 0.0
        return shared, demand.sessions * (
            size(demand.prompt + demand.output, self.kv_dtype) - shared
        )

    def _uses(
        self, mix: Mix, load: Load, off: float, held: dict[str, float], working: float
    ) -> dict[str, TierUse]:
        # What a tier has no room for is in the one below; only the last has to hold everything.
        usable, free = load.budget.usable, max(0.0, load.budget.free)
        runtime = {"vram": usable - free, "host": off, "disk": 0.0}
        limits = {"vram": usable, "host": float(self.means.host), "disk": float(self.means.disk)}
        last = mix.tiers[-1] if mix.tiers else "vram"
        uses = {}
        for name, base in runtime.items():
            kept = min(held[name], working)
            uses[name] = TierUse(
                limits[name], base + kept, base + (working if name == last else kept)
            )
        return uses

    def _notes(
        self, mix: Mix, held: dict[str, float], working: float, placed: Load | None
    ) -> Iterator[str]:
        if placed is not None:
            yield f"{placed.off_share:.0%} of what a step reads is off the card"
        below, upper = "", 0.0
        for name in mix.tiers:
            if upper and working > upper and held[name] <= upper:
                yield (
                    f"the {name} tier ({format_size(held[name])}) is no larger than the {below} tier "
                    f"({format_size(upper)}): it adds only copies"
                )
            below, upper = name, max(upper, held[name])
        if mix.tiers and upper < working and not mix.retrieval:
            yield f"tiers hold {format_size(upper)} of the {format_size(working)} of all sessions"
        if mix.tiers and self.demand.turns == 1:
            yield "a session has one turn, so nothing of it comes again"
        if mix.retrieval:
            yield f"reads {self.demand.short:,} of {self.demand.prompt:,} tokens: not exact"

    # parts that mixes have in common

    @cached_property
    def _first(self) -> FirstToken:
        return FirstToken(
            self.model, self.means.card, self.constants, kv_dtype=self.kv_dtype,
            weight_bits=self.weight_bits,
        )  # fmt: skip

    @cached_property
    def _loads(self) -> dict[tuple[int, int], Load]:
        return {}

    def _load(self, context: int, batch: int) -> Load:
        key = (context, batch)
        if key not in self._loads:
            self._loads[key] = Load(
                self.model, self.means.card, context, batch, self.kv_dtype, self.weight_bits,
                vram=self.means.vram, constants=self.constants,
            )  # fmt: skip
        return self._loads[key]

    def _step(self, context: int, batch: int, placed: Load | None) -> float:
        return (placed or self._load(context, batch)).estimate.seconds

    def _off_bytes(self, load: Load) -> float:
        weights = load.weights_off * self.model.weight_bytes(self.weight_bits)
        return weights + load.kv_off * self.model.sequence_bytes(load.context, self.kv_dtype)

    def _tps(
        self, context: int, most: int, placed: Load | None, compute_s: float, arrivals: float
    ) -> float:
        """Tokens/s of a request: at the fewest requests decoded together that keep up."""
        share = 1 - arrivals * compute_s
        tokens = arrivals * self.demand.output
        if share <= 0:
            return 0.0
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            keeps_up = middle * share >= tokens * self._step(context, middle, placed)
            low, high = (low, middle) if keeps_up else (middle, high)
        return share / self._step(context, high, placed)

    def _decode_gain(self, context: int) -> dict[str, float]:
        """Decoding against whole prompts, each at its most sequences: what reading less does at the
        same number of them, times what more of them do."""
        whole = self.demand.prompt + self.demand.output
        if not self._load(whole, 1).fits:
            return {}
        base, most = self._most(whole), self._most(context)
        return decode_gain(
            reference=base / self._step(whole, base, None),
            matched=base / self._step(context, base, None),
            largest=most / self._step(context, most, None),
        )


def _residency(held: dict[str, float], size: float, after: float = 0.0) -> dict[Place, float]:
    """Share of ``size`` bytes by the fastest tier that has them, if ``after`` bytes come before them.
    Tiers are inclusive."""
    shares, below, capacity = dict.fromkeys(PLACES, 0.0), 0.0, 0.0
    if size:
        for place in ("vram", "host", "disk"):
            capacity = max(capacity, held[place])
            reached = min(1.0, max(0.0, (capacity - after) / size))
            shares[place], below = reached - below, reached
    shares["nowhere"] = 1 - below
    return shares


def _wait(arrivals: float, service: float) -> float:
    """Mean wait in an M/D/1 queue."""
    rho = arrivals * service
    return rho * service / (2 * (1 - rho)) if rho < 1 else math.inf


def advise(
    model: ModelShape,
    means: Means,
    demand: Demand,
    goals: Goals | None = None,
    *,
    kv_dtype: str = "bf16",
    weight_bits: float | None = None,
    constants: Constants = DEFAULTS,
) -> Advice:
    """Compare all mixes.

    Args:
        kv_dtype: of the KV cache. weight_bits: of a weight; None: as stored, or Q4_K_M's.

    Raises:
        ConfigError: the card's FLOPS are unknown, so no prefill can be predicted.
    """
    if means.card.bf16_flops is None:
        raise ConfigError(
            f"card {means.card.name} has no FLOPS in the table, so no time to first token can be "
            "predicted; give them, e.g. --gpu NAME,flops=44T"
        )
    return Advice(model, means, demand, goals or Goals(), kv_dtype, weight_bits, constants)
