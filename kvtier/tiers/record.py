"""The on-disk form of a page: its index entry, which says everything but its bytes.

All integers are little-endian::

    magic "kvtr" | version u16 | flags u8 | parent_len u8 | identity_len u8 | layout_len u8
    | count u16 | depth u32 | nbytes u64 | sequence u64 | created_ns u64 | slot u64
    | parent | identity | layout | count x sum u64
    | XXH3-128 over the page's key and everything before

``sequence`` grows with every put, so it is also the generation of the slot: an entry of an earlier
use of the slot has other sums and another seal. ``slot`` is ``NO_SLOT`` where the payload is in the
database itself. How a payload is cut and summed is in ``page_shape``. XXH3 (https://xxhash.com)
finds damage; it is no defence against an attacker who can write to the folder.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import DiskError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"kvtr"
RECORD_VERSION = 2
#: Longest page key, identity digest and layout digest, in bytes.
KEY_MAX = 32

_HEADER = struct.Struct("<4sHBBBBHIQQQQ")
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
    slot: int | None = None

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
                    NO_SLOT if self.slot is None else self.slot,
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
            slot,
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
            slot=None if slot == NO_SLOT else slot,
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
            self.created_ns,
            self.slot,
        )


def entry_bytes(sums: int) -> int:
    """Bytes of the longest index entry with this many checksums."""
    return _HEADER.size + 3 * KEY_MAX + 8 * sums + _SEAL_BYTES


def _seal(key: bytes, body: bytes) -> bytes:
    state = xxhash.xxh3_128(bytes((len(key),)))
    state.update(key)
    state.update(body)
    return state.digest()
