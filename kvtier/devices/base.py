"""The contract of a device: memory, streams, events and copies.

The store, the mover and attention are written against this file alone and cannot tell a real card from the
emulated one. The words mean what they mean in CUDA: a stream runs its operations in order; operations of
different streams are ordered only by events; an event that was recorded stands for all work that was on its
stream at that moment; ``Stream.wait`` makes later work of a stream wait on the device, the host goes on.

Every operation declares the byte ranges it reads and writes. A real card ignores that; the emulated one
proves from it that nothing races.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

MemoryKind = Literal["vram", "pinned", "pageable"]


class Buffer(ABC):
    """A run of device or host memory. ``nbytes`` and ``kind`` never change."""

    nbytes: int
    kind: MemoryKind

    @abstractmethod
    def raw(self) -> torch.Tensor:
        """All bytes as a uint8 tensor ``[nbytes]``, unchecked. For code that runs inside ``Device.launch`` or
        after ``Device.use``; the host reads and writes host memory through ``Device.host``."""

    def range(self, start: int = 0, stop: int | None = None) -> Range:
        """The byte range ``[start, stop)`` of this buffer."""
        return Range(self, start, self.nbytes if stop is None else stop)


class Range(NamedTuple):
    """Bytes ``[start, stop)`` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def raw(self) -> torch.Tensor:
        """The bytes as a uint8 view, unchecked (see ``Buffer.raw``)."""
        return self.buffer.raw()[self.start : self.stop]


class Event(ABC):
    """A recorded point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before the point has ended, well or not. Does not wait."""

    @abstractmethod
    def synchronize(self, timeout_s: float) -> None:
        """Block the host until the point is reached.

        Raises:
            DeadlineExceededError: not reached within ``timeout_s``.
            CopyFailedError: an operation between the previous event of that stream and this one failed.
        """


class Stream(ABC):
    """A queue of operations that run in order."""

    name: str

    @abstractmethod
    def record(self) -> Event:
        """An event that stands for all work submitted to this stream so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work submitted to this stream from now on starts after ``event``. The host does not wait."""

    @abstractmethod
    def synchronize(self, timeout_s: float) -> None:
        """Block the host until the stream is empty. Raises as ``Event.synchronize``."""


class Device(ABC):
    """One accelerator with its memory and the host memory it can reach."""

    #: For people: "emulated rtx-4060-ti-16gb", "cuda:0 NVIDIA H200".
    name: str

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors live that share memory with ``alloc``'s buffers."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """VRAM that ``alloc`` may hand out in all."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """VRAM handed out now."""

    @abstractmethod
    def alloc(self, nbytes: int) -> Buffer:
        """VRAM, contents undefined. Raises DeviceOOMError when it would pass ``capacity_bytes``."""

    @abstractmethod
    def alloc_host(self, nbytes: int) -> Buffer:
        """Host memory that begins at a multiple of 4096 bytes (for direct I/O), pinned if possible. Falls back to
        pageable with one OffloadWarning a device."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give a buffer back. All work that touches it must be ordered before (host-synchronised)."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """The stream of that name, made at the first call (``"h2d"``, ``"d2h"``)."""

    @abstractmethod
    def compute_stream(self) -> Stream:
        """The stream that torch work of the calling thread goes to at this moment."""

    @abstractmethod
    def copy(self, stream: Stream, parts: Sequence[tuple[Range, Range]]) -> None:
        """Copy bytes, ``(destination, source)`` pairs of equal length, unordered among themselves. All sources
        are of one side (VRAM or host) and all destinations too."""

    @abstractmethod
    def launch(
        self,
        stream: Stream,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """Run ``kernel`` (torch code or a compiled kernel on ``Range.raw()`` views) in stream order."""

    @abstractmethod
    def use(
        self,
        stream: Stream,
        name: str,
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """Announce torch work that the caller itself is about to put on ``stream``, its compute stream.

        Raises:
            CopyFailedError: the bytes to be read come from a copy that failed (where the device can know).
        """

    @abstractmethod
    def host(self, at: Range, *, write: bool = False) -> torch.Tensor:
        """Host memory for the host to read, or to write with ``write=True``: uint8 ``[at.nbytes]``.
        Pending work that touches it must have been waited for."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Context in which torch work of this thread goes to ``stream``."""

    @abstractmethod
    def synchronize(self, timeout_s: float) -> None:
        """Block until all streams are empty."""

    @abstractmethod
    def close(self) -> None:
        """Release streams and memory; buffers that are still allocated become invalid. Idempotent."""
