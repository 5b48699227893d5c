"""What a caller wants of a folder, and what opening it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Payload
from kvtier.tiers.record import DiskRecord

#: Chooses what to give up: given the pages, the one used longest ago first and parents before
#: children, and the bytes that may stay.
Evict = Callable[[Sequence[DiskRecord], int], Sequence[bytes]]


@dataclass(frozen=True)
class Wish:
    """What the caller wants of a folder; see ``DiskTier``."""

    shape: PageShape
    layout: bytes
    payload: Payload | None
    capacity_bytes: int
    batch_bytes: int
    segment_bytes: int
    durable: bool
    layout_info: Mapping[str, Any] | None
    evict: Evict | None
    patience_s: float


@dataclass(frozen=True)
class OpenReport:
    """What opening a folder found, in pages.

    Attributes:
        kept: pages that are usable.
        damaged: index entries that were not readable, or whose slot is not there.
        ephemeral: pages that were stored for the time until close only.
        orphans: pages whose parent is gone.
        evicted: pages that did not fit a lowered capacity.
        emptied: why the whole folder was given up, or ``None``.
    """

    kept: int = 0
    damaged: int = 0
    ephemeral: int = 0
    orphans: int = 0
    evicted: int = 0
    emptied: str | None = None
