"""The store's side of sessions: pages that somebody owns, and slots that are not pages yet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from kvtier.devices.base import Event
from kvtier.errors import PageLostError
from kvtier.policy import ANONYMOUS, Request
from kvtier.store.base import StoreBase
from kvtier.store.hints import stamped
from kvtier.store.page import Copy, Page
from kvtier.tiers.memory import Slot


class SessionPages(StoreBase):
    """What a ``Session`` asks of a store. Use the session, not these."""

    def new_owner(self, name: str) -> str:
        """A unique name for somebody who owns pages."""
        return f"{name}#{next(self._names)}"

    def own(self, pages: Sequence[Page], owner: str) -> None:
        """Keep pages from being dropped, though not from moving, until ``disown``."""
        with self._locked(None):
            for page in pages:
                self._directory.own(page, owner)

    def disown(self, pages: Sequence[Page], owner: str) -> None:
        with self._locked(None, even_closed=True):
            if not self._closed:
                for page in reversed(pages):
                    self._placement.disown(page, owner)

    def take_tails(
        self, count: int, *, owner: str = "an unsealed page", timeout_s: float | None = None
    ) -> list[Slot]:
        """VRAM slots for pages that are about to be written, at once or not at all.

        Whoever writes to one first orders its work behind ``Slot.after``. ``owner`` is who is named
        when VRAM is full.

        Raises:
            TierFullError: VRAM has no room and nothing in it may go.
        """
        with self._locked(timeout_s) as deadline:
            slots = self._placement.take_many("vram", count, deadline)
            self._placement.tails.update((slot.index, owner) for slot in slots)
            return slots

    def give_tails(self, slots: Sequence[Slot], after: Sequence[Event]) -> None:
        """Give unsealed slots back; ``after`` are events of the last work on them."""
        with self._locked(None, even_closed=True):
            if not self._closed:
                for slot in slots:
                    del self._placement.tails[slot.index]
                    self._placement.slots["vram"].give(slot, after)

    def lend(self, count: int, owner: str, *, timeout_s: float | None = None) -> list[Slot]:
        """VRAM slots for something that is no page, as ``take_tails``, and for long: the policy goes by what is left."""
        with self._locked(timeout_s):
            slots = self.take_tails(count, owner=owner, timeout_s=timeout_s)
            self._placement.resize_lent(count)
            return slots

    def take_back(self, slots: Sequence[Slot], after: Sequence[Event]) -> None:
        """The end of ``lend``; ``after`` are events of the last work on the slots."""
        with self._locked(None, even_closed=True):
            if not self._closed:
                self.give_tails(slots, after)
                self._placement.resize_lent(-len(slots))

    def fill_tail(self, slot: Slot, page: Page, *, timeout_s: float | None = None) -> None:
        """Copy a page that the caller owns into an unsealed slot, and wait until it is there.

        Raises:
            PageLostError: the page has no readable copy.
            CopyFailedError: the copy failed; the slot holds nothing usable.
        """
        with self._locked(timeout_s) as deadline:
            if page.readable() is None:
                raise PageLostError(
                    "a page of the sequence was lost (failed copy or damaged record); "
                    "compute it again"
                )
            with self._hold([page]) as lease:
                self._placement.fill(slot, page, lease.copies[0], deadline)

    def seal(
        self,
        slot: Slot,
        *,
        key: bytes | None,
        parent: Page | None,
        identity: bytes,
        written: Event,
        owner: str,
        request: Request = ANONYMOUS,
        timeout_s: float | None = None,
    ) -> tuple[Page, Page]:
        """Turn a full slot into a page and start its write-through.

        A page without a key (its tokens are unknown) is ephemeral. So is one whose key is stored already: its
        numbers may differ in rounding from the stored ones, and a sequence never changes numbers under way.

        Args:
            written: event of the last write into the slot.
            request: hints for the policies.

        Returns:
            The page that holds these bytes, and the page that stands for the key (the same one, unless the key
            was stored already). ``owner`` owns both.
        """
        with self._locked(timeout_s) as deadline:
            del self._placement.tails[slot.index]
            known = self._directory.get(key) if key is not None else None
            copy = Copy("vram", slot, written=written)
            if known is not None and not known.copies:
                # Its bytes were lost, but somebody still owns it: these are as good.
                known.request = stamped(request)
                self._directory.own(known, owner)
                self._directory.attach(known, copy)
                self._recording.stored(known.key, known.parent)
                self._write_through(known, deadline)
                return known, known
            private = key is None or known is not None
            page = Page(
                os.urandom(32) if private else cast(bytes, key),
                parent.key if parent else None,
                parent.depth + 1 if parent else 0,
                identity,
                ephemeral=private,
            )
            page.request = stamped(request)
            self._directory.add(page)
            self._directory.own(page, owner)
            self._directory.attach(page, copy)
            if known is not None:
                self._directory.own(known, owner)
            elif not private:
                self._recording.stored(page.key, page.parent)
                self._write_through(page, deadline)
            return page, known or page

    def copy_tails(
        self, pairs: Sequence[tuple[Slot, Slot]], *, timeout_s: float | None = None
    ) -> None:
        """Copy unsealed slots, ``(target, source)``, in the order of compute work, and wait until
        they are there.

        Raises:
            CopyFailedError: the copy failed; the targets hold nothing usable.
        """
        if pairs:
            with self._locked(timeout_s) as deadline:
                self._placement.copy_slots(pairs, deadline)
