"""Making room in VRAM and host RAM: eviction and demotion."""

from __future__ import annotations

from collections import Counter

from kvtier.errors import CopyFailedError, TierFullError
from kvtier.mover import remaining
from kvtier.store.page import Copy, Page
from kvtier.store.writes import Writes
from kvtier.tiers.memory import Slot
from kvtier.units import format_size

Held = list[tuple[Page, Copy]]


class Room(Writes):
    """A residence that makes room in its tiers."""

    def ensure(self, tier: str, pages: int, deadline: float, *, optional: bool = False) -> bool:
        """Free ``pages`` slots of a slot tier.

        A page whose way down fails is given up if nobody owns it.

        Args:
            optional: return False instead of closing idle leases or failing.

        Raises:
            TierFullError: everything left in the tier is held; names by whom.
            DeadlineExceededError: the copies that would make room did not finish.
        """
        slots = self.slots[tier]
        if pages > slots.capacity_pages and not optional:
            raise TierFullError(
                f"the {tier} tier has room for {slots.capacity_pages} pages in all, {pages} are "
                "needed at once; make it larger or take smaller steps",
                tier=tier,
                needed_bytes=pages * slots.page_bytes,
                holders={},
            )
        begun: Held = []
        waiting: Held = []  # no way down at present: held to find the next victim
        failed: Held = []  # no way down, as tried
        try:
            while slots.free_pages < pages:
                remaining(deadline, f"making room in the {tier} tier")
                if self.poll():
                    self._let_go(waiting)
                begun = self._still_leaving(begun, failed)
                if pages - slots.free_pages - self._leaving[tier] > 0:
                    page = self.directory.victim(tier)
                    if page is not None:
                        copy = page.copies[tier]
                        if not self._evict(page, tier, deadline):
                            if page.copies.get(tier) is copy:
                                self.directory.hold(page, copy)
                                waiting.append((page, copy))
                        elif copy.leaving:
                            begun.append((page, copy))
                        continue
                    if not self.busy:
                        if optional:
                            return False
                        if not self._park():
                            raise self._full(tier, pages, len(failed))
                        self._let_go(waiting)
                        continue
                if slots.free_pages < pages:
                    self.progress(deadline)
                    self._let_go(waiting)
            return True
        finally:
            self._let_go(waiting)
            self._let_go(failed, used=True)

    def _still_leaving(self, begun: Held, failed: Held) -> Held:
        """What of the evictions that were begun is still under way. A page that did not get down is
        dropped, or held in ``failed`` so that it is not tried again."""
        rest: Held = []
        for page, copy in begun:
            if page.copies.get(copy.tier) is not copy:
                continue
            if copy.leaving:
                rest.append((page, copy))
            elif not copy.holds and (page.owners or not self.drop_page(page, evicted=True)):
                self.directory.hold(page, copy)
                failed.append((page, copy))
        return rest

    def _let_go(self, held: Held, *, used: bool = False) -> None:
        """Let the policy have these again; with ``used`` it names them last, for they were tried."""
        while held:
            self.unhold(*held.pop(), used=used)

    def take(self, tier: str, deadline: float) -> Slot:
        """A free slot of a slot tier; makes room if need be. Raises as ``ensure``."""
        while True:
            self.ensure(tier, 1, deadline)
            slot = self.slots[tier].take()
            if slot is not None:
                return slot
            # The device had less memory than promised; the tier has shrunk.
            self.warn(self.slots[tier].shortfall or f"the {tier} tier could not grow")

    def take_many(self, tier: str, count: int, deadline: float) -> list[Slot]:
        """``count`` free slots, or none and an error. Raises as ``ensure``."""
        slots: list[Slot] = []
        try:
            self.ensure(tier, count, deadline)
            while len(slots) < count:
                slots.append(self.take(tier, deadline))
        except BaseException:
            for slot in slots:
                self.slots[tier].give(slot)
            raise
        return slots

    def _full(self, tier: str, pages: int, failed: int) -> TierFullError:
        holders = self.directory.holders(tier)
        if tier == "vram":
            holders = dict(Counter(holders) + Counter(self.tails.values()))
        who = ", ".join(f"{name} ({n} pages)" for name, n in sorted(holders.items())) or "nobody"
        trouble = f" ({failed} of them since their copies failed)" if failed else ""
        slots = self.slots[tier]
        return TierFullError(
            f"no room for {pages} page(s) of {format_size(slots.page_bytes)} in the {tier} tier of "
            f"{slots.capacity_pages} pages: everything in it is held{trouble}, by {who}; close "
            "leases and sessions or make the tier larger",
            tier=tier,
            needed_bytes=pages * slots.page_bytes,
            holders=holders,
        )

    def _evict(self, page: Page, tier: str, deadline: float) -> bool:
        """Begin to remove a page from a slot tier. A page that the tiers below cannot take is
        dropped, unless somebody owns it: then False."""
        if self.push_down(page, tier, deadline):
            return True
        copy = page.copies.get(tier)
        if copy is None:
            return True
        return not copy.holds and not page.owners and self.drop_page(page, evicted=True)

    def push_down(self, page: Page, tier: str, deadline: float) -> bool:
        """Begin to remove a page from a slot tier without losing it. Other copies may end
        meanwhile. False if no tier below can take it now."""
        copy = page.copies[tier]
        # Host RAM is worth having even if the page is on disk already.
        if tier == "vram" and "host" not in page.copies and self.demote(page, deadline):
            self.leave(page, copy)
            return True
        if self._moved_on(page, copy):
            return page.copies.get(tier) is not copy
        below = self.below(page, tier)
        above = page.copies.get("vram") if tier == "host" else None
        if any(not c.arriving for c in below) or (above is not None and not above.arriving):
            self.drop_copy(page, copy, evicted=True)
            return True
        if below:
            self.leave(page, copy)
            return True
        if self.disk is None or not self.write_to_disk(page, deadline):
            return page.copies.get(tier) is not copy
        if page.copies.get(tier) is copy and not copy.leaving:
            self.leave(page, copy)
        return True

    @staticmethod
    def _moved_on(page: Page, copy: Copy) -> bool:
        """Whether the copy went, or was taken up by a transfer, while something was waited for."""
        return page.copies.get(copy.tier) is not copy or copy.holds > 0

    def demote(self, page: Page, deadline: float) -> bool:
        """Start a copy VRAM -> host; False if the host tier has no room for it."""
        source = page.copies.get("vram")
        if "host" not in self.slots or source is None or source.arriving:
            return False
        if not page.owners and not self._worth_host(page):
            return False
        self.directory.hold(page, source)
        slot: Slot | None = None
        try:
            if self.ensure("host", 1, deadline, optional=True) and "host" not in page.copies:
                slot = self.slots["host"].take()
        finally:
            if slot is None:
                self.unhold(page, source)
        if slot is None:
            return False
        target = Copy("host", slot, arriving=True)
        self.directory.attach(page, target)

        def finished(error: CopyFailedError | None) -> None:
            self.unhold(page, source)
            self.landed(page, target, error)

        assert source.slot is not None
        transfer = self.mover.down(source.slot, slot, source.written, finished)
        source.was_read(transfer.event)
        if not page.owners:
            self.host_guard.wrote()
        return True

    def _worth_host(self, page: Page) -> bool:
        """Whether a page that nobody owns should go to host RAM: not while all that goes there is
        evicted again before it is asked for."""
        guard = self.host_guard
        if guard.admit():
            return True
        slots = self.slots["host"]
        self.warn(
            f"the host tier of {slots.capacity_pages} pages "
            f"({format_size(slots.capacity_pages * slots.page_bytes)}) thrashes: of {guard.limit} "
            "pages that were copied to it one after another none was asked for before it had to go "
            "again; such copies stop until a page in it is hit. Make host larger, or leave it out"
        )
        return False
