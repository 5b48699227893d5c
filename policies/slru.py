"""Segmented LRU: pages used once go before pages used again.

Origin: R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance",
IEEE Computer 27(3), 1994. A page enters the probationary segment; used there, it moves to the protected
one, which takes at most ``protected`` of the tier. What is too much there goes back to the hot end of
probation. Victims come from probation, from the protected segment only when nothing there may go.

Cost: O(1) for everything, O(log n) for pages that were parked (see ``kvtier.policies.queue``).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.queue import PageQueue
from kvtier.policy import Key, ResidencyPolicy, decode_key


class SLRU(ResidencyPolicy):
    """Pages used once first, then the least recently used of the others.

    Args:
        leaf_first: see ResidencyPolicy.
        protected: share of the tier that pages used again may fill, between 0 and 1.

    Raises:
        ConfigError: ``protected`` is not between 0 and 1.
    """

    name: ClassVar[str] = "slru"

    def __init__(self, *, leaf_first: bool, protected: float = 0.8) -> None:
        super().__init__(leaf_first=leaf_first)
        if not 0.0 < protected < 1.0:
            raise ConfigError(
                f"policy 'slru': protected={protected!r}; give a share between 0 and 1"
            )
        self._share = protected
        self._limit_pages = 0
        self._probation, self._protected = PageQueue(self), PageQueue(self)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._probation.push(key, beside)

    def on_use(self, key: Key) -> None:
        protected = self._protected
        if key in protected:
            protected.renew(key)
            return
        self._probation.discard(key)
        protected.push(key)
        if len(protected) > (self._limit_pages or self._share * len(self.pages)):
            coldest = protected.first()
            if coldest is not None:
                protected.discard(coldest)
                self._probation.push(coldest)

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._of(key).discard(key)

    def on_release(self, key: Key) -> None:
        self._of(key).release(key)

    def on_unpin(self, key: Key) -> None:
        self._of(key).renew(key)

    def on_resize(self) -> None:
        self._limit_pages = max(1, int(self._share * self.capacity))

    def victim(self, incoming: Key | None = None) -> Key | None:
        key = self._probation.first()
        return self._protected.first() if key is None else key

    def own_state(self) -> dict[str, Any]:
        return {"probation": self.saved(self._probation), "protected": self.saved(self._protected)}

    def load_own_state(self, state: dict[str, Any]) -> None:
        for name, queue in (("probation", self._probation), ("protected", self._protected)):
            for key in map(decode_key, state[name]):
                if key in self.pages:
                    self._of(key).discard(key)
                    queue.push(key)

    def own_check(self) -> None:
        probation, protected = set(self._probation), set(self._protected)
        assert not probation & protected, "a page is in both segments"
        assert probation | protected == self.pages.keys(), "the segments have other pages"
        self._probation.check()
        self._protected.check()

    def _of(self, key: Key) -> PageQueue:
        return self._protected if key in self._protected else self._probation
