"""The on-disk form of a page: an index entry, and how its payload is cut and checked.

An index entry says everything about a stored page but its bytes. All integers are little-endian::

    magic "kvtr" | version u16 | flags u8 | parent_len u8 | identity_len u8 | layout_len u8
    | count u16 | depth u32 | nbytes u64 | sequence u64 | created_ns u64
    | parent | identity | layout | count x sum u64
    | XXH3-128 over the page's key and everything before

Each plane has its own XXH3-64, seeded by the page's key and the plane's number, so a plane can be
read and verified alone and bytes that belong to another page or plane never verify. The few bytes
between planes (alignment) have one more sum. XXH3 (https://xxhash.com) finds damage; it is no
defence against an attacker who can write to the folder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import DiskError, LayoutError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"kvtr"
RECORD_VERSION = 1
#: Longest page key, identity digest and layout digest, in bytes.
KEY_MAX = 32

_HEADER = struct.Struct("<4sHBBBBHIQQQ")
_SEAL_BYTES = 16
_EPHEMERAL = 1
_HAS_PARENT = 2

#: A payload is stored in pieces of at least this many bytes, cut between planes. The binding
#: touches every 4 KiB of a value it returns, so a piece is what reading one plane costs; the kernel
#: reads ahead about this much anyway, and smaller pieces would waste most of their last database
#: page.
PIECE_BYTES = 64 << 10


class RecordError(DiskError):
    """An index entry or a payload on disk cannot be trusted; the page counts as not stored."""


class DiskRecord(NamedTuple):
    """What the disk tier knows of a stored page without reading it.

    Attributes:
        key: the page's key.
        parent: key of the page before it in its sequence; ``None`` for the first.
        depth: number of pages before it in its sequence.
        nbytes: bytes of the payload.
        stored_bytes: bytes it is charged with in the tier.
        identity: digest of the model identity it was computed with.
        layout: digest of the page layout.
        ephemeral: whether it is to be forgotten at the next open.
        sequence: grows with every page that is stored, over restarts.
    """

    key: bytes
    parent: bytes | None
    depth: int
    nbytes: int
    stored_bytes: int
    identity: bytes
    layout: bytes
    ephemeral: bool
    sequence: int


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An index entry in memory. ``sums`` are the checksums of the planes, and of the gaps if there
    are any.
    """

    parent: bytes | None
    depth: int
    identity: bytes
    layout: bytes
    ephemeral: bool
    nbytes: int
    sequence: int
    created_ns: int
    sums: tuple[int, ...]

    def encode(self, key: bytes) -> bytes:
        """The entry's bytes, sealed for ``key``."""
        parent = self.parent or b""
        flags = _EPHEMERAL * self.ephemeral | _HAS_PARENT * (self.parent is not None)
        body = b"".join(
            (
                _HEADER.pack(
                    MAGIC,
                    RECORD_VERSION,
                    flags,
                    len(parent),
                    len(self.identity),
                    len(self.layout),
                    len(self.sums),
                    self.depth,
                    self.nbytes,
                    self.sequence,
                    self.created_ns,
                ),
                parent,
                self.identity,
                self.layout,
                struct.pack(f"<{len(self.sums)}Q", *self.sums),
            )
        )
        return body + _seal(key, body)

    @classmethod
    def decode(cls, key: bytes, raw: bytes) -> IndexEntry:
        """The entry of ``key`` from its bytes.

        Raises:
            RecordError: it is truncated, of another version, altered, or belongs to another key.
        """
        if len(raw) < _HEADER.size + _SEAL_BYTES:
            raise RecordError(f"index entry has {len(raw)} bytes, fewer than its header")
        (
            magic,
            version,
            flags,
            n_parent,
            n_identity,
            n_layout,
            n_sums,
            depth,
            nbytes,
            sequence,
            created,
        ) = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise RecordError(f"index entry starts with {magic!r} instead of {MAGIC!r}")
        if version != RECORD_VERSION:
            raise RecordError(
                f"index entry has version {version}, this is version {RECORD_VERSION}"
            )
        body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
        if seal != _seal(key, body):
            raise RecordError("index entry does not match its checksum")
        if len(body) != _HEADER.size + n_parent + n_identity + n_layout + 8 * n_sums:
            raise RecordError("index entry's lengths do not add up")
        at = _HEADER.size
        parent = body[at : at + n_parent]
        at += n_parent
        identity = body[at : at + n_identity]
        at += n_identity
        layout = body[at : at + n_layout]
        at += n_layout
        return cls(
            parent=parent if flags & _HAS_PARENT else None,
            depth=depth,
            identity=identity,
            layout=layout,
            ephemeral=bool(flags & _EPHEMERAL),
            nbytes=nbytes,
            sequence=sequence,
            created_ns=created,
            sums=struct.unpack_from(f"<{n_sums}Q", body, at),
        )

    def record(self, key: bytes, stored_bytes: int) -> DiskRecord:
        """What the tier keeps in memory of this entry."""
        return DiskRecord(
            key,
            self.parent,
            self.depth,
            self.nbytes,
            stored_bytes,
            self.identity,
            self.layout,
            self.ephemeral,
            self.sequence,
        )


