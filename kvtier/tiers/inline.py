"""Payloads in the database: a page's pieces are values of the transaction that stores its entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import lmdb
import numpy as np

from kvtier.tiers.lmdb_file import DAMAGE, LmdbFile
from kvtier.tiers.lmdb_room import overflow_pages
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
    """See ``kvtier.tiers.payload.Payloads``."""

    kind: Payload = "inline"

    def __init__(self, file: LmdbFile, shape: PageShape) -> None:
        self._file = file
        self._shape = shape

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
        for number, piece in enumerate(self._shape.pieces):
            self._load_piece(txn, entry, number, 0, out[piece.offset : piece.stop])
        self._shape.verify(key, entry.sums, out)

    def load_pages(
        self, txn: lmdb.Transaction, wanted: Sequence[Wanted]
    ) -> Iterator[Exception | None]:
        for key, entry, out in wanted:
            try:
                self.load_page(txn, key, entry, out)
                yield None
            except (RecordError, *DAMAGE) as error:
                yield error

    def load_planes(
        self, txn: lmdb.Transaction, plane: int, wanted: Sequence[Wanted]
    ) -> Iterator[Exception | None]:
        number, offset = self._shape.piece_of(plane)
        for key, entry, out in wanted:
            try:
                self._require_inline(entry)
                self._load_piece(txn, entry, number, offset, out)
                self._shape.verify_plane(key, entry.sums, plane, out)
                yield None
            except (RecordError, *DAMAGE) as error:
                yield error

    @staticmethod
    def _require_inline(entry: IndexEntry) -> None:
        if entry.slot is not None:
            raise RecordError("index entry names a slot in a store without slabs")

    def _load_piece(
        self, txn: lmdb.Transaction, entry: IndexEntry, number: int, offset: int, out: Bytes
    ) -> None:
        """Copy bytes of a piece, from ``offset`` on, into ``out``. The copy is what gets verified,
        not the map, which may still change under a failing disk."""
        value = txn.get(piece_place(entry.sequence, number), db=self._file.pages)
        want = self._shape.pieces[number].nbytes
        if value is None or len(value) != want:
            have = "no" if value is None else len(value)
            raise RecordError(f"piece {number} has {have} bytes instead of {want}")
        np.copyto(out, np.frombuffer(value, np.uint8, out.nbytes, offset))

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
        return True
