"""The on-disk form of a page: its index entry, which says everything but its bytes.

All integers are little-endian::

    magic "kvtr" | version u16 | flags u8 | key_len u8 | parent_len u8 | identity_len u8
    | layout_len u8 | count u16 | depth u32 | nbytes u64 | sequence u64 | created_ns u64 | slot u64
    | key | parent | identity | layout | count x sum u64
    | XXH3-128 over everything before

The entry lies in the index under its ``sequence`` (big-endian, so that the table is in the order of
the puts), and counts only there. ``sequence`` grows with every put, so that puts go to the table's
end and old pages, which are evicted together, lie together; by the page's key every change would
rewrite another leaf of a large table. It is also the generation of the slot: an entry of an earlier
use of the slot has other sums and another seal. ``slot`` is ``NO_SLOT`` where the payload is in the
database itself. How a payload is cut and summed is in ``page_shape``. XXH3 (https://xxhash.com)
finds damage; it is no defence against an attacker who can write to the folder.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import DiskError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"kvtr"
RECORD_VERSION = 3
#: Longest page key, identity digest and layout digest, in bytes.
KEY_MAX = 32

#: Bytes of a place (see ``place_of``), and of the place of a piece of an inline payload.
PLACE_BYTES = 8
PIECE_PLACE_BYTES = PLACE_BYTES + 2

_HEADER = struct.Struct("<4sHBBBBBHIQQQQ")
#: Where these are among its fields.
_KEY_LEN, _SEQUENCE = 3, 10
_PLACE = struct.Struct(">Q")
_PIECE = struct.Struct(">QH")
_SEAL_BYTES = 16
_EPHEMERAL = 1
_HAS_PARENT = 2

#: Slot number of a payload that is not in a slab.
NO_SLOT = (1 << 64) - 1


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
        created_ns: when it was stored, nanoseconds since the epoch.
        slot: number of its slot over all slab files; ``None`` where the database holds the bytes.
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
    created_ns: int = 0
    slot: int | None = None

    @property
    def place(self) -> bytes:
        """Where its entry lies in the index."""
        return place_of(self.sequence)


class IndexEntry(NamedTuple):
    """An index entry in memory. ``sums`` are the checksums of the planes, and of the gaps if there
    are any.
    """

    key: bytes
    parent: bytes | None
    depth: int
    identity: bytes
    layout: bytes
    ephemeral: bool
    nbytes: int
    sequence: int
    created_ns: int
    sums: tuple[int, ...]
    slot: int | None = None

    @property
    def place(self) -> bytes:
        """Where it lies in the index."""
        return place_of(self.sequence)

    def encode(self) -> bytes:
        """The entry's bytes, sealed."""
        parent = self.parent or b""
        flags = _EPHEMERAL * self.ephemeral | _HAS_PARENT * (self.parent is not None)
        body = b"".join(
            (
                _HEADER.pack(
                    MAGIC,
                    RECORD_VERSION,
                    flags,
                    len(self.key),
                    len(parent),
                    len(self.identity),
                    len(self.layout),
                    len(self.sums),
                    self.depth,
                    self.nbytes,
                    self.sequence,
                    self.created_ns,
                    NO_SLOT if self.slot is None else self.slot,
                ),
                self.key,
                parent,
                self.identity,
                self.layout,
                struct.pack(f"<{len(self.sums)}Q", *self.sums),
            )
        )
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def decode(cls, place: bytes, raw: bytes) -> IndexEntry:
        """The entry at ``place`` of the index from its bytes.

        Raises:
            RecordError: it is truncated, of another version, altered, or belongs in another place.
        """
        if len(raw) < _HEADER.size + _SEAL_BYTES:
            raise RecordError(f"index entry has {len(raw)} bytes, fewer than its header")
        (
            magic,
            version,
            flags,
            n_key,
            n_parent,
            n_identity,
            n_layout,
            n_sums,
            depth,
            nbytes,
            sequence,
            created,
            slot,
        ) = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise RecordError(f"index entry starts with {magic!r} instead of {MAGIC!r}")
        if version != RECORD_VERSION:
            raise RecordError(
                f"index entry has version {version}, this is version {RECORD_VERSION}"
            )
        body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
        if seal != xxhash.xxh3_128_digest(body):
            raise RecordError("index entry does not match its checksum")
        if place != place_of(sequence):
            raise RecordError(f"index entry of put {sequence} is in the place of another")
        if len(body) != _HEADER.size + n_key + n_parent + n_identity + n_layout + 8 * n_sums:
            raise RecordError("index entry's lengths do not add up")
        at = _HEADER.size
        key = body[at : at + n_key]
        at += n_key
        parent = body[at : at + n_parent]
        at += n_parent
        identity = body[at : at + n_identity]
        at += n_identity
        layout = body[at : at + n_layout]
        at += n_layout
        return cls(
            key,
            parent if flags & _HAS_PARENT else None,
            depth,
            identity,
            layout,
            bool(flags & _EPHEMERAL),
            nbytes,
            sequence,
            created,
            struct.unpack_from(f"<{n_sums}Q", body, at),
            None if slot == NO_SLOT else slot,
        )

    def record(self, stored_bytes: int) -> DiskRecord:
        """What the tier keeps in memory of this entry."""
        return DiskRecord(
            self.key,
            self.parent,
            self.depth,
            self.nbytes,
            stored_bytes,
            self.identity,
            self.layout,
            self.ephemeral,
            self.sequence,
            self.created_ns,
            self.slot,
        )


def key_at(place: bytes, raw: bytes) -> bytes | None:
    """The key in the index entry at ``place``; ``None`` if ``IndexEntry.decode`` would refuse it."""
    if len(raw) < _HEADER.size + _SEAL_BYTES:
        return None
    header = _HEADER.unpack_from(raw)
    if (
        raw[-_SEAL_BYTES:] != xxhash.xxh3_128_digest(raw[:-_SEAL_BYTES])
        or header[:2] != (MAGIC, RECORD_VERSION)
        or place != place_of(header[_SEQUENCE])
    ):
        return None
    return raw[_HEADER.size : _HEADER.size + header[_KEY_LEN]]


def entry_bytes(sums: int) -> int:
    """Bytes of the longest index entry with this many checksums."""
    return _HEADER.size + 4 * KEY_MAX + 8 * sums + _SEAL_BYTES


def place_of(sequence: int) -> bytes:
    """Key of a page's entry in the database ``index``, and of its last use in ``use``."""
    return _PLACE.pack(sequence)


def piece_place(sequence: int, number: int) -> bytes:
    """Key of a piece of a page's inline payload in the database ``pages``."""
    return _PIECE.pack(sequence, number)
