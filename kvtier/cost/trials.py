"""Repeating something for some seconds, for those who measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

#: Called with a share of the step that is done, 0..1.
Tick = Callable[[float], None]


def trials(
    work: Callable[[], object],
    seconds: float,
    tick: Tick,
    *,
    least: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each run of ``work``: for ``seconds`` in all, at least ``least`` times; one run before
    them does not count."""
    work()
    found: list[float] = []
    began = now()
    while len(found) < least or now() - began < seconds:
        started = now()
        work()
        found.append(now() - started)
        tick(min(1.0, (now() - began) / max(seconds, 1e-9)))
        if len(found) >= 10_000:
            break
    return found


def shares(parts: int, tick: Tick) -> Iterator[Tick]:
    """A tick for each of ``parts`` equal parts of a step."""
    for index in range(parts):
        yield lambda done, at=index: tick((at + done) / parts)  # type: ignore[misc]
