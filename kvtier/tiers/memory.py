"""A tier made of page slots in VRAM or host RAM.

Slots are cut from slabs that are allocated on demand, so a tier that is configured but not used costs
nothing and nothing is pinned before it is needed. The lowest free slot is handed out first: pages that are
written one after another lie one after another, and a run of them is one strided copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.devices.base import Buffer, Event, Range
from kvtier.errors import DeviceOOMError

if TYPE_CHECKING:
    from kvtier.tiers.codec import PageCodec

#: Slabs are about this large: few enough to register with a driver, small enough to grow in steps.
SLAB_BYTES = 128 << 20


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one page: ``nbytes`` bytes at ``start`` of ``slab``, coded by ``codec`` (``None``: as they are).

    ``after`` holds events of work that may still use the bytes of the slot's former page; whoever writes to
    the slot first must order itself behind them.
    """

    index: int
    slab: Buffer
    start: int
    nbytes: int
    codec: PageCodec | None = None
    after: list[Event] = field(default_factory=list)

    def range(self, offset: int = 0, nbytes: int | None = None) -> Range:
        """``nbytes`` bytes of the slot from ``offset`` on (default: all)."""
        start = self.start + offset
        return Range(self.slab, start, start + (self.nbytes - offset if nbytes is None else nbytes))


class SlotTier:
    """Slots for up to ``capacity_bytes // page_bytes`` pages.

    Args:
        name: ``"vram"``, ``"host"``; for messages and statistics.
        alloc: ``Device.alloc`` or ``Device.alloc_host``.
        free: ``Device.free``.
        page_bytes: bytes of a slot.
        capacity_bytes: limit of all slabs together; never passed.
        codec: how the pages in the slots are coded; ``page_bytes`` is then what they take coded.
    """

    def __init__(
        self,
        name: str,
        *,
        alloc: Callable[[int], Buffer],
        free: Callable[[Buffer], None],
        page_bytes: int,
        capacity_bytes: int,
        codec: PageCodec | None = None,
    ) -> None:
        self.name = name
        self.codec = codec
        self.page_bytes = page_bytes
        self.capacity_pages = capacity_bytes // page_bytes
        self._alloc = alloc
        self._free_buffer = free
        self._slabs: list[Buffer] = []
        self._slots: list[Slot] = []
        self._free: list[int] = []
        self._taken: set[int] = set()
        self.peak_pages = 0
        #: Set when the device had less memory than the tier was promised.
        self.shortfall: str | None = None

    @property
    def used_pages(self) -> int:
        return len(self._taken)

    @property
    def used_bytes(self) -> int:
        return self.used_pages * self.page_bytes

    @property
    def free_pages(self) -> int:
        """Slots that ``take`` can still hand out without anything being given back."""
        return self.capacity_pages - self.used_pages

    def take(self) -> Slot | None:
        """A free slot, contents undefined, or ``None`` if the tier is full."""
        if self.free_pages <= 0 or (not self._free and not self._grow()):
            return None
        index = heapq.heappop(self._free)
        self._taken.add(index)
        self.peak_pages = max(self.peak_pages, len(self._taken))
        return self._slots[index]

    def give(self, slot: Slot, after: Iterable[Event] = ()) -> None:
        """Give a slot back; ``after`` are events its next writer has to wait for."""
        self._taken.remove(slot.index)
        slot.after.extend(after)
        heapq.heappush(self._free, slot.index)

    def close(self) -> None:
        """Free all slabs. All work on them must have been waited for."""
        for slab in self._slabs:
            self._free_buffer(slab)
        self._slabs.clear()
        self._slots.clear()
        self._free.clear()
        self._taken.clear()
        self.capacity_pages = 0

    def check(self) -> None:
        """Recount: every slot is either free or taken, and the slabs keep the limit."""
        assert len(self._free) == len(set(self._free)), f"{self.name}: a slot is free twice"
        assert not self._taken & set(self._free), f"{self.name}: a slot is both free and taken"
        assert len(self._free) + len(self._taken) == len(self._slots) <= self.capacity_pages

    def _grow(self) -> bool:
        room = self.capacity_pages - len(self._slots)
        if room <= 0:
            return False
        pages = min(room, max(8, SLAB_BYTES // self.page_bytes))
        try:
            slab = self._alloc(pages * self.page_bytes)
        except DeviceOOMError as error:
            if not self._slots:
                raise
            self.shortfall = f"the {self.name} tier stays at {len(self._slots)} of {self.capacity_pages} pages: {error}"
            self.capacity_pages = len(self._slots)
            return False
        self._slabs.append(slab)
        for i in range(pages):
            index = len(self._slots)
            start = i * self.page_bytes
            self._slots.append(Slot(index, slab, start, self.page_bytes, self.codec))
            heapq.heappush(self._free, index)
        return True
