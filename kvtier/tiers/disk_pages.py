"""What the writing tier and a reader of the same folder have in common: looking, reading, checking."""

from __future__ import annotations

import errno
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from kvtier.errors import DiskError, LayoutError
from kvtier.tiers.aligned import aligned_buffer
from kvtier.tiers.disk_reads import Reader
from kvtier.tiers.folder_info import FolderInfo
from kvtier.tiers.lmdb_file import LmdbFile, unseal
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.page_tree import oldest_first
from kvtier.tiers.payload import Payload, Payloads
from kvtier.tiers.record import Bytes, DiskRecord
from kvtier.tiers.usage import UsageBook

#: Notes that describe an identity begin with this; its digest follows.
IDENTITY_NOTE = b"identity:"


class DiskEntry(NamedTuple):
    """A stored page, for people and tools.

    Attributes:
        key, parent, depth, nbytes, stored_bytes, identity, layout, ephemeral, created_ns: see
            ``DiskRecord``.
        used_ns: last use, nanoseconds since the epoch; when it was stored if there was none.
        hits: reads of the whole page so far.
        payload: where its bytes are, ``slab`` or ``inline``.
        segment, slot: number of its slab file, and of its slot in it; -1 for ``inline``.
    """

    key: bytes
    parent: bytes | None
    depth: int
    nbytes: int
    stored_bytes: int
    identity: bytes
    layout: bytes
    ephemeral: bool
    created_ns: int
    used_ns: int
    hits: int
    payload: Payload
    segment: int
    slot: int


@dataclass(frozen=True)
class VerifyReport:
    """What a full check found.

    Attributes:
        checked: pages read.
        damaged: keys of pages that failed.
        tree: what is wrong with the database's tree; empty where it was sound, or could not be
            looked at since another process writes to it.
    """

    checked: int
    damaged: list[bytes]
    tree: list[str]


