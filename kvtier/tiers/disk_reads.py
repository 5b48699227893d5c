"""Reading pages and planes, each verified before it counts as a hit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import lmdb

from kvtier.errors import DeadlineExceededError, DiskError
from kvtier.tiers.lmdb_file import LmdbFile, disk_error
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Payloads, Wanted
from kvtier.tiers.record import Bytes, IndexEntry, RecordError

#: Called with a key, the index entry's bytes as they were read, and what is wrong with the page.
OnDamage = Callable[[bytes, bytes, str], None]
#: Begins a snapshot and says where in it the index entries of pages should be; ``None`` for pages
#: that are not stored. What is there may be newer or older than the snapshot, so an entry may be in
#: another place, unless ``settled`` is asked for, which may wait for a commit.
Look = Callable[
    [Sequence[bytes], bool],
    AbstractContextManager[tuple[lmdb.Transaction, Sequence[bytes | None]]],
]
_Load = Callable[[lmdb.Transaction, Sequence[Wanted]], Iterable[Exception | None]]

#: Payload that is read in one snapshot; what was freed meanwhile cannot be written again.
_SNAPSHOT_BYTES = 32 << 20
_PATIENCE_S = 2.0
#: Looks before one that must be settled: a page is seldom replaced at the very moment of a look.
_LOOSE_LOOKS = 2


@dataclass
class ReadCounts:
    """Page and plane reads; ``damaged`` ones are misses."""

    reads: int = 0
    hits: int = 0
    bytes_read: int = 0
    damaged: int = 0


#: A page that failed verification, as ``OnDamage`` is told of it.
_Damage = tuple[bytes, bytes, str]


class _Found(NamedTuple):
    """What one snapshot gave: hits, pages that are damaged, and which were not in their place."""

    hits: list[bool]
    damaged: list[_Damage]
    moved: list[int]


class Reader:
    """Reads in the calling thread; any number of threads at once, beside the writer.

    Args:
        look: where index entries are.
        on_damage: told of each page that failed verification.
    """

    def __init__(
        self,
        file: LmdbFile,
        payloads: Payloads,
        shape: PageShape,
        layout: bytes,
        *,
        look: Look,
        on_damage: OnDamage,
    ) -> None:
        self._file = file
        self._payloads = payloads
        self._shape = shape
        self._layout = layout
        self._look = look
        self._on_damage = on_damage
        self._counting = threading.Lock()
        self.counts = ReadCounts()

    def pages(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[bool]:
        """Whole pages into ``outs``, ``[page_bytes]`` each."""
        at_once = max(1, _SNAPSHOT_BYTES // self._shape.page_bytes)
        hits: list[bool] = []
        for at in range(0, len(keys), at_once):
            part = slice(at, at + at_once)
            hits += self._read(keys[part], outs[part], self._payloads.load_pages)
        return hits

    def planes(self, keys: Sequence[bytes], plane: int, outs: Sequence[Bytes]) -> list[bool]:
        """One plane of each page, in one snapshot."""

        def load(txn: lmdb.Transaction, wanted: Sequence[Wanted]) -> Iterable[Exception | None]:
            return self._payloads.load_planes(txn, plane, wanted)

        return self._read(keys, outs, load)

    def _read(self, keys: Sequence[bytes], outs: Sequence[Bytes], load: _Load) -> list[bool]:
        hits, damaged, left = self._patiently(keys, outs, load, False)
        for look in range(1, _LOOSE_LOOKS + 1):
            if not left:
                break
            settled = look == _LOOSE_LOOKS
            part = [keys[at] for at in left], [outs[at] for at in left]
            found = self._patiently(*part, load, settled)
            damaged += found.damaged
            for at, hit in zip(left, found.hits, strict=True):
                hits[at] = hit
            left = [left[at] for at in found.moved]
        there = sum(hits)
        with self._counting:
            self.counts.reads += len(keys)
            self.counts.hits += there
            self.counts.bytes_read += there * outs[0].nbytes if there else 0
            self.counts.damaged += len(damaged)
        for key, seen, reason in damaged:
            self._on_damage(key, seen, reason)
        return hits

    def _patiently(
        self, keys: Sequence[bytes], outs: Sequence[Bytes], load: _Load, settled: bool
    ) -> _Found:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._try_read(keys, outs, load, settled)
            except lmdb.PanicError as error:
                # The writer reopens the database at once after LMDB has failed to write it.
                if time.monotonic() > deadline:
                    raise disk_error(error, "reading pages", self._file.path) from error
                time.sleep(0.005)

    def _try_read(
        self, keys: Sequence[bytes], outs: Sequence[Bytes], load: _Load, settled: bool
    ) -> _Found:
        found = _Found([False] * len(keys), [], [])
        try:
            with self._look(keys, settled) as (txn, places):
                wanted: list[Wanted] = []
                reading: list[tuple[int, bytes]] = []
                for at, (key, place) in enumerate(zip(keys, places, strict=True)):
                    if place is None:
                        continue
                    raw = txn.get(place, db=self._file.index)
                    if raw is None:
                        found.moved.append(at)
                        continue
                    seen = bytes(raw)
                    try:
                        wanted.append((key, self._entry(key, place, seen), outs[at]))
                        reading.append((at, seen))
                    except RecordError as error:
                        found.damaged.append((key, seen, str(error)))
                for (at, seen), wrong in zip(reading, load(txn, wanted), strict=True):
                    if wrong is None:
                        found.hits[at] = True
                    else:
                        found.damaged.append((keys[at], seen, str(wrong)))
        except (lmdb.PanicError, DiskError, DeadlineExceededError):
            raise
        except (lmdb.Error, OSError) as error:
            raise disk_error(error, "reading pages", self._file.path) from error
        return found

    def _entry(self, key: bytes, place: bytes, raw: bytes) -> IndexEntry:
        entry = IndexEntry.decode(place, raw)
        if entry.key != key:
            raise RecordError("index entry is of another page")
        shape = self._shape
        if entry.nbytes != shape.page_bytes or len(entry.sums) != shape.sums:
            raise RecordError(f"index entry is of a page of {entry.nbytes} bytes")
        if entry.layout != self._layout:
            raise RecordError("index entry is of another layout")
        return entry
