"""First in, first out: the page that came first goes first, however often it was used.

Origin: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966. Of pages that came together the deepest goes first, as everywhere. It is here as
the base line that needs no bookkeeping on a hit.

Cost: O(1) for everything, O(log n) for pages that were parked (see ``kvtier.policies.queue``).
"""

from __future__ import annotations

from typing import ClassVar

from kvtier.policies.lru import LRU
from kvtier.policy import Key


class FIFO(LRU):
    """Oldest page first."""

    name: ClassVar[str] = "fifo"
    renews: ClassVar[bool] = False

    def on_use(self, key: Key) -> None:
        pass

    def on_unpin(self, key: Key) -> None:
        pass
