"""Copies between tiers, and the only place that starts them.

A copy is a ``Transfer``: submitted to a stream, finished when its event is reached, and only then reported
to whoever asked, so that the directory changes when the bytes are in place and not before. Two streams,
one a direction, run beside the compute stream. Every reuse of a buffer is ordered on the device by an
event, in both directions.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvtier.devices.base import Device, Event, Range, Stream
from kvtier.errors import CopyFailedError, DeadlineExceededError
from kvtier.tiers.memory import Slot


@dataclass(slots=True)
class LinkStats:
    """Traffic over one path: payload bytes and number of copies submitted, and copies that failed."""

    bytes: int = 0
    copies: int = 0
    failed: int = 0

    def add(self, nbytes: int, copies: int = 1) -> None:
        self.bytes += nbytes
        self.copies += copies


class Copied(Protocol):
    """See ``Mover.copied``."""

    def __call__(
        self, link: str, nbytes: int, asked: float, began: float, *, failed: bool = False
    ) -> None: ...


def _nobody(link: str, nbytes: int, asked: float, began: float, *, failed: bool = False) -> None:
    pass


@dataclass(slots=True, eq=False)
class Transfer:
    """One submitted copy; ``finished`` is called exactly once, with the error if it failed."""

    event: Event
    finished: Callable[[CopyFailedError | None], None]
    link: str
    nbytes: int
    asked: float


def deadline_after(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def remaining(deadline: float, what: str) -> float:
    """Seconds until ``deadline``; DeadlineExceededError naming ``what`` once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceededError(f"{what} did not finish before its deadline")
    return left


class Mover:
    """Moves whole pages between VRAM and host slots."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.h2d: Stream = device.stream("h2d")
        self.d2h: Stream = device.stream("d2h")
        self.links = {
            "vram->host": LinkStats(),
            "host->vram": LinkStats(),
            "host->disk": LinkStats(),
            "disk->host": LinkStats(),
        }
        #: Told of every copy that has ended: link, bytes, when it was asked for and when it began
        #: (``time.monotonic``), and whether it failed.
        self.copied: Copied = _nobody
        self._pending: deque[Transfer] = deque()
        #: When a link was last seen to end a copy; the next one cannot have begun before.
        self._idle_since: dict[str, float] = {}

    def down(
        self,
        source: Slot,
        target: Slot,
        after: Event | None,
        finished: Callable[[CopyFailedError | None], None],
    ) -> Transfer:
        """Copy a page VRAM -> host once ``after`` (the event of its last write) is reached."""
        return self._start(self.d2h, "vram->host", source, target, after, finished)

    def up(
        self,
        source: Slot,
        target: Slot,
        after: Event | None,
        finished: Callable[[CopyFailedError | None], None],
    ) -> Transfer:
        """Copy a page host -> VRAM."""
        return self._start(self.h2d, "host->vram", source, target, after, finished)

    def _start(
        self,
        stream: Stream,
        link: str,
        source: Slot,
        target: Slot,
        after: Event | None,
        finished: Callable[[CopyFailedError | None], None],
    ) -> Transfer:
        if after is not None:
            stream.wait(after)
        order_behind(stream, target)
        self.device.copy(stream, [(target.range(), source.range())])
        self.links[link].add(source.nbytes)
        transfer = Transfer(stream.record(), finished, link, source.nbytes, time.monotonic())
        self._pending.append(transfer)
        return transfer

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def poll(self) -> bool:
        """Report every transfer that has ended; never waits. Whether any had."""
        ended = False
        for _ in range(len(self._pending)):
            transfer = self._pending.popleft()
            if transfer.event.done():
                self._finish(transfer)
                ended = True
            else:
                self._pending.append(transfer)
        return ended

    def wait_oldest(self, deadline: float) -> None:
        """Wait for the transfer that was submitted first and report it."""
        if self._pending:
            transfer = self._pending[0]
            wait_for(transfer.event, deadline, "a copy between tiers")
            if self._pending and self._pending[0] is transfer:
                self._pending.popleft()
                self._finish(transfer)

    def drain(self, deadline: float) -> None:
        """Wait for all transfers."""
        while self._pending:
            self.wait_oldest(deadline)

    def _finish(self, transfer: Transfer) -> None:
        error: CopyFailedError | None = None
        link = transfer.link
        try:
            transfer.event.synchronize(1.0)
        except CopyFailedError as failure:
            error = failure
            self.links[link].failed += 1
        began = max(transfer.asked, self._idle_since.get(link, 0.0))
        self._idle_since[link] = time.monotonic()
        self.copied(link, transfer.nbytes, transfer.asked, began, failed=error is not None)
        transfer.finished(error)


def wait_for(event: Event, deadline: float, what: str) -> None:
    """Wait until ``event`` is reached, whether or not the work before it failed."""
    with contextlib.suppress(CopyFailedError):  # reported through Transfer.finished
        event.synchronize(remaining(deadline, what))


def order_behind(stream: Stream, slot: Slot) -> None:
    """Make ``stream`` wait for whatever may still use the bytes of the slot's former page."""
    for event in slot.after:
        stream.wait(event)
    slot.after.clear()


def host_order_behind(slot: Slot, deadline: float) -> None:
    """The same for the host, which has to wait itself."""
    for event in slot.after:
        wait_for(event, deadline, "the former use of a host slot")
    slot.after.clear()


def write_host(device: Device, slot: Slot, deadline: float) -> Range:
    """The range of a host slot, safe for the host to write once this returns."""
    host_order_behind(slot, deadline)
    return slot.range()


def events(*groups: Iterable[Event | None]) -> list[Event]:
    """All events of the groups, without gaps."""
    return [event for group in groups for event in group if event is not None]
