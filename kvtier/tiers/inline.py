"""Payloads in the database: a page's pieces are values of the transaction that stores its entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import lmdb
import numpy as np

from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.lmdb_file import DAMAGE, LmdbFile
from kvtier.tiers.lmdb_room import overflow_pages
from kvtier.tiers.map_place import ValuePart
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Following, Payload, Wanted
from kvtier.tiers.record import (
    PIECE_PLACE_BYTES,
    Bytes,
    DiskRecord,
    IndexEntry,
    RecordError,
    piece_place,
)
from kvtier.tiers.writer import Put


class InlinePayloads:
    """See ``kvtier.tiers.payload.Payloads``.

    Args:
        reads: threads that read what is not in memory past the page cache, as there is no room for it there;
            closed with this. ``None``: everything is read from the map.
    """

    kind: Payload = "inline"

    def __init__(self, file: LmdbFile, shape: PageShape, reads: IoPool | None) -> None:
        self._file = file
        self._shape = shape
        self._reads = reads

    ready: int | None = None

    def stage(self, puts: Sequence[Put]) -> list[int | Exception | None]:
        return [None] * len(puts)

    def stage_ahead(self, following: Following) -> None:
        pass

    def store(self, txn: lmdb.Transaction, put: Put, sequence: int) -> None:
        for number, piece in enumerate(self._shape.pieces):
            part: Bytes = put.data[piece.offset : piece.stop]
            self._file.append(txn, self._file.pages, piece_place(sequence, number), part.data)

    def remove(self, txn: lmdb.Transaction, record: DiskRecord) -> None:
        self._file.remove_pieces(txn, record.place)

    def committed(self, txn_id: int, freed: Sequence[int]) -> None:
        pass

    def failed(self, txn_id: int, slots: Sequence[int]) -> None:
        pass

    def sync(self) -> None:
        pass

    def load_page(self, txn: lmdb.Transaction, key: bytes, entry: IndexEntry, out: Bytes) -> None:
        self._require_inline(entry)
        parts = self._parts(entry, out)
        with suppress(RecordError, OSError):
            if reads := self._direct_reads(txn, parts):
                assert self._reads is not None
                self._reads.run(reads)
                self._shape.verify(key, entry.sums, out)
                return
        for part in parts:
            self._load_part(txn, part)
        self._shape.verify(key, entry.sums, out)

    def load_pages(
        self, txn: lmdb.Transaction, wanted: Sequence[Wanted]
    ) -> Iterator[Exception | None]:
        there = self._read_ahead(txn, wanted) if len(wanted) > 1 else set()
        for at, (key, entry, out) in enumerate(wanted):
            try:
                if at not in there:
                    self.load_page(txn, key, entry, out)
                yield None
            except (RecordError, *DAMAGE) as error:
                yield error

    def _read_ahead(self, txn: lmdb.Transaction, wanted: Sequence[Wanted]) -> set[int]:
        """Read several pages past the page cache at once; those that are there, and verified."""
        there: set[int] = set()

        def load(at: int, reads: Sequence[Callable[[], None]]) -> None:
            key, entry, out = wanted[at]
            with suppress(RecordError, OSError):
                for read in reads:
                    read()
                self._shape.verify(key, entry.sums, out)
                there.add(at)

        if self._reads is not None:
            loads = []
            for at, (_, entry, out) in enumerate(wanted):
                reads = (
                    self._direct_reads(txn, self._parts(entry, out)) if entry.slot is None else []
                )
                if reads:
                    loads.append(partial(load, at, reads))
            self._reads.run(loads)
        return there

    def load_planes(
        self, txn: lmdb.Transaction, plane: int, wanted: Sequence[Wanted]
    ) -> Iterator[Exception | None]:
        number, offset = self._shape.piece_of(plane)
        nbytes = self._shape.pieces[number].nbytes
        for key, entry, out in wanted:
            part = ValuePart(piece_place(entry.sequence, number), nbytes, offset, out)
            try:
                self._require_inline(entry)
                self._load_plane(txn, part, key, entry, plane)
                yield None
            except (RecordError, *DAMAGE) as error:
                yield error

    def _load_plane(
        self, txn: lmdb.Transaction, part: ValuePart, key: bytes, entry: IndexEntry, plane: int
    ) -> None:
        with suppress(RecordError, OSError):
            if reads := self._direct_reads(txn, [part]):
                for read in reads:
                    read()
                self._shape.verify_plane(key, entry.sums, plane, part.out)
                return
        self._load_part(txn, part)
        self._shape.verify_plane(key, entry.sums, plane, part.out)

    def _parts(self, entry: IndexEntry, out: Bytes) -> list[ValuePart]:
        return [
            ValuePart(
                piece_place(entry.sequence, number),
                piece.nbytes,
                0,
                out[piece.offset : piece.stop],
            )
            for number, piece in enumerate(self._shape.pieces)
        ]

    def _direct_reads(
        self, txn: lmdb.Transaction, parts: Sequence[ValuePart]
    ) -> list[Callable[[], None]]:
        if self._reads is None:
            return []
        return self._file.places.find(txn, self._file.pages, parts)

    @staticmethod
    def _require_inline(entry: IndexEntry) -> None:
        if entry.slot is not None:
            raise RecordError("index entry names a slot in a store without slabs")

    def _load_part(self, txn: lmdb.Transaction, part: ValuePart) -> None:
        """Copy bytes out of the map. The copy is what gets verified, not the map, which may still change
        under a failing disk."""
        value = txn.get(part.key, db=self._file.pages)
        if value is None or len(value) != part.nbytes:
            have = "no" if value is None else len(value)
            raise RecordError(f"a piece has {have} bytes instead of {part.nbytes}")
        np.copyto(part.out, np.frombuffer(value, np.uint8, part.out.nbytes, part.offset))

    def check(self, txn: lmdb.Transaction, records: Mapping[bytes, DiskRecord]) -> None:
        pieces = self._shape.pieces
        pages = txn.stat(self._file.pages)
        keys = {
            bytes(key) for key in txn.cursor(db=self._file.pages).iternext(keys=True, values=False)
        }
        assert keys == {
            piece_place(record.sequence, i)
            for record in records.values()
            for i in range(len(pieces))
        }, "pieces differ from the index"
        own = len(records) * sum(
            overflow_pages(self._file.psize, piece.nbytes, PIECE_PLACE_BYTES) for piece in pieces
        )
        assert pages["overflow_pages"] == own, "payload pages differ from the index"
        assert all(record.slot is None for record in records.values())

    def disk_bytes(self) -> int:
        return 0

    def close(self, timeout_s: float) -> bool:
        return self._reads is None or self._reads.close(timeout_s)
