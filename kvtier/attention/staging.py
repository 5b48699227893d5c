"""Staging memory: where one layer's K and V lie contiguous while attention reads them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch

from kvtier.devices.base import Buffer, Device, Event, Range
from kvtier.errors import CopyFailedError
from kvtier.layout import Part


@dataclass(slots=True, eq=False)
class Half:
    """One of the two staging buffers: K of one layer, ``[rows, columns, heads, dim]``, and behind it V, and the
    host memory through which planes from disk get there."""

    buffer: Buffer
    bounce: Buffer | None = None
    #: The copies out of ``bounce``; the host waits for it before it writes there again.
    bounced: Event | None = None
    #: The cold pages are in place once this is reached.
    ready: Event | None = None
    #: Where they are.
    cold: list[Range] = field(default_factory=list)


class Staging:
    """Two halves, so that the pages of the next layer arrive in one while attention reads the other.

    Args:
        device: where the memory is.
        k_token_bytes, v_token_bytes: the largest of any layer.
        columns: tokens to make room for at first; grows when needed.
    """

    def __init__(
        self, device: Device, *, k_token_bytes: int, v_token_bytes: int, columns: int
    ) -> None:
        self.device = device
        self.k_token_bytes = k_token_bytes
        self.v_token_bytes = v_token_bytes
        self.rows = 0
        self.columns = 0
        #: Byte of a half at which V starts; K starts at 0.
        self.v_start = 0
        self.halves: list[Half] = []
        self._first_columns = columns

    @property
    def nbytes(self) -> int:
        """VRAM in use, both halves."""
        return sum(half.buffer.nbytes for half in self.halves)

    def fit(self, rows: int, columns: int, timeout_s: float) -> None:
        """Have room for ``rows`` sequences of ``columns`` tokens. Growing waits for the work on the old memory and
        forgets its contents.

        Raises:
            DeviceOOMError: VRAM outside the tier is not enough for it.
        """
        if self.halves and rows <= self.rows and columns <= self.columns:
            return
        if self.halves and columns > self.columns:
            columns = max(columns, self.columns + self.columns // 4)
        columns = max(columns, self.columns)
        columns, rows = max(columns, self._first_columns), max(rows, self.rows)
        self.release(timeout_s)
        # Whole words: a half is viewed as other types.
        k_bytes, v_bytes = (
            -(-max(1, rows * columns * x) // 16) * 16
            for x in (self.k_token_bytes, self.v_token_bytes)
        )
        first = self.device.alloc(k_bytes + v_bytes)
        try:
            second = self.device.alloc(k_bytes + v_bytes)
        except BaseException:
            self.device.free(first)
            raise
        self.rows, self.columns, self.v_start = rows, columns, k_bytes
        self.halves = [Half(first), Half(second)]

    def bounce(self, half: Half, nbytes: int, timeout_s: float) -> Buffer:
        """Host memory of a half with at least ``nbytes``, free to be written by the host."""
        if half.bounced is not None:
            # Whoever read what such a copy should have brought has been told of its failure.
            with contextlib.suppress(CopyFailedError):
                half.bounced.synchronize(timeout_s)
            half.bounced = None
        if half.bounce is None or half.bounce.nbytes < nbytes:
            if half.bounce is not None:
                self.device.free(half.bounce)
            # Memory made under inference_mode could never be written outside it again.
            with torch.inference_mode(False):
                half.bounce = self.device.alloc_host(nbytes + nbytes // 4)
        return half.bounce

    def start(self, side: int, token_bytes: int, row: int, column: int) -> int:
        """Byte of a half at which the K (side 0) or V (side 1) of a column starts, of a layer with ``token_bytes`` a
        token there."""
        return side * self.v_start + (row * self.columns + column) * token_bytes

    def tensor(
        self, half: Half, side: int, part: Part, dtype: torch.dtype, rows: int, columns: int
    ) -> torch.Tensor:
        """``[rows, heads, columns, dim]`` view of the K (side 0) or V (side 1) in a half, as attention wants it."""
        heads, dim = part.heads, part.dim
        token = heads * dim
        typed = half.buffer.raw().view(dtype)
        at = typed.storage_offset() + side * self.v_start // dtype.itemsize
        strides = (self.columns * token, dim, token, 1)
        return typed.as_strided((rows, heads, columns, dim), strides, at)

    def release(self, timeout_s: float) -> None:
        """Free everything, once the work on it is done."""
        if not self.halves:
            return
        # A failed copy has ended as well as any other.
        with contextlib.suppress(CopyFailedError):
            self.device.synchronize(timeout_s)
        for half in self.halves:
            for buffer in (half.buffer, half.bounce):
                if buffer is not None:
                    self.device.free(buffer)
        self.halves.clear()
        self.rows = self.columns = 0
