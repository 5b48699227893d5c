"""The way up, and reading: promotion, reads through a lease, private copies.

What the store works with. All of it runs under the store's lock. Copies between VRAM and host, and
writes to disk, go on in the background; their ends are handled in ``poll`` and ``progress``, and
only there does the directory change. The layers below, each a file: ``Residence`` (what is where),
``Writes`` (time passes; to disk), ``Room`` (eviction).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvtier.devices.base import Event
from kvtier.errors import CopyFailedError, PageLostError
from kvtier.mover import events, order_behind, remaining, write_host
from kvtier.store.page import TIERS, Copy, Page
from kvtier.store.room import Room
from kvtier.tiers.aligned import aligned_buffer
from kvtier.tiers.codec import PageCodec, alike, recode
from kvtier.tiers.memory import Slot


class Placement(Room):
    """The tiers, the mover between them and the directory over them."""

    # ------------------------------------------------------------------ up

    def promote(self, page: Page, tier: str, deadline: float, *, evict: bool) -> bool:
        """Start to bring a page, held where it is, into ``vram`` or read it into ``host``.

        With ``evict`` other pages may have to go; otherwise only free slots are used. False if
        there is no room, or if the record on disk is damaged (then the page is gone from there).

        Raises:
            DiskError: the system refuses to read; the page may still be good.
        """
        if tier in page.copies or tier not in self.slots:
            return tier in page.copies
        slots = self.slots[tier]
        if not slots.free_pages and not (evict and self.ensure(tier, 1, deadline, optional=True)):
            return False
        host, disk = page.copies.get("host"), page.copies.get("disk")
        if tier == "vram" and host is not None and not host.arriving:
            slot = slots.take()
            if slot is None:
                return False
            source = host
            assert source.slot is not None
            self.directory.hold(page, source)
            self._rise(page, source.slot, slot, lambda: self.unhold(page, source))
            return True
        if disk is None or disk.arriving:
            return False
        with contextlib.ExitStack() as undo:
            bounce: Slot | None = None
            if tier == "vram":
                bounce = self.bounce_slot(deadline, self.disk_codec)
                undo.callback(self.bounce.give, bounce)
            slot = slots.take()
            if slot is None:
                return False
            undo.callback(slots.give, slot)
            if not self._read_disk(page, bounce or slot, deadline):
                return False
            undo.pop_all()
        if bounce is None:
            self.directory.attach(page, Copy("host", slot))
        else:
            through = bounce
            self._rise(page, through, slot, lambda: self.bounce.give(through))
        return True

    def _rise(self, page: Page, source: Slot, slot: Slot, release: Callable[[], None]) -> None:
        """Start the copy of a page from host memory into a VRAM slot."""
        target = Copy("vram", slot, arriving=True)
        self.directory.attach(page, target)

        def finished(error: CopyFailedError | None) -> None:
            release()
            self.landed(page, target, error)

        transfer = self.mover.up(source, slot, None, finished)
        host = page.copies.get("host")
        if host is not None and host.slot is source:
            host.was_read(transfer.event)

    def verify(self, page: Page, deadline: float) -> bool:
        """Read a page that is only on disk and check it, keeping nothing. False: damaged, and gone.

        Raises:
            DiskError: the system refuses to read; the page may still be good.
        """
        slot = self.bounce_slot(deadline, self.disk_codec)
        try:
            return self._read_disk(page, slot, deadline)
        finally:
            self.bounce.give(slot)

    def upload(self, data: torch.Tensor, slot: Slot, deadline: float) -> None:
        """Fill a VRAM slot from the host, and wait until it is filled.

        Raises:
            CopyFailedError: the copy failed.
            DeadlineExceededError: it did not end in time; ``slot.after`` has its event.
        """
        bounce = self.bounce_slot(deadline)
        try:
            self.device.host(write_host(self.device, bounce, deadline), write=True).copy_(data)
        except BaseException:
            self.bounce.give(bounce)
            raise
        outcome: list[CopyFailedError | None] = []

        def finished(error: CopyFailedError | None) -> None:
            self.bounce.give(bounce)
            outcome.append(error)

        transfer = self.mover.up(bounce, slot, None, finished)
        try:
            while not outcome:
                self.progress(deadline)
        except BaseException:
            slot.after.append(transfer.event)
            raise
        if outcome[0] is not None:
            raise outcome[0]

    # ------------------------------------------------------------------ reading

    def _read_disk(self, page: Page, slot: Slot, deadline: float) -> bool:
        at = write_host(self.device, slot, deadline)
        return self._read_page(page, self.device.host(at, write=True).numpy(), slot.codec)

    def _read_page(self, page: Page, out: np.ndarray, codec: PageCodec | None) -> bool:
        """A page on disk into ``out``, coded by ``codec``."""
        of = self.disk_codec
        if alike(codec, of):
            good = self._read_record(page, out)
            if good and codec is not None and codec is not of:
                codec.note(codec.facts_of(torch.from_numpy(out)[None]))
            return good
        found = aligned_buffer(self.disk_page_bytes)
        good = self._read_record(page, found)
        if good:
            recode(torch.from_numpy(found), of, torch.from_numpy(out), codec)
        return good

    def _read_record(self, page: Page, out: np.ndarray) -> bool:
        """A page on disk into ``out``, as it is there."""
        assert self.disk is not None
        began = time.monotonic()
        good = self.disk.read(page.key, out)
        self.mover.copied("disk->host", len(out), began, began, failed=not good)
        if good:
            self.mover.links["disk->host"].add(len(out))
            return True
        self.damaged += 1
        self.lose(page, "disk")
        return False

    def read(self, page: Page, copy: Copy, out: np.ndarray, deadline: float) -> bool:
        """The bytes of a held copy, or else of another one of the page, into ``out`` (uint8
        ``[page_bytes]``). False if they are not to be had.

        Raises:
            DiskError: the system refuses to read; the page may still be good.
        """
        others = [page.copies[t] for t in TIERS if t in page.copies]
        for each in (copy, *(c for c in others if c is not copy and not c.arriving)):
            if page.copies.get(each.tier) is not each:
                continue
            self.directory.hold(page, each)
            try:
                if self._read_copy(page, each, out, deadline):
                    return True
            finally:
                self.unhold(page, each)
        return False

    def _read_copy(self, page: Page, copy: Copy, out: np.ndarray, deadline: float) -> bool:
        if copy.slot is None:
            return self._read_page(page, out, None)
        if copy.tier == "host":
            found = self.device.host(copy.slot.range())
            recode(found, copy.slot.codec, torch.from_numpy(out), None)
            return True
        bounce = self.bounce_slot(deadline)
        outcome: list[CopyFailedError | None] = []

        def finished(error: CopyFailedError | None) -> None:
            # Read here: after a missed deadline nobody waits, and the slot is free all the same.
            if error is None:
                np.copyto(data, self.device.host(bounce.range()).numpy())
            self.bounce.give(bounce)
            outcome.append(error)

        data = np.empty_like(out)
        transfer = self.mover.down(copy.slot, bounce, copy.written, finished)
        copy.was_read(transfer.event)
        while not outcome:
            self.progress(deadline)
        if outcome[0] is not None:
            return False
        np.copyto(out, data)
        return True

    def read_planes(
        self, pages: list[Page], plane: int, outs: list[np.ndarray], layer: int | None = None
    ) -> list[bool]:
        """One plane of each of several pages on disk, checked, decoded as that of ``layer``; None: what is not coded."""
        assert self.disk is not None
        codec = None if layer is None else self.disk_codec
        found = outs
        if codec is not None and layer is not None:
            coded = np.empty((len(pages), codec.plane(layer).nbytes), np.uint8)
            found = list(coded)
        results = self.disk.read_planes([page.key for page in pages], plane, found)
        link = self.mover.links["disk->host"]
        for page, data, out, good in zip(pages, found, outs, results, strict=True):
            if good:
                link.add(len(data))
                if codec is not None and layer is not None:
                    raw = torch.from_numpy(out)[None]
                    codec.decode_planes(layer, torch.from_numpy(data)[None], raw)
            else:
                self.damaged += 1
                self.lose(page, "disk")
        return results

    # ------------------------------------------------------------------ private copies

    def fill(self, slot: Slot, page: Page, copy: Copy, deadline: float) -> None:
        """Put the bytes of a held copy into a private VRAM slot, ordered before later compute work.
        Waits for the copy, so that one that fails never becomes part of a page.

        Raises:
            CopyFailedError: the copy failed; the slot may be given back.
            PageLostError: the record on disk is damaged.
        """
        compute = self.device.compute_stream()
        bounce: Slot | None = None
        source = copy.slot
        if source is None or source.codec is not None:
            source = bounce = self.bounce_slot(deadline)
        event: Event | None = None
        try:
            if bounce is not None and copy.slot is not None:
                at = self.device.host(write_host(self.device, bounce, deadline), write=True)
                recode(self.device.host(copy.slot.range()), copy.slot.codec, at, None)
            elif bounce is not None and not self._read_disk(page, bounce, deadline):
                raise PageLostError(
                    "a page of the sequence is damaged on disk and was removed; compute it again"
                )
            order_behind(compute, slot)
            if copy.written is not None:
                compute.wait(copy.written)
            self.device.copy(compute, [(slot.range(), source.range())])
            if copy.tier != "vram":
                self.mover.links["host->vram"].add(slot.nbytes)
            event = compute.record()
            if bounce is None:
                copy.was_read(event)
            self._confirm([slot], event, deadline)
        finally:
            if bounce is not None:
                self.bounce.give(bounce, events([event]))

    def copy_slots(self, pairs: Sequence[tuple[Slot, Slot]], deadline: float) -> None:
        """Copy private VRAM slots, ``(target, source)``, in the order of compute work. Waits for the
        copy, as ``fill``. Raises CopyFailedError."""
        compute = self.device.compute_stream()
        for target, _ in pairs:
            order_behind(compute, target)
        self.device.copy(compute, [(target.range(), source.range()) for target, source in pairs])
        event = compute.record()
        self._confirm([target for target, _ in pairs], event, deadline)

    @staticmethod
    def _confirm(targets: Sequence[Slot], event: Event, deadline: float) -> None:
        try:
            event.synchronize(remaining(deadline, "a copy between unsealed pages"))
        except BaseException:
            for slot in targets:
                slot.after.append(event)
            raise
