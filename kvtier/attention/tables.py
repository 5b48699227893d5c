"""Where the pages of one sequence are, as tables that kernels read: in VRAM, in host memory, on disk, unsealed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.attention.window import Row
from kvtier.devices.base import Buffer, Device, Range
from kvtier.kernels.table import PageTable
from kvtier.layout import PageLayout
from kvtier.store.lease import Lease
from kvtier.store.page import Page
from kvtier.tiers.memory import Slot


class LeasedPages:
    """The sealed pages of a lease by where they are. Made once a lease, not once a step.

    Attributes:
        hot, host: places in the sequence of the pages in VRAM and in host memory.
        hot_table, host_table: the tables of them, in that order; ``None`` if there are none.
        disk: (place, page) of those on disk only.
        ranges: the pages in VRAM, for a device to check; neighbours as one.
        host_slots: of the pages in host memory; ``host_ranges`` as ``ranges``.
        host_codec: how those are coded, all alike; their table then is of coded pages.
    """

    def __init__(self, lease: Lease, layout: PageLayout) -> None:
        self.lease = lease
        self.hot: list[int] = []
        self.host: list[int] = []
        self.disk: list[tuple[int, Page]] = []
        hot_slots: list[Slot] = []
        self.host_slots: list[Slot] = []
        for place, (page, copy) in enumerate(zip(lease.pages, lease.copies, strict=True)):
            if copy.slot is None:
                self.disk.append((place, page))
            elif copy.tier == "vram":
                self.hot.append(place)
                hot_slots.append(copy.slot)
            else:
                self.host.append(place)
                self.host_slots.append(copy.slot)
        self.hot_table = table_of(hot_slots, layout)
        self.host_codec = self.host_slots[0].codec if self.host_slots else None
        self.host_table = table_of(self.host_slots, layout)
        self.ranges = merged([slot.range() for slot in hot_slots])
        self.host_ranges = merged([slot.range() for slot in self.host_slots])
        #: place in the sequence -> row of its table.
        self.hot_row = {place: row for row, place in enumerate(self.hot)}
        self.host_row = {place: row for row, place in enumerate(self.host)}
        self.disk_page = dict(self.disk)
        self._indexes: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.lease.pages)

    def check_host(self, device: Device) -> None:
        """Have the device check that the host may read its pages now."""
        for at in self.host_ranges:
            device.host(at)

    def index(self, tier: str, device: torch.device) -> torch.Tensor:
        """int64: places of the pages in ``vram``, ``host`` or ``disk``, on a torch device."""
        found = self._indexes.get(tier)
        if found is None:
            places = {"vram": self.hot, "host": self.host, "disk": [at for at, _ in self.disk]}[
                tier
            ]
            with torch.inference_mode(False):
                found = torch.tensor(places, dtype=torch.int64, device=device)
            self._indexes[tier] = found
        return found


def table_of(
    slots: Sequence[Slot], layout: PageLayout, tokens: Sequence[int] | None = None
) -> PageTable | None:
    """The table of these slots; ``None`` if there are none."""
    if not slots:
        return None
    slabs: dict[int, Buffer] = {}
    for slot in slots:
        slabs.setdefault(id(slot.slab), slot.slab)
    number = {key: n for n, key in enumerate(slabs)}
    return PageTable(
        [slab.raw() for slab in slabs.values()],
        [(number[id(slot.slab)], slot.start) for slot in slots],
        page_bytes=slots[0].nbytes,
        page_tokens=layout.page_tokens,
        tokens=tokens,
    )


def tail_table(row: Row, layout: PageLayout) -> PageTable | None:
    """The unsealed slots of a row, up to the last token of this step."""
    sealed = len(row.lease.copies) * layout.page_tokens
    left = row.before + row.new - sealed
    slots, tokens = [], []
    for slot in row.tails:
        if left > 0:
            slots.append(slot)
            tokens.append(min(left, layout.page_tokens))
            left -= layout.page_tokens
    return table_of(slots, layout, tokens)


def merged(places: Sequence[Range]) -> list[Range]:
    """The same bytes, ranges that follow each other as one."""
    ranges: list[Range] = []
    for place in places:
        last = ranges[-1] if ranges else None
        if last is not None and last.buffer is place.buffer and last.stop == place.start:
            ranges[-1] = Range(place.buffer, last.start, place.stop)
        else:
            ranges.append(place)
    return ranges
