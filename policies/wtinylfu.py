"""W-TinyLFU: behind a small LRU window, a page comes in only if it is used more than the one that goes.

Origin: G. Einziger, R. Friedman, B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM
Transactions on Storage 13(4), 2017. A new page enters the window. The page that the window gives up meets
the coldest page of the main part, a segmented LRU of which ``protected`` is for pages used there, and the one
that was used less goes; with equal counts the newcomer. Counts go up to 15 and are halved after ten times as
many uses as the tier has pages, here and gone ones alike.

The paper counts in a sketch; here each key has its own count until it is halved to nothing, so results
do not depend on hash functions, and no two pages share a count.

Beware: like all policies by count, it freezes on sessions (see ``kvtier.policies.sieve``).

Sizes that differ: counted in pages.

Cost: O(1) amortised, O(log n) for pages that were parked (see ``kvtier.policies.queue``). Memory: a queue entry
a page, and counts for at most 20 times as many keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.queue import PageQueue
from kvtier.policy import Key, ResidencyPolicy, decode_key, encode_key

#: Highest count, and uses before counts are halved, in multiples of the tier's pages.
MOST, SAMPLE = 15, 10


class WTinyLFU(ResidencyPolicy):
    """Window, TinyLFU admission, segmented LRU.

    Args:
        leaf_first: see ResidencyPolicy.
        window: share of the tier for new pages, between 0 and 1; at least one page.
        protected: share of the rest for pages used again there, between 0 and 1.

    Raises:
        ConfigError: a parameter is out of its range.
    """

    name: ClassVar[str] = "wtinylfu"

    def __init__(self, *, leaf_first: bool, window: float = 0.01, protected: float = 0.8) -> None:
        super().__init__(leaf_first=leaf_first)
        for name, value in (("window", window), ("protected", protected)):
            if not 0.0 < value < 1.0:
                raise ConfigError(
                    f"policy 'wtinylfu': {name}={value!r}; give a share between 0 and 1"
                )
        self._window_share, self._protected_share = window, protected
        self._window = PageQueue(self)
        self._probation, self._protected = PageQueue(self), PageQueue(self)
        self._counts: dict[Key, int] = {}
        self._counted = 0

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._count(key)
        self._window.push(key, beside)
        if len(self._window) > self._most_window:
            coldest = self._window.first()
            if coldest is not None:
                self._window.discard(coldest)
                self._probation.push(coldest)

    def on_use(self, key: Key) -> None:
        self._count(key)
        queue = self._of(key)
        if queue is not self._probation:
            queue.renew(key)
            return
        queue.discard(key)
        protected = self._protected
        protected.push(key)
        size = self.capacity or len(self.pages)
        if len(protected) > self._protected_share * (size - self._most_window):
            coldest = protected.first()
            if coldest is not None:
                protected.discard(coldest)
                queue.push(coldest)

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._of(key).discard(key)
        if not evicted:
            self._counts.pop(key, None)

    def on_release(self, key: Key) -> None:
        self._of(key).release(key)

    def on_unpin(self, key: Key) -> None:
        self._of(key).renew(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        coldest = self._probation.first()
        if coldest is None:
            coldest = self._protected.first()
        if len(self._window) < self._most_window and coldest is not None:
            return coldest
        candidate = self._window.first()
        if candidate is None or coldest is None:
            return coldest if candidate is None else candidate
        if self._counts.get(candidate, 0) <= self._counts.get(coldest, 0):
            return candidate
        self._window.discard(candidate)
        self._probation.push(candidate)
        return coldest

    def own_state(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "window": self.saved(self._window),
            "probation": self.saved(self._probation),
            "protected": self.saved(self._protected),
            "counts": [[encode_key(key), counts[key]] for key in self.hottest(counts)],
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        queues = (
            ("probation", self._probation),
            ("protected", self._protected),
            ("window", self._window),
        )
        for name, queue in queues:
            for key in map(decode_key, state[name]):
                if key in self.pages:
                    self._of(key).discard(key)
                    queue.push(key)
        self._counts = {
            decode_key(key): min(MOST, max(1, int(count))) for key, count in state["counts"]
        }

    def own_check(self) -> None:
        parts = [set(self._window), set(self._probation), set(self._protected)]
        assert sum(map(len, parts)) == len(set().union(*parts)), "a page is in two parts"
        assert set().union(*parts) == self.pages.keys(), "the parts have other pages than the tier"
        assert all(0 < count <= MOST for count in self._counts.values()), "a count is out of range"
        for queue in (self._window, self._probation, self._protected):
            queue.check()

    @property
    def _most_window(self) -> int:
        return max(1, int(self._window_share * (self.capacity or len(self.pages))))

    def _count(self, key: Key) -> None:
        count = self._counts.get(key, 0)
        if count < MOST:
            self._counts[key] = count + 1
        self._counted += 1
        if self._counted >= SAMPLE * max(self.capacity or len(self.pages), 64):
            self._counted = 0
            self._counts = {key: half for key, n in self._counts.items() if (half := n // 2)}

    def _of(self, key: Key) -> PageQueue:
        for queue in (self._window, self._probation):
            if key in queue:
                return queue
        return self._protected
