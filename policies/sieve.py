"""SIEVE: a hand goes round; pages used since its last visit stay where they are, others go.

Origin: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is simpler than LRU", NSDI 2024.
New pages enter at the new end and the hand goes from the old end to the new one. Here the line is cut at the
hand: ``ahead`` has the pages it has still to visit in this round, new ones at their end; ``behind`` those
it has passed. When nothing is ahead any more, the round is over and the two change names.

A page that may not go when the hand comes is passed without loss of its mark, and is the next that the
hand visits once it may go.

Beware: each request of a session uses all its pages so far, so pages of old sessions are always marked
and new ones go first. On agents' traffic this loses most of LRU's hits (see docs/policies.md).

Cost: O(1) amortised, each page passed being paid for by a use; O(log n) for pages that were parked (see
``kvtier.policies.queue``). Memory: a queue entry a page and a key for each marked one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.policies.queue import PageQueue
from kvtier.policy import Key, ResidencyPolicy, decode_key


class Sieve(ResidencyPolicy):
    """Lazy promotion, quick demotion."""

    name: ClassVar[str] = "sieve"

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        self._ahead, self._behind = PageQueue(self), PageQueue(self)
        self._marked: set[Key] = set()

    def on_insert(self, key: Key, beside: Key | None) -> None:
        # Behind its parent if the hand has not been there yet, else at the new end.
        self._ahead.push(key, beside)

    def on_use(self, key: Key) -> None:
        self._marked.add(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._of(key).discard(key)
        self._marked.discard(key)
        if evicted and not self._ahead:
            # The hand was at the new end: what comes now is not before it.
            self._ahead, self._behind = self._behind, self._ahead

    def on_release(self, key: Key) -> None:
        self._of(key).release(key)

    def on_unpin(self, key: Key) -> None:
        """Recency plays no part here."""

    def victim(self, incoming: Key | None = None) -> Key | None:
        while True:
            while (key := self._ahead.first()) is not None:
                if key not in self._marked:
                    return key
                self._marked.remove(key)
                self._ahead.discard(key)
                self._behind.push(key)
            if self._behind.first() is None:
                return None
            self._ahead, self._behind = self._behind, self._ahead

    def own_state(self) -> dict[str, Any]:
        return {
            "ahead": self.saved(self._ahead),
            "behind": self.saved(self._behind),
            "marked": self.saved(key for key in self.pages if key in self._marked),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        for name, queue in (("ahead", self._ahead), ("behind", self._behind)):
            for key in map(decode_key, state[name]):
                if key in self.pages:
                    self._of(key).discard(key)
                    queue.push(key)
        self._marked = {key for key in map(decode_key, state["marked"]) if key in self.pages}

    def own_check(self) -> None:
        ahead, behind = set(self._ahead), set(self._behind)
        assert not ahead & behind, "a page is on both sides of the hand"
        assert ahead | behind == self.pages.keys(), "the line has other pages than the tier"
        assert self._marked <= self.pages.keys(), "a page that is not here is marked"
        self._ahead.check()
        self._behind.check()

    def _of(self, key: Key) -> PageQueue:
        return self._ahead if key in self._ahead else self._behind
