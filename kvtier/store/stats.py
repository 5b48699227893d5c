"""What a store tells of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.mover import LinkStats


@dataclass(slots=True)
class TierStats:
    """One tier. ``pages_in``/``pages_out`` count pages that came and went; ``hits`` pages found here by a
    lookup, in the fastest tier that had them. ``codec`` is how it keeps pages, ``pages_coded`` how many it has been given
    so, ``worst_error`` the largest absolute error of any value in them, ``relative_error`` the root of the mean squared
    error over that of the mean squared value."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    pages: int = 0
    pages_in: int = 0
    pages_out: int = 0
    hits: int = 0
    codec: str = "none"
    pages_coded: int = 0
    worst_error: float = 0.0
    relative_error: float = 0.0


@dataclass(slots=True)
class StoreStats:
    """A snapshot.

    Attributes:
        tiers: ``vram``, ``host``, ``disk``.
        links: ``vram->host``, ``host->vram``, ``host->disk``, ``disk->host``, bytes of page payload.
        lookups, lookup_pages, hit_pages: calls of ``match``, pages asked for, pages found.
        leases, owners: leases open now; sessions holding pages now.
        damaged: records that failed their checksum and were removed.
        lost: pages whose last copy was lost to a failed copy or write.
        warnings: texts of all warnings raised so far.
    """

    tiers: dict[str, TierStats] = field(default_factory=dict)
    links: dict[str, LinkStats] = field(default_factory=dict)
    lookups: int = 0
    lookup_pages: int = 0
    hit_pages: int = 0
    leases: int = 0
    owners: int = 0
    damaged: int = 0
    lost: int = 0
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
