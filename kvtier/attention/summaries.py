"""Summaries of pages: made when a page is sealed, kept in VRAM for all pages of a sequence, wherever those are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from kvtier.devices.base import Buffer, Device, Event, Range
from kvtier.errors import CopyFailedError, DeviceOOMError, PageLostError, TierFullError
from kvtier.kernels.pages import scatter_pages
from kvtier.kernels.summary import summarise_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import Part
from kvtier.store.lease import Lease
from kvtier.store.page import Page
from kvtier.store.store import TieredStore
from kvtier.tiers.memory import Slot

#: Pages that an index makes room for beyond those that there are, at least,
MIN_PAGES = 16
#: unless that takes more than this part of the VRAM tier.
SPARE_SHARE = 32


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
    """The summaries of one sequence's sealed pages in VRAM, layer by layer.

    Its bytes are taken from the VRAM tier's capacity.

    Args:
        store: where the pages are; its layout has summaries.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.device: Device = store.device
        self._parts = {n: p for n, p in enumerate(store.layout.summary_parts) if p is not None}
        self._first, self._page_bytes = store.layout.summary_range
        self._pages: list[Page] = []
        self._buffer: Buffer | None = None
        self._room = 0
        #: Whose pages are held, all of them.
        self._lease: Lease | None = None
        #: Work that may still read the memory.
        self._used: Event | None = None

    @property
    def nbytes(self) -> int:
        """VRAM in use."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def ranges(self) -> list[Range]:
        """The memory, for a device to check."""
        return [] if self._buffer is None else [self._buffer.range()]

    def reserve(self, pages: int) -> None:
        """Have room for ``pages`` pages. Called while no lease pins the tier, which may have to give pages up for it.

        Raises:
            DeviceOOMError, TierFullError: there is no VRAM for them, even if only these are held.
        """
        if pages <= self._room:
            return
        spare = self.store.sizes["vram"] // SPARE_SHARE // self._page_bytes
        room = pages + min(spare, max(MIN_PAGES, pages // 4))
        try:
            fresh = self._take(room)
        except (DeviceOOMError, TierFullError):
            # No room for the old and the new memory at once: the pages themselves have what is in it.
            self.close()
            room = pages
            fresh = self._take(room)
        old, keep = self._buffer, len(self._pages)
        before = {n: self._rows(n, p)[:keep] for n, p in self._parts.items()} if old else {}
        self._buffer, self._room = fresh, room
        if old is None:
            return
        compute = self.device.compute_stream()
        if self._used is not None:
            compute.wait(self._used)

        def kernel() -> None:
            for n, rows in before.items():
                self._rows(n, self._parts[n])[:keep].copy_(rows)

        self.device.launch(
            compute, "grow summaries", kernel, reads=[old.range()], writes=[fresh.range()]
        )
        compute.record().synchronize(self.store.timeout_s)
        self._give(old)

    def follow(self, lease: Lease) -> None:
        """Hold the summaries of the leased pages, in order; what is held already is not read again. There must be
        room (see ``reserve``), and the compute stream be behind all that wrote the pages.

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
        del self._pages[have:]
        if have < len(lease.pages):
            self._fetch(lease, have)
            self._pages += lease.pages[have:]
        self._lease = lease

    def layer(self, layer: int) -> torch.Tensor:
        """``[pages, 4, kv_heads, dim]`` of a layer, for work on the compute stream."""
        part = self._parts[layer]
        raw = self._rows(layer, part)[: len(self._pages)]
        return raw.view(getattr(torch, part.dtype)).view(-1, 4, part.heads, part.dim)

    def used(self, event: Event) -> None:
        """``event`` is behind the last reads."""
        self._used = event

    def close(self) -> None:
        """Give the memory back, once the work on it is done. Idempotent; can be used again."""
        self._pages.clear()
        self._lease = None
        buffer, self._buffer, self._room = self._buffer, None, 0
        if buffer is not None:
            if self._used is not None and not self.store.closed:
                # A failed copy has ended as well as any other.
                with contextlib.suppress(CopyFailedError):
                    self._used.synchronize(self.store.timeout_s)
            self._give(buffer)

    # ------------------------------------------------------------------ inside

    def _take(self, room: int) -> Buffer:
        """Memory for ``room`` pages, taken from the tier."""
        nbytes = room * self._page_bytes
        self.store.withhold_vram(nbytes)
        try:
            return self.device.alloc(nbytes)
        except BaseException:
            self.store.withhold_vram(-nbytes)
            raise

    def _give(self, buffer: Buffer) -> None:
        self.device.free(buffer)
        self.store.withhold_vram(-buffer.nbytes)

    def _rows(self, layer: int, part: Part) -> torch.Tensor:
        """uint8 ``[room, bytes of a summary]``."""
        assert self._buffer is not None
        start = (part.offset - self._first) * self._room
        return self._buffer.raw()[start : start + self._room * part.nbytes].view(self._room, -1)

    def _fetch(self, lease: Lease, have: int) -> None:
        """Bring the summaries of the pages from ``have`` on to the end of those held."""
        fresh = range(have, len(lease.pages))
        compute = self.device.compute_stream()
        packed = self.device.alloc(len(fresh) * self._page_bytes)
        bounce: Buffer | None = None
        try:
            disk = [n for n in fresh if lease.copies[n].slot is None]
            if disk:
                bounce = self.device.alloc_host(len(disk) * self._page_bytes)
                self._read(lease, disk, bounce)
            places = {n: at * self._page_bytes for at, n in enumerate(disk)}
            up: list[tuple[Range, Range]] = []
            across: list[tuple[Range, Range]] = []
            for at, n in enumerate(fresh):
                to = packed.range(at * self._page_bytes, (at + 1) * self._page_bytes)
                copy = lease.copies[n]
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
            self._spread(compute_rows=packed, first=have, count=len(fresh))
            # The packed copy and the bounce memory go at once, so the copies have to be over.
            compute.record().synchronize(self.store.timeout_s)
        finally:
            self.device.free(packed)
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

    def _spread(self, compute_rows: Buffer, first: int, count: int) -> None:
        """From page by page to layer by layer."""
        assert self._buffer is not None
        rows = compute_rows.raw().view(count, self._page_bytes)

        def kernel() -> None:
            for n, part in self._parts.items():
                at = part.offset - self._first
                self._rows(n, part)[first : first + count] = rows[:, at : at + part.nbytes]

        self.device.launch(
            self.device.compute_stream(), "spread summaries", kernel,
            reads=[compute_rows.range()], writes=[self._buffer.range()],
        )  # fmt: skip
