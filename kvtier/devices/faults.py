"""Faults on demand for the emulated device, and the bytes that a fault leaves unusable."""

from __future__ import annotations

import math
import random
from typing import NamedTuple, get_args

from kvtier.devices.cards import Direction
from kvtier.errors import ConfigError


class CopyFault(NamedTuple):
    """What befalls one copy: it fails, takes ``stall_s`` longer (infinity: never ends), or its bytes
    flow ``slowdown`` times slower."""

    fails: bool
    stall_s: float
    slowdown: float = 1.0


NO_FAULT = CopyFault(False, 0.0)


class Faults:
    """Which operations go wrong. Counts start at the call: ``nth=1`` is the next one.

    Args:
        seed: of the generator behind the rates; the same operations then meet the same faults.
        copy_failure_rate: probability that a copy fails.
        stall_rate: probability that a copy is late by ``stall_s`` seconds of virtual time.
        slow_rate: probability that the bytes of a copy flow ``slow_factor`` times slower, as when
            the driver has paged memory out.
        alloc_failure_rate: probability that a VRAM allocation fails.

    Raises:
        ConfigError: a rate outside 0..1, a negative stall, a factor below 1, a count below 1 or an
            unknown direction.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        copy_failure_rate: float = 0.0,
        stall_rate: float = 0.0,
        stall_s: float = 1.0,
        slow_rate: float = 0.0,
        slow_factor: float = 10.0,
        alloc_failure_rate: float = 0.0,
    ) -> None:
        for name, rate in (
            ("copy_failure_rate", copy_failure_rate),
            ("stall_rate", stall_rate),
            ("slow_rate", slow_rate),
            ("alloc_failure_rate", alloc_failure_rate),
        ):
            if not 0.0 <= rate <= 1.0:
                raise ConfigError(f"{name} is {rate}; it must be between 0 and 1")
        if not stall_s >= 0.0:
            raise ConfigError(f"stall_s is {stall_s}; it must be >= 0")
        self._random = random.Random(seed)
        self._copy_failure_rate = copy_failure_rate
        self._stall_rate = stall_rate
        self._stall_s = stall_s
        self._slow_rate = slow_rate
        self._slow_factor = _factor(slow_factor)
        self._alloc_failure_rate = alloc_failure_rate
        self._copies: dict[str, int] = dict.fromkeys(get_args(Direction), 0)
        self._allocs = 0
        self._failing: set[tuple[str, int]] = set()
        self._stalling: dict[tuple[str, int], float] = {}
        #: Direction -> (first copy, last copy, factor).
        self._slow: dict[str, list[tuple[int, float, float]]] = {}
        self._failing_allocs: set[int] = set()
        self._pinnable: int | None = None

    def fail_copy(self, direction: Direction, nth: int = 1) -> Faults:
        """The ``nth`` copy of that direction from now on fails."""
        self._failing.add((direction, self._count(direction) + _nth(nth)))
        return self

    def stall_copy(self, direction: Direction, seconds: float, nth: int = 1) -> Faults:
        """The ``nth`` copy of that direction from now on takes ``seconds`` longer (``inf``: never
        ends)."""
        if not seconds >= 0.0:
            raise ConfigError(f"a stall of {seconds} s; it must be >= 0")
        self._stalling[direction, self._count(direction) + _nth(nth)] = seconds
        return self

    def slow_link(
        self,
        direction: Direction,
        factor: float = 10.0,
        nth: int = 1,
        copies: int | None = None,
    ) -> Faults:
        """From the ``nth`` copy of that direction from now on the link runs at ``1 / factor`` of its
        rate, for ``copies`` copies (None: for ever)."""
        first = self._count(direction) + _nth(nth)
        last = math.inf if copies is None else first + _nth(copies) - 1
        self._slow.setdefault(direction, []).append((first, last, _factor(factor)))
        return self

    def fail_alloc(self, nth: int = 1) -> Faults:
        """The ``nth`` VRAM allocation from now on fails as if the card were full."""
        self._failing_allocs.add(self._allocs + _nth(nth))
        return self

    def refuse_pinning(self, beyond_bytes: int = 0) -> Faults:
        """Host memory beyond ``beyond_bytes`` in all cannot be pinned."""
        self._pinnable = beyond_bytes
        return self

    def on_copy(self, direction: Direction) -> CopyFault:
        """Counts a copy and says what befalls it."""
        self._copies[direction] += 1
        at = (direction, self._copies[direction])
        fails = at in self._failing
        stall_s = self._stalling.pop(at, 0.0)
        if self._copy_failure_rate and self._random.random() < self._copy_failure_rate:
            fails = True
        if self._stall_rate and self._random.random() < self._stall_rate:
            stall_s += self._stall_s
        self._failing.discard(at)
        slowdown = 1.0
        for first, last, factor in self._slow.get(direction, ()):
            if first <= at[1] <= last:
                slowdown *= factor
        if self._slow_rate and self._random.random() < self._slow_rate:
            slowdown *= self._slow_factor
        if not fails and not stall_s and slowdown == 1.0:
            return NO_FAULT
        return CopyFault(fails, stall_s, slowdown)

    def on_alloc(self) -> bool:
        """Counts an allocation; True if it fails."""
        self._allocs += 1
        if self._allocs in self._failing_allocs:
            self._failing_allocs.discard(self._allocs)
            return True
        rate = self._alloc_failure_rate
        return bool(rate) and self._random.random() < rate

    def may_pin(self, pinned_bytes: int) -> bool:
        """Whether host memory of ``pinned_bytes`` in all can be pinned."""
        return self._pinnable is None or pinned_bytes <= self._pinnable

    def _count(self, direction: Direction) -> int:
        if direction not in self._copies:
            raise ConfigError(f"direction {direction!r} is unknown; use {', '.join(self._copies)}")
        return self._copies[direction]


def _nth(nth: int) -> int:
    if nth < 1:
        raise ConfigError(f"nth is {nth}; the next operation is 1")
    return nth


def _factor(factor: float) -> float:
    if not 1.0 <= factor < math.inf:
        raise ConfigError(f"a slowdown of {factor}; give a finite factor >= 1")
    return factor


class Damage:
    """Bytes of a buffer whose last writer failed, and who that was. Empty nearly always."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, str]] = []

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, start: int, stop: int, who: str) -> None:
        self.clear(start, stop)
        if start < stop:
            self._ranges.append((start, stop, who))

    def clear(self, start: int, stop: int) -> None:
        """These bytes were written."""
        if not self._ranges:
            return
        kept = []
        for lo, hi, who in self._ranges:
            for left, right in ((lo, min(hi, start)), (max(lo, stop), hi)):
                if left < right:
                    kept.append((left, right, who))
        self._ranges = kept

    def find(self, start: int, stop: int) -> str | None:
        """Who failed to write some of these bytes, if anybody did."""
        for lo, hi, who in self._ranges:
            if lo < stop and start < hi:
                return who
        return None
