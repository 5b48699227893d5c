"""An accelerator that is not there: real bytes, virtual time, and a proof that nothing races.

Memory is ordinary torch memory with a hard limit. Streams, events and copies keep CUDA's semantics
in the virtual time of ``kvtier.devices.clock``; every access is checked by happens-before
(``kvtier.devices.races``), so a missing event is found even where the copy would long have been
over. Bytes arrive when their copy *ends*; until then, and after a failed copy, the destination is
0xFF, which is NaN in float16, bfloat16 and float8_e4m3fn. All times it reports are simulated,
never measured.

With ``scale`` a large card is stressed in little memory: whoever makes all data ``scale`` times as
large gets the times of the full size. Scaled are bytes and bytes/s: the VRAM limit (``vram_bytes``
is given at full size), the memory bandwidth, the compute rate, the link's rates and its small-piece
threshold. Not scaled are seconds and counts: latencies, costs of calls, numbers of pieces, faults.
``payload=False`` keeps no bytes at all, so that full sizes need no memory: limits, races, damage
and times are as usual, kernels do not run, and tensors are on torch's meta device.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from kvtier.devices.base import Buffer, Device, Event, Range, Stream
from kvtier.devices.cards import DEFAULT_CARD, Card, LinkKind, LinkModel
from kvtier.devices.clock import Engine, VirtualClock
from kvtier.devices.costs import Costs, Traffic
from kvtier.devices.faults import Faults
from kvtier.devices.handles import EmulatedBuffer, EmulatedEvent, EmulatedStream
from kvtier.devices.heap import Heap
from kvtier.devices.operations import (
    Books,
    Operation,
    Span,
    raise_first,
    refuse_damaged,
    require,
    transfer,
)
from kvtier.devices.parts import check_range, direction_of, merge, overlap, runs, spans
from kvtier.devices.spec import CardSpec, parse_card
from kvtier.devices.timeline import Timeline
from kvtier.devices.trace import chrome_trace, write_trace
from kvtier.devices.wall import WallClock
from kvtier.errors import ClosedError, ConfigError, RaceError
from kvtier.units import parse_size


class EmulatedDevice(Device):
    """A device in virtual time on ordinary CPU memory.

    Threads may share it: one lock, and one host clock for all of them, so what one thread has
    waited for counts as ordered for the others too.

    Args:
        card: a Card, or text for ``kvtier.devices.spec.parse_card``: a name of ``gpus.csv``,
            numbers, or both. With ``link=pageable`` no host memory is pinned.
        vram_bytes: limit of ``alloc`` in bytes or as text ("2GiB"); default the card's memory.
        link: copy-time model; default the card's.
        check_races: False skips all race checks; uses after free and failed copies are still found.
        pinned: False emulates a host where no memory can be pinned.
        faults: what goes wrong, and when; more can be added to it while the device runs.
        trace_limit: newest operations kept in ``trace``.
        scale: see the module; in (0, 1].
        payload: see the module.
        efficiency: share of the card's memory bandwidth that kernels reach.
        traffic: bytes that a kernel or torch work moves, from the ranges that it declares; default
            their sum. For work that declares more, or moves it more often, than that.
        clock: ``virtual``, or ``wall`` (see ``kvtier.devices.wall``) with ``dilation`` real seconds
            a second.
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
        scale: float = 1.0,
        payload: bool = True,
        efficiency: float = 1.0,
        traffic: Traffic | None = None,
        clock: Literal["virtual", "wall"] = "virtual",
        dilation: float = 1.0,
    ) -> None:
        for what, value in (("scale", scale), ("efficiency", efficiency)):
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{what} is {value}; it must lie in (0, 1]")
        if clock not in ("virtual", "wall"):
            raise ConfigError(f"clock is {clock!r}; use virtual or wall")
        if isinstance(card, str):
            spec = parse_card(card)
        else:
            spec = CardSpec(card, "pinned", card.link_model())
        self.card = spec.card
        #: Kind of the link to host memory.
        self.link_kind: LinkKind = spec.kind if pinned else "pageable"
        self.scale = scale
        self.name = f"emulated {self.card.slug}"
        full_link = spec.link if link is None else link
        self.link = full_link.scaled(scale)
        self.faults = Faults() if faults is None else faults
        self.has_payload = payload
        self._costs = Costs(
            self.card, self.link, scale=scale, efficiency=efficiency, traffic=traffic
        )
        self._books = Books(trace_limit)
        self.trace = self._books.trace
        full = self.card.vram_bytes if vram_bytes is None else parse_size(vram_bytes, "vram_bytes")
        self._heap = Heap(
            self,
            capacity=round(full * scale),
            link=full_link,
            scale=scale,
            pin=pinned and spec.kind != "pageable",
            payload=payload,
            faults=self.faults,
        )
        self._check_races = check_races
        self._lock = threading.RLock()
        self._local = threading.local()
        self._clock = (
            VirtualClock(self.link.duplex, self.link.engines)
            if clock == "virtual"
            else WallClock(self.link.duplex, self.link.engines, self._lock, dilation)
        )
        self._time = Timeline(self, self._clock, check_races)
        self._operations = 0
        self._closed = self._in_kernel = False

    # memory

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu" if self.has_payload else "meta")

    @property
    def capacity_bytes(self) -> int:
        return self._heap.capacity

    @property
    def used_bytes(self) -> int:
        return self._heap.used

    @property
    def host_bytes(self) -> int:
        """Host memory handed out now, pinned and pageable."""
        return self._heap.host

    @property
    def stats(self) -> Any:
        """``DeviceStats`` since the device was opened."""
        self._books.stats.peak_bytes = self._heap.peak
        return self._books.stats

    @property
    def now_s(self) -> float:
        """Virtual seconds since the device was opened."""
        return self._clock.now

    def alloc(self, nbytes: int) -> EmulatedBuffer:
        with self._entered():
            return self._heap.vram(nbytes)

    def alloc_host(self, nbytes: int) -> EmulatedBuffer:
        with self._entered():
            return self._heap.on_host(nbytes)

    def reserve(self, nbytes: int, *, host: bool = False) -> EmulatedBuffer:
        """Memory that counts, and that operations may declare, but that holds no bytes: weights, for
        example. VRAM, or host memory with ``host``. Raises as ``alloc``."""
        with self._entered():
            make = self._heap.on_host if host else self._heap.vram
            return make(nbytes, payload=False)

    def free(self, buffer: Buffer) -> None:
        with self._lock:
            if self._closed:
                return
            self._no_kernel()
            mine = self._heap.mine(buffer)
            if self._check_races:
                mine.log.write(0, mine.nbytes, self._time.host, None, "free()")
            self._heap.free(mine, f"freed at {self._clock.now:.6f} s of virtual time")

    # streams

    def stream(self, name: str) -> EmulatedStream:
        with self._entered():
            return self._time.stream(name)

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
            for event in [stream.record() for stream in self._time.streams.values()]:
                self._time.reach(event, deadline, timeout_s)
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
            nbytes = sum([piece.nbytes for piece in pieces])
            # Between two memories only destinations can meet, and then their spans are shorter.
            if direction == "d2d" or sum([stop - start for _, start, stop in writes]) != nbytes:
                at = overlap(pieces) if self._check_races else None
                if at is not None:
                    raise RaceError(
                        f"parts of a {direction} copy overlap at byte {at}, without order"
                    )
            operation = self._operation(queue, "copy", direction, reads, writes)
            self._time.order(operation)
            operation.nbytes = nbytes
            operation.overwrites = True
            fault = self.faults.on_copy(direction)
            operation.action = partial(transfer, operation, pieces, fault.fails)
            pinned = all(buffer.kind != "pageable" for buffer, _, _ in (*reads, *writes))
            engine: Engine = "vram" if direction == "d2d" else direction
            seconds = self._costs.copy_s(direction, nbytes, len(pieces), pinned, fault.slowdown)
            cost = self.link.host_s(len(runs(pieces, direction)))
            self._time.submit(operation, engine, seconds + fault.stall_s, cost)
            if not pinned:
                self._time.finish(queue)

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
            self._refuse_later(queue, operation)
            self._time.order(operation)
            if self.has_payload:
                operation.action = partial(self._run, kernel)
            self._time.submit(operation, "vram", self._kernel_s(operation), self.link.submit_s)

    def compute(
        self,
        stream: Stream,
        name: str,
        *,
        nbytes: float,
        flops: float = 0.0,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """A kernel of which only the time matters: the longer of ``nbytes`` of memory traffic and
        ``flops`` at the card's peak (left out where the table has none), both at full size scaled
        like the device. Declares and checks ranges as ``launch``."""
        with self._entered():
            queue = self._own(stream)
            operation = self._operation(
                queue, "kernel", name, self._ranges(reads), self._ranges(writes)
            )
            self._refuse_later(queue, operation)
            self._time.order(operation)
            seconds = self._costs.compute_s(nbytes, flops)
            self._time.submit(operation, "vram", seconds, self.link.submit_s)

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
            self._time.finish(queue)
            self._refuse_damaged(operation)
            self._time.order(operation)
            for buffer, start, stop in operation.writes:
                buffer.damage.clear(start, stop)
            self._time.submit(operation, "vram", self._kernel_s(operation), 0.0)

    def host(self, at: Range, *, write: bool = False) -> torch.Tensor:
        """See ``Device.host``. Raises RaceError if work that touches the bytes was not waited for,
        and CopyFailedError for reading what a failed copy should have written."""
        with self._entered():
            buffer = self._heap.mine(at.buffer)
            check_range(at)
            if buffer.kind == "vram":
                raise ConfigError(
                    f"the host cannot touch {buffer.label}; copy it to host memory first"
                )
            if self._check_races:
                if write:
                    buffer.log.write(at.start, at.stop, self._time.host, None)
                else:
                    buffer.log.read(at.start, at.stop, self._time.host, None, self._time.host)
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
            self._clock.rest(seconds)

    def chrome_trace(self) -> dict[str, Any]:
        """The operations in ``trace`` for chrome://tracing or Perfetto: a row a stream, a row an
        engine. Times are virtual microseconds."""
        return chrome_trace(self.trace, self.name)

    def write_trace(self, path: str | Path) -> None:
        """``chrome_trace`` as a JSON file."""
        write_trace(self.chrome_trace(), path)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._no_kernel()
            self._closed = True
            self._heap.close()
            self._time.streams.clear()
            self._clock.close()
        if isinstance(self._clock, WallClock):
            self._clock.join()

    # events, called by streams and events

    def _record(self, stream: EmulatedStream) -> EmulatedEvent:
        with self._entered():
            return self._time.record(stream)

    def _hold(self, stream: EmulatedStream, event: Event) -> None:
        with self._entered():
            self._time.hold(stream, event)

    def _query(self, event: EmulatedEvent) -> bool:
        with self._entered():
            return self._time.query(event)

    def _await(self, event: EmulatedEvent, timeout_s: float) -> None:
        with self._entered():
            self._time.reach(event, self._clock.now + timeout_s, timeout_s)
            raise_first(event.errors)

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

    def _own(self, stream: Stream) -> EmulatedStream:
        if not isinstance(stream, EmulatedStream) or stream.device is not self:
            raise ConfigError(f"{stream!r} is not a stream of this {self.name}")
        return stream

    def _refuse_damaged(self, operation: Operation) -> None:
        refuse_damaged(operation, self._time.host if self._check_races else None)

    def _refuse_later(self, queue: EmulatedStream, operation: Operation) -> None:
        """The same for an operation that is queued: what is before it may still put the bytes right."""
        if any(buffer.damage.find(start, stop) for buffer, start, stop in operation.reads):
            self._time.finish(queue)
        self._refuse_damaged(operation)

    def _spans(self, ranges: Sequence[tuple[Buffer, int, int]]) -> list[Span]:
        return [(self._heap.mine(buffer), start, stop) for buffer, start, stop in spans(ranges)]

    def _ranges(self, ranges: Sequence[Range]) -> list[Span]:
        for at in ranges:
            check_range(at)
        return self._spans(ranges)

    def _kernel_s(self, operation: Operation) -> float:
        return self._costs.kernel_s(operation.nbytes, operation.reads, operation.writes)

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

    def _run(self, kernel: Callable[[], None]) -> None:
        self._in_kernel = True
        try:
            kernel()
        finally:
            self._in_kernel = False
