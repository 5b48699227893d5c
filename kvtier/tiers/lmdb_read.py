"""Reading pages and planes out of the database, each verified before it counts as a hit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lmdb
import numpy as np

from kvtier.tiers.lmdb_commit import Committer
from kvtier.tiers.lmdb_file import DAMAGE, LmdbFile, disk_error, piece_key
from kvtier.tiers.record import Bytes, IndexEntry, PageShape, RecordError

#: Called with a key, the index entry's bytes as they were read, and what is wrong with the page.
OnDamage = Callable[[bytes, bytes, str], None]
_Load = Callable[[lmdb.Transaction, bytes, IndexEntry, Bytes], None]


@dataclass
class ReadCounts:
    """Page and plane reads; ``damaged`` ones are misses."""

    reads: int = 0
    hits: int = 0
    bytes_read: int = 0
    damaged: int = 0


class Reader:
    """Reads in the calling thread; any number of threads at once, beside the writer."""

    def __init__(
        self, file: LmdbFile, commits: Committer, shape: PageShape, on_damage: OnDamage
    ) -> None:
        self._file = file
        self._commits = commits
        self._shape = shape
        self._on_damage = on_damage
        self._counting = threading.Lock()
        self.counts = ReadCounts()

    def page(self, key: bytes, out: Bytes) -> bool:
        """A whole page into ``out``, ``[page_bytes]``."""
        return self._read([key], [out], self._load_page)[0]

    def planes(self, keys: Sequence[bytes], plane: int, outs: Sequence[Bytes]) -> list[bool]:
        """One plane of each page, in one snapshot."""
        number, offset = self._shape.piece_of(plane)

        def load(txn: lmdb.Transaction, key: bytes, entry: IndexEntry, out: Bytes) -> None:
            self._load_piece(txn, key, number, offset, out)
            self._shape.verify_plane(key, entry.sums, plane, out)

        return self._read(keys, outs, load)

    def _read(self, keys: Sequence[bytes], outs: Sequence[Bytes], load: _Load) -> list[bool]:
        hits = [False] * len(keys)
        known = [at for at, key in enumerate(keys) if self._commits.shows(key)]
        damaged: list[tuple[bytes, bytes, str]] = []
        try:
            with self._file.reading() as txn:
                for at in known:
                    key = keys[at]
                    raw = txn.get(key, db=self._file.index)
                    if raw is None:
                        continue  # removed since the look in memory
                    seen = bytes(raw)
                    try:
                        load(txn, key, self._entry(key, seen), outs[at])
                        hits[at] = True
                    except (RecordError, *DAMAGE) as error:
                        damaged.append((key, seen, str(error)))
        except lmdb.Error as error:
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
        if entry.layout != self._commits.layout:
            raise RecordError("index entry is of another layout")
        return entry

    def _load_page(self, txn: lmdb.Transaction, key: bytes, entry: IndexEntry, out: Bytes) -> None:
        for number, piece in enumerate(self._shape.pieces):
            self._load_piece(txn, key, number, 0, out[piece.offset : piece.stop])
        self._shape.verify(key, entry.sums, out)

    def _load_piece(
        self, txn: lmdb.Transaction, key: bytes, number: int, offset: int, out: Bytes
    ) -> None:
        """Copy bytes of a piece, from ``offset`` on, into ``out``. The copy is what gets verified,
        not the map, which may still change under a failing disk."""
        value = txn.get(piece_key(key, number), db=self._file.pages)
        want = self._shape.pieces[number].nbytes
        if value is None or len(value) != want:
            have = "no" if value is None else len(value)
            raise RecordError(f"piece {number} has {have} bytes instead of {want}")
        np.copyto(out, np.frombuffer(value, np.uint8, out.nbytes, offset))
