"""What is in which tier, who holds it, and how it is let go. Nothing here waits or starts a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvtier.announce import announce
from kvtier.devices.base import Device
from kvtier.errors import CopyFailedError
from kvtier.mover import Mover, events
from kvtier.store.directory import Directory
from kvtier.store.page import TIERS, Copy, Page
from kvtier.store.thrash import ThrashGuard
from kvtier.tiers.codec import PageCodec
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.memory import SlotTier


class Residence:
    """The tiers and the directory over them. Used under the store's lock only.

    Args:
        slots: the slot tiers that exist, ``vram`` and ``host``.
        disk: the disk tier or ``None``.
        bounce: host slots through which pages pass between VRAM and disk without a place in the
            host tier. Each is as large as a page and as a coded page.
        disk_codec: how pages on disk are coded; those in host memory are as ``slots`` say.
        park: asks idle sessions to give up the leases they keep between steps; returns whether one
            did.
    """

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
        self.device = device
        self.directory = directory
        self.slots = slots
        self.disk = disk
        self.bounce = bounce
        self.disk_codec = disk_codec
        #: Bytes of a page on disk.
        self.disk_page_bytes = disk_codec.page_bytes if disk_codec else directory.page_bytes
        self.mover = Mover(device)
        #: Index of each unsealed VRAM slot -> who writes to it.
        self.tails: dict[int, str] = {}
        #: VRAM slots that are no pages and will not become any.
        self.lent = 0
        host = slots.get("host")
        self.host_guard = ThrashGuard(host.capacity_pages if host is not None else 0)
        self.warnings: list[str] = []
        self.damaged = 0
        self.lost = 0
        #: Stored bytes of all disk copies, arriving ones included.
        self.disk_bytes = 0
        self.disk_peak_bytes = 0
        #: What one page is charged with on disk.
        self.stored_bytes = disk.stored_bytes_of(self.disk_page_bytes) if disk is not None else 0
        self._park = park
        self._leaving: Counter[str] = Counter()
        #: Pages to drop as soon as nothing below them is held.
        self._condemned: dict[bytes, Page] = {}
        self._unsaid: list[str] = []

    # ------------------------------------------------------------------ arriving and leaving

    def attach_disk(self, page: Page, *, arriving: bool) -> Copy:
        """Enter a copy on disk and charge it."""
        copy = Copy("disk", None, arriving=arriving)
        self.directory.attach(page, copy)
        self.disk_bytes += self.stored_bytes
        self.disk_peak_bytes = max(self.disk_peak_bytes, self.disk_bytes)
        return copy

    def landed(self, page: Page, copy: Copy, error: CopyFailedError | None) -> None:
        """A copy has arrived, or failed to."""
        if error is None:
            self.directory.arrived(page, copy)
            if copy.tier == "disk":
                page.torn = False
        else:
            self._detach(page, copy)
        self.settle(page)

    def leave(self, page: Page, copy: Copy) -> None:
        """The copy goes once one below it has arrived."""
        copy.leaving = True
        self._leaving[copy.tier] += 1
        self.directory.hold(page, copy)

    def settle(self, page: Page) -> None:
        """Let go of copies that were waiting for one below them."""
        for copy in list(page.copies.values()):
            if not copy.leaving:
                continue
            below = self.below(page, copy.tier)
            ready = any(not c.arriving for c in below)
            if below and not ready:
                continue
            copy.leaving = False
            self._leaving[copy.tier] -= 1
            self.directory.unhold(page, copy)
            if copy.holds == 0 and ready:
                self.drop_copy(page, copy, evicted=True)
        self.reap(page)

    @staticmethod
    def below(page: Page, tier: str) -> list[Copy]:
        """Copies of a page in the tiers below one, arriving ones included."""
        return [page.copies[t] for t in TIERS[TIERS.index(tier) + 1 :] if t in page.copies]

    # ------------------------------------------------------------------ holding

    def unhold(self, page: Page, copy: Copy, *, used: bool = False) -> None:
        """One reason less to keep a copy (see ``Directory.unhold``); lets go of what only waited for that."""
        self.directory.unhold(page, copy, used=used)
        self.settle(page)

    def disown(self, page: Page, owner: str) -> None:
        self.directory.disown(page, owner)
        self._bury(page)
        self.reap(page)

    def resize_lent(self, slots: int) -> None:
        """So many more VRAM slots are lent, or (negative) fewer."""
        self.lent += slots
        left = self.slots["vram"].capacity_pages - self.lent
        self.directory.policies["vram"].resize(max(1, left))

    # ------------------------------------------------------------------ going

    def reap(self, page: Page) -> None:
        """Drop a page that nobody can find any more: unowned, and ephemeral or without its prefix.
        What cannot go yet, for something below it is held, goes with the first call after that."""
        if self._useless(page):
            self._condemned[page.key] = page
        for each in list(self._condemned.values()):
            if not self._useless(each) or self.drop_page(each):
                self._condemned.pop(each.key, None)

    def _useless(self, page: Page) -> bool:
        if page.owners or self.directory.get(page.key) is not page:
            return False
        return page.ephemeral or self.directory.orphan(page)

    def drop_copy(self, page: Page, copy: Copy, *, evicted: bool) -> None:
        """Remove a copy that nothing holds; ``evicted`` if it has to make room."""
        assert not copy.holds
        assert not copy.arriving
        self._detach(page, copy, evicted=evicted)
        if copy.tier == "disk":
            assert self.disk is not None
            self.disk.delete([page.key])

    def drop_page(self, page: Page, *, evicted: bool = False) -> bool:
        """Remove a page from all tiers, after the pages below it, which are of no use without it.
        False, and nothing done, if one of them is held or owned."""
        if page.kept:
            return False
        doomed = [*self.directory.descendants(page), page]
        if any(p.kept for p in doomed):
            return False
        for p in doomed:
            for copy in list(p.copies.values()):
                self.drop_copy(p, copy, evicted=evicted)
        return True

    def lose(self, page: Page, tier: str) -> None:
        """A copy turned out to be unreadable: it is gone, whoever holds it."""
        copy = page.copies.get(tier)
        if copy is None or copy.arriving:
            return
        page.torn |= tier == "disk"
        self._detach(page, copy)
        self.lost += not page.copies

    def _detach(self, page: Page, copy: Copy, *, evicted: bool = False) -> None:
        self.directory.detach(page, copy, evicted=evicted)
        if copy.slot is not None:
            self.slots[copy.tier].give(copy.slot, events([copy.written], copy.reads))
        else:
            self.disk_bytes -= self.stored_bytes
        self._bury(page)

    def _bury(self, page: Page) -> None:
        """Pages below one that has no copy any more are of no use."""
        if not page.copies:
            for p in self.directory.descendants(page):
                self.reap(p)

    # ------------------------------------------------------------------ warnings

    def warn(self, text: str) -> None:
        """Note a warning. It is raised by ``speak``, since this may run where a filter that turns
        warnings into errors would leave work half done."""
        if text not in self.warnings:
            self.warnings.append(text)
            self._unsaid.append(text)

    def speak(self) -> None:
        """Raise the warnings noted so far."""
        while self._unsaid:
            announce(self._unsaid.pop(0), stacklevel=4)
