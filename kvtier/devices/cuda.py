"""A CUDA card through torch: torch owns the memory and the streams, this file keeps the books.

Host memory is our own anonymous mapping, registered with the driver: torch's and CuPy's pinned
allocators round up to a power of two, and a mapping can be pinned a slab at a time, in exactly its
size. The host tier asks for its slabs (about 32 MiB) when it grows, so memory is pinned in chunks
and not before it is used; a chunk that cannot be pinned is pageable, and that is said once.

A copy is submitted by the size of its pieces:

* one contiguous piece, a whole page as a rule: one DMA;
* several pieces of 32 KiB or more: one ``cudaMemcpyBatchAsync`` where the driver and cuda-bindings
  have it (``kvtier.devices.batch``), else one call a run of pieces with equal pitch;
* several smaller pieces: ``small_copy``, by default one kernel for all of them
  (``kvtier.devices.small``); where kernels cannot run, one call a run as above.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from kvtier.announce import announce
from kvtier.devices.base import Buffer, Device, Event, MemoryKind, Range, Stream
from kvtier.devices.batch import BatchCopy, find_batch_copy
from kvtier.devices.cards import Direction, vram_margin
from kvtier.devices.parts import Piece, check_range, direction_of, merge, runs
from kvtier.devices.small import PIECES_A_LAUNCH, Lists, SmallMoves
from kvtier.devices.views import views
from kvtier.errors import (
    ClosedError,
    ConfigError,
    CopyFailedError,
    DeadlineExceededError,
    DeviceOOMError,
)
from kvtier.kernels.launch import Launcher, launcher_for
from kvtier.kernels.moves import reaches_host_memory
from kvtier.units import format_size, parse_size

#: Pieces from this size on go through the copy engine one by one: below, submitting (0.5 us a piece)
#: and the engine (4-7 GB/s under 28 KiB, vLLM PR 42212) cost more than a kernel.
BATCH_PIECE_BYTES = 32 * 1024

#: Copies pieces smaller than that on a torch stream, which is the current one:
#: ``(pieces, direction, stream) -> done``. False leaves them to the copy engine.
SmallCopy = Callable[[Sequence[Piece], Direction, Any], bool]

#: cudaHostRegisterPortable, cudaHostRegisterMapped: pinned for all CUDA contexts of the process, and
#: within the reach of kernels.
_PORTABLE_AND_MAPPED = 1 | 2

#: torch annotates these only in part.
_cuda: Any = torch.cuda

_CLOSE_TIMEOUT_S = 30.0
_SHORTEST_POLL_S = 20e-6
_LONGEST_POLL_S = 1e-3


class CudaBuffer(Buffer):
    """See ``Buffer``. ``mapping`` keeps pinned host memory alive."""

    def __init__(
        self,
        device: CudaDevice,
        memory: torch.Tensor,
        kind: MemoryKind,
        mapping: mmap.mmap | None = None,
    ) -> None:
        self.nbytes = memory.numel()
        self.kind = kind
        self.device = device
        self.mapping = mapping
        self.memory: torch.Tensor | None = memory

    def raw(self) -> torch.Tensor:
        if self.memory is None:
            raise ClosedError(f"a {self.kind} buffer is used after it was freed")
        return self.memory


class CudaEvent(Event):
    """See ``Event``. Waits poll, so that every wait has a deadline."""

    def __init__(self, event: Any) -> None:
        self.cuda = event

    def done(self) -> bool:
        return self._poll() is not None

    def synchronize(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause = _SHORTEST_POLL_S
        while (error := self._poll()) is None:
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"a CUDA event was not reached within {timeout_s} s; the work before it is "
                    "slow or stalled: wait longer, or give its pages up"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        if error:
            raise CopyFailedError(
                f"work before a CUDA event failed: {error}; the card can be used again after a "
                "restart of the process"
            )

    def _poll(self) -> str | None:
        """None while work is pending, then "" or the error of the card."""
        try:
            return "" if self.cuda.query() else None
        except RuntimeError as error:
            return str(error) or repr(error)


class CudaStream(Stream):
    """See ``Stream``. ``cuda`` is the torch stream."""

    def __init__(self, device: CudaDevice, name: str, cuda: torch.cuda.Stream) -> None:
        self.device = device
        self.name = name
        self.cuda = cuda

    def record(self) -> CudaEvent:
        return _record(self.cuda)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise ConfigError(f"stream {self.name!r} of {self.device.name} got {event!r}")
        self.cuda.wait_event(event.cuda)

    def synchronize(self, timeout_s: float) -> None:
        self.record().synchronize(timeout_s)


class CudaDevice(Device):
    """One CUDA card.

    Args:
        index: the card's number, also as text.
        vram_bytes: what ``alloc`` may hand out in all, in bytes or as text ("2GiB"). Default: the
            memory that is free now less 8 % of it, at least 512 MiB.
        small_copy: copies of several small pieces; default: a kernel, see the module.

    Raises:
        ConfigError: no CUDA, no card of that number, or no memory left on it.
    """

    def __init__(
        self,
        index: int | str = 0,
        *,
        vram_bytes: int | str | None = None,
        small_copy: SmallCopy | None = None,
    ) -> None:
        self._index = _card_index(index)
        self._torch_device = torch.device("cuda", self._index)
        free, total = _cuda.mem_get_info(self._index)
        margin = vram_margin(free)
        self._capacity = (
            free - margin if vram_bytes is None else parse_size(vram_bytes, "vram_bytes")
        )
        if self._capacity <= 0:
            raise ConfigError(
                f"cuda:{self._index} has {format_size(free)} of {format_size(total)} free, less "
                f"than the margin of {format_size(margin)}; free some, or give vram_bytes"
            )
        self.name = f"cuda:{self._index} {_cuda.get_device_name(self._index)}"
        self._lock = threading.RLock()
        self._streams: dict[str, CudaStream] = {}
        self._seen: dict[int, CudaStream] = {}
        self._buffers: set[CudaBuffer] = set()
        self._used = 0
        self._warned = self._closed = False
        # torch reuses a freed block in the order of the stream it came from. With a stream of its
        # own, an allocation never meets work of others that is still pending on its block.
        self._alloc_stream = _cuda.Stream(self._torch_device)
        self._small_copy: SmallCopy = small_copy or SmallMoves(
            self._find_launcher, self._alloc_lists, _record
        )
        self._batch: BatchCopy | None = find_batch_copy()

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        return self._used

    def alloc(self, nbytes: int) -> CudaBuffer:
        with self._lock:
            self._open(nbytes)
            free = self._capacity - self._used
            memory = None
            if nbytes <= free:
                try:
                    with _cuda.stream(self._alloc_stream):
                        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._torch_device)
                except _cuda.OutOfMemoryError:
                    free = _cuda.mem_get_info(self._index)[0]
            if memory is None:
                raise DeviceOOMError(
                    f"{self.name} cannot give {format_size(nbytes)}: {format_size(free)} of "
                    f"{format_size(self._capacity)} are free; lower the VRAM budget of the cache, "
                    "or free buffers first"
                )
            self._used += nbytes
            return self._keep(CudaBuffer(self, memory, "vram"))

    def alloc_host(self, nbytes: int) -> CudaBuffer:
        with self._lock:
            self._open(nbytes)
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
            with _cuda.device(self._index):
                error = int(
                    _cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE_AND_MAPPED)
                )
            if error:
                self._warn_pageable(nbytes, error)
            return self._keep(CudaBuffer(self, memory, "pageable" if error else "pinned", mapping))

    def free(self, buffer: Buffer) -> None:
        with self._lock:
            if self._closed:
                return
            mine = self._mine(buffer)
            self._buffers.remove(mine)
            self._release(mine)

    def stream(self, name: str) -> CudaStream:
        with self._lock:
            self._open()
            if name not in self._streams:
                cuda = _cuda.Stream(self._torch_device)
                self._streams[name] = CudaStream(self, name, cuda)
            return self._streams[name]

    def compute_stream(self) -> CudaStream:
        with self._lock:
            self._open()
            current = _cuda.current_stream(self._torch_device)
            handle = int(current.cuda_stream)
            if handle not in self._seen:
                self._seen[handle] = CudaStream(self, "compute", current)
            return self._seen[handle]

    def copy(self, stream: Stream, parts: Sequence[tuple[Range, Range]]) -> None:
        if not parts:
            return
        self._open()
        cuda = self._own(stream).cuda
        direction = direction_of(parts)
        pieces = merge(parts)
        for piece in pieces:
            self._mine(piece.dst)
            self._mine(piece.src)
        grouped = runs(pieces, direction)
        if len(grouped) > 1:
            grouped = runs(self._copy_together(pieces, direction, cuda), direction)
        with _cuda.stream(cuda):
            for run in grouped:
                pinned = "pageable" not in (run.first.dst.kind, run.first.src.kind)
                dst, src = views(run)
                dst.copy_(src, non_blocking=pinned)

    def _copy_together(
        self, pieces: Sequence[Piece], direction: Direction, cuda: Any
    ) -> Sequence[Piece]:
        """Copy pieces that torch would need several calls for in one a size class, and return those
        that are left. Pageable memory is left to torch, which waits for it."""
        if any("pageable" in (piece.dst.kind, piece.src.kind) for piece in pieces):
            return pieces
        small = [piece for piece in pieces if piece.nbytes < BATCH_PIECE_BYTES]
        large = [piece for piece in pieces if piece.nbytes >= BATCH_PIECE_BYTES]
        if len(small) > 1:
            with _cuda.stream(cuda):
                if self._small_copy(small, direction, cuda):
                    small = []
        if len(large) > 1 and self._copy_batch(large, cuda):
            large = []
        return [*small, *large]

    def _copy_batch(self, pieces: Sequence[Piece], cuda: Any) -> bool:
        # The driver refuses batches on the legacy default stream, whose handle is 0.
        if self._batch is None or not int(cuda.cuda_stream):
            return False
        with _cuda.device(self._index):
            done = self._batch(
                [piece.dst.raw().data_ptr() + piece.dst_start for piece in pieces],
                [piece.src.raw().data_ptr() + piece.src_start for piece in pieces],
                [piece.nbytes for piece in pieces],
                int(cuda.cuda_stream),
            )
        if not done:
            self._batch = None
        return done

    def _find_launcher(self) -> Launcher | None:
        launcher = launcher_for(self._torch_device)
        return launcher if launcher and reaches_host_memory(self._torch_device) else None

    def _alloc_lists(self) -> Lists | None:
        shape = (3, PIECES_A_LAUNCH)
        try:
            with _cuda.stream(self._alloc_stream):
                vram = torch.empty(shape, dtype=torch.int64, device=self._torch_device)
        except _cuda.OutOfMemoryError:
            return None
        host = self.alloc_host(vram.nbytes).raw().view(torch.int64).view(shape)
        return Lists(host, vram)

    def launch(
        self,
        stream: Stream,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._open()
        with _cuda.stream(self._own(stream).cuda):
            kernel()

    def use(
        self,
        stream: Stream,
        name: str,
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._open()

    def host(self, at: Range, *, write: bool = False) -> torch.Tensor:
        self._open()
        buffer = self._mine(at.buffer)
        check_range(at)
        if buffer.kind == "vram":
            raise ConfigError("the host cannot touch VRAM; copy it to host memory first")
        return buffer.raw()[at.start : at.stop]

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], _cuda.stream(self._own(stream).cuda))

    def synchronize(self, timeout_s: float) -> None:
        with self._lock:
            self._open()
            streams = {int(s.cuda.cuda_stream): s for s in self._streams.values()} | self._seen
        deadline = time.monotonic() + timeout_s
        for event in [stream.record() for stream in streams.values()]:
            event.synchronize(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                # Memory must not be unpinned under a copy.
                self.synchronize(_CLOSE_TIMEOUT_S)
            finally:
                self._closed = True
                for buffer in self._buffers:
                    self._release(buffer)
                self._buffers.clear()
                self._streams.clear()
                self._seen.clear()

    def _open(self, nbytes: int = 1) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} is closed; open another device")
        if nbytes < 1:
            raise ConfigError(f"an allocation of {nbytes} bytes; give at least 1")

    def _keep(self, buffer: CudaBuffer) -> CudaBuffer:
        self._buffers.add(buffer)
        return buffer

    def _release(self, buffer: CudaBuffer) -> None:
        if buffer.kind == "pinned":
            with _cuda.device(self._index):
                _cuda.cudart().cudaHostUnregister(buffer.raw().data_ptr())
        if buffer.kind == "vram":
            self._used -= buffer.nbytes
        buffer.memory = buffer.mapping = None

    def _mine(self, buffer: Buffer) -> CudaBuffer:
        if not isinstance(buffer, CudaBuffer) or buffer.device is not self:
            raise ConfigError(f"{buffer!r} is not a buffer of {self.name}")
        buffer.raw()
        return buffer

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.device is not self:
            raise ConfigError(f"{stream!r} is not a stream of {self.name}")
        return stream

    def _warn_pageable(self, nbytes: int, error: int) -> None:
        if self._warned:
            return
        self._warned = True
        announce(
            f"{self.name}: {format_size(nbytes)} of host memory could not be pinned (CUDA "
            f"error {error}); copies run at less than half the speed of the link and block the "
            "caller; make the host tier smaller, or raise the limit on locked memory",
            stacklevel=3,
        )


def _record(cuda: Any) -> CudaEvent:
    """An event behind the work of a torch stream so far."""
    event = _cuda.Event()
    event.record(cuda)
    return CudaEvent(event)


def _card_index(index: int | str) -> int:
    try:
        number = int(index)
    except ValueError:
        raise ConfigError(f"CUDA card {index!r} is no number; use cuda:0, cuda:1, ...") from None
    if not _cuda.is_available():
        raise ConfigError(
            f"cuda:{number} was asked for, but torch finds no CUDA card (torch "
            f"{torch.__version__}); install a CUDA build of torch and a driver, or use device "
            "'emulated'"
        )
    count = _cuda.device_count()
    if not 0 <= number < count:
        raise ConfigError(f"cuda:{number} was asked for, but cards 0 to {count - 1} exist")
    return number
