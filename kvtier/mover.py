"""Copies between tiers, and the only place that starts them.

A copy is a ``Transfer``: submitted to a stream, finished when its event is reached, and only then reported
to whoever asked, so that the directory changes when the bytes are in place and not before. Two streams,
one a direction, run beside the compute stream. Every reuse of a buffer is ordered on the device by an
event, in both directions.

Pages that are coded in host memory are coded on the device, on the stream of the copy, so that only coded bytes cross the
link: in VRAM they pass through a scratch buffer, one a direction, which the order of the stream guards.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.devices.base import Buffer, Device, Event, Range, Stream
from kvtier.errors import CopyFailedError, DeadlineExceededError
from kvtier.tiers.codec import PageCodec
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
    """One submitted copy; ``finished`` is called exactly once, with the error if it failed.

    Attributes:
        coded: where the page now lies coded in host memory, if the copy coded it.
        failure: what went wrong before the copy had been submitted as a whole.
    """

    event: Event
    finished: Callable[[CopyFailedError | None], None]
    link: str
    nbytes: int
    asked: float
    coded: Slot | None = None
    failure: CopyFailedError | None = None


def deadline_after(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def remaining(deadline: float, what: str) -> float:
    """Seconds until ``deadline``; DeadlineExceededError naming ``what`` once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceededError(f"{what} did not finish before its deadline")
    return left


class Mover:
    """Moves whole pages between VRAM and host slots, which tell how their pages are coded."""

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
        #: For pages that are coded: VRAM for one by stream.
        self._scratch: dict[str, Buffer] = {}

    def prepare(self, codecs: Iterable[PageCodec]) -> None:
        """Take the VRAM that pages coded by these pass through; call before the first copy of one.

        Raises:
            DeviceOOMError: there is none.
        """
        need = max((codec.page_bytes for codec in codecs), default=0)
        for stream in (self.h2d, self.d2h) if need else ():
            self._scratch[stream.name] = self.device.alloc(need)

    def close(self) -> None:
        """Free the VRAM that ``prepare`` took. All work on it must have been waited for."""
        while self._scratch:
            self.device.free(self._scratch.popitem()[1])

    def down(
        self,
        source: Slot,
        target: Slot,
        after: Event | None,
        finished: Callable[[CopyFailedError | None], None],
    ) -> Transfer:
        """Copy a page VRAM -> host once ``after`` (the event of its last write) is reached; coded if the target is."""
        return self._start(self.d2h, "vram->host", source, target, after, finished)

    def up(
        self,
        source: Slot,
        target: Slot,
        after: Event | None,
        finished: Callable[[CopyFailedError | None], None],
    ) -> Transfer:
        """Copy a page host -> VRAM, where it is decoded."""
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
        failure: CopyFailedError | None = None
        try:
            self._submit(stream, source, target)
        except CopyFailedError as error:
            failure = error
        except torch.OutOfMemoryError as error:
            failure = CopyFailedError(f"there is no VRAM left in which to code a page: {error}")
        codec = _codec(source, target)
        nbytes = source.nbytes if codec is None else codec.page_bytes
        self.links[link].add(nbytes)
        transfer = Transfer(
            stream.record(),
            finished,
            link,
            nbytes,
            time.monotonic(),
            target if target.codec is not None else None,
            failure,
        )
        self._pending.append(transfer)
        return transfer

    def _submit(self, stream: Stream, source: Slot, target: Slot) -> None:
        """Put the copy, and the coding of the page, on the stream.

        Raises:
            CopyFailedError: the device knows already that what it has copied cannot be used.
        """
        codec = _codec(source, target)
        if codec is None:
            self.device.copy(stream, [(target.range(), source.range())])
            return
        scratch = self._scratch[stream.name].range(0, codec.page_bytes)
        if target.codec is not None:
            page = source.range()

            def encode() -> None:
                codec.encode(page.raw()[None], scratch.raw()[None])

            self.device.launch(stream, "encode", encode, reads=[page], writes=[scratch])
            self.device.copy(stream, [(target.range(), scratch)])
        else:
            page = target.range()

            def decode() -> None:
                codec.decode(scratch.raw()[None], page.raw()[None])

            self.device.copy(stream, [(scratch, source.range())])
            self.device.launch(stream, "decode", decode, reads=[scratch], writes=[page])

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
        error = transfer.failure
        link = transfer.link
        try:
            transfer.event.synchronize(1.0)
        except CopyFailedError as failure:
            error = failure
        if error is not None:
            self.links[link].failed += 1
        elif transfer.coded is not None:
            note_coded(self.device, transfer.coded)
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


def note_coded(device: Device, slot: Slot) -> None:
    """Add the error of the page in a host slot, which has just been coded there, to its codec's statistics."""
    codec = slot.codec
    assert codec is not None
    codec.note(codec.facts_of(device.host(slot.range())[None]))


def _codec(source: Slot, target: Slot) -> PageCodec | None:
    """How the page is coded on the host's side of a copy."""
    return source.codec or target.codec


def events(*groups: Iterable[Event | None]) -> list[Event]:
    """All events of the groups, without gaps."""
    return [event for group in groups for event in group if event is not None]
