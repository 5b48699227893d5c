"""How soon pages are used again, by class and age, learnt from what happened; and what keeping one is worth.

An *age* is the number of page uses since a page's own last one. For each class of pages a life table counts, in
intervals of age that grow by the square root of two, how many were used again there and how many were forgotten
(which says only that they were not used until then), as E. L. Kaplan, P. Meier, "Nonparametric estimation
from incomplete observations", JASA 53, 1958, for survival times. Old counts fade.

What a page is worth is the best ratio of the probability that it is used again to the time that it takes room
until then, over all times at which one might give up waiting: J. C. Gittins, "Bandit processes and dynamic
allocation indices", JRSS B 41(2), 1979. N. Beckmann et al., "LHD: improving cache hit rate by maximizing hit
density", NSDI 2018, rank by the same ratio without the choice of when to give up, and learn only from
pages in the cache; here evicted ones count, so a use that comes later than the cache can wait is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

#: Intervals of age, and the first age of each.
INTERVALS = 44
STARTS = [0, *(int(16 * 2 ** (i / 2)) for i in range(INTERVALS - 1))]
#: An interval's width. The last one has no end.
WIDTHS = [*(b - a for a, b in pairwise(STARTS)), STARTS[-1]]
#: Hazard where nothing is known: the same in each interval, so that what was used last is worth most.
UNKNOWN = 0.1


def interval(age: int) -> int:
    """The number of the interval of an age >= 0."""
    return bisect_right(STARTS, age) - 1


class LifeTable:
    """Reuse by class and age.

    Args:
        classes: number of classes.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.used = [[0.0] * INTERVALS for _ in range(classes)]
        self.forgotten = [[0.0] * INTERVALS for _ in range(classes)]

    def worth(self, waiting: Sequence[Sequence[float]], doubt: float) -> list[list[float]]:
        """What a page is worth, by class and interval, in uses per use of any page.

        ``waiting`` has the pages by class and interval that are still waited for. ``doubt`` is the number
        of pages as which each class's prior knowledge counts: that of all classes, and for all together
        that of LRU. Pages of one request share their fate, so it has to be a few requests' worth. A class with more uses
        behind it is worth no less at any age, so that a prefix is worth no less than what follows it.
        Cost: O(classes * intervals**2).
        """
        everyone = _hazards(
            [sum(column) for column in zip(*self.used, strict=True)],
            [sum(column) for column in zip(*self.forgotten, strict=True)],
            [sum(column) for column in zip(*waiting, strict=True)],
            [UNKNOWN] * INTERVALS,
            doubt,
        )
        table: list[list[float]] = []
        for used, forgotten, alive in zip(self.used, self.forgotten, waiting, strict=True):
            row = _indices(_hazards(used, forgotten, alive, everyone, doubt))
            if table:
                row = list(map(max, row, table[-1]))
            table.append(row)
        return table

    def fade(self, keep: float) -> None:
        """Let old counts weigh less, by this factor."""
        for rows in (self.used, self.forgotten):
            for row in rows:
                row[:] = [count * keep for count in row]


def _hazards(
    used: Sequence[float],
    forgotten: Sequence[float],
    waiting: Sequence[float],
    prior: Sequence[float],
    doubt: float,
) -> list[float]:
    """The probability of a use in each interval for a page that comes to it."""
    hazards = [0.0] * INTERVALS
    later = 0.0
    for at in range(INTERVALS - 1, -1, -1):
        left = forgotten[at] + waiting[at]
        # Who leaves without use did so halfway through the interval, on average.
        exposed = later + used[at] + 0.5 * left + doubt
        hazards[at] = (used[at] + doubt * prior[at]) / exposed
        later += used[at] + left
    return hazards


def _indices(hazards: Sequence[float]) -> list[float]:
    row = [0.0] * INTERVALS
    for start in range(INTERVALS):
        alive, chance, time, best = 1.0, 0.0, 0.0, 0.0
        for at in range(start, INTERVALS):
            hazard = hazards[at]
            time += alive * WIDTHS[at] * (1.0 - 0.5 * hazard)
            chance += alive * hazard
            alive *= 1.0 - hazard
            if chance > best * time:
                best = chance / time
        row[start] = best
    return row
