"""Time passes: the ends of copies and writes; and the way of a page to disk.

A page is written in three steps: its bytes reach host memory (they are there, or pass through a
bounce slot), the disk tier queues them, the disk acknowledges. Writes are queued in the order in
which they began, so a prefix is never behind its suffix.

Where the disk codes its pages, those from VRAM are coded on the device on their way down. Those that
are in host memory only are coded here, by the CPU, if host memory has them otherwise.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from kvtier.devices.base import Device
from kvtier.errors import (
    CopyFailedError,
    DeadlineExceededError,
    DiskError,
    KvtierError,
    TierFullError,
)
from kvtier.mover import remaining
from kvtier.store.directory import Directory
from kvtier.store.page import Copy, Page
from kvtier.store.residence import Residence
from kvtier.tiers.codec import PageCodec, alike, recode
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.memory import Slot, SlotTier


@dataclass(slots=True, eq=False)
class Write:
    """A page on its way to disk.

    Attributes:
        target: its copy on disk, arriving.
        slot: the host memory that its bytes are read from.
        release: lets go of that memory.
        above: the disk copy of its prefix, held until the write has ended.
        copied: the bytes are in ``slot``.
        data: they, as the disk wants them, once it has been asked to take them.
        asked, began: when it was begun, and handed to the disk tier (``time.monotonic``).
    """

    page: Page
    target: Copy
    slot: Slot
    release: Callable[[], None]
    above: tuple[Page, Copy] | None
    copied: bool
    asked: float = field(default_factory=time.monotonic)
    began: float = 0.0
    data: np.ndarray | None = None


class Writes(Residence):
    """A residence in which time passes."""

    def __init__(
        self,
        device: Device,
        directory: Directory,
        slots: dict[str, SlotTier],
        disk: DiskTier | None,
        bounce: SlotTier,
        disk_codec: PageCodec | None,
        park: Callable[[], bool],
    ) -> None:
        super().__init__(device, directory, slots, disk, bounce, disk_codec, park)
        self._writes: deque[Write] = deque()
        self._acks: queue.SimpleQueue[tuple[Future[None], Write]] = queue.SimpleQueue()
        self._unacknowledged = 0

    # ------------------------------------------------------------------ time passes

    @property
    def busy(self) -> bool:
        """Whether copies or writes are under way."""
        return self.mover.busy or self._unacknowledged > 0 or bool(self._writes)

    def poll(self) -> bool:
        """Handle everything that has ended; never waits. Whether anything had."""
        ended = self.mover.poll()
        while self._unacknowledged:
            try:
                self._acknowledged(*self._acks.get_nowait())
            except queue.Empty:
                break
            ended = True
        self._submit()
        return ended

    def progress(self, deadline: float) -> None:
        """Wait until at least one thing that is under way has ended."""
        if self.poll() or not self.busy:
            return
        if self.mover.busy:
            self.mover.wait_oldest(deadline)
        elif self._unacknowledged:
            try:
                ended = self._acks.get(timeout=remaining(deadline, "a write to disk"))
            except queue.Empty:
                raise DeadlineExceededError(
                    f"the disk did not acknowledge {self._unacknowledged} page(s) before the "
                    "deadline; they are still being written"
                ) from None
            self._acknowledged(*ended)
            self._submit()
        else:
            self._submit(remaining(deadline, "the queue of the disk tier"))

    def drain(self, deadline: float) -> None:
        """Wait until nothing is under way."""
        while self.busy:
            remaining(deadline, "copies between tiers")
            self.progress(deadline)

    def bounce_slot(self, deadline: float, codec: PageCodec | None = None) -> Slot:
        """A bounce slot for a page coded by ``codec``, contents undefined. Other copies may end meanwhile.

        Raises:
            TierFullError: all are taken, and nothing is under way that would free one.
            DeadlineExceededError: none was freed in time.
        """
        while True:
            slot = self.bounce.take()
            if slot is not None:
                slot.codec = codec
                slot.nbytes = self.directory.page_bytes if codec is None else codec.page_bytes
                return slot
            if not self.busy:
                raise TierFullError(
                    f"all {self.bounce.capacity_pages} host slots between VRAM and disk are taken "
                    "and nothing is under way that would free one; close the store",
                    tier="bounce",
                    needed_bytes=self.bounce.page_bytes,
                    holders={},
                )
            remaining(deadline, "a free host slot between VRAM and disk")
            self.progress(deadline)

    # ------------------------------------------------------------------ down to disk

    def write_to_disk(self, page: Page, deadline: float) -> bool:
        """Start the write of a page, and before it of those of its prefix that are not on disk: a
        page on disk without its prefix could not be found after a restart. Other copies may end
        meanwhile. False if the disk cannot take it."""
        chain: list[Page] = []
        at: Page | None = page
        while at is not None and "disk" not in at.copies:
            if at.readable() is None:
                return False
            chain.append(at)
            at = self.directory.get(at.parent) if at.parent is not None else None
        return all(self._write_one(p, deadline) for p in reversed(chain))

    def _write_one(self, page: Page, deadline: float) -> bool:
        bounce: Slot | None = None
        if not self._from_host(page):
            bounce = self.bounce_slot(deadline, self.disk_codec)
        # Waiting for the slot may have changed where the page is, and whether it is.
        host = page.copies.get("host")
        if bounce is not None and (self._from_host(page) or page.readable() is None):
            self.bounce.give(bounce)
            bounce = None
        if "disk" in page.copies or page.readable() is None:
            if bounce is not None:
                self.bounce.give(bounce)
            return "disk" in page.copies
        source = page.copies["vram"] if bounce is not None or host is None else host
        parent = self.directory.get(page.parent) if page.parent is not None else None
        above: tuple[Page, Copy] | None = None
        if parent is not None:
            if "disk" not in parent.copies:
                if bounce is not None:
                    self.bounce.give(bounce)
                return False
            above = (parent, parent.copies["disk"])
            self.directory.hold(*above)
        self.directory.hold(page, source)
        if not self._make_disk_room():
            if bounce is not None:
                self.bounce.give(bounce)
            if above is not None:
                self.unhold(*above)
            self.unhold(page, source)
            return False
        target = self.attach_disk(page, arriving=True)
        assert source.slot is not None
        if bounce is None:
            write = Write(
                page, target, source.slot, lambda: self.unhold(page, source), above, copied=True
            )
        else:
            slot = bounce
            write = Write(page, target, slot, lambda: self.bounce.give(slot), above, copied=False)

            def copied(error: CopyFailedError | None) -> None:
                self.unhold(page, source)
                self._copied(write, error)

            transfer = self.mover.down(source.slot, slot, source.written, copied)
            source.was_read(transfer.event)
        self._writes.append(write)
        self._submit()
        return page.copies.get("disk") is target

    def _from_host(self, page: Page) -> bool:
        """Whether a page is to be written out of its place in host memory: it is in place there, and as the disk wants
        it, or nowhere else."""
        host = page.copies.get("host")
        if not _ready(host):
            return False
        assert host is not None
        assert host.slot is not None
        return alike(host.slot.codec, self.disk_codec) or not _ready(page.copies.get("vram"))

    def _copied(self, write: Write, error: CopyFailedError | None) -> None:
        if error is not None:
            self._writes.remove(write)
            self._ended(write, error)
        else:
            write.copied = True
            self._submit()

    def _submit(self, wait_s: float | None = None) -> None:
        """Hand the writes that are ready to the disk tier, in order. Does not wait for room in its
        queue, unless ``wait_s`` is given.

        Raises:
            DeadlineExceededError: no room within ``wait_s``.
        """
        while self._writes and self._writes[0].copied:
            assert self.disk is not None
            write = self._writes[0]
            page = write.page
            if write.data is None:
                write.data = self._for_disk(write.slot)
            try:
                future = self.disk.put(
                    page.key,
                    parent=page.parent,
                    depth=page.depth,
                    identity=page.identity,
                    data=write.data,
                    ephemeral=page.ephemeral,
                    timeout_s=wait_s or 0.0,
                )
            except DeadlineExceededError:
                if wait_s is None:
                    return
                raise
            except (KvtierError, OSError) as error:
                self._writes.popleft()
                self._ended(write, error)
                continue
            self._writes.popleft()
            write.began = time.monotonic()
            self._unacknowledged += 1
            future.add_done_callback(_reporter(self._acks, write))

    def _for_disk(self, slot: Slot) -> np.ndarray:
        """The bytes to store: in place if the page is coded as on disk, else in memory of their own."""
        codec = self.disk_codec
        found = self.device.host(slot.range())
        if alike(slot.codec, codec):
            if codec is not None and slot.codec is not codec:
                # Coded for host memory; the error goes on with the page.
                codec.note(codec.facts_of(found[None]))
            return found.numpy()
        data = torch.empty(self.disk_page_bytes, dtype=torch.uint8)
        recode(found, slot.codec, data, codec)
        return data.numpy()

    def _acknowledged(self, future: Future[None], write: Write) -> None:
        self._unacknowledged -= 1
        if future.cancelled():
            self._ended(write, DiskError("the write was cancelled"))
        else:
            self._ended(write, future.exception())

    def _ended(self, write: Write, error: BaseException | None) -> None:
        write.release()
        if write.began:
            self.mover.copied(
                "host->disk",
                self.disk_page_bytes,
                write.asked,
                write.began,
                failed=error is not None,
            )
        if error is None:
            self.mover.links["host->disk"].add(self.disk_page_bytes)
            self.landed(write.page, write.target, None)
        else:
            self.warn(f"a page could not be written to disk: {error}")
            # Its suffix may be on disk already, or come there.
            write.page.torn = True
            self.landed(write.page, write.target, CopyFailedError(str(error)))
        if write.above is not None:
            self.unhold(*write.above)

    def _make_disk_room(self) -> bool:
        """Room for one page on disk."""
        assert self.disk is not None
        stuck: list[tuple[Page, Copy]] = []
        try:
            while self.disk_bytes + self.stored_bytes > self.disk.live_capacity_bytes:
                page = self.directory.victim("disk")
                if page is None:
                    return False
                copy = page.copies["disk"]
                if any(c is not copy and not c.arriving for c in page.copies.values()):
                    self.drop_copy(page, copy, evicted=True)
                elif not self.drop_page(page, evicted=True):
                    self.directory.hold(page, copy)
                    stuck.append((page, copy))
            return True
        finally:
            for page, copy in stuck:
                self.unhold(page, copy)


def _ready(copy: Copy | None) -> bool:
    return copy is not None and not copy.arriving


def _reporter(
    acks: queue.SimpleQueue[tuple[Future[None], Write]], write: Write
) -> Callable[[Future[None]], None]:
    return lambda future: acks.put((future, write))
