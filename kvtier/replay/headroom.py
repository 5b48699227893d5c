"""How much there is to gain at all: the optimum against ``lru`` at each size.

The optimum (``opt``) knows the future and may leave a page out; no policy can have more prefix hits.
What it gains over ``lru`` is the most that any choice of policy can bring at that size. Where it is
small, no tuning helps, only more room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.replay.tier import Cell
from kvtier.trace.trace import END, REMOVE, REQUEST, Trace

BASE, BEST = "lru", "opt"


@dataclass
class Headroom:
    """At one size.

    Attributes:
        pages: of the tier. share: of all unique pages.
        gain_points: by how many percentage points of the references the optimum is above ``lru``.
    """

    pages: int
    share: float
    lru_prefix_hits: int
    opt_prefix_hits: int
    block_refs: int
    gain_points: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def closed_by(self, cell: Cell) -> float | None:
        """The share of the gap that another policy closes; ``None`` if there is no gap."""
        gap = self.opt_prefix_hits - self.lru_prefix_hits
        return (cell.prefix_hits - self.lru_prefix_hits) / gap if gap > 0 else None


def headroom(trace: Trace, lru: Sequence[Cell], opt: Sequence[Cell]) -> list[Headroom]:
    """From the cells of both policies at the same sizes."""
    rows = []
    for base, best in zip(lru, opt, strict=True):
        gain = best.prefix_hits - base.prefix_hits
        rows.append(
            Headroom(
                pages=base.pages,
                share=base.pages / max(1, trace.unique_pages),
                lru_prefix_hits=base.prefix_hits,
                opt_prefix_hits=best.prefix_hits,
                block_refs=base.block_refs,
                gain_points=100 * gain / max(1, base.block_refs),
            )
        )
    return rows


def infinite_prefix_hits(trace: Trace) -> int:
    """Prefix hits with room for everything."""
    seen: set[int] = set()
    hits = 0
    for kind, pages in zip(trace.kinds, trace.entries(), strict=True):
        if kind == REQUEST:
            for page in pages:
                if page not in seen:
                    break
                hits += 1
        if kind == REMOVE:
            seen.difference_update(trace.with_followers(pages))
        elif kind != END:
            seen.update(pages)
    return hits
