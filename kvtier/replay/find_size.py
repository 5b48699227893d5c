"""The smallest tier that reaches a hit ratio.

By bisection over the number of pages. For ``lru`` more pages never mean fewer hits, so the answer is
exact; other policies may have several sizes at which they cross the ratio, and the answer is one of
them: it reaches the ratio, and one page less does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policy import Order
from kvtier.replay.tier import Cell, Progress, replay_tier
from kvtier.trace.trace import Trace


@dataclass
class SizeFound:
    """What was found.

    Attributes:
        pages: the smallest tier, or ``None`` if no tier reaches the ratio.
        prefix_ratio: at that size; with a tier for all pages if none reaches it.
        probes: sizes tried.
    """

    policy: str
    order: str
    target: float
    pages: int | None
    prefix_hits: int
    prefix_ratio: float
    probes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def find_size(
    trace: Trace,
    spec: str,
    target: float,
    *,
    order: Order | None = None,
    leaf_first: bool = False,
    entries: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> SizeFound:
    """The smallest tier in which ``spec`` has a prefix hit ratio of ``target``.

    Raises:
        ConfigError: ``target`` is not above 0 and at most 1.
    """
    if not 0 < target <= 1:
        raise ConfigError(f"the target hit ratio is {target}; it must be above 0 and at most 1")
    chains = list(trace.entries()) if entries is None else entries
    probes = 0

    def probe(pages: int) -> Cell:
        nonlocal probes
        probes += 1
        return replay_tier(trace, spec, pages, order=order, leaf_first=leaf_first, entries=chains)

    high = max(1, trace.unique_pages)
    best = probe(high)
    reached = best.prefix_ratio >= target
    low = 0
    while reached and high - low > 1:
        middle = (low + high) // 2
        cell = probe(middle)
        if cell.prefix_ratio >= target:
            high, best = middle, cell
        else:
            low = middle
    if progress is not None:
        progress(len(trace))
    return SizeFound(
        policy=spec,
        order=best.order,
        target=target,
        pages=high if reached else None,
        prefix_hits=best.prefix_hits,
        prefix_ratio=best.prefix_ratio,
        probes=probes,
    )
