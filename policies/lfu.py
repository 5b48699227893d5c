"""Least frequently used, decayed: the page that was used least often of late goes first.

Origin: LRFU (D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least
frequently used policies", IEEE Transactions on Computers 50(12), 2001). Plain counts never forget: the
pages of a long conversation that is over keep the highest counts and the tier freezes, which costs 20 to 70
points of hit ratio on agent traffic. So a use counts half after ``half_life`` requests; a short one makes
this LRU, ``half_life=inf`` is plain LFU.

Cost: O(1) a used page, O(log n) amortised for everything else (see ``kvtier.policies.decayed``).
"""

from __future__ import annotations

from typing import ClassVar

from kvtier.policies.decayed import DecayedPolicy


class LFU(DecayedPolicy):
    """Least often used page first, with decay.

    Args:
        leaf_first: see ResidencyPolicy.
        half_life: requests after which a use counts half; at least 0.01, ``inf`` for no decay.

    Raises:
        ConfigError: ``half_life`` is below 0.01 or no number.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, *, leaf_first: bool, half_life: float = 256.0) -> None:
        super().__init__(leaf_first=leaf_first, half_life=half_life)

    def weight(self) -> float:
        return 1.0
