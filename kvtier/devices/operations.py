"""What an operation of the emulated device does to bytes, and the books on all of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.devices.base import Buffer
from kvtier.devices.clock import Work
from kvtier.devices.handles import POISON, EmulatedBuffer, EmulatedStream
from kvtier.devices.parts import Piece
from kvtier.devices.races import Clock, join
from kvtier.errors import CopyFailedError
from kvtier.units import format_size

Span = tuple[EmulatedBuffer, int, int]


class TraceEntry(NamedTuple):
    """An operation that ended: virtual seconds on its engine, payload bytes, error ("": none).

    ``engine`` is ``h2d``, ``d2h`` or ``vram``, ``submitted_s`` when the host handed it over.
    """

    stream: str
    kind: str
    name: str
    start_s: float
    end_s: float
    nbytes: int
    error: str
    engine: str
    submitted_s: float


@dataclass
class DeviceStats:
    """Totals since the device was opened. Keys are directions or engines, times virtual seconds."""

    copies: dict[str, int] = field(default_factory=lambda: {"h2d": 0, "d2h": 0, "d2d": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"h2d": 0, "d2h": 0, "d2d": 0})
    busy_s: dict[str, float] = field(default_factory=lambda: {"h2d": 0.0, "d2h": 0.0, "vram": 0.0})
    kernels: int = 0
    failed: int = 0
    peak_bytes: int = 0


class Books:
    """Statistics, and the newest ``limit`` operations in the order in which they ended."""

    def __init__(self, limit: int) -> None:
        self.stats = DeviceStats()
        self.trace: deque[TraceEntry] = deque(maxlen=limit)

    def enter(self, operation: Operation, work: Work) -> None:
        stats = self.stats
        if operation.kind == "copy":
            stats.copies[operation.name] += 1
            stats.bytes[operation.name] += operation.nbytes
        else:
            stats.kernels += 1
        stats.failed += operation.error is not None
        stats.busy_s[work.engine] += work.end_s - work.start_s
        error = "" if operation.error is None else str(operation.error)
        stream, kind, name = operation.stream.name, operation.kind, operation.name
        self.trace.append(
            TraceEntry(
                stream,
                kind,
                name,
                work.start_s,
                work.end_s,
                operation.nbytes,
                error,
                work.engine,
                operation.submitted_s,
            )
        )


class Operation:
    """One copy, kernel or piece of torch work. As text, what messages call it.

    Args:
        action: moves the bytes when the operation ends; what it raises makes the operation fail.
        overwrites: whether ``writes`` hold nothing while it runs, as with a copy.
    """

    __slots__ = (
        "action",
        "books",
        "error",
        "index",
        "kind",
        "name",
        "nbytes",
        "overwrites",
        "reads",
        "stream",
        "submitted_s",
        "writes",
    )

    def __init__(
        self,
        books: Books,
        stream: EmulatedStream,
        kind: str,
        name: str,
        index: int,
        nbytes: int,
        reads: Sequence[Span],
        writes: Sequence[Span],
    ) -> None:
        self.books = books
        self.stream = stream
        self.kind = kind
        self.name = name
        self.index = index
        self.nbytes = nbytes
        self.reads = reads
        self.writes = writes
        self.action: Callable[[], None] | None = None
        self.overwrites = False
        self.submitted_s = math.nan
        self.error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} (#{self.index} on stream {self.stream.name!r})"

    def begin(self) -> None:
        """The operation got its engine."""
        if self.overwrites:
            self._poison()

    def finish(self, work: Work) -> None:
        """The operation is through: its bytes arrive, or it fails and they are unusable."""
        try:
            if self.action is not None:
                require(self, self.reads)
                self.action()
                for buffer, start, stop in self.writes:
                    buffer.damage.clear(start, stop)
        except Exception as error:
            self.error = error
            self.stream.errors.append(error)
            self._poison()
            for buffer, start, stop in self.writes:
                buffer.damage.add(start, stop, str(self))
        self.books.enter(self, work)
        # The access logs keep operations for their messages; nothing else may live on through them.
        self.action, self.reads, self.writes = None, (), ()

    def _poison(self) -> None:
        for buffer, start, stop in self.writes:
            buffer.poison(start, stop)


def require(who: object, reads: Sequence[Span]) -> None:
    """Raise CopyFailedError if bytes that ``who`` reads were left unusable by a failure."""
    for buffer, start, stop in reads:
        failed = buffer.damage.find(start, stop) if buffer.damage else None
        if failed is not None:
            raise CopyFailedError(
                f"{who} needs bytes [{start}, {stop}) of {buffer.label}, but {failed} failed and "
                "left nothing usable there; copy the page again or give it up"
            )


def refuse_damaged(operation: Operation, host: Clock | None) -> None:
    """Raise CopyFailedError if it reads what a failure left. It does not enter the logs then, since
    the caller will not do it; but a race is worth more than the failure it met.

    Args:
        host: the host's clock, None if races are not checked.
    """
    try:
        require(operation, operation.reads)
    except CopyFailedError:
        if host is not None:
            clock = operation.stream.clock
            join(clock, host)
            for buffer, start, stop in operation.reads:
                buffer.log.read(start, stop, clock, None, host, operation)
        raise


def transfer(operation: Operation, pieces: Sequence[Piece], fails: bool) -> None:
    """The action of a copy."""
    if fails:
        raise CopyFailedError(
            f"{operation} of {format_size(operation.nbytes)} failed (injected fault); its "
            "destination holds nothing usable: copy again, or give the page up"
        )
    for dst, dst_start, src, src_start, nbytes in pieces:
        target, source = _bytes(dst), _bytes(src)
        if target is None:
            continue
        if source is None:
            # Memory that only counts has nothing to give.
            target[dst_start : dst_start + nbytes] = POISON
        else:
            target[dst_start : dst_start + nbytes] = source[src_start : src_start + nbytes]


def _bytes(buffer: Buffer) -> np.ndarray | None:
    assert isinstance(buffer, EmulatedBuffer)
    if buffer.dead:
        buffer.raw()
    return buffer.array


def raise_first(errors: Sequence[Exception]) -> None:
    """Raise the first error: a failed copy anew, what a kernel raised as it is."""
    for first in errors:
        if isinstance(first, CopyFailedError):
            raise CopyFailedError(str(first)) from first
        raise first
