"""Least decayed attention mass: the page that got the least attention of late goes first.

Origin: H2O (Zhang et al., arXiv 2306.14048) keeps the tokens with the largest attention mass,
summed up over all steps. Undecayed sums favour age: a page that mattered once beats a page that
matters now, and a young one never catches up. So the sum decays here: after ``half_life`` touches a
share counts half (``half_life=inf`` is H2O's sum). Without measured mass this is LRFU (Lee et al.,
IEEE Transactions on Computers 50(12), 2001), each request giving its pages equal shares of 1.

* A step is one call of ``touch``, whichever pages it names.
* A touch without mass gives each of its n pages the share 1/n: what measured shares are on average.
* A new page starts with the average share of its own sequence, 1/(depth + 1), as if touched once:
  with zero it would be the next victim before anybody could attend to it.
* Equal mass: the least recently used page goes first. Being unpinned refreshes recency, not mass.

The score is log2 of the sum of share * 2**(step / half_life). Decay multiplies all sums by the same
factor and so never changes their order; nothing needs to be visited as time passes, and scores only
rise.

Cost: O(1) a touched page, O(log n) amortised for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ranked import Node, RankedPolicy
from kvtier.policy import PageFacts

#: Steps; below it step / half_life leaves too few bits of a float for the shares.
MIN_HALF_LIFE = 0.01


class Mass(RankedPolicy):
    """Least decayed attention mass first.

    Args:
        leaf_first: see ResidencyPolicy.
        half_life: touches after which a share counts half; at least 0.01, ``inf`` for no decay.

    Raises:
        ConfigError: ``half_life`` is below 0.01 or no number.
    """

    name: ClassVar[str] = "mass"

    def __init__(self, *, leaf_first: bool, half_life: float = 64.0) -> None:
        super().__init__(leaf_first=leaf_first)
        if not half_life >= MIN_HALF_LIFE:
            raise ConfigError(
                f"policy 'mass': half_life={half_life!r}; give at least {MIN_HALF_LIFE} or inf"
            )
        self.half_life = half_life
        self._step = 0

    def first_score(self, page: PageFacts) -> float:
        return self._step / self.half_life - math.log2(page.depth + 1)

    def used(self, nodes: Sequence[tuple[Node, float]]) -> None:
        self._step += 1
        now = self._step / self.half_life
        for node, share in nodes:
            if share > 0.0:
                node.score = _log2_sum(node.score, now + math.log2(share))


def _log2_sum(a: float, b: float) -> float:
    """log2(2**a + 2**b)."""
    high, low = (a, b) if a >= b else (b, a)
    return high + math.log1p(2.0 ** (low - high)) / math.log(2.0)
