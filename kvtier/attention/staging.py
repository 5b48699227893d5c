"""Staging memory: where one layer's K and V lie contiguous while attention reads them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from kvtier.devices.base import Buffer, Device, Event, Range
from kvtier.errors import CopyFailedError
from kvtier.layout import Part


@dataclass(slots=True, eq=False)
class Half:
    """One of the two staging buffers: K and V of one layer, ``[rows, columns, heads, dim]`` each, and the host
    memory through which planes from disk get there."""

    k: Buffer
    v: Buffer
    bounce: Buffer | None = None
    #: The copies out of ``bounce``; the host waits for it before it writes there again.
    bounced: Event | None = None
    #: The cold pages are in place once this is reached.
    ready: Event | None = None


class Staging:
    """Two halves, so that the pages of the next layer arrive in one while attention reads the other.

    Args:
        device: where the memory is.
        k_token_bytes, v_token_bytes: the largest of any layer.
        columns: tokens to make room for at first; grows when needed.
    """

    def __init__(self, device: Device, *, k_token_bytes: int, v_token_bytes: int, columns: int) -> None:
        self.device = device
        self.k_token_bytes = k_token_bytes
        self.v_token_bytes = v_token_bytes
        self.rows = 0
        self.columns = 0
        self.halves: list[Half] = []
        self._first_columns = columns

    @property
    def nbytes(self) -> int:
        """VRAM in use, both halves."""
        return sum(half.k.nbytes + half.v.nbytes for half in self.halves)

    def fit(self, rows: int, columns: int, timeout_s: float) -> None:
        """Have room for ``rows`` sequences of ``columns`` tokens. Growing waits for the work on the old memory and
        forgets its contents.

        Raises:
            DeviceOOMError: VRAM outside the tier is not enough for it.
        """
        if self.halves and rows <= self.rows and columns <= self.columns:
            return
        if self.halves:
            columns = max(columns, self.columns + self.columns // 4)
        self.columns = max(columns, self._first_columns)
        self.rows = max(rows, self.rows)
        self.release(timeout_s)
        tokens = self.rows * self.columns
        for _ in range(2):
            k = self.device.alloc(max(1, tokens * self.k_token_bytes))
            try:
                v = self.device.alloc(max(1, tokens * self.v_token_bytes))
            except BaseException:
                self.device.free(k)
                raise
            self.halves.append(Half(k, v))

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
            half.bounce = self.device.alloc_host(nbytes + nbytes // 4)
        return half.bounce

    def part_range(self, buffer: Buffer, token_bytes: int, row: int, column: int, tokens: int) -> Range:
        """``tokens`` tokens from ``column`` on in a row, of a layer with ``token_bytes`` a token."""
        start = (row * self.columns + column) * token_bytes
        return Range(buffer, start, start + tokens * token_bytes)

    def tensor(self, buffer: Buffer, part: Part, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        """``[rows, heads, columns, dim]`` view of a half, as attention wants it."""
        used = rows * self.columns * part.heads * part.dim * dtype.itemsize
        typed = buffer.raw()[:used].view(dtype).view(rows, self.columns, part.heads, part.dim)
        return typed[:, :columns].transpose(1, 2)

    def release(self, timeout_s: float) -> None:
        """Free everything, once the work on it is done."""
        if not self.halves:
            return
        # A failed copy has ended as well as any other.
        with contextlib.suppress(CopyFailedError):
            self.device.synchronize(timeout_s)
        for half in self.halves:
            for buffer in (half.k, half.v, half.bounce):
                if buffer is not None:
                    self.device.free(buffer)
        self.halves.clear()
