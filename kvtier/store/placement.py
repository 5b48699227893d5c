"""The way up, and reading: promotion, reads through a lease, private copies.

What the store works with. All of it runs under the store's lock. Copies between VRAM and host, and
writes to disk, go on in the background; their ends are handled in ``poll`` and ``progress``, and
only there does the directory change. The layers below, each a file: ``Residence`` (what is where),
``Writes`` (time passes; to disk), ``Room`` (eviction), ``Reads`` (from disk).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from kvtier.devices.base import Event
from kvtier.errors import CopyFailedError, PageLostError
from kvtier.mover import events, order_behind, remaining, write_host
from kvtier.store.page import TIERS, Copy, Page
from kvtier.store.reads import Reads
from kvtier.tiers.codec import recode
from kvtier.tiers.memory import Slot


class _Landing(NamedTuple):
    """Room for a page that comes from disk: it is read into the host slot ``through``, which is a bounce slot unless
    it is ``slot``, the page's place in ``tier``. Without a slot it is checked first, and others make room in the tier
    once it is known to be good; without a tier it is only checked."""

    through: Slot
    tier: str | None = None
    slot: Slot | None = None


class Placement(Reads):
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
        if not self._has_room(tier, deadline, evict=evict):
            return False
        host, disk = page.copies.get("host"), page.copies.get("disk")
        if tier == "vram" and host is not None and not host.arriving:
            slot = self.slots[tier].take()
            if slot is None:
                return False
            source = host
            assert source.slot is not None
            self.directory.hold(page, source)
            try:
                self._rise(page, source.slot, slot, lambda: self.unhold(page, source))
            except BaseException:
                self.slots[tier].give(slot)
                self.unhold(page, source)
                raise
            return True
        if disk is None or disk.arriving:
            return False
        landing = self._reserve(tier, deadline, evict=evict)
        return landing is not None and self._land([page], [landing], deadline) == 1

    def bring(self, pages: Sequence[Page], deadline: float, *, up: bool) -> int:
        """Read up to ``reads_at_once`` pages that are on disk, and held there, and check them. With ``up`` those that
        have room come up: into free slots of VRAM, or into host memory, colder pages making room; what is on its way
        up already is left alone.

        Returns:
            The number of pages in front that are good; the first one behind them is damaged, and gone.

        Raises:
            DiskError: the system refuses to read; the pages may still be good.
            DeadlineExceededError: they were not all read in time.
        """
        remaining(deadline, "reading pages from disk")
        wanted = [
            page
            for page in dict.fromkeys(pages)
            if not (up and any(tier in page.copies for tier in self.slots))
        ]
        landings: list[_Landing] = []
        try:
            for _ in wanted:
                landing: _Landing | None = None
                for tier in self.slots if up else ():
                    landing = landing or self._reserve(tier, deadline, evict=False)
                if landing is None:
                    later = "host" if up and "host" in self.slots else None
                    landing = _Landing(self.bounce_slot(deadline, self.disk_codec), later)
                landings.append(landing)
        except BaseException:
            self._give_up(landings)
            raise
        good = self._land(wanted, landings, deadline)
        return len(pages) if good == len(wanted) else pages.index(wanted[good])

    def _reserve(self, tier: str, deadline: float, *, evict: bool) -> _Landing | None:
        """A place in a tier for a page from disk; with ``evict`` others may have to go."""
        slots = self.slots.get(tier)
        if slots is None or not self._has_room(tier, deadline, evict=evict):
            return None
        bounce = self.bounce_slot(deadline, self.disk_codec) if tier == "vram" else None
        slot = slots.take()
        if slot is None:
            if bounce is not None:
                self.bounce.give(bounce)
            return None
        return _Landing(bounce or slot, tier, slot)

    def _has_room(self, tier: str, deadline: float, *, evict: bool) -> bool:
        if self.slots[tier].free_pages:
            return True
        return evict and self.ensure(tier, 1, deadline, optional=True)

    def _land(self, pages: Sequence[Page], landings: Sequence[_Landing], deadline: float) -> int:
        """Read pages and start to bring them where room was made for them, up to the first that is damaged; how many
        those are. The room of the others is given back."""
        landed = 0
        # What has come up must not make room for what follows.
        held: list[tuple[Page, Copy]] = []
        try:
            through = [landing.through for landing in landings]
            good = self.fetch(pages, through, deadline)
            for page, landing, fine in zip(pages, landings, good, strict=True):
                if not fine:
                    break
                if landing.slot is None:
                    if landing.tier is not None:
                        self._settle_in(page, landing.tier, landing.through, deadline)
                    self.bounce.give(landing.through)
                elif landing.through is landing.slot:
                    self.directory.attach(page, Copy("host", landing.slot))
                else:
                    release = partial(self.bounce.give, landing.through)
                    self._rise(page, landing.through, landing.slot, release)
                landed += 1
                if landing.tier in page.copies:
                    self.directory.hold(page, page.copies[landing.tier])
                    held.append((page, page.copies[landing.tier]))
        finally:
            self._give_up(landings[landed:])
            for page, copy in held:
                self.unhold(page, copy)
        return landed

    def _settle_in(self, page: Page, tier: str, source: Slot, deadline: float) -> None:
        """A page that has been read comes into the host tier, if others make room."""
        if not self._has_room(tier, deadline, evict=True):
            return
        slot = self.slots[tier].take()
        if slot is None:
            return
        try:
            target = self.device.host(write_host(self.device, slot, deadline), write=True)
            recode(self.device.host(source.range()), source.codec, target, slot.codec)
        except BaseException:
            self.slots[tier].give(slot)
            raise
        self.directory.attach(page, Copy(tier, slot))

    def _give_up(self, landings: Sequence[_Landing]) -> None:
        for landing in landings:
            if landing.slot is not None and landing.tier is not None:
                self.slots[landing.tier].give(landing.slot)
            if landing.through is not landing.slot:
                self.bounce.give(landing.through)

    def _rise(self, page: Page, source: Slot, slot: Slot, release: Callable[[], None]) -> None:
        """Start the copy of a page from host memory into a VRAM slot."""
        target = Copy("vram", slot, arriving=True)
        self.directory.attach(page, target)

        def finished(error: CopyFailedError | None) -> None:
            release()
            self.landed(page, target, error)

        try:
            transfer = self.mover.up(source, slot, None, finished)
        except BaseException:
            self.directory.detach(page, target)
            raise
        host = page.copies.get("host")
        if host is not None and host.slot is source:
            host.was_read(transfer.event)

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
            return self.read_pages([page], [out], [None])[0]
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
            elif bounce is not None and not self.fetch([page], [bounce], deadline)[0]:
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
