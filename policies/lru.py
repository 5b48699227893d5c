"""Least recently used: the page that was not used for longest goes first.

Origin: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966. On sequences of pages the question is which page of a sequence is the
older one, since a request
uses them all at once: here the deeper one, because a prefix without its suffix is of use to more
requests than a suffix without its prefix, which is of use to none (see ``kvtier.policies.ranked``).

Cost: O(1) a touched page, O(log n) amortised for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvtier.policies.ranked import Node, RankedPolicy
from kvtier.policy import PageFacts


class LRU(RankedPolicy):
    """Least recently used page first; of pages used together, the deepest."""

    name: ClassVar[str] = "lru"

    def first_score(self, page: PageFacts) -> float:
        return 0.0

    def used(self, nodes: Sequence[tuple[Node, float]]) -> None:
        pass