class DiskPages(ABC):
    """Reads of an open folder. All methods may be called from any thread."""

    def __init__(
        self, file: LmdbFile, payloads: Payloads, shape: PageShape, info: FolderInfo
    ) -> None:
        self._file = file
        self._payloads = payloads
        self._shape = shape
        self._info = info
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._reader = Reader(
            file,
            payloads,
            shape,
            info.layout_digest,
            look=self._look,
            on_damage=self._damaged,
        )

    # ------------------------------------------------------------------ what differs

    @abstractmethod
    def _look(
        self, keys: Sequence[bytes], settled: bool
    ) -> AbstractContextManager[tuple[lmdb.Transaction, Sequence[bytes | None]]]:
        """A snapshot, and where in it the entries of pages are; see ``disk_reads.Look``."""

    @abstractmethod
    def _damaged(self, key: bytes, seen: bytes, reason: str) -> None:
        """A page failed verification."""

    @abstractmethod
    def _snapshot(self) -> tuple[dict[bytes, DiskRecord], UsageBook]:
        """All stored pages and their uses."""

    @abstractmethod
    def _used(self, keys: Sequence[bytes], hits: int) -> None:
        """Pages were read."""

    @abstractmethod
    def _require_open(self) -> None:
        """ClosedError after ``close``, DiskError in a forked child."""

    # ------------------------------------------------------------------ looking

    @property
    def path(self) -> Path:
        """The folder."""
        return self._file.folder

    @property
    def info(self) -> FolderInfo:
        """The geometry of the folder."""
        return self._info

    def records(self) -> Iterator[DiskRecord]:
        """All stored pages, the one used longest ago first and parents before children, as they are
        at the call.
        """
        self._require_open()
        records, usage = self._snapshot()
        return oldest_first(records, usage.order)

    def entries(self) -> Iterator[DiskEntry]:
        """All stored pages with their use, in the order of ``records``."""
        self._require_open()
        records, usage = self._snapshot()
        slot_bytes = self._info.slot_bytes
        per_segment = self._info.segment_bytes // slot_bytes if slot_bytes else 1
        for record in oldest_first(records, usage.order):
            use = usage.of(record)
            segment, slot = (-1, -1) if record.slot is None else divmod(record.slot, per_segment)
            yield DiskEntry(
                key=record.key,
                parent=record.parent,
                depth=record.depth,
                nbytes=record.nbytes,
                stored_bytes=record.stored_bytes,
                identity=record.identity,
                layout=record.layout,
                ephemeral=record.ephemeral,
                created_ns=record.created_ns,
                used_ns=use.used_ns,
                hits=use.hits,
                payload=self._info.payload,
                segment=segment,
                slot=slot,
            )

    def identities(self) -> dict[bytes, dict[str, Any]]:
        """Digest of each identity that has pages here -> its description, empty if nobody gave one."""
        self._require_open()
        records, _ = self._snapshot()
        found: dict[bytes, dict[str, Any]] = {r.identity: {} for r in records.values()}
        with self._file.reading() as txn:
            for digest in found:
                name = IDENTITY_NOTE + digest
                text = unseal(name, txn.get(name, db=self._file.notes))
                if text is not None:
                    found[digest] = json.loads(text)
        return found

    # ------------------------------------------------------------------ reading

    def read(self, key: bytes, out: Bytes) -> bool:
        """Read a page into ``out``, uint8 ``[page_bytes]``. True only after every byte was
        verified.

        On False the page is not there or was damaged, and ``out`` holds nothing meaningful. Slabs
        are read into ``out`` directly where it begins at a multiple of 512 bytes (4096 on some
        devices) and ``page_bytes`` is one of 4096, else through a buffer.

        Raises:
            DiskError: the system refuses to read; the page may still be good.
            DeadlineExceededError: the page is being replaced, and that takes longer than the tier's
                ``timeout_s``.
            LayoutError, ClosedError.
        """
        return self.read_pages([key], [out])[0]

    def read_pages(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[bool]:
        """Read pages into ``outs``, neighbours on disk together; one answer a page, as ``read``."""
        self._require_open()
        _require_pairs(keys, outs)
        outs = [flat(out, self._shape.page_bytes, "out", writable=True) for out in outs]
        hits = self._reader.pages(keys, outs)
        self._used([key for key, hit in zip(keys, hits, strict=True) if hit], 1)
        return hits

    def read_plane(self, key: bytes, plane: int, out: Bytes) -> bool:
        """Read one plane into ``out``, uint8 of the plane's size, verified by its own checksum. As
        ``read``.
        """
        return self.read_planes([key], plane, [out])[0]

    def read_planes(self, keys: Sequence[bytes], plane: int, outs: Sequence[Bytes]) -> list[bool]:
        """The same plane of many pages, in one snapshot; one answer a page, as ``read_plane``.

        Space that is freed meanwhile cannot be reused before the call ends, so read some MiB a
        call.
        """
        self._require_open()
        if not 0 <= plane < len(self._shape.planes):
            raise LayoutError(
                f"plane {plane} does not exist; a page has {len(self._shape.planes)} planes"
            )
        _require_pairs(keys, outs)
        outs = [flat(out, self._shape.planes[plane][1], "out", writable=True) for out in outs]
        hits = self._reader.planes(keys, plane, outs)
        self._used([key for key, hit in zip(keys, hits, strict=True) if hit], 0)
        return hits

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and verify every page, and the database's tree. The writing tier removes the pages
        that fail; a damaged tree is given up at the next open.

        Args:
            progress: called with the pages done and the pages in all.
        """
        self._require_open()
        records, _ = self._snapshot()
        damaged: list[bytes] = []
        out = aligned_buffer(self._shape.page_bytes)
        for done, key in enumerate(records, 1):
            if not self._reader.pages([key], [out])[0] and self._still_stored(key, records[key]):
                damaged.append(key)
            if progress is not None:
                progress(done, len(records))
        return VerifyReport(len(records), damaged, self._tree_problems())

    @abstractmethod
    def _still_stored(self, key: bytes, record: DiskRecord) -> bool:
        """Whether a page that could not be read was damaged, rather than removed meanwhile."""

    @abstractmethod
    def _tree_problems(self) -> list[str]:
        """What is wrong with the database's tree."""

    # ------------------------------------------------------------------ inside

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise DiskError(
                errno.EPERM,
                f"it was opened by process {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}; open tiers after the fork, or start children with spawn",
                str(self._file.folder),
            )


def _require_pairs(keys: Sequence[bytes], outs: Sequence[Bytes]) -> None:
    if len(keys) != len(outs):
        raise LayoutError(f"{len(keys)} keys and {len(outs)} outputs; there must be one a key")


def flat(array: Bytes, nbytes: int, name: str, *, writable: bool) -> Bytes:
    """``array`` as ``[nbytes]``, the same memory; LayoutError if that is not what it is."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.nbytes != nbytes:
        what = (
            f"{array.dtype} of {array.nbytes} bytes"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise LayoutError(f"{name} is {what}; it must be a uint8 array of {nbytes} bytes")
    if not array.flags.c_contiguous or (writable and not array.flags.writeable):
        raise LayoutError(f"{name} must be contiguous{' and writable' if writable else ''}")
    return array.reshape(-1)
