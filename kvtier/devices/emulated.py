"""An accelerator that is not there: real bytes, virtual time, and a proof that nothing races.

Memory is ordinary torch memory with a hard limit. Streams, events and copies keep CUDA's semantics
in the virtual time of ``kvtier.devices.clock``; every access is checked by happens-before
(``kvtier.devices.races``), so a missing event is found even where the copy would long have been
over. Bytes arrive when their copy *ends*; until then, and after a failed copy, the destination is
0xFF, which is NaN in float16, bfloat16 and float8_e4m3fn. All times it reports are simulated,
never measured.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kvtier.devices.base import Buffer, Device, Event, MemoryKind, Range, Stream
from kvtier.devices.cards import DEFAULT_CARD, Card, LinkModel, find_card
from kvtier.devices.clock import Engine, Hold, Point, VirtualClock, Work
from kvtier.devices.faults import Faults
from kvtier.devices.handles import EmulatedBuffer, EmulatedEvent, EmulatedStream
from kvtier.devices.operations import Books, Operation, Span, raise_first, require
from kvtier.devices.parts import (
    Piece,
    check_range,
    direction_of,
    merge,
    overlap,
    runs,
    spans,
)
from kvtier.devices.races import Access, Clock, join
from kvtier.errors import (
    ClosedError,
    ConfigError,
    CopyFailedError,
    DeadlineExceededError,
    DeviceOOMError,
    OffloadWarning,
    RaceError,
)
from kvtier.units import format_size, parse_size

#: Seconds from a kernel's turn to its first byte; assumed.
KERNEL_START_S = 4e-6
#: Seconds that recording, waiting for or querying an event takes the host; assumed.
EVENT_CALL_S = 1e-6


class EmulatedDevice(Device):
    """A device in virtual time on ordinary CPU memory.

    Threads may share it: one lock, and one host clock for all of them, so what one thread has
    waited for counts as ordered for the others too.

    Args:
        card: name of a card in ``gpus.csv``, or a Card.
        vram_bytes: limit of ``alloc`` in bytes or as text ("2GiB"); default the card's memory.
        link: copy-time model; default the card's.
        check_races: False skips all race checks; uses after free and failed copies are still found.
        pinned: False emulates a host where no memory can be pinned.
        faults: what goes wrong, and when; more can be added to it while the device runs.
        trace_limit: newest operations kept in ``trace``.
    """

    def __init__(
        self,
        card: str | Card = DEFAULT_CARD,
        *,
        vram_bytes: int | str | None = None,
        link: LinkModel | None = None,
        check_races: bool = True,
        pinned: bool = True,
        faults: Faults | None = None,
        trace_limit: int = 4096,
    ) -> None:
        self.card = find_card(card) if isinstance(card, str) else card
        self.name = f"emulated {self.card.slug}"
        self.link = self.card.link_model() if link is None else link
        self.faults = Faults() if faults is None else faults
        self._books = Books(trace_limit)
        self.stats = self._books.stats
        self.trace = self._books.trace
        self._capacity = (
            self.card.vram_bytes if vram_bytes is None else parse_size(vram_bytes, "vram_bytes")
        )
        self._check_races = check_races
        self._pin = pinned
        self._lock = threading.RLock()
        self._local = threading.local()
        self._clock = VirtualClock(self.link.duplex)
        self._host: Clock = []
        self._streams: dict[str, EmulatedStream] = {}
        self._buffers: set[EmulatedBuffer] = set()
        self._used = self._pinned_bytes = self._host_bytes = 0
        self._operations = self._allocations = 0
        self._warned = self._closed = self._in_kernel = False

    # memory

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def host_bytes(self) -> int:
        """Host memory handed out now, pinned and pageable."""
        return self._host_bytes

    @property
    def now_s(self) -> float:
        """Virtual seconds since the device was opened."""
        return self._clock.now

    def alloc(self, nbytes: int) -> EmulatedBuffer:
        with self._entered():
            _positive(nbytes)
            free = self._capacity - self._used
            injected = self.faults.on_alloc()
            if nbytes > free or injected:
                raise DeviceOOMError(
                    f"{self.name} cannot give {format_size(nbytes)}: {format_size(free)} of "
                    f"{format_size(self._capacity)} are free{' (injected fault)' * injected}; "
                    "lower the VRAM budget of the cache, or free buffers first"
                )
            buffer = self._make(nbytes, "vram")
            self._used += nbytes
            self.stats.peak_bytes = max(self.stats.peak_bytes, self._used)
            return buffer

    def alloc_host(self, nbytes: int) -> EmulatedBuffer:
        with self._entered():
            _positive(nbytes)
            pinned = self._pin and self.faults.may_pin(self._pinned_bytes + nbytes)
            if not pinned:
                self._warn_pageable(nbytes)
            buffer = self._make(nbytes, "pinned" if pinned else "pageable")
            self._host_bytes += nbytes
            self._pinned_bytes += nbytes if pinned else 0
            return buffer

    def free(self, buffer: Buffer) -> None:
        with self._lock:
            if self._closed:
                return
            self._no_kernel()
            mine = self._mine(buffer)
            if self._check_races:
                mine.log.write(0, mine.nbytes, self._host, None, "free()")
            mine.drop(f"freed at {self._clock.now:.6f} s of virtual time")
            self._buffers.remove(mine)
            if mine.kind == "vram":
                self._used -= mine.nbytes
            else:
                self._host_bytes -= mine.nbytes
                self._pinned_bytes -= mine.nbytes if mine.kind == "pinned" else 0

    # streams

    def stream(self, name: str) -> EmulatedStream:
        with self._entered():
            found = self._streams.get(name)
            if found is None:
                for clock in (self._host, *(stream.clock for stream in self._streams.values())):
                    clock.append(0)
                found = EmulatedStream(self, name, len(self._streams), list(self._host))
                self._streams[name] = found
            return found

    def compute_stream(self) -> EmulatedStream:
        entered: list[EmulatedStream] | None = getattr(self._local, "streams", None)
        return entered[-1] if entered else self.stream("compute")

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        entered = self._local.__dict__.setdefault("streams", [])
        entered.append(self._own(stream))
        try:
            yield
        finally:
            entered.pop()

    def synchronize(self, timeout_s: float) -> None:
        with self._entered():
            deadline = self._clock.now + timeout_s
            errors: list[Exception] = []
            for event in [stream.record() for stream in self._streams.values()]:
                self._reach(event, deadline, timeout_s)
                errors += event.errors
            raise_first(errors)

    # work

    def copy(self, stream: Stream, parts: Sequence[tuple[Range, Range]]) -> None:
        if not parts:
            return
        with self._entered():
            queue = self._own(stream)
            direction = direction_of(parts)
            pieces = merge(parts)
            if not pieces:
                return
            reads = self._spans([(p.src, p.src_start, p.src_start + p.nbytes) for p in pieces])
            writes = self._spans([(p.dst, p.dst_start, p.dst_start + p.nbytes) for p in pieces])
            if self._check_races and (at := overlap(pieces)) is not None:
                raise RaceError(f"parts of a {direction} copy overlap at byte {at}, without order")
            operation = self._operation(queue, "copy", direction, reads, writes)
            self._order(operation)
            operation.nbytes = nbytes = sum(piece.nbytes for piece in pieces)
            operation.overwrites = True
            fault = self.faults.on_copy(direction)
            operation.action = partial(_transfer, operation, pieces, fault.fails)
            pinned = all(buffer.kind != "pageable" for buffer, _, _ in (*reads, *writes))
            engine: Engine = "vram" if direction == "d2d" else direction
            if direction == "d2d":
                seconds = self._vram_s(2 * nbytes)
            else:
                seconds = self.link.device_s(direction, nbytes, len(pieces), pinned)
            cost = self.link.host_s(len(runs(pieces, direction)))
            self._submit(operation, engine, seconds + fault.stall_s, cost)
            if not pinned:
                self._finish_queue(queue)

    def launch(
        self,
        stream: Stream,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """See ``Device.launch``. The kernel runs when its turn ends in virtual time; what it raises
        is raised again, as it is, where the stream is next waited for.

        Raises:
            CopyFailedError: the bytes to be read are known to come from a failed operation.
        """
        with self._entered():
            queue = self._own(stream)
            operation = self._operation(
                queue, "kernel", name, self._ranges(reads), self._ranges(writes)
            )
            self._refuse_damaged(operation)
            self._order(operation)
            operation.action = partial(self._run, kernel)
            self._submit(operation, "vram", self._vram_s(operation.nbytes), self.link.submit_s)

    def use(
        self,
        stream: Stream,
        name: str,
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """See ``Device.use``. Virtual time moves to where all work ordered before it has ended,
        since the caller's torch code runs at once; the host does not count as having waited for
        anything. The torch work itself takes its time on the stream."""
        with self._entered():
            queue = self._own(stream)
            operation = self._operation(
                queue, "torch work", name, self._ranges(reads), self._ranges(writes)
            )
            self._clock.spend(self.link.submit_s)
            self._finish_queue(queue)
            self._refuse_damaged(operation)
            self._order(operation)
            for buffer, start, stop in operation.writes:
                buffer.damage.clear(start, stop)
            self._submit(operation, "vram", self._vram_s(operation.nbytes), 0.0)

    def host(self, at: Range, *, write: bool = False) -> torch.Tensor:
        """See ``Device.host``. Raises RaceError if work that touches the bytes was not waited for,
        and CopyFailedError for reading what a failed copy should have written."""
        with self._entered():
            buffer = self._mine(at.buffer)
            check_range(at)
            if buffer.kind == "vram":
                raise ConfigError(
                    f"the host cannot touch {buffer.label}; copy it to host memory first"
                )
            if self._check_races:
                if write:
                    buffer.log.write(at.start, at.stop, self._host, None)
                else:
                    buffer.log.read(at.start, at.stop, self._host, None, self._host)
            if write:
                buffer.damage.clear(at.start, at.stop)
            else:
                require("the host's read", [(buffer, at.start, at.stop)])
            return buffer.raw()[at.start : at.stop]

    def host_work(self, seconds: float) -> None:
        """Let ``seconds`` of virtual time pass on the host, as if it computed something."""
        with self._entered():
            if not 0.0 <= seconds < math.inf:
                raise ConfigError(f"host work of {seconds} s; give a finite time >= 0")
            self._clock.spend(seconds)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._no_kernel()
            self._closed = True
            for buffer in self._buffers:
                buffer.drop("its device was closed")
            self._buffers.clear()
            self._streams.clear()
            self._used = self._pinned_bytes = self._host_bytes = 0

    # events, called by streams and events

    def _record(self, stream: EmulatedStream) -> EmulatedEvent:
        with self._entered():
            self._clock.spend(EVENT_CALL_S)
            event = EmulatedEvent(stream)
            self._clock.push(stream.queue, event.point)
            return event

    def _hold(self, stream: EmulatedStream, event: Event) -> None:
        with self._entered():
            if not isinstance(event, EmulatedEvent) or event.device is not self:
                raise ConfigError(
                    f"stream {stream.name!r} of {self.name} got an event of another device"
                )
            self._clock.spend(EVENT_CALL_S)
            join(stream.clock, event.clock)
            if not event.point.done:
                self._clock.push(stream.queue, Hold(event.point))

    def _query(self, event: EmulatedEvent) -> bool:
        with self._entered():
            self._clock.spend(EVENT_CALL_S)
            if event.point.done:
                join(self._host, event.clock)
            return event.point.done

    def _await(self, event: EmulatedEvent, timeout_s: float) -> None:
        with self._entered():
            self._reach(event, self._clock.now + timeout_s, timeout_s)
            raise_first(event.errors)

    def _reach(self, event: EmulatedEvent, deadline_s: float, timeout_s: float) -> None:
        if not self._clock.run_until(event.point, deadline_s):
            raise DeadlineExceededError(
                f"an event of {self.name} was not reached within {timeout_s} s of virtual time; "
                "the work before it is slow or stalled: wait longer, or give its pages up"
            )
        join(self._host, event.clock)

    # inside

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} is closed; open another device")
            self._no_kernel()
            yield

    def _no_kernel(self) -> None:
        if self._in_kernel:
            raise ConfigError(
                f"a kernel called back into {self.name}; kernels may only touch bytes"
            )

    def _make(self, nbytes: int, kind: MemoryKind) -> EmulatedBuffer:
        self._allocations += 1
        label = f"{kind} buffer {self._allocations} ({format_size(nbytes)})"
        buffer = EmulatedBuffer(self, nbytes, kind, label)
        self._buffers.add(buffer)
        return buffer

    def _mine(self, buffer: Buffer) -> EmulatedBuffer:
        if not isinstance(buffer, EmulatedBuffer) or buffer.device is not self:
            raise ConfigError(f"{buffer!r} is not a buffer of this {self.name}")
        if buffer.dead:
            raise RaceError(f"{buffer.label} is used after it was freed ({buffer.dead})")
        return buffer

    def _own(self, stream: Stream) -> EmulatedStream:
        if not isinstance(stream, EmulatedStream) or stream.device is not self:
            raise ConfigError(f"{stream!r} is not a stream of this {self.name}")
        return stream

    def _spans(self, ranges: Sequence[tuple[Buffer, int, int]]) -> list[Span]:
        return [(self._mine(buffer), start, stop) for buffer, start, stop in spans(ranges)]

    def _ranges(self, ranges: Sequence[Range]) -> list[Span]:
        for at in ranges:
            check_range(at)
        return self._spans(ranges)

    def _vram_s(self, nbytes: int) -> float:
        return KERNEL_START_S + nbytes / self.card.memory_bandwidth

    def _operation(
        self,
        stream: EmulatedStream,
        kind: str,
        name: str,
        reads: Sequence[Span],
        writes: Sequence[Span],
    ) -> Operation:
        self._operations += 1
        nbytes = sum(stop - start for _, start, stop in (*reads, *writes))
        return Operation(self._books, stream, kind, name, self._operations, nbytes, reads, writes)

    def _order(self, operation: Operation) -> None:
        """Check an operation against everything before it and enter it into the logs."""
        if not self._check_races:
            return
        stream, clock = operation.stream, operation.stream.clock
        join(clock, self._host)
        clock[stream.index] += 1
        access = Access(stream.index, clock[stream.index], operation)
        for buffer, start, stop in operation.reads:
            buffer.log.read(start, stop, clock, access, self._host, operation)
        for buffer, start, stop in operation.writes:
            buffer.log.write(start, stop, clock, access, operation)

    def _refuse_damaged(self, operation: Operation) -> None:
        """Raise CopyFailedError if it reads what a failure left. It does not enter the logs then,
        since the caller will not do it; but a race is worth more than the failure it met."""
        try:
            require(operation, operation.reads)
        except CopyFailedError:
            if self._check_races:
                clock = operation.stream.clock
                join(clock, self._host)
                for buffer, start, stop in operation.reads:
                    buffer.log.read(start, stop, clock, None, self._host, operation)
            raise

    def _submit(self, operation: Operation, engine: Engine, seconds: float, cost: float) -> None:
        self._clock.spend(cost)
        work = Work(engine, seconds, operation.begin, operation.finish)
        self._clock.push(operation.stream.queue, work)

    def _run(self, kernel: Callable[[], None]) -> None:
        self._in_kernel = True
        try:
            kernel()
        finally:
            self._in_kernel = False

    def _finish_queue(self, stream: EmulatedStream) -> None:
        point = Point()
        self._clock.push(stream.queue, point)
        self._clock.run_until(point, math.inf)

    def _warn_pageable(self, nbytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        pinned = self.link.rate("h2d", nbytes)
        pageable = self.link.rate("h2d", nbytes, pinned=False)
        warnings.warn(
            OffloadWarning(
                f"{self.name}: {format_size(nbytes)} of host memory could not be pinned; copies "
                f"run at about {pageable / 1e9:.1f} GB/s instead of {pinned / 1e9:.1f} "
                f"({pinned / pageable:.1f} times slower) and block the caller; make the host tier "
                "smaller, or raise the limit on locked memory"
            ),
            stacklevel=4,
        )


def _positive(nbytes: int) -> None:
    if nbytes < 1:
        raise ConfigError(f"an allocation of {nbytes} bytes; give at least 1")


def _transfer(operation: Operation, pieces: Sequence[Piece], fails: bool) -> None:
    if fails:
        raise CopyFailedError(
            f"{operation} of {format_size(operation.nbytes)} failed (injected fault); its "
            "destination holds nothing usable: copy again, or give the page up"
        )
    for dst, dst_start, src, src_start, nbytes in pieces:
        dst.raw()[dst_start : dst_start + nbytes] = src.raw()[src_start : src_start + nbytes]
