"""The way up, and reading: promotion, reads through a lease, private copies.

What the store works with. All of it runs under the store's lock. Copies between VRAM and host, and
writes to disk, go on in the background; their ends are handled in ``poll`` and ``progress``, and
only there does the directory change. The layers below, each a file: ``Residence`` (what is where),
``Writes`` (time passes; to disk), ``Room`` (eviction).
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from kvtier.errors import CopyFailedError, PageLostError
from kvtier.mover import order_behind, remaining, write_host
from kvtier.store.page import TIERS, Copy, Page
from kvtier.store.room import Room
from kvtier.tiers.memory import Slot


class Placement(Room):
    """The tiers, the mover between them and the directory over them."""

    # ------------------------------------------------------------------ up

    def promote(self, page: Page, tier: str, deadline: float, *, evict: bool) -> bool:
        """Start to bring a page, held where it is, into ``vram`` or read it into ``host``.

        With ``evict`` other pages may have to go; otherwise only free slots are used. False if
        there is no room, or if the record on disk is damaged (then the page is gone from there).
        """
        if tier in page.copies or tier not in self.slots:
            return tier in page.copies
        slots = self.slots[tier]
        if not slots.free_pages and not (
            evict and self.ensure(tier, 1, deadline, optional=True)
        ):
            return False
        with contextlib.ExitStack() as undo:
            bounce: Slot | None = None
            if tier == "vram" and _at(page, "host") is None:
                bounce = self.bounce_slot(deadline)
                undo.callback(self.bounce.give, bounce)
            slot = slots.take()
            if slot is None:
                return False
            undo.callback(slots.give, slot)
            source = _at(page, "host")
            if source is None:
                into = slot if tier == "host" else bounce
                if into is None or not self._read_disk(page, into, deadline):
                    return False
            if tier == "host":
                undo.pop_all()
                self.directory.attach(page, Copy("host", slot))
                return True
            if source is None:
                undo.pop_all()
            else:
                # Keeps the bounce slot, if one was taken, among what is given back.
                self.directory.hold(page, source)
                rest = undo.pop_all()
                if bounce is not None:
                    self.bounce.give(bounce)
                del rest
            target = Copy("vram", slot, arriving=True)
            self.directory.attach(page, target)
