"""What policies share that order pages by a score.

The victim is the page of the lowest ``(score, tick, place)`` among those that may go. The score is the
policy's, the rest is recency, as in ``kvtier.policies.queue``: pages of one request share a tick and come
tail first, and a page that arrives alone below its parent takes the parent's tick and comes before its pages.

Cost: O(1) a used page whose score rises, O(log n) amortised for everything else. Memory: about 300 bytes a
page (see ``kvtier.policies.heap``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from kvtier.policies.heap import RankedPages
from kvtier.policy import Key, ResidencyPolicy, decode_key, encode_key


class RankedPolicy(ResidencyPolicy):
    """The lowest score goes first. A policy defines it by ``first_score`` and ``next_score``."""

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        self._ranks = RankedPages(self)
        self._serial = 0

    @abstractmethod
    def first_score(self, key: Key, beside: float | None) -> float:
        """The score of a page that has just become resident; ``beside`` is its parent's, where it came alone
        and its parent is here."""

    @abstractmethod
    def next_score(self, key: Key, score: float) -> float:
        """The score of a page that had ``score`` and was used once more."""

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._serial += 1
        if beside is None:
            self._ranks[key] = (self.first_score(key, None), self.tick, self._serial)
        else:
            score, tick, _ = self._ranks[beside]
            self._ranks[key] = (self.first_score(key, score), tick, -self._serial)

    def on_use(self, key: Key) -> None:
        self._serial += 1
        self._ranks[key] = (
            self.next_score(key, self._ranks[key][0]),
            self.tick,
            self._serial,
        )

    def on_unpin(self, key: Key) -> None:
        self._serial += 1
        self._ranks[key] = (self._ranks[key][0], self.tick, self._serial)

    def on_release(self, key: Key) -> None:
        self._ranks.release(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        del self._ranks[key]

    def victim(self, incoming: Key | None = None) -> Key | None:
        return self._ranks.first()

    def own_state(self) -> dict[str, Any]:
        scored = [(key, self._ranks[key][0]) for key in self.hottest(self._ranks)]
        return {
            "pages": [[encode_key(key), s if s > -math.inf else None] for key, s in scored],
            "clock": self.score_clock(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.set_score_clock(float(state["clock"]))
        scores = {decode_key(value): score for value, score in state["pages"]}
        for key in (*(key for key in self.pages if key not in scores), *scores):
            if key in self.pages:
                score = scores.get(key)
                self._serial += 1
                self._ranks[key] = (
                    -math.inf if score is None else float(score),
                    self.tick,
                    self._serial,
                )

    def score_clock(self) -> float:
        """The origin of the scores, which rises as time passes; saved with them."""
        return 0.0

    def set_score_clock(self, clock: float) -> None:
        """Go on from a saved origin."""

    def own_check(self) -> None:
        assert set(self._ranks) == self.pages.keys(), "other pages are ranked than are here"
        self._ranks.check()
