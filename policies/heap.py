"""Pages by rank, lowest first, skipping those that may not go.

The pages that may go wait in a binary heap, each once. A rank that rises is corrected when its entry reaches
the top, since most pages are used many times before anybody asks; a rank that falls gets a new entry. A page
that may not go falls out at the top and returns when it may again. Each correction is paid for by the
operation that made it necessary.

Cost: O(1) for a rank that rises, O(log n) amortised for everything else. Memory: about 300 bytes a page.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvtier.policy import Key, ResidencyPolicy, show

#: (score, tick or 0, place); no two pages have the same.
Rank = tuple[float, int, int]


class RankedPages:
    """Pages, each with a rank.

    Args:
        policy: whose ``pinned`` and ``children`` count.
    """

    def __init__(self, policy: ResidencyPolicy) -> None:
        self._policy = policy
        self._ranks: dict[Key, Rank] = {}
        self._heap: list[tuple[Rank, Key]] = []
        #: Pages in the heap -> the rank they have there. Other entries count no more.
        self._queued: dict[Key, Rank] = {}

    def __getitem__(self, key: Key) -> Rank:
        return self._ranks[key]

    def __setitem__(self, key: Key, rank: Rank) -> None:
        """Enter a page, or change its rank."""
        ranks, queued = self._ranks, self._queued
        if key not in ranks:
            ranks[key] = rank
            self.release(key)
            return
        ranks[key] = rank
        at = queued.get(key)
        if at is not None and rank < at:
            queued[key] = rank
            heapq.heappush(self._heap, (rank, key))
            self._tidy()

    def __delitem__(self, key: Key) -> None:
        del self._ranks[key]
        self._queued.pop(key, None)
        self._tidy()

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks

    def __iter__(self) -> Iterator[Key]:
        """All pages, the lowest rank first, also those that may not go. O(n log n)."""
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))

    def release(self, key: Key) -> None:
        """A page, here or not, may go again (``ResidencyPolicy.on_release``)."""
        if key in self._ranks and key not in self._queued and self._policy.may_go(key):
            rank = self._ranks[key]
            self._queued[key] = rank
            heapq.heappush(self._heap, (rank, key))

    def first(self) -> Key | None:
        """The page of the lowest rank that may go."""
        heap, queued = self._heap, self._queued
        pinned, children = self._policy.pinned, self._policy.children
        while heap:
            rank, key = heap[0]
            if queued.get(key) != rank:
                heapq.heappop(heap)
            elif key in pinned or key in children:
                heapq.heappop(heap)
                del queued[key]
            elif (now := self._ranks[key]) != rank:
                heapq.heapreplace(heap, (now, key))
                queued[key] = now
            else:
                return key
        return None

    def check(self) -> None:
        """Recount; AssertionError if the books are wrong."""
        live = {key for rank, key in self._heap if self._queued.get(key) == rank}
        assert live == self._queued.keys(), "a page is marked as waiting and does not wait"
        for key, rank in self._queued.items():
            assert rank <= self._ranks[key], f"page {show(key)} waits behind its rank"
        for key in self._ranks:
            assert key in self._queued or not self._policy.may_go(key), (
                f"page {show(key)} may go and does not wait"
            )
        assert len(self._heap) <= self._most, "the heap keeps too much that counts no more"

    @property
    def _most(self) -> int:
        return 2 * len(self._ranks) + 64

    def _tidy(self) -> None:
        """Drop what counts no more, for which those who left it have paid."""
        if len(self._heap) > self._most:
            kept = [(rank, key) for rank, key in self._heap if self._queued.get(key) == rank]
            heapq.heapify(kept)
            self._heap = kept
