"""Applying groups of changes to the folder, and the books that follow it.

A group goes through three steps: what the limit refuses is sorted out, the payloads of the other
puts are staged (and synced, in the durable mode), one transaction changes the index. Only then are
slots free that the transaction let go of, and only then is anybody told.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import lmdb

from kvtier.errors import ConfigError, DeadlineExceededError, KvtierError, TierFullError
from kvtier.tiers.commit_group import Group, Staged, WriteCounts, recount
from kvtier.tiers.lmdb_file import LmdbFile, disk_error
from kvtier.tiers.lmdb_packing import Packer
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.lmdb_spare import require_spare
from kvtier.tiers.payload import Following, Payloads
from kvtier.tiers.record import DiskRecord, IndexEntry, place_of
from kvtier.tiers.usage import UsageBook
from kvtier.tiers.writer import Delete, Discard, Look, Note, Op, Put, Sync
from kvtier.units import format_size

_NO_HOLDERS: dict[str, int] = {}
#: In the relaxed mode a power cut undoes at most this much: what was written since the last sync.
RELAXED_COMMITS = 32
RELAXED_SECONDS = 1.0
#: Uses that were not saved by then are saved when there is nothing else to do.
_SAVE_USES_S = 5.0


class Committer:
    """Commits groups (in the writer thread) and keeps ``records`` and ``live_bytes`` equal to the
    folder.

    Other threads may look keys up in ``records``; ``lock`` is held while the database and the books
    differ.
    """

    def __init__(
        self,
        file: LmdbFile,
        payloads: Payloads,
        room: Room,
        layout: bytes,
        records: dict[bytes, DiskRecord],
        usage: UsageBook,
        *,
        durable: bool,
        timeout_s: float,
        following: Following,
    ) -> None:
        self._file = file
        self._following = following
        self._payloads = payloads
        self._room = room
        self.layout = layout
        self._durable = durable
        self._timeout_s = timeout_s
        self.records = records
        self.usage = usage
        #: Pages that proved damaged and whose removal is queued.
        self.hidden: set[bytes] = set()
        self.live_bytes = sum(record.stored_bytes for record in records.values())
        self.counts = WriteCounts()
        self.lock = threading.Lock()
        self._packer = Packer(file, room)
        #: The last put in the books, and whether the transaction that was begun last failed.
        self._last_put = max(
            file.last_put(), max((record.sequence for record in records.values()), default=0)
        )
        self._failed = False
        self._unsynced = 0
        self._synced_at = time.monotonic()

    # ------------------------------------------------------------------ groups

    def apply(self, batch: list[Op]) -> list[Exception | None]:
        """Commit ``batch`` in one transaction, or piecewise where the map has no room for that.

        Returns:
            One outcome a change: ``None``, TierFullError, or DiskError. A group that cannot be
            committed changes nothing, and the next one is tried afresh.
        """
        staged = Staged([], [])
        try:
            if not self._file.is_open:
                self._file.reopen(self._timeout_s)
            refused = self._refuse(batch)
            puts = [
                op
                for op, error in zip(batch, refused, strict=True)
                if isinstance(op, Put) and error is None
            ]
            staged = Staged(puts, self._payloads.stage(puts))
            if self._durable and puts:
                self._payloads.sync()
            self._payloads.stage_ahead(self._following)
            with self.lock:
                outcomes = self._commit(batch, refused, staged)
        except (lmdb.Error, OSError) as error:
            self.counts.commit_errors += 1
            failure = disk_error(error, "writing pages", self._file.path)
            outcomes = [failure] * len(batch)
            self._revive()
        finally:
            # Whether a transaction that failed is on the disk is known only after the next one.
            self._payloads.failed(self._file.last_txn + 1, staged.left())
        try:
            self._after(batch)
        except (lmdb.Error, OSError) as error:
            self.counts.commit_errors += 1
            for at, op in enumerate(batch):
                if isinstance(op, Sync | Look) and outcomes[at] is None:
                    outcomes[at] = disk_error(error, "syncing", self._file.path)
        self._pack()
        return [self._clear(outcome) for outcome in outcomes]

    def _revive(self) -> None:
        """After LMDB failed to write its meta page it refuses to read too, until it is reopened."""
        with suppress(lmdb.Error, OSError, KvtierError):
            try:
                with self._file.reading():
                    pass
            except lmdb.PanicError:
                self._file.reopen(self._timeout_s)

    def _pack(self) -> None:
        try:
            self._packer.pack()
        except (lmdb.Error, OSError, KvtierError):
            self.counts.commit_errors += 1
            self._revive()

    def _clear(self, outcome: Exception | None) -> Exception | None:
        if isinstance(outcome, OSError) and not isinstance(outcome, KvtierError):
            self.counts.commit_errors += 1
            return disk_error(outcome, "writing a page", self._file.path)
        return outcome

    def _refuse(self, batch: list[Op]) -> list[Exception | None]:
        """What the limits do not let in, as if everything else succeeded."""
        group = Group(self.records, self.live_bytes)
        return [self._plan(group, op) for op in batch]

    def _plan(self, group: Group, op: Op) -> Exception | None:
        if isinstance(op, Put):
            stored = self._room.page_stored_bytes
            over = group.live_bytes + stored > self._room.live_capacity_bytes
            if over and group.get(op.key) is None:
                return self._full(group.live_bytes, stored)
            # Only the size matters here.
            group.set(
                op.key,
                DiskRecord(op.key, None, 0, 0, stored, b"", b"", False, 0),
            )
        elif isinstance(op, Delete):
            for key in op.keys:
                if group.get(key) is not None:
                    group.set(key, None)
        elif isinstance(op, Note) and op.text is not None and len(op.text) > self._room.note_bytes:
            return ConfigError(
                f"the note {op.name!r} has {len(op.text)} bytes; a disk tier of this capacity keeps "
                f"{self._room.note_bytes} at most"
            )
        return None

    def _full(self, live: int, stored: int) -> TierFullError:
        return TierFullError(
            f"the disk tier holds {format_size(live)} of "
            f"{format_size(self._room.live_capacity_bytes)} and cannot take "
            f"{format_size(stored)} more; delete pages first or raise its capacity",
            tier="disk",
            needed_bytes=stored,
            holders=_NO_HOLDERS,
        )

    def _commit(
        self, batch: list[Op], refused: list[Exception | None], staged: Staged
    ) -> list[Exception | None]:
        outcomes = list(refused)
        for at, op in enumerate(batch):
            if isinstance(op, Put) and outcomes[at] is None:
                outcomes[at] = staged.error(op)
        todo = [op for op, error in zip(batch, outcomes, strict=True) if error is None]
        try:
            self._transaction(todo, staged)
        except lmdb.MapFullError:
            self.counts.map_full += 1
            self._file.env.reader_check()
            for at, op in enumerate(batch):
                if outcomes[at] is None:
                    outcomes[at] = self._squeeze(op, staged)
        except lmdb.PanicError:
            self._file.reopen(self._timeout_s)
            self._transaction(todo, staged)
        return outcomes

    def _squeeze(self, op: Op, staged: Staged) -> Exception | None:
        """One change by itself, after the pages freed so far were made usable."""
        for last in (False, True):
            try:
                self._transaction([op], staged)
                break
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

    # ------------------------------------------------------------------ one transaction

    def _transaction(self, batch: list[Op], staged: Staged) -> None:
        group = Group(self.records, self.live_bytes)
        failed, self._failed = self._failed, True
        with self._file.writing() as txn:
            if failed:
                self._remove_behind(txn)
            for op in batch:
                if isinstance(op, Put):
                    self._put(txn, group, op, staged.slot(op))
                elif isinstance(op, Delete):
                    for key in op.keys:
                        self._delete(txn, group, key)
                elif isinstance(op, Discard):
                    record = group.get(op.key)
                    if record is not None and (
                        txn.get(record.place, db=self._file.index) == op.seen
                    ):
                        self._delete(txn, group, op.key)
                elif isinstance(op, Note):
                    self._file.set_note(txn, op.name, op.text)
            if group.puts:
                self._file.set_last_put(txn, group.last_put)
                require_spare(self._file, txn)
        self._failed = False
        staged.named([op for op in batch if isinstance(op, Put)])
        self._close_books(group)
        self.hidden.difference_update(op.key for op in batch if isinstance(op, Discard))

    def _remove_behind(self, txn: lmdb.Transaction) -> None:
        """Remove what is not in the books: a transaction whose commit failed may still be in the
        file.
        """
        cursor = txn.cursor(db=self._file.index)
        while cursor.set_range(place_of(self._last_put + 1)):
            self._file.remove(txn, bytes(cursor.key()))

    def _put(self, txn: lmdb.Transaction, group: Group, op: Put, slot: int | None) -> None:
        shape = self._room.shape
        entry = IndexEntry(
            key=op.key,
            parent=op.parent,
            depth=op.depth,
            identity=op.identity,
            layout=self.layout,
            ephemeral=op.ephemeral,
            nbytes=shape.page_bytes,
            sequence=next(self.usage.clock),
            created_ns=time.time_ns(),
            sums=shape.checksums(op.key, op.data) if op.sums is None else op.sums.result(),
            slot=slot,
        )
        self._remove(txn, group.get(op.key))
        self._file.append(txn, self._file.index, entry.place, entry.encode())
        self._payloads.store(txn, op, entry.sequence)
        group.set(op.key, entry.record(self._room.page_stored_bytes))
        group.puts += 1
        group.bytes += shape.page_bytes
        group.last_put = entry.sequence

    def _delete(self, txn: lmdb.Transaction, group: Group, key: bytes) -> None:
        record = group.get(key)
        if record is not None:
            self._remove(txn, record)
            group.set(key, None)
            group.deletes += 1

    def _remove(self, txn: lmdb.Transaction, record: DiskRecord | None) -> None:
        if record is not None:
            txn.delete(record.place, db=self._file.index)
            txn.delete(record.place, db=self._file.use)
            self._payloads.remove(txn, record)

    def _close_books(self, group: Group) -> None:
        for key, record in group.changes.items():
            self.hidden.discard(key)
            self.usage.forget(key)
            if record is None:
                self.records.pop(key, None)
            else:
                self.records[key] = record
        self.live_bytes = group.live_bytes
        self._last_put = max(self._last_put, group.last_put)
        self._payloads.committed(self._file.last_txn, group.freed)
        self.counts.puts += group.puts
        self.counts.deletes += group.deletes
        self.counts.bytes_written += group.bytes
        self.counts.commits += 1
        self._unsynced += 1

    # ------------------------------------------------------------------ syncing

    def _after(self, batch: list[Op]) -> None:
        for op in batch:
            if isinstance(op, Look):
                op.look()
        if any(isinstance(op, Sync) for op in batch):
            self._save_uses()
            self._sync()
        elif self._sync_is_due:
            self._sync()

    @property
    def _sync_is_due(self) -> bool:
        late = time.monotonic() - self._synced_at >= RELAXED_SECONDS
        return (
            not self._durable and self._unsynced > 0 and (late or self._unsynced >= RELAXED_COMMITS)
        )

    def _sync(self) -> None:
        # Data first: an index that is durable names only what is durable.
        self._payloads.sync()
        self._file.sync()
        self._unsynced, self._synced_at = 0, time.monotonic()

    def _save_uses(self) -> None:
        """Store when pages were last used. Losing this costs no page, so a full map ends it."""
        while self.usage.unsaved:
            try:
                with self._file.writing() as txn:
                    part = self.usage.save(txn, self._file.use, self._room.batch_uses, self.records)
            except lmdb.MapFullError:
                return
            self.usage.saved(part)

    def idle(self) -> None:
        """Nothing is queued: sync what is due, and save uses that have waited long."""
        try:
            if not self._file.is_open:
                return
            if self._sync_is_due:
                self._sync()
            if self.usage.unsaved_for() >= _SAVE_USES_S:
                self._save_uses()
        except (lmdb.Error, OSError, KvtierError):
            self.counts.commit_errors += 1

    # ------------------------------------------------------------------ looking

    def shows(self, key: bytes) -> bool:
        """Whether a committed page is there and nobody found it damaged."""
        return key in self.records and key not in self.hidden

    def place(self, key: bytes) -> bytes | None:
        """Where the index entry of a page is, if ``shows``."""
        record = self.records.get(key)
        return None if record is None or key in self.hidden else place_of(record.sequence)

    def wait(self, timeout_s: float) -> None:
        """Take ``lock``: the database and the books are the same until it is released.

        Raises:
            DeadlineExceededError: a commit takes longer than ``timeout_s``.
        """
        if not self.lock.acquire(timeout=timeout_s):
            raise DeadlineExceededError(
                f"a commit to {self._file.folder} has not ended within {timeout_s:.1f} s; the disk "
                "may hang"
            )

    def hide(self, key: bytes) -> None:
        """Do not show a page any more; until it is put again or a ``Discard`` has settled what it
        is.
        """
        if key in self.records:
            self.hidden.add(key)

    def check(self) -> None:
        """Recount the books from the folder; AssertionError if they differ. The writer must be
        idle.
        """
        with self.lock, self._file.reading() as txn:
            found = recount(txn, self._file, self._room)
            assert found == self.records, "the records in memory differ from the index"
            self._packer.check(txn)
            self._payloads.check(txn, found)
        live = sum(record.stored_bytes for record in found.values())
        assert self.live_bytes == live, f"live_bytes is {self.live_bytes}, recounted {live}"
        assert live <= self._room.live_capacity_bytes, (
            f"{live} bytes live, the limit is {self._room.live_capacity_bytes}"
        )
        assert self.hidden <= set(found), "a page that is not stored is marked as damaged"