def entry_bytes(sums: int) -> int:
    """Bytes of the longest index entry with this many checksums."""
    return _HEADER.size + 3 * KEY_MAX + 8 * sums + _SEAL_BYTES


def _seal(key: bytes, body: bytes) -> bytes:
    state = xxhash.xxh3_128(bytes((len(key),)))
    state.update(key)
    state.update(body)
    return state.digest()


class Piece(NamedTuple):
    """A run of whole planes that is stored as one value."""

    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


class PageShape:
    """How a page of ``page_bytes`` is cut into planes for checking and into pieces for storing.

    Args:
        page_bytes: bytes of a page.
        plane_ranges: ``(offset, nbytes)`` of each plane, ascending, not overlapping.

    Raises:
        LayoutError: the planes are not ascending ranges inside the page.
    """

    def __init__(self, page_bytes: int, plane_ranges: Sequence[tuple[int, int]]) -> None:
        if page_bytes < 1 or not plane_ranges:
            raise LayoutError(
                f"a page has {page_bytes} bytes and {len(plane_ranges)} planes; both must be >= 1"
            )
        self.page_bytes = page_bytes
        self.planes = tuple((int(offset), int(nbytes)) for offset, nbytes in plane_ranges)
        self.gaps: list[tuple[int, int]] = []
        at = 0
        for index, (offset, nbytes) in enumerate((*self.planes, (page_bytes, 0))):
            if offset < at or nbytes < 0:
                raise LayoutError(
                    f"plane {index} at {offset} + {nbytes} bytes overlaps its neighbour"
                )
            if offset > at:
                self.gaps.append((at, offset))
            at = offset + nbytes
        self.pieces = self._cut()
        self._piece_of = tuple(
            next(
                i
                for i, piece in enumerate(self.pieces)
                if offset < piece.stop or piece.stop == page_bytes
            )
            for offset, _ in self.planes
        )

    @property
    def sums(self) -> int:
        """Checksums a page has."""
        return len(self.planes) + bool(self.gaps)

    def _cut(self) -> tuple[Piece, ...]:
        """Pieces that cover the page and begin where a plane begins, about ``PIECE_BYTES`` or one
        plane long.
        """
        starts = [0]
        for offset, _ in self.planes[1:]:
            room = self.page_bytes - offset
            if offset - starts[-1] >= PIECE_BYTES and room >= PIECE_BYTES // 2:
                starts.append(offset)
        stops = [*starts[1:], self.page_bytes]
        return tuple(Piece(start, stop - start) for start, stop in zip(starts, stops, strict=True))

    def piece_of(self, plane: int) -> tuple[int, int]:
        """Number of the piece that holds a plane, and the plane's offset in it."""
        index = self._piece_of[plane]
        return index, self.planes[plane][0] - self.pieces[index].offset

    def checksums(self, key: bytes, page: Bytes) -> tuple[int, ...]:
        """The checksums of a page, uint8 ``[page_bytes]``, stored under ``key``."""
        sums = [plane_sum(key, i, page[at : at + n]) for i, (at, n) in enumerate(self.planes)]
        if self.gaps:
            sums.append(self._gap_sum(key, page))
        return tuple(sums)

    def verify(self, key: bytes, sums: Sequence[int], page: Bytes) -> None:
        """Raise RecordError unless every byte of ``page`` is as it was when ``sums`` were taken."""
        for index, (at, nbytes) in enumerate(self.planes):
            self.verify_plane(key, sums, index, page[at : at + nbytes])
        if self.gaps and self._gap_sum(key, page) != sums[-1]:
            raise RecordError("the bytes between the planes do not match their checksum")

    def verify_plane(self, key: bytes, sums: Sequence[int], plane: int, data: Bytes) -> None:
        """Raise RecordError unless ``data`` is plane ``plane`` of the page that ``sums`` were taken
        of.
        """
        if plane_sum(key, plane, data) != sums[plane]:
            raise RecordError(f"plane {plane} does not match its checksum")

    def _gap_sum(self, key: bytes, page: Bytes) -> int:
        state = xxhash.xxh3_64(seed=_seed(key, len(self.planes)))
        for start, stop in self.gaps:
            state.update(page[start:stop].data)
        return state.intdigest()


def plane_sum(key: bytes, plane: int, data: Bytes) -> int:
    """XXH3-64 of a plane's bytes, different for every key and plane number."""
    return xxhash.xxh3_64_intdigest(data.data, seed=_seed(key, plane))


def _seed(key: bytes, plane: int) -> int:
    return xxhash.xxh3_64_intdigest(key, seed=plane)
