"""A sealed page and its copies in the tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvtier.devices.base import Event
from kvtier.policy import ANONYMOUS, PageFacts, Request
from kvtier.tiers.memory import Slot

#: Fastest first. A page moves down when it is evicted and up when it is needed.
TIERS = ("vram", "host", "disk")

#: Events of reads from which on those that have ended are dropped.
MANY_READS = 4


@dataclass(slots=True, eq=False)
class Copy:
    """The bytes of a page in one tier.

    Attributes:
        tier: one of ``TIERS``.
        slot: where the bytes are; ``None`` on disk.
        arriving: the bytes are still on their way and may not be read.
        leaving: once the copy below has arrived, this one goes, unless somebody holds it by then.
        holds: reasons why it may not be evicted now: leases, a running transfer, sessions in the last tier.
        written: event of the last write, for readers on other streams; ``None`` when the host has seen it done.
        reads: events of reads that may not have ended; the next writer of the slot waits for them.
    """

    tier: str
    slot: Slot | None
    arriving: bool = False
    leaving: bool = False
    holds: int = 0
    written: Event | None = None
    reads: list[Event] = field(default_factory=list)

    def was_read(self, event: Event) -> None:
        """``event`` stands for a read. Leases end in any order, so a later call may bring an earlier
        event: none stands for another, even on one stream."""
        if event in self.reads:
            return
        if len(self.reads) >= MANY_READS:
            self.reads = [e for e in self.reads if not e.done()]
        self.reads.append(event)


@dataclass(slots=True, eq=False)
class Page:
    """A sealed page.

    Attributes:
        key, parent, depth, identity: see ``kvtier.keys``; ``parent`` is ``None`` for a sequence's first page.
        ephemeral: the page is not shared by key (its tokens are unknown, or it is one session's own version
            of a stored page) and goes away with its last owner.
        copies: tier name -> copy.
        owners: sessions that need the page to stay somewhere; it may move, but is never dropped.
        torn: its record on disk was lost or could not be written, while its suffix may be on disk. It is
            written again when it is evicted or flushed.
        request: the request that used it last, for the policy of a tier that it moves to.
    """

    key: bytes
    parent: bytes | None
    depth: int
    identity: bytes
    ephemeral: bool = False
    copies: dict[str, Copy] = field(default_factory=dict)
    owners: Counter[str] = field(default_factory=Counter)
    torn: bool = False
    request: Request = ANONYMOUS

    def facts(self, nbytes: int) -> PageFacts:
        return PageFacts(self.key, self.parent, self.depth, nbytes)

    @property
    def kept(self) -> bool:
        """Whether somebody owns the page, or a lease or a transfer holds a copy of it."""
        return bool(self.owners) or any(c.holds or c.arriving for c in self.copies.values())

    def readable(self) -> Copy | None:
        """The fastest copy whose bytes are in place."""
        for tier in TIERS:
            copy = self.copies.get(tier)
            if copy is not None and not copy.arriving:
                return copy
        return None
