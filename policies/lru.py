"""Least recently used: the page that was not used for longest goes first.

Origin: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966. On sequences of pages the question is which page of a sequence is the
older one, since a request uses them all at once: here the deeper one, because a prefix without its
suffix is of use to more requests than a suffix without its prefix, which is of use to none. So the
order is leaf-first by construction.

Cost: O(1) for everything, O(log n) for pages that were parked (see ``kvtier.policies.queue``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvtier.policies.queue import PageQueue
from kvtier.policy import Access, Key, ResidencyPolicy, decode_key


class LRU(ResidencyPolicy):
    """Least recently used page first; of pages used together, the deepest."""

    name: ClassVar[str] = "lru"
    #: Whether a page that is used becomes the hottest.
    renews: ClassVar[bool] = True

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        self._queue = PageQueue(self)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._queue.push(key, beside)

    def on_use(self, key: Key) -> None:
        self._queue.renew(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._queue.discard(key)

    def on_release(self, key: Key) -> None:
        self._queue.release(key)

    def on_unpin(self, key: Key) -> None:
        self._queue.renew(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        return self._queue.first()

    def plain_access(self, keys: Sequence[Key], capacity: int) -> Access:
        done = self._queue.sweep(list(self.walk(keys)), capacity, renew=self.renews)
        if done is None:
            return super().plain_access(keys, capacity)
        new, gone = done
        for key in gone:
            del self.pages[key]
        self.pages.update(dict.fromkeys(new))
        return Access(len(keys) - len(new), gone)

    def own_state(self) -> dict[str, Any]:
        return {"order": self.saved(self._queue)}

    def load_own_state(self, state: dict[str, Any]) -> None:
        for key in map(decode_key, state["order"]):
            if key in self.pages:
                self._queue.renew(key)

    def own_check(self) -> None:
        assert set(self._queue) == self.pages.keys(), "the queue has other pages than the tier"
        self._queue.check()
