"""The answer of ``kvtier plan``: what fits, how fast it decodes at several contexts, what to do."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvtier.cost.basis import UNITS
from kvtier.cost.cliff import LEVELS
from kvtier.cost.lint import Verdict, plausibility
from kvtier.cost.outlook import Load
from kvtier.cost.profile import Profile
from kvtier.cost.warning import CostWarning, worst
from kvtier.cost.workload import kv_read, read_weights

#: Contexts of the table, and of ``kvtier stress``, where none are given.
CONTEXTS = (512, 2048, 8192, 32768)

#: Contexts of a sweep: three a doubling.
SWEEP_STEPS = 3
SWEEP_LEAST = 512
SWEEP_MOST = 131072


@dataclass(frozen=True)
class Row:
    """One context. ``load`` is None if it does not fit, whatever is off the card."""

    context: int
    load: Load | None

    def to_json(self) -> dict[str, Any]:
        if self.load is None:
            return {"context": self.context, "fits": False}
        load, estimate = self.load, self.load.estimate
        return {
            "context": self.context,
            "fits": True,
            "mode": estimate.mode,
            "weights_off_card": load.weights_off,
            "kv_off_card": load.kv_off,
            "prefill_s": load.prefill_s,
            "tpot_ms": estimate.seconds * 1e3,
            "tps": estimate.tps,
            "low_tps": estimate.low,
            "high_tps": estimate.high,
            "baseline_tps": estimate.baseline_tps,
            "slowdown": estimate.slowdown,
            "level": estimate.level,
            "bound": estimate.bound,
        }


@dataclass(frozen=True)
class Plan:
    """A load at several contexts.

    Attributes:
        asked: the load at the context in question.
        contexts: of the table, ascending.
        one: warnings are about ``asked`` alone, and not about the worst context of the table.
        sweep: contexts of the curve; empty if it was not asked for.
        claimed_tps: a rate to check, if any.
        profile: that the load's constants were taken from, where it has them; None: all from a table.
    """

    asked: Load
    contexts: tuple[int, ...]
    one: bool
    sweep: tuple[int, ...] = ()
    claimed_tps: float | None = None
    profile: Profile | None = None

    @cached_property
    def rows(self) -> list[Row]:
        return self._rows(self.contexts)

    @cached_property
    def curve(self) -> list[Row]:
        """The rows of the sweep."""
        return self._rows(self.sweep)

    def _rows(self, contexts: Sequence[int]) -> list[Row]:
        return [Row(n, replace(self.asked, context=n).placed()) for n in contexts]

    @cached_property
    def placed(self) -> Load | None:
        """The load in question with what must be off the card; None if it does not fit at all."""
        return self.asked.placed()

    @property
    def worked_out(self) -> bool:
        """Whether more is off the card than was asked for, since it does not fit otherwise."""
        return self.placed is not None and self.placed is not self.asked

    @cached_property
    def warnings(self) -> list[CostWarning]:
        """Of the load in question, or of the worst context of the table."""
        loads = [self.placed] if self.one else [row.load for row in self.rows]
        return worst([one for load in loads if load is not None for one in load.warnings()])

    @cached_property
    def cliff(self) -> dict[str, Any]:
        """Where everything stops to fit, and from which context on each level applies."""
        return {
            "fits_up_to": self.asked.resident.budget.longest_context(),
            "begins": cliff_of(self.asked, max(SWEEP_MOST, self.asked.context)),
        }

    @cached_property
    def claim(self) -> Verdict | None:
        """The claimed rate against what the bytes of a step allow."""
        if self.claimed_tps is None or self.placed is None:
            return None
        load = self.placed
        # What nothing exceeds: the peak of the memory, and the fast end of the link's class.
        return plausibility(
            weights_gb=read_weights(load.work, load.constants) / 1e9,
            claimed_tps=self.claimed_tps,
            gpu_gbs=load.card.memory_bandwidth / 1e9,
            gpu_fraction=1 - load.weights_off,
            cpu_gbs=load.slow.high / 1e9,
            kv_gb=kv_read(load.work, "vram") * (1 - load.kv_off) / 1e9,
            batch=load.sequences,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; see docs/plan.md."""
        asked, placed = self.asked, self.placed
        basis = placed.estimate.basis.to_json() if placed is not None else None
        found = {
            "model": asked.model.name,
            "gpu": asked.card.name,
            "context": asked.context,
            "sequences": asked.sequences,
            "kv_dtype": asked.kv_dtype,
            "kv_bytes_per_token": asked.model.token_bytes(asked.kv_dtype),
            "weight_bits": asked.bits,
            "weight_bytes": asked.model.weight_bytes(asked.weight_bits),
            "link": asked.slow.to_json(),
            "off_card": {
                "weights": None if placed is None else placed.weights_off,
                "kv": None if placed is None else placed.kv_off,
                "asked_weights": asked.weights_off,
                "asked_kv": asked.kv_off,
                "worked_out": self.worked_out,
            },
            "fits": placed is not None,
            "budget": (asked if placed is None else placed).budget.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "sweep": [row.to_json() for row in self.curve],
            "cliff": self.cliff,
            "warnings": [one.to_json() for one in self.warnings],
            "claim": None if self.claim is None else self.claim.to_json(),
            "basis": basis,
            "profile": None if self.profile is None else self.profile.summary(asked.card),
            "units": UNITS,
        }
        if asked.codecs:
            load = placed or asked
            over = load.kv_over_link
            found["codecs"] = asked.codecs.to_json() | {"kv_over_link_bytes": over}
        if asked.mode == "select":
            found["selection_tokens"] = asked.selected.tokens
        return found


def table_contexts(context: int | None, longest: int) -> tuple[int, ...]:
    """Contexts of the table: the usual ones that the model reads (``longest``, 0 if unknown), and
    the one in question."""
    usual = [n for n in CONTEXTS if not longest or n <= longest]
    return tuple(sorted({*usual, *([context] if context else [])})) or (CONTEXTS[0],)


def sweep_contexts(context: int, longest: int) -> tuple[int, ...]:
    """Three contexts a doubling, up to what the model reads or 131,072, or ``context`` if longer."""
    most = max(context, min(longest or SWEEP_MOST, SWEEP_MOST))
    found, n = [], 0
    while (value := round(SWEEP_LEAST * 2 ** (n / SWEEP_STEPS))) < most:
        found.append(value)
        n += 1
    return (*found, most)


def cliff_of(load: Load, most: int) -> dict[str, int | None]:
    """Level -> shortest context, in tokens up to ``most``, at which the load as placed reaches it;
    None if it never does."""

    @functools.cache
    def factor(tokens: int) -> float:
        placed = replace(load, context=tokens).placed()
        return math.inf if placed is None else placed.estimate.slowdown

    # Weights off the card cost most at a short context, KV at a long one, so no plain bisection:
    # the first of some lengths that is past the level, then between it and the one before.
    lengths = sorted({1, *(round(2 ** (n / 2)) for n in range(8, 2 * most.bit_length())), most})
    lengths = [n for n in lengths if n <= most]
    begins: dict[str, int | None] = {}
    for name, past in reversed(LEVELS):
        index = next((i for i, n in enumerate(lengths) if factor(n) >= past), None)
        if index is None:
            begins[name] = None
            continue
        low, high = lengths[index - 1] if index else 0, lengths[index]
        while high - low > max(1, high // 256):
            middle = (low + high) // 2
            low, high = (low, middle) if factor(middle) >= past else (middle, high)
        begins[name] = high
    return begins
