"""Summaries of pages: made when a page is sealed, kept in VRAM for all pages of a sequence, wherever those are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.attention.tables import merged
from kvtier.devices.base import Buffer, Device, Event, Range
from kvtier.errors import PageLostError
from kvtier.kernels.pages import scatter_pages
from kvtier.kernels.summary import PageSummaries, summarise_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import PLANE_ALIGN
from kvtier.mover import order_behind
from kvtier.store.lease import Lease
from kvtier.store.page import Page
from kvtier.store.store import TieredStore
from kvtier.tiers.memory import Slot


def write_summaries(store: TieredStore, slots: Sequence[Slot], written: Event | None) -> Event:
    """Summarise the keys of full, unsealed slots into their summary parts, on the compute stream.

    Args:
        written: the last write into the slots.

    Returns:
        An event behind the summaries.
    """
    layout, device = store.layout, store.device
    compute = device.compute_stream()
    if written is not None:
        compute.wait(written)
    slabs = list({id(slot.slab): slot.slab for slot in slots}.values())
    number = {id(slab): n for n, slab in enumerate(slabs)}
    table = PageTable(
        [slab.raw() for slab in slabs],
        [(number[id(slot.slab)], slot.start) for slot in slots],
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
    )
    parts = [part for part in layout.summary_parts if part is not None]

    def kernel() -> None:
        for plane, part in zip(layout.planes, layout.summary_parts, strict=True):
            if plane is not None and part is not None:
                made = summarise_pages(
                    table, start=plane.k.offset, heads=part.heads, dim=part.dim,
                    dtype=getattr(torch, part.dtype),
                )  # fmt: skip
                rows = made.view(len(slots), -1).view(torch.uint8)
                scatter_pages(table, rows, start=part.offset)

    keys = [p.k for p, s in zip(layout.planes, layout.summary_parts, strict=True) if p and s]
    device.launch(
        compute,
        "summaries",
        kernel,
        reads=[slot.range(k.offset, k.nbytes) for slot in slots for k in keys],
        writes=[slot.range(part.offset, part.nbytes) for slot in slots for part in parts],
    )
    return compute.record()


class SummaryIndex:
    """The summaries of one sequence's sealed pages in VRAM, page by page in slots of the VRAM tier.

    It takes no memory but such slots, so that pages and summaries together never take more than the tier, and it grows
    by one slot after another: nothing that is held has to move.

    Args:
        store: where the pages are; its layout has summaries.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.device: Device = store.device
        self._parts = {n: p for n, p in enumerate(store.layout.summary_parts) if p is not None}
        self._first, self._page_bytes = store.layout.summary_range
        #: From one summary to the next in a slot.
        self._stride = -(-self._page_bytes // PLANE_ALIGN) * PLANE_ALIGN
        self._each = store.layout.summaries_a_slot
        self._slots: list[Slot] = []
        self._pages: list[Page] = []
        self._ranges: list[Range] = []
        self._table: PageTable | None = None
        #: Whose pages are held, all of them.
        self._lease: Lease | None = None
        #: Work that may still read the memory.
        self._used: Event | None = None

    @property
    def nbytes(self) -> int:
        """VRAM in use."""
        return len(self._slots) * self.store.layout.page_bytes

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def ranges(self) -> list[Range]:
        """Where the summaries are, for a device to check."""
        return self._ranges

    def lacking(self, pages: int) -> int:
        """Slots that it takes, beyond those that there are, to hold the summaries of so many pages."""
        return max(0, self.store.layout.summary_slots(pages) - len(self._slots))

    def grow(self, slots: Sequence[Slot]) -> None:
        """Have these slots too, until ``close``; see ``TieredStore.lend``."""
        self._slots += slots

    def follow(self, lease: Lease) -> None:
        """Hold the summaries of the leased pages, in order; what is held already is not read again. There must be
        room (see ``lacking``), and the compute stream be behind all that wrote the pages.

        Raises:
            PageLostError: a page on disk turned out to be damaged.
        """
        if lease is self._lease:
            return
        self._lease = None
        have = 0
        for mine, theirs in zip(self._pages, lease.pages, strict=False):
            if mine is not theirs:
                break
            have += 1
        if have < max(len(self._pages), len(lease.pages)):
            del self._pages[have:]
            try:
                self._fetch(lease, have)
                self._pages += lease.pages[have:]
            finally:
                self._find()
        self._lease = lease

    def layer(self, layer: int) -> PageSummaries:
        """Those of a layer, for compute work. There is a page at least."""
        assert self._table is not None
        part = self._parts[layer]
        return PageSummaries(
            self._table, part.offset - self._first, part.heads, part.dim, getattr(torch, part.dtype)
        )

    def used(self, event: Event) -> None:
        """``event`` is behind the last reads."""
        self._used = event

    def close(self) -> None:
        """Give the slots back; their next writer waits for the work on them. Idempotent; can be used again."""
        self._pages.clear()
        self._lease = None
        self._find()
        slots, self._slots = self._slots, []
        self.store.take_back(slots, [] if self._used is None else [self._used])

    # ------------------------------------------------------------------ inside

    def _place(self, number: int) -> Range:
        """Where the summaries of a page are."""
        slot, at = divmod(number, self._each)
        return self._slots[slot].range(at * self._stride, self._page_bytes)

    def _find(self) -> None:
        """The table and the ranges of what is held. The gaps between summaries are nobody's: nothing was written there
        since the slot was another's."""
        places = [self._place(number) for number in range(len(self._pages))]
        self._ranges = merged(places)
        slabs = list({id(at.buffer): at.buffer for at in places}.values())
        number = {id(slab): n for n, slab in enumerate(slabs)}
        self._table = None
        if places:
            self._table = PageTable(
                [slab.raw() for slab in slabs],
                [(number[id(at.buffer)], at.start) for at in places],
                page_bytes=self._page_bytes,
                page_tokens=self.store.layout.page_tokens,
            )

    def _fetch(self, lease: Lease, have: int) -> None:
        """Bring the summaries of the pages from ``have`` on behind those held."""
        fresh = range(have, len(lease.pages))
        if not fresh:
            return
        compute = self.device.compute_stream()
        for slot in self._slots[have // self._each :]:
            order_behind(compute, slot)
        bounce: Buffer | None = None
        try:
            disk = [n for n in fresh if lease.copies[n].slot is None]
            if disk:
                bounce = self.device.alloc_host(len(disk) * self._page_bytes)
                self._read(lease, disk, bounce)
            places = {n: at * self._page_bytes for at, n in enumerate(disk)}
            up: list[tuple[Range, Range]] = []
            across: list[tuple[Range, Range]] = []
            for n in fresh:
                to, copy = self._place(n), lease.copies[n]
                if copy.slot is None:
                    assert bounce is not None
                    up.append((to, bounce.range(places[n], places[n] + self._page_bytes)))
                else:
                    codec = copy.slot.codec
                    first = self._first if codec is None else codec.summary_offset
                    source = copy.slot.range(first, self._page_bytes)
                    (across if copy.tier == "vram" else up).append((to, source))
            for parts in (up, across):
                if parts:
                    self.device.copy(compute, parts)
            if up:
                self.store.count_streamed(len(up) * self._page_bytes, len(up))
            # The bounce memory goes at once, and a failed copy must not count as held.
            compute.record().synchronize(self.store.timeout_s)
        finally:
            if bounce is not None:
                self.device.free(bounce)

    def _read(self, lease: Lease, disk: list[int], bounce: Buffer) -> None:
        outs = [
            self.device.host(
                bounce.range(at * self._page_bytes, (at + 1) * self._page_bytes), write=True
            ).numpy()
            for at in range(len(disk))
        ]
        try:
            self.store.read_disk_summaries([lease.pages[n] for n in disk], outs)
        except PageLostError:
            self._pages.clear()
            raise
