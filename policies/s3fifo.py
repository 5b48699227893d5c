"""S3-FIFO: pages that are not used again soon leave quickly, through a small queue of their own.

Origin: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction",
SOSP 2023. A new page enters the small queue. At its end it moves to the main queue if it was used at least
``promote_uses`` times since; otherwise it is evicted and its key remembered. A page that comes back while
it is remembered enters the main queue at once. At the end of the main queue a page that was used goes round
again, with one use less. Until the first page had to go, new pages also enter the main queue, once the small one
has its share (as in the authors' code; the paper is silent). Victims come from the small queue when that has its share of the tier, else from
the main queue. Uses are counted up to 3.

Sizes that differ: the shares are counted in pages.

Cost: O(1) amortised, each round of a page being paid for by a use; O(log n) for pages that were parked (see
``kvtier.policies.queue``). Memory: a queue entry and a count a page, and a key for each of ``ghosts`` times
as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ghosts import Ghosts
from kvtier.policies.queue import PageQueue
from kvtier.policy import Access, Key, ResidencyPolicy, decode_key, encode_key

#: Uses that are counted.
MOST = 3


class S3FIFO(ResidencyPolicy):
    """Small, main and ghost FIFO queues.

    Args:
        leaf_first: see ResidencyPolicy.
        small: share of the tier for new pages, between 0 and 1.
        ghosts: evicted pages that are remembered, in multiples of the tier's pages.
        promote_uses: uses that bring a page from the small queue to the main one, 1 to 3.

    Raises:
        ConfigError: a parameter is out of its range.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(
        self,
        *,
        leaf_first: bool,
        small: float = 0.1,
        ghosts: float = 0.9,
        promote_uses: int = 2,
    ) -> None:
        super().__init__(leaf_first=leaf_first)
        if not 0.0 < small < 1.0:
            raise ConfigError(f"policy 's3fifo': small={small!r}; give a share between 0 and 1")
        if not 0.0 <= ghosts < math.inf:
            raise ConfigError(f"policy 's3fifo': ghosts={ghosts!r}; give a number of at least 0")
        if not 1 <= promote_uses <= MOST:
            raise ConfigError(f"policy 's3fifo': promote_uses={promote_uses!r}; give 1 to {MOST}")
        self._share, self._ghosts_per_page, self._promote = small, ghosts, promote_uses
        self._small, self._main = PageQueue(self), PageQueue(self)
        self._ghosts: Ghosts[bool] = Ghosts()
        #: Whether the tier was full once.
        self._filled = False
        #: Uses since a page came in or went round, by page.
        self._uses: dict[Key, int] = {}

    def plain_access(self, keys: Sequence[Key], capacity: int) -> Access:
        pages, uses, victim = self.pages, self._uses, self.victim
        small, main, ghosts = self._small.plain(), self._main.plain(), self._ghosts.order
        if small is None or main is None:
            return super().plain_access(keys, capacity)
        hits, tick = 0, self.tick
        evicted: list[Key] = []
        for key in self.walk(keys):
            used = uses.get(key)
            if used is not None:
                hits += 1
                if used < MOST:
                    uses[key] = used + 1
                continue
            while len(pages) >= capacity and (gone := victim(key)) is not None:
                del pages[gone]
                self.on_remove(gone, True)
                evicted.append(gone)
            pages[key] = None
            uses[key] = 0
            new = ghosts.pop(key, None) is None and not self._overflows()
            (small if new else main)[key] = tick
        return Access(hits, evicted)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._uses[key] = 0
        if self._ghosts.pop(key) is None and not self._overflows():
            self._small.push(key, beside)
        else:
            self._main.push(key, beside)

    def on_use(self, key: Key) -> None:
        uses = self._uses
        if uses[key] < MOST:
            uses[key] += 1

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._filled = self._filled or evicted
        del self._uses[key]
        if key in self._small:
            self._small.discard(key)
            if evicted:
                self._ghosts.add(key, True)
                self._ghosts.trim(int(self._ghosts_per_page * (self.capacity or len(self.pages))))
        else:
            self._main.discard(key)

    def on_release(self, key: Key) -> None:
        (self._small if key in self._small else self._main).release(key)

    def on_unpin(self, key: Key) -> None:
        """Recency plays no part here."""

    def victim(self, incoming: Key | None = None) -> Key | None:
        small, main, uses = self._small, self._main, self._uses
        limit = self._share * (self.capacity or len(self.pages))
        while len(small) >= limit or not main:
            key = small.first()
            if key is None:
                break
            if uses[key] < self._promote:
                return key
            small.discard(key)
            uses[key] = 0
            main.push(key)
        while (key := main.first()) is not None:
            if not uses[key]:
                return key
            uses[key] -= 1
            main.renew(key)
        # Nothing of the main queue may go; the small one has less than its share.
        while (key := small.first()) is not None and uses[key] >= self._promote:
            small.discard(key)
            uses[key] = 0
            main.push(key)
        return main.first() if key is None else key

    def _overflows(self) -> bool:
        """Whether a new page has no place in the small queue although there is room elsewhere."""
        if self._filled:
            return False
        return len(self._small) >= self._share * (self.capacity or len(self.pages))

    def own_state(self) -> dict[str, Any]:
        uses = self._uses
        return {
            "small": [[encode_key(key), uses[key]] for key in self.hottest(self._small)],
            "main": [[encode_key(key), uses[key]] for key in self.hottest(self._main)],
            "ghosts": self.saved(self._ghosts),
            "filled": self._filled,
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        for name, queue in (("small", self._small), ("main", self._main)):
            for saved, uses in state[name]:
                key = decode_key(saved)
                if key in self.pages:
                    (self._small if key in self._small else self._main).discard(key)
                    queue.push(key)
                    self._uses[key] = min(MOST, max(0, int(uses)))
        self._filled = bool(state["filled"])
        for key in map(decode_key, state["ghosts"]):
            if key not in self.pages:
                self._ghosts.add(key, True)
        self._ghosts.trim(int(self._ghosts_per_page * (self.capacity or len(self.pages))))

    def own_check(self) -> None:
        small, main = set(self._small), set(self._main)
        assert not small & main, "a page is in both queues"
        assert small | main == self.pages.keys() == self._uses.keys(), "the queues have other pages"
        assert not any(key in self.pages for key in self._ghosts), (
            "a page here is remembered as gone"
        )
        self._small.check()
        self._main.check()
