"""The clock of a replay."""

from __future__ import annotations


class VirtualClock:
    """Seconds of the trace; whoever replays sets ``now``."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
