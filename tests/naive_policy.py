"""The residency policies by definition: every question is answered by looking at everything."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.policy import ANONYMOUS, Access, PageFacts, Request


@dataclass
class Entry:
    """A page with all that ever happened to it. ``place`` is (tick, position): smaller is colder."""

    page: PageFacts
    place: tuple[int, int]
    #: (number of the request, share of attention)
    uses: list[tuple[int, float]]
    pinned: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


class NaivePolicy:
    """The contract of ``ResidencyPolicy`` by definition; as it stands, ``lru``."""

    def __init__(self, *, leaf_first: bool, order: str = "tail") -> None:
        self.leaf_first, self.order = leaf_first, order
        self.pages: list[Entry] = []
        self.now = 0.0
        self.tick = 0
        self.requests = 0
        self.serial = 0
        self.capacity = 0
        self.unpinning = False

    # what a policy differs in

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        """A page came; ``parent`` is given if it came alone and its parent was here."""

    def used(self, entry: Entry, share: float, request: Request) -> None:
        self.renew(entry)

    def unpinned(self, entry: Entry) -> None:
        self.renew(entry)

    def removed(self, entry: Entry, evicted: bool) -> None:
        pass

    def coldness(self, entry: Entry) -> Any:
        return entry.place

    def ended(self, entries: list[Entry], session: Hashable) -> None:
        pass

    # the same for all

    def find(self, key: Any) -> Entry | None:
        return next((entry for entry in self.pages if entry.page.key == key), None)

    def get(self, key: Any) -> Entry:
        entry = self.find(key)
        assert entry is not None
        return entry

    def renew(self, entry: Entry) -> None:
        self.serial += 1
        entry.place = (self.tick, self.serial)

    def walk(self, items: Sequence[Any]) -> list[Any]:
        return list(items)[::-1] if self.order == "tail" else list(items)

    def enter(self, page: PageFacts, parent: Entry | None, share: float, request: Request) -> None:
        self.serial += 1
        place = (self.tick, self.serial) if parent is None else (parent.place[0], -self.serial)
        entry = Entry(page, place, [(self.requests, share)])
        self.pages.append(entry)
        self.inserted(entry, parent, request)

    def insert(self, page: PageFacts, request: Request = ANONYMOUS) -> None:
        parent = self.find(page.parent)
        if parent is None:
            self.tick += 1
            self.unpinning = False
        self.enter(page, parent, 1 / (page.depth + 1), request)

    def begin(self) -> None:
        self.tick += 1
        self.requests += 1
        self.unpinning = False

    def use(
        self,
        keys: Sequence[Any],
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> None:
        self.begin()
        shares = [1 / max(1, len(keys))] * len(keys) if mass is None else list(mass)
        for key, share in zip(self.walk(keys), self.walk(shares), strict=True):
            entry = self.find(key)
            if entry is not None:
                self.use_one(entry, share, request)

    def use_one(self, entry: Entry, share: float, request: Request) -> None:
        entry.uses.append((self.requests, share))
        self.used(entry, share, request)

    def access_bytes(
        self, pages: Sequence[PageFacts], capacity_bytes: int, *, request: Request = ANONYMOUS
    ) -> Access:
        self.begin()
        hits, evicted = 0, []
        for page in self.walk(pages):
            entry = self.find(page.key)
            if entry is not None:
                hits += 1
                self.use_one(entry, 1 / len(pages), request)
                continue
            if page.nbytes > capacity_bytes:
                continue
            while sum(e.page.nbytes for e in self.pages) + page.nbytes > capacity_bytes:
                gone = self.victim()
                if gone is None:
                    break
                self.remove(gone, evicted=True)
                evicted.append(gone)
            else:
                self.enter(page, None, 1 / len(pages), request)
        return Access(hits, evicted)

    def pin(self, key: Any) -> None:
        self.get(key).pinned = True

    def unpin(self, key: Any, *, used: bool = True) -> None:
        entry = self.get(key)
        entry.pinned = False
        if used:
            if not self.unpinning:
                self.tick += 1
                self.unpinning = True
            self.unpinned(entry)

    def remove(self, key: Any, *, evicted: bool = False) -> None:
        entry = self.get(key)
        self.pages.remove(entry)
        self.removed(entry, evicted)

    def session_ended(self, keys: Sequence[Any], session: Hashable = None) -> None:
        self.ended([entry for key in keys if (entry := self.find(key))], session)

    def resize(self, capacity: int) -> None:
        self.capacity = capacity

    def may_go(self, entry: Entry) -> bool:
        parents = {other.page.parent for other in self.pages}
        return not entry.pinned and not (self.leaf_first and entry.page.key in parents)

    def candidates(self) -> list[Entry]:
        """Pages that may go, the first victim first."""
        return sorted(filter(self.may_go, self.pages), key=self.coldness)

    def victim(self) -> Any:
        free = self.candidates()
        return free[0].page.key if free else None

    def victims(self) -> set[Any]:
        """What ``victim`` may name: more than one key only where scores differ by rounding."""
        return {self.victim()}


class NaiveFIFO(NaivePolicy):
    def used(self, entry: Entry, share: float, request: Request) -> None:
        pass

    def unpinned(self, entry: Entry) -> None:
        pass


class NaiveSLRU(NaivePolicy):
    """``notes["again"]``: in the protected segment."""

    def __init__(self, *, leaf_first: bool, order: str = "tail", protected: float = 0.8) -> None:
        super().__init__(leaf_first=leaf_first, order=order)
        self.protected = protected

    def used(self, entry: Entry, share: float, request: Request) -> None:
        again = entry.notes.get("again")
        entry.notes["again"] = True
        self.renew(entry)
        segment = [e for e in self.pages if e.notes.get("again")]
        most = (
            max(1, int(self.protected * self.capacity))
            if self.capacity
            else self.protected * len(self.pages)
        )
        free = sorted(filter(self.may_go, segment), key=lambda e: e.place)
        if not again and len(segment) > most and free:
            free[0].notes["again"] = False
            self.renew(free[0])

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        if parent is not None and parent.notes.get("again"):
            self.renew(entry)  # its parent is in the other segment

    def coldness(self, entry: Entry) -> Any:
        return (bool(entry.notes.get("again")), entry.place)


class NaiveDecayed(NaivePolicy):
    """``mass``, or with ``counts`` ``lfu``."""

    def __init__(
        self, *, leaf_first: bool, order: str = "tail", half_life: float, counts: bool
    ) -> None:
        super().__init__(leaf_first=leaf_first, order=order)
        self.half_life, self.counts = half_life, counts

    def score(self, entry: Entry) -> float:
        return math.fsum(
            (1.0 if self.counts else share) * 0.5 ** ((self.requests - step) / self.half_life)
            for step, share in entry.uses
        )

    def coldness(self, entry: Entry) -> Any:
        return (self.score(entry), entry.place)

    def victims(self) -> set[Any]:
        free = self.candidates()
        if not free:
            return {None}
        least = self.score(free[0])
        return {e.page.key for e in free if self.score(e) <= least * (1 + 1e-9)}


class NaiveGDSF(NaivePolicy):
    def __init__(self, *, leaf_first: bool, order: str = "tail", depth_scale: float) -> None:
        super().__init__(leaf_first=leaf_first, order=order)
        self.depth_scale = depth_scale
        self.clock = 0.0
        self.unit: int | None = None
        self.highest: dict[int, float] = {}  # tick -> value

    def value(self, entry: Entry) -> float:
        page = entry.page
        if self.unit is None:
            self.unit = page.nbytes
        if page.recompute_s is None:
            cost = 1 + page.depth / self.depth_scale
        else:
            cost = max(0.0, page.recompute_s - (page.reload_s or 0.0))
        return self.clock + len(entry.uses) * cost * self.unit / page.nbytes

    def in_walk(self, value: float) -> float:
        if self.order == "tail":
            value = self.highest[self.tick] = max(value, self.highest.get(self.tick, 0.0))
        return value

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        value = self.value(entry)
        if parent is not None:
            value = min(value, parent.notes["value"])
        entry.notes["value"] = self.in_walk(value) if parent is None else value

    def used(self, entry: Entry, share: float, request: Request) -> None:
        entry.notes["value"] = self.in_walk(max(entry.notes["value"], self.value(entry)))
        self.renew(entry)

    def removed(self, entry: Entry, evicted: bool) -> None:
        if evicted:
            self.clock = max(self.clock, entry.notes["value"])

    def coldness(self, entry: Entry) -> Any:
        return (entry.notes["value"], entry.place)


class NaiveTTL(NaivePolicy):
    """Over ``lru``. ``notes``: deadline, seconds, session, and the order of uses."""

    def __init__(self, *, leaf_first: bool, order: str = "tail", seconds: float) -> None:
        super().__init__(leaf_first=leaf_first, order=order)
        self.seconds = seconds
        self.uses = 0

    def set(self, entry: Entry, deadline: float, **notes: Any) -> None:
        self.uses += 1
        entry.notes.update(notes, deadline=deadline, use=self.uses)

    def live(self, entry: Entry, request: Request) -> None:
        at = self.now if request.at is None else request.at
        seconds = self.seconds if request.ttl_s is None else request.ttl_s
        if request.next_use_at is not None:
            at = max(at, request.next_use_at)
        self.set(entry, at + seconds, seconds=seconds, session=request.session)

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        self.live(entry, request)

    def used(self, entry: Entry, share: float, request: Request) -> None:
        self.live(entry, request)
        self.renew(entry)

    def unpinned(self, entry: Entry) -> None:
        self.set(entry, max(entry.notes["deadline"], self.now + entry.notes["seconds"]))
        self.renew(entry)

    def ended(self, entries: list[Entry], session: Hashable) -> None:
        for entry in reversed(entries):
            if session is not None and entry.notes["session"] == session:
                self.set(entry, min(entry.notes["deadline"], self.now))

    def coldness(self, entry: Entry) -> Any:
        if entry.notes["deadline"] <= self.now:
            return (0, entry.notes["deadline"], entry.notes["use"])
        return (1, *entry.place)


class NaivePriority(NaivePolicy):
    """Over ``lru``. ``notes["level"]``."""

    def __init__(self, *, leaf_first: bool, order: str = "tail", levels: int, default: int) -> None:
        super().__init__(leaf_first=leaf_first, order=order)
        self.levels, self.default = levels, default

    def level(self, request: Request) -> int | None:
        if request.priority is None:
            return None
        return min(max(request.priority, 0), self.levels - 1)

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        level = self.level(request)
        entry.notes["level"] = self.default if level is None else level
        if parent is not None and parent.notes["level"] != entry.notes["level"]:
            self.renew(entry)

    def used(self, entry: Entry, share: float, request: Request) -> None:
        level = self.level(request)
        if level is not None:
            entry.notes["level"] = level
        self.renew(entry)

    def coldness(self, entry: Entry) -> Any:
        return (entry.notes["level"], entry.place)
