"""The residency policies by definition: every question is answered by looking at everything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvtier.policy import PageFacts


@dataclass
class Entry:
    """A page with all that ever happened to it: ``uses`` are (step, share) pairs."""

    page: PageFacts
    order: int
    last_use: int
    uses: list[tuple[int, float]]
    pinned: bool = False


@dataclass
class NaivePolicy:
    """A quadratic model of ``lru`` (``half_life=None``) and ``mass``."""

    leaf_first: bool
    half_life: float | None = None
    now: int = 0
    steps: int = 0
    inserted: int = 0
    pages: list[Entry] = field(default_factory=list)

    def find(self, key: bytes | None) -> Entry | None:
        return next((entry for entry in self.pages if entry.page.key == key), None)

    def insert(self, page: PageFacts) -> None:
        parent = self.find(page.parent)
        if parent is not None and not parent.pinned:
            last_use = parent.last_use
        else:
            self.now += 1
            last_use = self.now
        self.inserted += 1
        self.pages.append(
            Entry(page, self.inserted, last_use, [(self.steps, 1 / (page.depth + 1))])
        )

    def touch(self, keys: list[bytes], mass: list[float] | None = None) -> None:
        self.now += 1
        self.steps += 1
        for index, key in enumerate(keys):
            entry = self.find(key)
            if entry is not None:
                entry.last_use = self.now
                entry.uses.append((self.steps, 1 / len(keys) if mass is None else mass[index]))

    def pin(self, key: bytes) -> None:
        entry = self.find(key)
        assert entry is not None
        entry.pinned = True

    def unpin(self, key: bytes) -> None:
        entry = self.find(key)
        assert entry is not None
        self.now += 1
        entry.pinned = False
        entry.last_use = self.now

    def remove(self, key: bytes) -> None:
        self.pages = [entry for entry in self.pages if entry.page.key != key]

    def score(self, entry: Entry) -> float:
        if self.half_life is None:
            return 0.0
        return math.fsum(
            share * 0.5 ** ((self.steps - step) / self.half_life) for step, share in entry.uses
        )

    def candidates(self) -> list[Entry]:
        """Pages that may go, the first victim first."""
        parents = {entry.page.parent for entry in self.pages}
        free = [
            e
            for e in self.pages
            if not e.pinned and not (self.leaf_first and e.page.key in parents)
        ]
        return sorted(free, key=lambda e: (self.score(e), e.last_use, -e.page.depth, e.order))

    def victims(self) -> set[bytes | None]:
        """What ``victim`` may name: more than one key only where scores differ by rounding."""
        free = self.candidates()
        if not free:
            return {None}
        if self.half_life is None:
            return {free[0].page.key}
        least = self.score(free[0])
        return {e.page.key for e in free if self.score(e) <= least * (1 + 1e-9)}
