"""Making room and moving pages: eviction, demotion, promotion, loss.

All of it runs under the store's lock. Copies between VRAM and host, and writes to disk, go on in the
background; their ends are handled in ``poll`` and ``progress``, and only there does the directory change.
"""

from __future__ import annotations

import queue
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from kvtier.devices.base import Device
from kvtier.errors import CopyFailedError, DeadlineExceededError, DiskError, OffloadWarning, TierFullError
from kvtier.mover import Mover, events, order_behind, remaining, write_host
from kvtier.store.directory import Directory
from kvtier.store.page import TIERS, Copy, Page
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.memory import Slot, SlotTier
from kvtier.units import format_size

Settled = Callable[[], None]

#: Failed copies out of one tier, while making room in it, after which the device is taken to be broken.
MAX_COPY_FAILURES = 3


class Placement:
    """The tiers, the mover between them and the directory over them.

    Args:
        slots: the slot tiers that exist, ``vram`` and ``host``.
        disk: the disk tier or ``None``.
        bounce: host slots through which pages pass between VRAM and disk without a place in the host tier.
        park: asks idle sessions to give up the leases they keep between steps; returns whether one did.
    """

    def __init__(
        self,
        device: Device,
        directory: Directory,
        slots: dict[str, SlotTier],
        disk: DiskTier | None,
        bounce: SlotTier,
        park: Callable[[], bool],
    ) -> None:
        self.device = device
        self.directory = directory
        self.slots = slots
        self.disk = disk
        self.bounce = bounce
        self.mover = Mover(device)
        self.warnings: list[str] = []
        self.damaged = 0
        self.lost = 0
        self._park = park
        #: Stored bytes of all disk copies, arriving ones included.
        self.disk_bytes = 0
        self.disk_peak_bytes = 0
        self._leaving: Counter[str] = Counter()
        self._acks: queue.SimpleQueue[tuple[Future[None], Callable[[BaseException | None], None]]] = queue.SimpleQueue()
        self._unacknowledged = 0
        self._disk_failures = 0
        self._copy_failures = 0

    # ------------------------------------------------------------------ time passes

    @property
    def busy(self) -> bool:
        """Whether copies or writes are under way."""
        return self.mover.busy or self._unacknowledged > 0

    def poll(self) -> None:
        """Handle everything that has ended; never waits."""
        self.mover.poll()
        while self._unacknowledged:
            try:
                self._acknowledge(*self._acks.get_nowait())
            except queue.Empty:
                return

    def progress(self, deadline: float) -> None:
        """Wait until at least one thing that is under way has ended."""
        if self.mover.busy:
            self.mover.wait_oldest(deadline)
        elif self._unacknowledged:
            try:
                self._acknowledge(*self._acks.get(timeout=remaining(deadline, "a write to disk")))
            except queue.Empty:
                raise DeadlineExceededError("a write to disk did not finish before its deadline") from None

    def drain(self, deadline: float) -> None:
        """Wait until nothing is under way."""
        while self.busy:
            self.progress(deadline)

    # ------------------------------------------------------------------ room

    def ensure(self, tier: str, pages: int, deadline: float, *, optional: bool = False) -> bool:
        """Free ``pages`` slots of a slot tier.

        Args:
            optional: return False instead of waiting for leases to end or failing.

        Raises:
            TierFullError: everything left in the tier is held; names by whom.
            DeadlineExceededError: the copies that would make room did not finish.
        """
        slots = self.slots[tier]
        disk_failures, copy_failures = self._disk_failures, self._copy_failures
        stuck: list[tuple[Page, Copy]] = []
        if pages > slots.capacity_pages and not optional:
            raise TierFullError(
                f"the {tier} tier has room for {slots.capacity_pages} pages in all, {pages} are needed at once; "
                f"make it larger or take smaller steps",
                tier=tier, needed_bytes=pages * slots.page_bytes, holders={},
            )  # fmt: skip
        try:
            while slots.free_pages < pages:
                remaining(deadline, f"making room in the {tier} tier")
                self.poll()
                if pages - slots.free_pages - self._leaving[tier] > 0:
                    if self._copy_failures - copy_failures > MAX_COPY_FAILURES:
                        raise CopyFailedError(f"copies out of the {tier} tier keep failing; no room can be made")
                    key = self.directory.policies[tier].victim()
                    if key is not None:
                        page = self.directory.pages[key]
                        if not self._evict(page, tier, deadline, self._disk_failures > disk_failures):
                            copy = page.copies.get(tier)
                            if copy is not None:
                                self.directory.hold(page, copy)
                                stuck.append((page, copy))
                        continue
                    if not self.busy:
                        if optional:
                            return False
                        if not self._park():
                            raise self._full(tier, pages)
                        continue
                if slots.free_pages < pages:
                    self.progress(deadline)
            return True
        finally:
            for page, copy in stuck:
                self.directory.unhold(page, copy)

    def take(self, tier: str, deadline: float) -> Slot:
        """A free slot of a slot tier; makes room if need be."""
        self.ensure(tier, 1, deadline)
        slot = self.slots[tier].take()
        if slot is None:  # the device had less memory than promised; the tier has shrunk
            self._warn(self.slots[tier].shortfall or f"the {tier} tier could not grow")
            return self.take(tier, deadline)
        return slot

    def _full(self, tier: str, pages: int) -> TierFullError:
        holders = self.directory.holders(tier)
        who = ", ".join(f"{name} ({n} pages)" for name, n in sorted(holders.items())) or "unsealed pages of open sessions"
        slots = self.slots[tier]
        return TierFullError(
            f"no room for {pages} page(s) of {format_size(slots.page_bytes)} in the {tier} tier of "
            f"{slots.capacity_pages} pages: everything in it is held, by {who}; close sessions or make the tier larger",
            tier=tier, needed_bytes=pages * slots.page_bytes, holders=holders,
        )  # fmt: skip

    # ------------------------------------------------------------------ down

    def _evict(self, page: Page, tier: str, deadline: float, disk_fails: bool) -> bool:
        """Begin to remove a page from a slot tier. A page that the tiers below cannot take is dropped, unless
        somebody owns it: then False."""
        copy = page.copies[tier]
        below = [page.copies[t] for t in TIERS[TIERS.index(tier) + 1 :] if t in page.copies]
        if tier == "vram" and "host" in self.slots and "host" not in page.copies:
            # Host RAM is worth having even if the page is on disk already.
            if self.demote(page, deadline):
                self._leave(page, copy)
                return True
        if any(not c.arriving for c in below):
            self.drop_copy(page, copy)
            return True
        if below:
            self._leave(page, copy)
            return True
        if self.disk is not None and not disk_fails and self.write_to_disk(page, deadline):
            self._leave(page, copy)
            return True
        return not page.owners and self.drop_page(page)

    def demote(self, page: Page, deadline: float) -> bool:
        """Start a copy VRAM -> host; False if the host tier has no room for it."""
        if "host" not in self.slots or not self.ensure("host", 1, deadline, optional=True):
            return False
        slot = self.slots["host"].take()
        source = page.copies.get("vram")
        if slot is None or source is None or "host" in page.copies:
            if slot is not None:
                self.slots["host"].give(slot)
            return False
        target = Copy("host", slot, arriving=True)
        self.directory.attach(page, target)
        self.directory.hold(page, source)

        def finished(error: CopyFailedError | None) -> None:
            self.directory.unhold(page, source)
            self._landed(page, target, error)

        assert source.slot is not None
        transfer = self.mover.down(source.slot, slot, source.written, finished)
        source.reads["d2h"] = transfer.event
        return True

    def write_to_disk(self, page: Page, deadline: float) -> bool:
        """Start the write of a page, and before it of those of its prefix that are not on disk: a page on disk
        without its prefix could never be found again. False if the disk cannot take it."""
        assert self.disk is not None
        chain: list[Page] = []
        at: Page | None = page
        while at is not None and "disk" not in at.copies:
            if at.readable() is None:
                return False
            chain.append(at)
            at = self.directory.get(at.parent) if at.parent is not None else None
        return all(self._write_one(p, deadline) for p in reversed(chain))

    def _write_one(self, page: Page, deadline: float) -> bool:
        assert self.disk is not None
        stored = self.disk.stored_bytes_of(self.directory.page_bytes)
        parent = self.directory.get(page.parent) if page.parent is not None else None
        above = parent.copies.get("disk") if parent is not None else None
        if parent is not None and above is not None:
            self.directory.hold(parent, above)
        if not self._disk_room(stored):
            if parent is not None and above is not None:
                self.directory.unhold(parent, above)
            return False
        target = Copy("disk", None, arriving=True)
        self.directory.attach(page, target)
        self._count_disk(stored)

        def release_parent() -> None:
            if parent is not None and above is not None:
                self.directory.unhold(parent, above)
                self._reap(parent)

        def failed(error: BaseException) -> None:
            self._disk_failures += 1
            self._warn(f"a page could not be written to disk: {error}")
            release_parent()
            self._count_disk(-stored)
            self._landed(page, target, CopyFailedError(str(error)))

        def put(slot: Slot, done: Settled) -> None:
            def acknowledged(error: BaseException | None) -> None:
                done()
                if error is not None:
                    failed(error)
                    return
                self.mover.links["host->disk"].add(self.directory.page_bytes)
                release_parent()
                self._landed(page, target, None)

            try:
                data = self.device.host(slot.range()).numpy()
                future = self.disk.put(  # type: ignore[union-attr]
                    page.key, parent=page.parent, depth=page.depth, identity=page.identity, data=data,
                    ephemeral=page.ephemeral, timeout_s=remaining(deadline, "the queue of the disk tier"),
                )  # fmt: skip
            except (DiskError, DeadlineExceededError, TierFullError) as error:
                done()
                failed(error)
                return
            self._unacknowledged += 1
            future.add_done_callback(lambda f: self._acks.put((f, acknowledged)))

        host = page.copies.get("host")
        if host is not None and not host.arriving:
            self.directory.hold(page, host)
            assert host.slot is not None
            put(host.slot, lambda: self._unhold(page, host))
        else:
            source = page.copies["vram"]
            slot = self._bounce_slot(deadline)
            self.directory.hold(page, source)

            def copied(error: CopyFailedError | None) -> None:
                self._unhold(page, source)
                if error is not None:
                    self.bounce.give(slot)
                    failed(error)
                else:
                    put(slot, lambda: self.bounce.give(slot))

            assert source.slot is not None
            transfer = self.mover.down(source.slot, slot, source.written, copied)
            source.reads["d2h"] = transfer.event
        return target.tier in page.copies

    def _disk_room(self, stored: int) -> bool:
        assert self.disk is not None
        while self.disk_bytes + stored > self.disk.live_capacity_bytes:
            key = self.directory.policies["disk"].victim()
            if key is None:
                return False
            page = self.directory.pages[key]
            if len(page.copies) > 1:
                self.drop_copy(page, page.copies["disk"])
            elif not self.drop_page(page):
                return False
        return True

    def _bounce_slot(self, deadline: float) -> Slot:
        while True:
            slot = self.bounce.take()
            if slot is not None:
                return slot
            self.progress(deadline)

    # ------------------------------------------------------------------ up

    def promote(self, page: Page, tier: str, deadline: float, *, evict: bool) -> bool:
        """Start to bring a page into ``vram`` or read it into ``host``. With ``evict`` other pages may have to
        go; otherwise only free slots are used. False if there is no room, or if the record on disk is damaged
        (then the page is gone)."""
        if tier in page.copies or tier not in self.slots:
            return tier in page.copies
        slots = self.slots[tier]
        if not slots.free_pages and not (evict and self.ensure(tier, 1, deadline, optional=True)):
            return False
        source = page.copies.get("host")
        if source is not None and source.arriving:
            source = None
        if source is None and "disk" not in page.copies:
            return False
        slot = slots.take()
        if slot is None:
            return False
        if tier == "host":
            if not self._read_disk(page, slot, deadline):
                slots.give(slot)
                return False
            self.directory.attach(page, Copy("host", slot))
            return True
        if source is not None:
            self.directory.hold(page, source)
            assert source.slot is not None
            from_slot, done = source.slot, lambda: self._unhold(page, source)
        else:
            from_slot = self._bounce_slot(deadline)
            if not self._read_disk(page, from_slot, deadline):
                self.bounce.give(from_slot)
                slots.give(slot)
                return False
            done = lambda: self.bounce.give(from_slot)  # noqa: E731
        target = Copy("vram", slot, arriving=True)
        self.directory.attach(page, target)

        def finished(error: CopyFailedError | None) -> None:
            done()
            self._landed(page, target, error)

        transfer = self.mover.up(from_slot, slot, None, finished)
        if source is not None:
            source.reads["h2d"] = transfer.event
        return True

    def verify(self, page: Page, deadline: float) -> bool:
        """Read a page that is only on disk and check it, keeping nothing. False: damaged, and gone."""
        slot = self._bounce_slot(deadline)
        try:
            return self._read_disk(page, slot, deadline)
        finally:
            self.bounce.give(slot)

    def _read_disk(self, page: Page, slot: Slot, deadline: float) -> bool:
        assert self.disk is not None
        out = self.device.host(write_host(self.device, slot, deadline), write=True).numpy()
        if self.disk.read(page.key, out):
            self.mover.links["disk->host"].add(len(out))
            return True
        self.damaged += 1
        self.lose(page, "disk")
        return False

    def read(self, page: Page, copy: Copy, out: np.ndarray, deadline: float) -> bool:
        """The bytes of a held copy, into ``out`` (uint8 ``[page_bytes]``). False if they are not to be had."""
        if copy.tier == "disk":
            assert self.disk is not None
            if self.disk.read(page.key, out):
                self.mover.links["disk->host"].add(len(out))
                return True
            self.damaged += 1
            self.lose(page, "disk")
            return False
        assert copy.slot is not None
        if copy.tier == "host":
            np.copyto(out, self.device.host(copy.slot.range()).numpy())
            return True
        slot = self._bounce_slot(deadline)
        outcome: list[CopyFailedError | None] = []
        transfer = self.mover.down(copy.slot, slot, copy.written, outcome.append)
        copy.reads["d2h"] = transfer.event
        try:
            while not outcome:
                self.progress(deadline)
            if outcome[0] is not None:
                return False
            np.copyto(out, self.device.host(slot.range()).numpy())
            return True
        finally:
            if outcome:
                self.bounce.give(slot)

    def read_planes(self, pages: list[Page], layer_plane: int, outs: list[np.ndarray]) -> list[bool]:
        """One plane of each of several pages on disk, checked."""
        assert self.disk is not None
        results = self.disk.read_planes([page.key for page in pages], layer_plane, outs)
        link = self.mover.links["disk->host"]
        for page, out, good in zip(pages, outs, results, strict=True):
            if good:
                link.add(len(out))
            else:
                self.damaged += 1
                self.lose(page, "disk")
        return results

    # ------------------------------------------------------------------ ends

    def _landed(self, page: Page, copy: Copy, error: CopyFailedError | None) -> None:
        """A copy has arrived, or failed to."""
        if error is None:
            self.directory.arrived(page, copy)
        else:
            self._copy_failures += 1
            self._detach(page, copy)
        self._settle(page)

    def _leave(self, page: Page, copy: Copy) -> None:
        copy.leaving = True
        self._leaving[copy.tier] += 1
        self.directory.hold(page, copy)

    def _settle(self, page: Page) -> None:
        """Let go of copies that were waiting for one below them."""
        for copy in list(page.copies.values()):
            if not copy.leaving:
                continue
            below = [page.copies[t] for t in TIERS[TIERS.index(copy.tier) + 1 :] if t in page.copies]
            if any(c.arriving for c in below) and not any(not c.arriving for c in below):
                continue
            copy.leaving = False
            self._leaving[copy.tier] -= 1
            self.directory.unhold(page, copy)
            if copy.holds == 0 and any(not c.arriving for c in below):
                self.drop_copy(page, copy)
        self._reap(page)

    def _unhold(self, page: Page, copy: Copy) -> None:
        self.directory.unhold(page, copy)
        self._settle(page)

    def release(self, page: Page, copy: Copy) -> None:
        """A lease on a copy ends."""
        self.directory.unhold(page, copy)
        self._reap(page)

    def _reap(self, page: Page) -> None:
        """Drop a page that nobody can find any more: unowned, and ephemeral or without its prefix."""
        if page.owners or self.directory.get(page.key) is not page:
            return
        orphan = page.parent is not None and page.parent not in self.directory.pages
        if (page.ephemeral or orphan) and not any(c.holds or c.arriving for c in page.copies.values()):
            self.drop_page(page)

    def disown(self, page: Page, owner: str) -> None:
        self.directory.disown(page, owner)
        self._reap(page)

    def drop_copy(self, page: Page, copy: Copy) -> None:
        """Remove a copy that nothing holds."""
        assert copy.holds == 0 and not copy.arriving
        self._detach(page, copy)
        if copy.tier == "disk":
            assert self.disk is not None
            self._count_disk(-self.disk.stored_bytes(page.key))
            self.disk.delete([page.key])

    def drop_page(self, page: Page) -> bool:
        """Remove a page from all tiers, after the pages below it, which are of no use without it. False, and
        nothing done, if one of them is held or owned."""
        doomed = [*self.directory.descendants(page), page] if page.children else [page]
        if any(p.owners or any(c.holds or c.arriving for c in p.copies.values()) for p in doomed):
            return False
        for p in doomed:
            for copy in list(p.copies.values()):
                self.drop_copy(p, copy)
        return True

    def lose(self, page: Page, tier: str) -> None:
        """A copy turned out to be unreadable: it is gone, whoever holds it."""
        copy = page.copies.get(tier)
        if copy is not None and not copy.arriving:
            self._detach(page, copy)
            if tier == "disk":
                assert self.disk is not None
                self._count_disk(-self.disk.stored_bytes_of(self.directory.page_bytes))
        if not page.copies:
            self.lost += 1
            for p in self.directory.descendants(page) if page.children else ():
                self._reap(p)

    def _detach(self, page: Page, copy: Copy) -> None:
        self.directory.detach(page, copy)
        if copy.slot is not None:
            self.slots[copy.tier].give(copy.slot, events([copy.written], copy.reads.values()))

    def _acknowledge(self, future: Future[None], acknowledged: Callable[[BaseException | None], None]) -> None:
        self._unacknowledged -= 1
        acknowledged(future.exception())

    def _count_disk(self, stored: int) -> None:
        self.disk_bytes += stored
        self.disk_peak_bytes = max(self.disk_peak_bytes, self.disk_bytes)

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(text, OffloadWarning, stacklevel=2)

    def fill(self, slot: Slot, page: Page, copy: Copy, deadline: float) -> None:
        """Put the bytes of a held copy into a private VRAM slot, ordered before later compute work.

        Raises:
            CopyFailedError: the record on disk is damaged.
        """
        compute = self.device.compute_stream()
        order_behind(compute, slot)
        if copy.tier == "vram":
            assert copy.slot is not None
            if copy.written is not None:
                compute.wait(copy.written)
            self.device.copy(compute, [(slot.range(), copy.slot.range())])
            copy.reads[compute.name] = compute.record()
            return
        bounce = None
        if copy.tier == "host":
            assert copy.slot is not None
            source = copy.slot
        else:
            bounce = source = self._bounce_slot(deadline)
            if not self._read_disk(page, source, deadline):
                self.bounce.give(source)
                raise CopyFailedError("a page that a session holds is damaged on disk")
        self.device.copy(compute, [(slot.range(), source.range())])
        self.mover.links["host->vram"].add(slot.nbytes)
        event = compute.record()
        if bounce is not None:
            self.bounce.give(bounce, [event])
        else:
            copy.reads[compute.name] = event
