"""Belady's optimum: the page whose next use is farthest away goes. It needs the future, so it only replays.

Origin: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966; optimality of the farthest next use: R. L. Mattson et al., "Evaluation techniques for
storage hierarchies", IBM Systems Journal 9(2), 1970. ``opt`` turns a page away whose next use is farther than that
of all pages that are here; ``min`` must take every page in, as in the papers. A tier may leave a page out,
so ``min`` is not a bound for it: other policies can beat it.

A page's next use is never before its parent's, and the root side of a request comes first among uses at
the same time. So ``opt`` keeps prefixes whole, and for pages of equal size it is the exact optimum also where
only hits without a gap count. For sizes that differ the exact optimum is out of reach (NP-hard); there it
is a good heuristic, no bound.

Cost: O(log n) amortised. Memory: 8 bytes for each page reference of the trace, and up to four entries a page.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvtier.errors import KvtierError
from kvtier.policy import ANONYMOUS, Access, Key, PageFacts, Request, ResidencyPolicy


class Opt(ResidencyPolicy):
    """Belady with bypass: an upper bound for every policy. For replays only."""

    name: ClassVar[str] = "opt"
    replay_only: ClassVar[bool] = True
    #: Whether a page may be turned away.
    bypass: ClassVar[bool] = True

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        #: (-next use, page), the farthest first; an entry counts while it is the page's next use.
        self._farthest: list[tuple[int, Key]] = []
        #: Position of a page's next use in the sequence of all references -> the one after it.
        self._following = array("q")
        self._ends = array("q")
        self._next: dict[Key, int] = {}
        self._entry = -1
        self._end = 0

    def foresee(self, entries: Iterable[Sequence[Key]]) -> None:
        """The pages of every request, as ``access`` will be called with them, in that order."""
        last: dict[Key, int] = {}
        self._next, self._following, self._ends = {}, array("q"), array("q")
        for keys in entries:
            for key in keys:
                at = len(self._following)
                if key in last:
                    self._following[last[key]] = at
                else:
                    self._next[key] = at
                last[key] = at
                self._following.append(0)
            self._ends.append(len(self._following))
        for order, at in enumerate(last.values()):
            self._following[at] = len(self._following) + order
        self._entry, self._end = -1, 0
        self._farthest = []

    def access(
        self,
        keys: Sequence[Key],
        capacity: int,
        *,
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> Access:
        self._advance(len(keys))
        return super().access(keys, capacity, mass=mass, request=request)

    def access_bytes(
        self,
        pages: Sequence[PageFacts],
        capacity_bytes: int,
        *,
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> Access:
        self._advance(len(pages))
        return super().access_bytes(pages, capacity_bytes, mass=mass, request=request)

    def plain_access(self, keys: Sequence[Key], capacity: int) -> Access:
        if self.pinned:
            return super().plain_access(keys, capacity)
        pages, following, end, places = self.pages, self._following, self._end, self._next
        heap, push, pop, bypass = self._farthest, heapq.heappush, heapq.heappop, self.bypass
        hits = 0
        evicted: list[Key] = []
        for key in self.walk(keys):
            at = places[key]
            while at < end:
                at = following[at]
            places[key] = at
            if key in pages:
                hits += 1
            elif len(pages) < capacity:
                pages[key] = None
            else:
                while (farthest := heap[0])[1] not in pages or places[farthest[1]] != -farthest[0]:
                    pop(heap)
                if bypass and at > -farthest[0]:
                    continue
                gone = farthest[1]
                del pages[gone]
                evicted.append(gone)
                pages[key] = None
            push(heap, (-at, key))
        self._tidy()
        return Access(hits, evicted)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._foreseen()
        self._next[key] = self._after_this(key)
        self._push(key)

    def on_use(self, key: Key) -> None:
        self._next[key] = self._after_this(key)
        self._push(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        """Its entry counts no more, as it is not in ``pages``."""

    def on_release(self, key: Key) -> None:
        self._push(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        key, heap = None, self._farthest
        while heap:
            at, page = heap[0]
            if page in self.pages and self._next[page] == -at and self.may_go(page):
                key = page
                break
            # A page that may not go has a new entry when it may.
            heapq.heappop(heap)
        if (
            self.bypass
            and key is not None
            and incoming is not None
            and self._after_this(incoming) > self._next[key]
        ):
            return incoming
        return key

    def own_state(self) -> dict[str, Any]:
        raise KvtierError(f"{self.name}: the future is not saved")

    def own_check(self) -> None:
        entries = set(self._farthest)
        for key in self.pages:
            assert not self.may_go(key) or (-self._next[key], key) in entries, "a page is lost"

    def _after_this(self, key: Key) -> int:
        """Position of the first use after the current request; past the end if there is none."""
        at = self._next.get(key, 2 * len(self._following))
        while at < self._end:
            at = self._following[at]
        return at

    def _push(self, key: Key) -> None:
        heapq.heappush(self._farthest, (-self._next[key], key))
        self._tidy()

    def _tidy(self) -> None:
        """Drop the entries that count no more, for which the uses that left them have paid."""
        if len(self._farthest) > 4 * len(self.pages) + 4096:
            self._farthest = [(-self._next[key], key) for key in self.pages if self.may_go(key)]
            heapq.heapify(self._farthest)

    def _advance(self, references: int) -> None:
        self._foreseen()
        self._entry += 1
        if self._entry >= len(self._ends) or self._ends[self._entry] - self._end != references:
            raise KvtierError(
                f"{self.name}: request {self._entry} has {references} pages, which is not what was "
                "foreseen; give foresee() the requests that will be replayed, in their order"
            )
        self._end = self._ends[self._entry]

    def _foreseen(self) -> None:
        if not self._ends:
            raise KvtierError(
                f"{self.name} has to know the future: it only replays traces (kvtier replay), after "
                "foresee(); for a live store choose another policy, such as auto"
            )


class Min(Opt):
    """Belady without bypass: every page that is asked for comes in. For replays only."""

    name: ClassVar[str] = "min"
    bypass: ClassVar[bool] = False
