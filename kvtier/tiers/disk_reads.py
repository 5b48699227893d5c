"""Reading pages and planes, each verified before it counts as a hit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import lmdb

from kvtier.errors import DiskError
from kvtier.tiers.lmdb_file import LmdbFile, disk_error
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Payloads, Wanted
from kvtier.tiers.record import Bytes, IndexEntry, RecordError

#: Called with a key, the index entry's bytes as they were read, and what is wrong with the page.
OnDamage = Callable[[bytes, bytes, str], None]
_Load = Callable[[lmdb.Transaction, Sequence[Wanted]], Iterable[Exception | None]]

#: Payload that is read in one snapshot; what was freed meanwhile cannot be written again.
_SNAPSHOT_BYTES = 32 << 20
_PATIENCE_S = 2.0


@dataclass
class ReadCounts:
    """Page and plane reads; ``damaged`` ones are misses."""

    reads: int = 0
    hits: int = 0
    bytes_read: int = 0
    damaged: int = 0


class Reader:
    """Reads in the calling thread; any number of threads at once, beside the writer.

    Args:
        shows: whether a key is worth looking up.
        on_damage: told of each page that failed verification.
    """

    def __init__(
        self,
        file: LmdbFile,
        payloads: Payloads,
        shape: PageShape,
        layout: bytes,
        *,
        shows: Callable[[bytes], bool],
        on_damage: OnDamage,
    ) -> None:
        self._file = file
        self._payloads = payloads
        self._shape = shape
        self._layout = layout
        self._shows = shows
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
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._try_read(keys, outs, load)
            except lmdb.PanicError as error:
                # The writer reopens the database at once after LMDB has failed to write it.
                if time.monotonic() > deadline:
                    raise disk_error(error, "reading pages", self._file.path) from error
                time.sleep(0.005)

    def _try_read(self, keys: Sequence[bytes], outs: Sequence[Bytes], load: _Load) -> list[bool]:
        hits = [False] * len(keys)
        damaged: list[tuple[bytes, bytes, str]] = []
        try:
            with self._file.reading() as txn:
                wanted: list[Wanted] = []
                places: list[tuple[int, bytes]] = []
                for at, key in enumerate(keys):
                    raw = txn.get(key, db=self._file.index) if self._shows(key) else None
                    if raw is None:
                        continue
                    seen = bytes(raw)
                    try:
                        wanted.append((key, self._entry(key, seen), outs[at]))
                        places.append((at, seen))
                    except RecordError as error:
                        damaged.append((key, seen, str(error)))
                for (at, seen), wrong in zip(places, load(txn, wanted), strict=True):
                    if wrong is None:
                        hits[at] = True
                    else:
                        damaged.append((keys[at], seen, str(wrong)))
        except (lmdb.PanicError, DiskError):
            raise
        except (lmdb.Error, OSError) as error:
            raise disk_error(error, "reading pages", self._file.path) from error
        with self._counting:
            self.counts.reads += len(keys)
            self.counts.hits += sum(hits)
            self.counts.bytes_read += sum(
                out.nbytes for out, hit in zip(outs, hits, strict=True) if hit
            )
            self.counts.damaged += len(damaged)
        for key, seen, reason in damaged:
            self._on_damage(key, seen, reason)
        return hits

    def _entry(self, key: bytes, raw: bytes) -> IndexEntry:
        entry = IndexEntry.decode(key, raw)
        shape = self._shape
        if entry.nbytes != shape.page_bytes or len(entry.sums) != shape.sums:
            raise RecordError(f"index entry is of a page of {entry.nbytes} bytes")
        if entry.layout != self._layout:
            raise RecordError("index entry is of another layout")
        return entry
