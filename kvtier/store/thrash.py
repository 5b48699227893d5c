"""The thrash guard: stop writing to a tier that is never read.

When the working set is a few times a tier's size, a recency policy evicts each page just before it is asked
for again: the hit rate is zero and every write was for nothing, at the price of link and disk bandwidth that
others need. The guard sees that from two numbers alone, pages written and pages hit.
"""

from __future__ import annotations


class ThrashGuard:
    """Watches one tier.

    Args:
        capacity_pages: pages the tier holds.
        turnovers: how often the whole tier may be rewritten without a single hit before it is closed.
        least: pages that must have been written at least, so that a small tier is not judged by a handful.
        probe: while closed, one page of this many is still let in, so that a change of the load is noticed.
    """

    def __init__(
        self, capacity_pages: int, *, turnovers: int = 4, least: int = 64, probe: int = 16
    ) -> None:
        self._limit = max(least, capacity_pages * turnovers)
        self._probe = probe
        self._written = 0
        self._asked = 0

    @property
    def closed(self) -> bool:
        return self._written >= self._limit

    @property
    def limit(self) -> int:
        """Pages written without a hit after which the tier is closed."""
        return self._limit

    def wrote(self) -> None:
        """A page was written to the tier."""
        self._written += 1

    def hit(self) -> None:
        """A page was found in the tier by a lookup: it is of use, and opens again if it was closed."""
        self._written = 0

    def admit(self) -> bool:
        """Whether the next page may be written to the tier."""
        if not self.closed:
            return True
        self._asked += 1
        return self._asked % self._probe == 0
