"""Reading values of the database past the page cache, at their place in its file.

LMDB hands a value out as memory of its map, and touches all of it. A value that is not in memory so comes in by
page faults: in pieces of the device's read-ahead, into a page cache that has no room for it where the store is
larger than memory. But its key lies in the map too, and behind it the number of the file's page where a
large value begins; under a read transaction that stays so, and a direct read brings the value whole.

The format is that of LMDB 0.9 (``mdb.c``: ``MDB_page``, ``MDB_node``). Nothing is believed: what was read is
verified like any page, and what is not as expected is read from the map.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from kvtier.tiers.aligned import ALIGN, AlignedBuffers, round_up
from kvtier.tiers.page_cache import expect_random, in_memory
from kvtier.tiers.record import Bytes

_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_F_BIGDATA = 1
_PAGE_HEADER = 16
#: One read at most (several are under way at once), and what may lie between two values that one brings.
_READ_BYTES = 1 << 20
_GAP_BYTES = 64 << 10


class ValuePart(NamedTuple):
    """Bytes of a value that are wanted.

    Attributes:
        key: of the value.
        nbytes: length of the value.
        offset: where in it the wanted bytes begin.
        out: where they go, uint8 ``[n]``.
    """

    key: bytes
    nbytes: int
    offset: int
    out: Bytes


class _Piece(NamedTuple):
    place: int
    out: Bytes

    @property
    def stop(self) -> int:
        return self.place + self.out.nbytes


class MapPlaces:
    """The values of one database file that stays open; any number of threads at once.

    Args:
        path: the file; ``None`` reads nothing.
        psize: bytes of one of its pages.
        map_bytes: length of its map.
    """

    def __init__(self, path: Path | None, psize: int = 1, map_bytes: int = 0) -> None:
        self._psize = psize
        self._map_bytes = map_bytes
        self._buffers = AlignedBuffers(_READ_BYTES + 2 * ALIGN, keep=4)
        self._advising = threading.Lock()
        self._advised: int | None = None
        self._fd: int | None = None
        if path is None:
            return
        with suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    @property
    def usable(self) -> bool:
        """Whether the file can be read past the page cache."""
        return self._fd is not None

    def find(
        self, txn: lmdb.Transaction, db: Any, parts: Sequence[ValuePart]
    ) -> list[Callable[[], None]]:
        """Reads that fill the parts from the file, for any thread, as long as ``txn`` is open; none if the
        values are in memory, or that cannot be done here. OSError from a read: what is in the parts means
        nothing.

        Args:
            txn: a transaction with ``buffers=True``.
        """
        if self._fd is None:
            return []
        pieces: list[_Piece] = []
        warm = True
        cursor = txn.cursor(db=db)
        for part in parts:
            found = self._value_of(cursor.key(), part.nbytes) if cursor.set_key(part.key) else None
            if found is None:
                return []
            base, place = found
            place += part.offset
            warm = warm and in_memory(base + place, part.out.nbytes)
            pieces.append(_Piece(place, part.out))
        if warm:
            return []
        runs = _runs(sorted(pieces, key=lambda piece: piece.place))
        return [partial(self._read_run, self._fd, run) for run in runs]

    def _value_of(self, key: bytes | memoryview, nbytes: int) -> tuple[int, int] | None:
        """First address of the map, and the place in the file of the value behind a key in it; ``None`` if
        it is not a value of ``nbytes`` in pages of its own."""
        at = np.frombuffer(key, np.uint8).ctypes.data
        low, high, flags, key_bytes = _NODE.unpack(ctypes.string_at(at - _NODE.size, _NODE.size))
        if key_bytes != len(key) or not flags & _F_BIGDATA or low | high << 16 != nbytes:
            return None
        page = at // self._psize * self._psize
        (own,) = _NUMBER.unpack(ctypes.string_at(page, _NUMBER.size))
        (first,) = _NUMBER.unpack(ctypes.string_at(at + key_bytes, _NUMBER.size))
        base = page - own * self._psize
        place = first * self._psize + _PAGE_HEADER
        if place + nbytes > self._map_bytes:
            return None
        self._advise(base)
        return base, place

    def _advise(self, base: int) -> None:
        """Let page faults bring one page: what is read by faults from now on is the index."""
        if self._advised != base:
            with self._advising:
                expect_random(base, self._map_bytes)
                self._advised = base

    def _read_run(self, fd: int, run: Sequence[_Piece]) -> None:
        first = run[0].place // ALIGN * ALIGN
        size = round_up(run[-1].stop - first)
        with self._buffers.borrow() as buffer:
            got = os.preadv(fd, [buffer[:size].data], first)
            if got != size:
                raise OSError(f"{got} of {size} bytes")
            for piece in run:
                np.copyto(piece.out, buffer[piece.place - first : piece.stop - first])

    def close(self) -> None:
        """Close the descriptor. Nothing may be reading. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _runs(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces, in the order of their places, that one read brings; a longer one is cut."""
    runs: list[list[_Piece]] = []
    for whole in pieces:
        for at in range(0, whole.out.nbytes, _READ_BYTES):
            piece = _Piece(whole.place + at, whole.out[at : at + _READ_BYTES])
            last = runs[-1] if runs else None
            if (
                last is not None
                and piece.place - last[-1].stop <= _GAP_BYTES
                and piece.stop - last[0].place <= _READ_BYTES
            ):
                last.append(piece)
            else:
                runs.append([piece])
    return runs
