"""An order of pages, coldest first, that skips in constant time the pages which may not go.

Most policies are one or several such queues. The coldest page is asked for far more often than it may not
go, so pages that may not go stay in line. One that is met at the front steps aside with its place, and counts
at that place (not at the end) as soon as it may go again.

Each page keeps the tick of its last use (``ResidencyPolicy.tick``), and a page that arrives alone can be put
before all others of its parent's tick: a sequence that is written page by page is in the same order as one that
came as a whole, from its tail to its root. Such pages stand aside too, at their place.

Cost: O(1) for pages in line, O(log n) for those aside. Memory: about 150 bytes a page.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Protocol

from kvtier.policy import Key, show

#: (tick, position among those of the tick); smaller is colder. All aside are colder than those of the same
#: tick that are in line.
Place = tuple[int, int]


class Gate(Protocol):
    """Who knows which pages may go, and what time it is: a policy, or a part of one."""

    @property
    def pinned(self) -> set[Key]: ...

    @property
    def children(self) -> dict[Key, int]: ...

    @property
    def tick(self) -> int: ...

    def may_go(self, key: Key) -> bool: ...


class PageQueue:
    """Pages in an order, coldest first.

    Args:
        policy: whose ``pinned``, ``children`` and ``tick`` count.
    """

    __slots__ = ("_aside", "_line", "_places", "_policy", "_ready", "_serial")

    def __init__(self, policy: Gate) -> None:
        self._policy = policy
        #: Pages in line, coldest first, each with its tick.
        self._line: OrderedDict[Key, int] = OrderedDict()
        #: Pages aside; and those of them that may go, in a heap, with the places that are in it.
        self._aside: dict[Key, Place] = {}
        self._ready: list[tuple[Place, Key]] = []
        self._places: set[Place] = set()
        self._serial = 0

    def push(self, key: Key, beside: Key | None = None) -> None:
        """Put a page that is not here at the hot end; or before the pages of the request with which
        ``beside`` was used, if that is here."""
        if beside is not None:
            tick = self._line.get(beside)
            if tick is None and beside in self._aside:
                tick = self._aside[beside][0]
            if tick is not None:
                self._serial += 1
                self._aside[key] = (tick, -self._serial)
                self.release(key)
                return
        self._line[key] = self._policy.tick

    def discard(self, key: Key) -> None:
        """Take out a page that is here. Raises KeyError if it is not."""
        if self._line.pop(key, None) is None:
            del self._aside[key]
            if len(self._ready) > self._limit:
                self._compact()

    def renew(self, key: Key) -> None:
        """Move a page that is here to the hot end."""
        line = self._line
        if key in line:
            line.move_to_end(key)
        else:
            self.discard(key)
        line[key] = self._policy.tick

    def sweep(
        self, walk: Sequence[Key], capacity: int, *, renew: bool
    ) -> tuple[list[Key], list[Key]] | None:
        """A whole request at once: renew (or leave) its pages that are here, push the others, and take out the
        coldest beyond ``capacity``, with the outcome of doing so page by page.

        Returns:
            The pages pushed and those taken out, each in order; ``None``, and nothing done, where only the steps
            can tell: some pages are aside or may not go, or one of those to go would be of the request.
        """
        if self._aside or self._policy.pinned or self._policy.children:
            return None
        line = self._line
        new = [key for key in walk if key not in line]
        over = len(line) + len(new) - capacity
        gone: list[Key] = []
        if over > 0:
            gone = list(islice(line, over))
            if len(gone) < over or not set(gone).isdisjoint(walk):
                return None
            for key in gone:
                del line[key]
        if renew and len(new) < len(walk):
            move, tick = line.move_to_end, self._policy.tick
            for key in walk:
                if key in line:
                    move(key)
                line[key] = tick
        else:
            line.update(zip(new, repeat(self._policy.tick)))
        return new, gone

    def plain(self) -> OrderedDict[Key, int] | None:
        """The pages, coldest first, each with its tick, to work on directly while a whole request is walked;
        ``None`` if some are aside or may not go. The caller keeps to what ``push`` and ``renew`` do."""
        if self._aside or self._policy.pinned or self._policy.children:
            return None
        return self._line

    def first(self) -> Key | None:
        """The coldest page that may go."""
        line, pinned, children = self._line, self._policy.pinned, self._policy.children
        aside = self._first_aside() if self._ready else None
        while line:
            key = next(iter(line))
            if aside is not None and aside[0][0] <= line[key]:
                break
            if key not in pinned and key not in children:
                return key
            self._serial += 1
            self._aside[key] = (line.pop(key), self._serial)
        return None if aside is None else aside[1]

    def release(self, key: Key) -> None:
        """A page, here or not, may go again (``ResidencyPolicy.on_release``)."""
        place = self._aside.get(key)
        if place is not None and place not in self._places and self._policy.may_go(key):
            heapq.heappush(self._ready, (place, key))
            self._places.add(place)

    def __len__(self) -> int:
        return len(self._line) + len(self._aside)

    def __contains__(self, key: object) -> bool:
        return key in self._line or key in self._aside

    def __iter__(self) -> Iterator[Key]:
        """All pages, coldest first, also those that may not go. O(n), and O(n log n) for those aside."""
        line = (((tick, math.inf), key) for key, tick in self._line.items())
        aside = sorted((place, key) for key, place in self._aside.items())
        for _, key in heapq.merge(aside, line, key=lambda item: item[0]):
            yield key

    def check(self) -> None:
        """Recount; AssertionError if the books are wrong."""
        ticks = list(self._line.values())
        assert ticks == sorted(ticks), "pages in line are out of order"
        assert not self._line.keys() & self._aside.keys(), "a page is in line and aside"
        for key, place in self._aside.items():
            assert place in self._places or not self._policy.may_go(key), (
                f"page {show(key)} may go and does not wait"
            )
        assert {place for place, _ in self._ready} == self._places
        assert len(self._ready) == len(self._places) <= self._limit

    @property
    def _limit(self) -> int:
        return 2 * len(self._aside) + 64

    def _first_aside(self) -> tuple[Place, Key] | None:
        """The coldest page aside that may go."""
        ready, policy = self._ready, self._policy
        while ready:
            place, key = ready[0]
            if self._aside.get(key) == place and policy.may_go(key):
                return ready[0]
            heapq.heappop(ready)
            self._places.discard(place)
        return None

    def _compact(self) -> None:
        """Drop what waits in vain; the removals since the last time pay."""
        kept = [
            (p, k) for p, k in self._ready if self._aside.get(k) == p and self._policy.may_go(k)
        ]
        heapq.heapify(kept)
        self._ready, self._places = kept, {place for place, _ in kept}
