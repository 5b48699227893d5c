"""Applying groups of changes to the database, and the books that follow it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import lmdb

from kvtier.errors import KvtierError, TierFullError
from kvtier.tiers.lmdb_file import LmdbFile, disk_error, piece_key
from kvtier.tiers.lmdb_room import Room, overflow_pages
from kvtier.tiers.record import Bytes, DiskRecord, IndexEntry
from kvtier.tiers.writer import Delete, Discard, Op, Put, Sync
from kvtier.units import format_size

_NO_HOLDERS: dict[str, int] = {}


@dataclass
class WriteCounts:
    """What was committed, and what was not."""

    puts: int = 0
    deletes: int = 0
    bytes_written: int = 0
    commits: int = 0
    commit_errors: int = 0
    map_full: int = 0


class _Group:
    """The books as they will be once the running transaction commits."""

    def __init__(self, records: Mapping[bytes, DiskRecord], live_bytes: int, sequence: int) -> None:
        self._records = records
        self.changes: dict[bytes, DiskRecord | None] = {}
        self.live_bytes = live_bytes
        self.sequence = sequence
        self.puts = self.deletes = self.bytes = 0

    def get(self, key: bytes) -> DiskRecord | None:
        return self.changes[key] if key in self.changes else self._records.get(key)

    def set(self, key: bytes, record: DiskRecord | None) -> None:
        old = self.get(key)
        self.live_bytes += (record.stored_bytes if record else 0) - (old.stored_bytes if old else 0)
        self.changes[key] = record


class Committer:
    """Commits groups (in the writer thread) and keeps ``records`` and ``live_bytes`` equal to the
    database.

    Other threads may look keys up in ``records``; ``lock`` is held while the database and the books
    differ.
    """

    def __init__(
        self,
        file: LmdbFile,
        room: Room,
        layout: bytes,
        records: dict[bytes, DiskRecord],
        timeout_s: float,
    ) -> None:
        self._file = file
        self._room = room
        self.layout = layout
        self._timeout_s = timeout_s
        self.records = records
        #: Pages that proved damaged and whose removal is queued.
        self.hidden: set[bytes] = set()
        self.live_bytes = sum(record.stored_bytes for record in records.values())
        self.counts = WriteCounts()
        self.lock = threading.Lock()
        self._sequence = 1 + max((record.sequence for record in records.values()), default=0)

    def apply(self, batch: list[Op]) -> list[Exception | None]:
        """Commit ``batch`` in one transaction, or piecewise where the map has no room for that.

        Returns:
            One outcome a change: ``None``, TierFullError, or DiskError. A group that cannot be
            committed changes nothing, and the next one is tried afresh.
        """
        try:
            with self.lock:
                return self._apply(batch)
        except (lmdb.Error, OSError) as error:
            self.counts.commit_errors += 1
            failure = disk_error(error, "writing pages", self._file.path)
            return [failure] * len(batch)

    def _apply(self, batch: list[Op]) -> list[Exception | None]:
        if not self._file.is_open:
            self._file.reopen(self._timeout_s)
        try:
            return self._transaction(batch)
        except lmdb.MapFullError:
            self.counts.map_full += 1
            self._file.env.reader_check()
            return [self._squeeze(op) for op in batch]
        except lmdb.PanicError:
            self._file.reopen(self._timeout_s)
            return self._transaction(batch)

    def _squeeze(self, op: Op) -> Exception | None:
        """One change by itself, after the pages freed so far were made usable."""
        for last in (False, True):
            try:
                return self._transaction([op])[0]
            except lmdb.MapFullError as error:
                if last:
                    return self._no_room(op, error)
                self._file.tick()
        return None

    def _no_room(self, op: Op, error: lmdb.MapFullError) -> KvtierError:
        if not isinstance(op, Put):
            return disk_error(error, "removing pages", self._file.path)
        return TierFullError(
            f"the map of {format_size(self._room.map_bytes)} at {self._file.folder} has no run of "
            f"free pages for {format_size(self._room.page_stored_bytes)}; something reads an old "
            "snapshot of it: end that reader",
            tier="disk",
            needed_bytes=self._room.page_stored_bytes,
            holders=_NO_HOLDERS,
        )

    def _transaction(self, batch: list[Op]) -> list[Exception | None]:
        group = _Group(self.records, self.live_bytes, self._sequence)
        outcomes: list[Exception | None] = [None] * len(batch)
        with self._file.writing() as txn:
            for at, op in enumerate(batch):
                if isinstance(op, Put):
                    outcomes[at] = self._put(txn, group, op)
                elif isinstance(op, Delete):
                    for key in op.keys:
                        self._delete(txn, group, key)
                elif isinstance(op, Discard):
                    self._discard(txn, group, op)
        self._close_books(group)
        self.hidden.difference_update(op.key for op in batch if isinstance(op, Discard))
        if any(isinstance(op, Sync) for op in batch):
            self._file.sync()
        return outcomes

    def _put(self, txn: lmdb.Transaction, group: _Group, op: Put) -> TierFullError | None:
        stored = self._room.page_stored_bytes
        old = group.get(op.key)
        if old is None and group.live_bytes + stored > self._room.live_capacity_bytes:
            return TierFullError(
                f"the disk tier holds {format_size(group.live_bytes)} of "
                f"{format_size(self._room.live_capacity_bytes)} and cannot take "
                f"{format_size(stored)} more; delete pages first or raise its capacity",
                tier="disk",
                needed_bytes=stored,
                holders=_NO_HOLDERS,
            )
        shape = self._room.shape
        entry = IndexEntry(
            parent=op.parent,
            depth=op.depth,
            identity=op.identity,
            layout=self.layout,
            ephemeral=op.ephemeral,
            nbytes=shape.page_bytes,
            sequence=group.sequence,
            created_ns=time.time_ns(),
            sums=shape.checksums(op.key, op.data),
        )
        txn.put(op.key, entry.encode(op.key), db=self._file.index)
        for number, piece in enumerate(shape.pieces):
            part: Bytes = op.data[piece.offset : piece.stop]
            txn.put(piece_key(op.key, number), part.data, db=self._file.pages)
        group.set(op.key, entry.record(op.key, stored))
        group.sequence += 1
        group.puts += 1
        group.bytes += shape.page_bytes
        return None

    def _delete(self, txn: lmdb.Transaction, group: _Group, key: bytes) -> None:
        if group.get(key) is not None:
            self._file.remove(txn, key)
            group.set(key, None)
            group.deletes += 1

    def _discard(self, txn: lmdb.Transaction, group: _Group, op: Discard) -> None:
        if txn.get(op.key, db=self._file.index) == op.seen:
            self._delete(txn, group, op.key)

    def _close_books(self, group: _Group) -> None:
        for key, record in group.changes.items():
            self.hidden.discard(key)
            if record is None:
                self.records.pop(key, None)
            else:
                self.records[key] = record
        self.live_bytes = group.live_bytes
        self._sequence = group.sequence
        self.counts.puts += group.puts
        self.counts.deletes += group.deletes
        self.counts.bytes_written += group.bytes
        self.counts.commits += 1

    def shows(self, key: bytes) -> bool:
        """Whether a committed page is there and nobody found it damaged."""
        return key in self.records and key not in self.hidden

    def hide(self, key: bytes) -> None:
        """Do not show a page any more; until it is put again or a ``Discard`` has settled what it
        is.
        """
        if key in self.records:
            self.hidden.add(key)

    def check(self) -> None:
        """Recount the books from the database; AssertionError if they differ. The writer must be
        idle.
        """
        room, shape = self._room, self._room.shape
        with self.lock, self._file.reading() as txn:
            found: dict[bytes, DiskRecord] = {}
            for key_view, raw in txn.cursor(db=self._file.index):
                key = bytes(key_view)
                found[key] = IndexEntry.decode(key, bytes(raw)).record(key, room.page_stored_bytes)
            pages = txn.stat(self._file.pages)
            keys = {
                bytes(key)
                for key in txn.cursor(db=self._file.pages).iternext(keys=True, values=False)
            }
            assert found == self.records, "the records in memory differ from the index"
            assert keys == {piece_key(key, i) for key in found for i in range(len(shape.pieces))}, (
                "pieces differ from the index"
            )
            own = sum(
                overflow_pages(room.psize, piece.nbytes, len(key) + 2)
                for key in found
                for piece in shape.pieces
            )
            assert pages["overflow_pages"] == own, "payload pages differ from the index"
        live = sum(record.stored_bytes for record in found.values())
        assert self.live_bytes == live, f"live_bytes is {self.live_bytes}, recounted {live}"
        assert live <= room.live_capacity_bytes, (
            f"{live} bytes live, the limit is {room.live_capacity_bytes}"
        )
        assert self.hidden <= set(found), "a page that is not stored is marked as damaged"
