"""The books of a folder: what a group of changes makes of them before it is committed, what was
committed so far, and what a recount finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lmdb

from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.record import DiskRecord, IndexEntry
from kvtier.tiers.writer import Put


@dataclass
class WriteCounts:
    """What was committed, and what was not."""

    puts: int = 0
    deletes: int = 0
    bytes_written: int = 0
    commits: int = 0
    commit_errors: int = 0
    map_full: int = 0


class Group:
    """The books as they will be once the running transaction commits."""

    def __init__(self, records: Mapping[bytes, DiskRecord], live_bytes: int) -> None:
        self._records = records
        self.changes: dict[bytes, DiskRecord | None] = {}
        self.live_bytes = live_bytes
        self.freed: list[int] = []
        self.puts = self.deletes = self.bytes = 0
        self.last_put = 0

    def get(self, key: bytes) -> DiskRecord | None:
        return self.changes[key] if key in self.changes else self._records.get(key)

    def set(self, key: bytes, record: DiskRecord | None) -> None:
        old = self.get(key)
        self.live_bytes += (record.stored_bytes if record else 0) - (old.stored_bytes if old else 0)
        if old is not None and old.slot is not None:
            self.freed.append(old.slot)
        self.changes[key] = record


class Staged:
    """Payloads of a group that are in slots which no transaction names yet."""

    def __init__(self, puts: Sequence[Put], outcomes: Sequence[int | Exception | None]) -> None:
        self._outcomes = {id(put): out for put, out in zip(puts, outcomes, strict=True)}

    def error(self, put: Put) -> Exception | None:
        out = self._outcomes.get(id(put))
        return out if isinstance(out, Exception) else None

    def slot(self, put: Put) -> int | None:
        out = self._outcomes[id(put)]
        assert not isinstance(out, Exception)
        return out

    def named(self, puts: Sequence[Put]) -> None:
        """A transaction that names the slots of ``puts`` holds."""
        for put in puts:
            self._outcomes.pop(id(put), None)

    def left(self) -> list[int]:
        return [out for out in self._outcomes.values() if isinstance(out, int)]


def recount(txn: lmdb.Transaction, file: LmdbFile, room: Room) -> dict[bytes, DiskRecord]:
    """The pages that the index holds; AssertionError if a page is there twice, or the use of one
    that is not.
    """
    found: dict[bytes, DiskRecord] = {}
    for place, raw in txn.cursor(db=file.index):
        record = IndexEntry.decode(bytes(place), bytes(raw)).record(room.page_stored_bytes)
        assert record.key not in found, "a page is stored twice"
        found[record.key] = record
    used = {bytes(place) for place in txn.cursor(db=file.use).iternext(keys=True, values=False)}
    assert used <= {record.place for record in found.values()}, (
        "the last use of a page that is not stored"
    )
    return found
