"""ARC: the border between pages used once and pages used again moves to where the misses are.

Origin: N. Megiddo, D. S. Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003. ``T1``
has the pages used once of late, ``T2`` those used again, both least recently used first; ``B1`` and
``B2`` remember the keys of pages evicted from them. A page that comes back from ``B1`` says that ``T1``
was too small, one from ``B2`` that ``T2`` was, and the target of ``T1`` moves by the ratio of the two
lists. ``T1`` and ``B1`` have as many keys as the tier has pages at most, all four lists twice as many.

Sizes that differ: the lists are counted in pages, as in the paper. Where the coldest pages of the list
that should shrink may not go, the other list gives one.

Cost: O(1) for everything, O(log n) for pages that were parked (see ``kvtier.policies.queue``). Memory: a
queue entry a page and a key for each page that the tier holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvtier.policies.ghosts import Ghosts
from kvtier.policies.queue import PageQueue
from kvtier.policy import Access, Key, ResidencyPolicy, decode_key

#: No key; ``None`` could be one.
_NOBODY = object()


class ARC(ResidencyPolicy):
    """Adaptive replacement cache."""

    name: ClassVar[str] = "arc"

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        self._t1, self._t2 = PageQueue(self), PageQueue(self)
        self._b1: Ghosts[bool] = Ghosts()
        self._b2: Ghosts[bool] = Ghosts()
        #: Pages that T1 should have.
        self._target = 0.0
        #: The page on its way in for which the target has moved already.
        self._adapted: object = _NOBODY

    def plain_access(self, keys: Sequence[Key], capacity: int) -> Access:
        t1, t2 = self._t1.plain(), self._t2.plain()
        if t1 is None or t2 is None:
            return super().plain_access(keys, capacity)
        pages, tick, b1, b2 = self.pages, self.tick, self._b1.order, self._b2.order
        hits = 0
        evicted: list[Key] = []
        for key in self.walk(keys):
            if key in t2:
                t2.move_to_end(key)
                t2[key] = tick
                hits += 1
                continue
            if key in t1:
                del t1[key]
                t2[key] = tick
                hits += 1
                continue
            again = key in b2
            if again or key in b1:
                self._adapt(key)
            while len(pages) >= capacity:
                size = len(t1)
                if not t2 or (size and (size > self._target or (again and size == self._target))):
                    gone, _ = t1.popitem(last=False)
                    b1[gone] = True
                else:
                    gone, _ = t2.popitem(last=False)
                    b2[gone] = True
                del pages[gone]
                evicted.append(gone)
            pages[key] = None
            if again:
                del b2[key]
                t2[key] = tick
            elif b1.pop(key, None):
                t2[key] = tick
            else:
                t1[key] = tick
            self._adapted = _NOBODY
            if len(t1) + len(b1) > capacity:
                self._b1.trim(max(0, capacity - len(t1)))
            if len(pages) + len(b1) + len(b2) > 2 * capacity:
                self._b2.trim(max(0, 2 * capacity - len(pages) - len(b1)))
        return Access(hits, evicted)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        b1, b2 = self._b1, self._b2
        if key in b1 or key in b2:
            self._adapt(key)
            if b1.pop(key) is None:
                b2.pop(key)
            self._t2.push(key)
        else:
            self._t1.push(key, beside)
        self._adapted = _NOBODY
        size = self.capacity or len(self.pages)
        b1.trim(max(0, size - len(self._t1)))
        b2.trim(max(0, 2 * size - len(self.pages) - len(b1)))

    def on_use(self, key: Key) -> None:
        t2 = self._t2
        if key in t2:
            t2.renew(key)
        else:
            self._t1.discard(key)
            t2.push(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        first = key in self._t1
        (self._t1 if first else self._t2).discard(key)
        if evicted:
            (self._b1 if first else self._b2).add(key, True)

    def on_release(self, key: Key) -> None:
        (self._t1 if key in self._t1 else self._t2).release(key)

    def on_unpin(self, key: Key) -> None:
        (self._t1 if key in self._t1 else self._t2).renew(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        again = False
        if incoming is not None:
            again = incoming in self._b2
            if again or incoming in self._b1:
                self._adapt(incoming)
        size = len(self._t1)
        first, second = self._t1, self._t2
        if not (size > self._target or (again and size == self._target)):
            first, second = second, first
        key = first.first()
        return second.first() if key is None else key

    def own_state(self) -> dict[str, Any]:
        return {
            "target": self._target,
            "t1": self.saved(self._t1),
            "t2": self.saved(self._t2),
            "b1": self.saved(self._b1),
            "b2": self.saved(self._b2),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._target = max(0.0, float(state["target"]))
        for name, queue in (("t1", self._t1), ("t2", self._t2)):
            for key in map(decode_key, state[name]):
                if key in self.pages:
                    (self._t1 if key in self._t1 else self._t2).discard(key)
                    queue.push(key)
        for name, ghosts in (("b1", self._b1), ("b2", self._b2)):
            for key in map(decode_key, state[name]):
                if key not in self.pages and key not in self._b1:
                    ghosts.add(key, True)
        size = self.capacity or len(self.pages)
        self._target = min(self._target, size)
        self._b1.trim(max(0, size - len(self._t1)))
        self._b2.trim(max(0, 2 * size - len(self.pages) - len(self._b1)))

    def on_resize(self) -> None:
        self._target = min(self._target, self.capacity)

    def own_check(self) -> None:
        t1, t2, b1, b2 = set(self._t1), set(self._t2), set(self._b1), set(self._b2)
        assert len(t1) + len(t2) + len(b1) + len(b2) == len(t1 | t2 | b1 | b2), "lists share keys"
        assert t1 | t2 == self.pages.keys(), "the lists have other pages than the tier"
        assert self._target >= 0
        assert not self.capacity or self._target <= self.capacity, "the target is out of range"
        self._t1.check()
        self._t2.check()

    def _adapt(self, key: Key) -> None:
        if self._adapted == key:
            return
        self._adapted = key
        b1, b2 = len(self._b1), len(self._b2)
        if key in self._b1:
            size = self.capacity or len(self.pages)
            self._target = min(float(size), self._target + max(1.0, b2 / b1))
        else:
            self._target = max(0.0, self._target - max(1.0, b1 / b2))
