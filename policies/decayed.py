"""Scores that are sums of shares, each of which counts half after some time.

Decay multiplies all sums by the same factor and so never changes their order. So the score is the
logarithm to base 2 of the sum of ``share * 2**(step / half_life)``: nothing needs to be visited as time
passes, scores only rise, and no number grows out of a float.

* A step is one request, whichever pages it names.
* Equal sums: the least recently used page goes first. Being unpinned refreshes recency, not the sum.

Cost: see ``kvtier.policies.ranked``.
"""

from __future__ import annotations

import math

from kvtier.errors import ConfigError
from kvtier.policies.ranked import RankedPolicy
from kvtier.policy import Key

#: Steps; below it step / half_life leaves too few bits of a float for the shares.
MIN_HALF_LIFE = 0.01


class DecayedPolicy(RankedPolicy):
    """Least decayed sum first.

    Args:
        leaf_first: see ResidencyPolicy.
        half_life: requests after which a share counts half; at least 0.01, ``inf`` for no decay.

    Raises:
        ConfigError: ``half_life`` is below 0.01 or no number.
    """

    def __init__(self, *, leaf_first: bool, half_life: float) -> None:
        super().__init__(leaf_first=leaf_first)
        if not half_life >= MIN_HALF_LIFE:
            raise ConfigError(
                f"policy {self.name!r}: half_life={half_life!r}; give at least {MIN_HALF_LIFE} or inf"
            )
        self.half_life = half_life
        self._before = 0.0

    def weight(self) -> float:
        """What the use of a page that is being reported adds, >= 0."""
        return self.share

    def first_score(self, key: Key, beside: float | None) -> float:
        return self._scaled(self.weight())

    def next_score(self, key: Key, score: float) -> float:
        return _log2_sum(score, self._scaled(self.weight()))

    def score_clock(self) -> float:
        return self._before + self.requests / self.half_life

    def set_score_clock(self, clock: float) -> None:
        self._before = max(self._before, clock - self.requests / self.half_life)

    def _scaled(self, weight: float) -> float:
        return self.score_clock() + math.log2(weight) if weight > 0.0 else -math.inf


def _log2_sum(a: float, b: float) -> float:
    """log2(2**a + 2**b)."""
    high, low = (a, b) if a >= b else (b, a)
    if low == -math.inf:
        return high
    return high + math.log1p(2.0 ** (low - high)) / math.log(2.0)
