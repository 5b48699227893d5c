"""Which pages are in which tier during a replay, and the moves between tiers, by the store's rules.

The counterpart of ``kvtier.store``'s ``Residence``, ``Writes`` and ``Room`` with copies that take no
time: the same calls reach the same policies in the same order, but there are no bytes, no failures
and nothing is under way. ``tests/test_replay_live.py`` holds the two against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.policy import ANONYMOUS, PageFacts, Request, ResidencyPolicy
from kvtier.store.thrash import ThrashGuard

TIERS = ("vram", "host", "disk")


@dataclass
class Flow:
    """Pages that came to a tier and that left it, and lookups that it served.

    Attributes:
        inserted: pages that came. evicted: that left to make room. removed: that left for another reason.
        hits: pages found here by a lookup, in the fastest tier that had them.
    """

    inserted: int = 0
    evicted: int = 0
    removed: int = 0
    hits: int = 0


class Residence:
    """Pages by number in up to three tiers.

    Args:
        capacities: tier -> pages, for the tiers that exist, fastest first.
        policies: tier -> its policy.
        parents, depths: of each page (``Trace``).
        page_bytes: what a policy is told of a page's size.
        host_write, disk_write: ``write_back`` or ``write_through``, as the store's.
    """

    def __init__(
        self,
        capacities: dict[str, int],
        policies: dict[str, ResidencyPolicy],
        parents: Sequence[int],
        depths: Sequence[int],
        page_bytes: int,
        host_write: str = "write_back",
        disk_write: str = "write_through",
    ) -> None:
        self.capacities, self.policies = capacities, policies
        self.tiers = list(capacities)
        self.floor = self.tiers[-1]
        self.flows = {tier: Flow() for tier in self.tiers}
        #: Pages moved over each link.
        self.moved: Counter[str] = Counter()
        #: Page -> its tiers, fastest first in ``TIERS`` order.
        self.copies: dict[int, set[str]] = {}
        self.owners: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self._holds: dict[str, dict[int, int]] = {tier: {} for tier in self.tiers}
        self._children: dict[int, set[int]] = {}
        self._parents, self._depths, self._page_bytes = parents, depths, page_bytes
        self._through = {
            "host": host_write == "write_through",
            "disk": disk_write == "write_through",
        }
        self._held: list[str] = []
        self._guard = ThrashGuard(capacities.get("host", 0))
        for tier, policy in policies.items():
            policy.resize(capacities[tier])

    # ------------------------------------------------------------------ books

    def fastest(self, page: int) -> str | None:
        """The fastest tier that has the page."""
        have = self.copies.get(page)
        if not have:
            return None
        return next(tier for tier in self.tiers if tier in have)

    def free(self, tier: str) -> int:
        return self.capacities[tier] - len(self.policies[tier])

    def hold(self, page: int, tier: str) -> None:
        holds = self._holds[tier]
        count = holds.get(page, 0)
        holds[page] = count + 1
        if not count:
            self.policies[tier].pin(page)

    def unhold(self, page: int, tier: str, *, used: bool = False) -> None:
        holds = self._holds[tier]
        count = holds.pop(page) - 1
        if count:
            holds[page] = count
        else:
            self.policies[tier].unpin(page, used=used)

    def own(self, page: int) -> None:
        """The page may move from now on, but not be dropped."""
        count = self.owners.get(page, 0)
        if not count and self.floor in self.copies[page]:
            self.hold(page, self.floor)
        self.owners[page] = count + 1

    def disown(self, page: int) -> None:
        count = self.owners.pop(page) - 1
        if count:
            self.owners[page] = count
        elif self.floor in self.copies[page]:
            self.unhold(page, self.floor)

    def attach(self, page: int, tier: str) -> None:
        """A copy is in place."""
        if page not in self.copies:
            self.copies[page] = set()
            parent = self._parents[page]
            if parent >= 0:
                self._children.setdefault(parent, set()).add(page)
        self.copies[page].add(tier)
        self.flows[tier].inserted += 1
        parent = self._parents[page]
        facts = PageFacts(
            page, None if parent < 0 else parent, self._depths[page], self._page_bytes
        )
        self.policies[tier].insert(facts, self.requests.get(page, ANONYMOUS))
        if tier == self.floor and page in self.owners:
            self.hold(page, tier)

    def detach(self, page: int, tier: str, *, evicted: bool) -> None:
        """A copy that nothing holds is gone."""
        self.policies[tier].remove(page, evicted=evicted)
        have = self.copies[page]
        have.discard(tier)
        flow = self.flows[tier]
        flow.evicted += evicted
        flow.removed += not evicted
        if not have:
            del self.copies[page]
            self.requests.pop(page, None)
            parent = self._parents[page]
            if parent >= 0:
                siblings = self._children[parent]
                siblings.discard(page)
                if not siblings:
                    del self._children[parent]

    def drop(self, page: int, *, evicted: bool) -> bool:
        """Drop a page from all tiers, after all that follow it. False, and nothing done, if one of them is
        held or owned."""
        doomed = [page]
        for each in doomed:
            doomed += self._children.get(each, ())
        if any(self._kept(each) for each in doomed):
            return False
        for each in sorted(doomed, key=lambda p: -self._depths[p]):
            for tier in self.tiers:
                if tier in self.copies.get(each, ()):
                    self.detach(each, tier, evicted=evicted)
        return True

    def _kept(self, page: int) -> bool:
        return page in self.owners or any(page in self._holds[tier] for tier in self.tiers)

    def check(self) -> None:
        """Recount; AssertionError if a book is wrong."""
        for tier in self.tiers:
            policy, flow = self.policies[tier], self.flows[tier]
            here = {page for page, have in self.copies.items() if tier in have}
            assert here == set(policy.pages), f"the policy of {tier} has other pages"
            assert len(here) <= self.capacities[tier], f"{tier} is over its capacity"
            assert flow.inserted - flow.evicted - flow.removed == len(here), f"{tier} miscounts"
            assert set(self._holds[tier]) == policy.pinned, f"pins of {tier} differ"
            policy.check()
        for page in self.copies:
            parent = self._parents[page]
            assert parent < 0 or self.copies.get(parent), "a page's prefix is gone"

    # ------------------------------------------------------------------ making room

    def ensure(self, tier: str) -> bool:
        """Room for one page in VRAM or host RAM; False if everything there is held."""
        policy = self.policies[tier]
        stuck: list[int] = []
        try:
            while not self.free(tier):
                page = policy.victim()
                if page is None:
                    return False
                assert isinstance(page, int)
                if not self._evict(page, tier):
                    self.hold(page, tier)
                    stuck.append(page)
            return True
        finally:
            for page in reversed(stuck):
                self.unhold(page, tier)

    def _evict(self, page: int, tier: str) -> bool:
        if self._push_down(page, tier):
            return True
        return page not in self.owners and self.drop(page, evicted=True)

    def _push_down(self, page: int, tier: str) -> bool:
        have = self.copies[page]
        if tier == "vram" and "host" not in have and self.demote(page, leave=True):
            return True
        if any(t in have for t in TIERS[TIERS.index(tier) + 1 :]) or (
            tier == "host" and "vram" in have
        ):
            self.detach(page, tier, evicted=True)
            return True
        if "disk" not in self.tiers or not self.write(page):
            return False
        self.detach(page, tier, evicted=True)
        return True

    def demote(self, page: int, *, leave: bool) -> bool:
        """Copy a page VRAM -> host, and with ``leave`` drop it above; False if the host tier has no room
        for it, or the thrash guard keeps it out."""
        if "host" not in self.tiers or "vram" not in self.copies[page]:
            return False
        if page not in self.owners and not self._guard.admit():
            return False
        self.hold(page, "vram")
        room = self.ensure("host")
        if room:
            self.attach(page, "host")
            self.moved["vram->host"] += 1
            if page not in self.owners:
                self._guard.wrote()
        self.unhold(page, "vram")
        if room and leave:
            self.detach(page, "vram", evicted=True)
        return room

    def write(self, page: int) -> bool:
        """Write a page to disk, and before it those of its prefix that are not there. False if the disk
        cannot take one of them."""
        chain = []
        at = page
        while at >= 0 and "disk" not in self.copies[at]:
            chain.append(at)
            at = self._parents[at]
        return all(self._write_one(each) for each in reversed(chain))

    def _write_one(self, page: int) -> bool:
        parent = self._parents[page]
        source = "host" if "host" in self.copies[page] else "vram"
        if parent >= 0:
            self.hold(parent, "disk")
        self.hold(page, source)
        room = self._disk_room()
        if room:
            self.attach(page, "disk")
            self.moved["host->disk"] += 1
            self.moved["vram->host"] += source == "vram"
        self.unhold(page, source)
        if parent >= 0:
            self.unhold(parent, "disk")
        return room

    def _disk_room(self) -> bool:
        stuck: list[int] = []
        policy = self.policies["disk"]
        try:
            while not self.free("disk"):
                page = policy.victim()
                if page is None:
                    return False
                assert isinstance(page, int)
                if len(self.copies[page]) > 1:
                    self.detach(page, "disk", evicted=True)
                elif not self.drop(page, evicted=True):
                    self.hold(page, "disk")
                    stuck.append(page)
            return True
        finally:
            for page in stuck:
                self.unhold(page, "disk")

    # ------------------------------------------------------------------ a request

    def found(self, pages: Sequence[int]) -> int:
        """How many leading pages are in some tier."""
        copies = self.copies
        for at, page in enumerate(pages):
            if not copies.get(page):
                return at
        return len(pages)

    def take(self, pages: Sequence[int], request: Request) -> list[str]:
        """Lease stored pages, bring them up as far as there is room, and count the hits.

        Returns:
            The tier that each was found in.
        """
        places = [self.fastest(page) or "" for page in pages]
        for page, tier in zip(pages, places, strict=True):
            self.hold(page, tier)
        self.use(pages, request)
        held = list(places)
        rising: list[int] = []
        room = self.free("vram") if "vram" in self.tiers else 0
        for at, page in enumerate(pages):
            if places[at] == "vram":
                continue
            if len(rising) < room:
                rising.append(page)
                self.moved["host->vram"] += 1
                self.moved["disk->host"] += places[at] == "disk"
            elif places[at] == "disk":
                self.moved["disk->host"] += 1  # to read it, wherever it then stays
                if "host" in self.tiers and self.ensure("host"):
                    self.attach(page, "host")
                    held[at] = self._repoint(page, "disk", "host")
        for page in rising:
            self.attach(page, "vram")
        for at, (page, tier) in enumerate(zip(pages, places, strict=True)):
            self.flows[tier].hits += 1
            if tier == "host":
                self._guard.hit()
            held[at] = self._repoint(page, held[at], self.fastest(page) or "")
        self._held = held
        return places

    def give(self, pages: Sequence[int]) -> int:
        """End the lease of the last ``take``; the number of its pages that are not in VRAM."""
        for page, tier in zip(reversed(pages), reversed(self._held), strict=True):
            self.unhold(page, tier, used=True)
        return len(self._held) - self._held.count("vram")

    def _repoint(self, page: int, old: str, new: str) -> str:
        if new != old:
            self.hold(page, new)
            self.unhold(page, old)
        return new

    def use(self, pages: Sequence[int], request: Request) -> None:
        """A request used these pages."""
        for policy in self.policies.values():
            policy.use(pages, None, request)
        if request is not ANONYMOUS:
            self.requests.update((page, request) for page in pages if page in self.copies)

    def put(self, page: int, tier: str, request: Request) -> bool:
        """A page that was computed comes in at ``tier``, behind its parent; False if there is no room
        that may be made, or its parent is not here."""
        parent = self._parents[page]
        if parent >= 0:
            if not self.copies.get(parent):
                return False
            self.own(parent)
        room = self.ensure(tier)
        if room:
            if request is not ANONYMOUS:
                self.requests[page] = request
            self.attach(page, tier)
            if self._through["disk"] and "disk" in self.tiers:
                self.write(page)
            if self._through["host"] and "host" not in self.copies[page]:
                self.demote(page, leave=False)
        if parent >= 0:
            self.disown(parent)
        return room

    def remove(self, pages: Sequence[int]) -> None:
        """Drop pages and all behind them."""
        for page in pages:
            if page in self.copies:
                self.drop(page, evicted=False)
