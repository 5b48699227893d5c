"""Page-aligned buffers for direct I/O whose caller's memory is not aligned."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtier.tiers.record import Bytes

#: What direct I/O needs at most of addresses, offsets and lengths.
ALIGN = 4096


def round_up(nbytes: int) -> int:
    """The next multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


def is_aligned(data: Bytes, align: int) -> bool:
    """Whether direct I/O may use this memory as it is."""
    return data.ctypes.data % align == 0 and data.nbytes % ALIGN == 0


def aligned_buffer(nbytes: int) -> Bytes:
    """Fresh memory, uint8 ``[nbytes]``, that begins at a memory page."""
    return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8, nbytes)


class AlignedBuffers:
    """Buffers of one size that are used again.

    One more is made whenever all are in use, so nobody waits; at most ``keep`` are kept, and at
    most one a thread is ever out.
    """

    def __init__(self, nbytes: int, keep: int) -> None:
        self.nbytes = nbytes
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[Bytes] = []

    @contextmanager
    def borrow(self) -> Iterator[Bytes]:
        """A buffer, contents undefined."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = aligned_buffer(self.nbytes)
        try:
            yield buffer
        finally:
            with self._lock:
                if len(self._free) < self._keep:
                    self._free.append(buffer)
