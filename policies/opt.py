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

Cost: O(log n) amortised. Memory: 8 bytes for each page reference of the trace, and two entries a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvtier.errors import KvtierError
from kvtier.policies.heap import RankedPages
from kvtier.policy import ANONYMOUS, Access, Key, PageFacts, Request, ResidencyPolicy


class Opt(ResidencyPolicy):
    """Belady with bypass: an upper bound for every policy. For replays only."""

    name: ClassVar[str] = "opt"
    replay_only: ClassVar[bool] = True
    #: Whether a page may be turned away.
    bypass: ClassVar[bool] = True

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        self._rank = RankedPages(self)
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

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._foreseen()
        self._rank[key] = (0.0, 0, -self._next_use(key))

    def on_use(self, key: Key) -> None:
        self._rank[key] = (0.0, 0, -self._next_use(key))

    def on_remove(self, key: Key, evicted: bool) -> None:
        del self._rank[key]

    def on_release(self, key: Key) -> None:
        self._rank.release(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        key = self._rank.first()
        if (
            self.bypass
            and key is not None
            and incoming is not None
            and self._next_use(incoming) > self._next_use(key)
        ):
            return incoming
        return key

    def own_state(self) -> dict[str, Any]:
        raise KvtierError(f"{self.name}: the future is not saved")

    def own_check(self) -> None:
        assert set(self._rank) == self.pages.keys(), "other pages are ranked than are here"
        self._rank.check()

    def _next_use(self, key: Key) -> int:
        """Position of the first use after the current request; past the end if there is none."""
        at = self._next.get(key)
        if at is None:
            return 2 * len(self._following)
        if at < self._end:
            while at < self._end:
                at = self._following[at]
            self._next[key] = at
        return at

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
