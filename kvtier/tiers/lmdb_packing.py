"""Keeping the leaves of the index as full as the room for it assumes.

Entries come in the order of the puts and are never put between others, so a leaf that lost some is
not filled again, and LMDB merges leaves only when they are less than a quarter full. Where pages die
in another order than they came, the tables would grow to two to three times what is planned
(measured). So neighbouring entries are taken out and put in again, which leaves their leaves about
two thirds full (measured), as soon as a table has more leaves than half full ones would be.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import lmdb

from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import Room

#: Entries that are packed together at least.
_MIN_ENTRIES = 4


class _NothingGainedError(Exception):
    """Ends a transaction that would not free a leaf."""


class Packer:
    """Packs in the writer thread, some leaves a transaction. Each goes on behind the one before, and
    is given up if it would free none.
    """

    def __init__(self, file: LmdbFile, room: Room) -> None:
        self._file = file
        self._room = room
        self._next: dict[str, bytes] = {}
        self._full = False

    def pack(self) -> None:
        """Pack the tables that have too many leaves; a full map puts it off to the next call.

        Raises:
            lmdb.Error, OSError: the system refuses to write; nothing is changed.
        """
        self._full = False
        try:
            for table, (in_leaf, leaves) in self._room.leaves.items():
                count = max(_MIN_ENTRIES, self._room.pack_leaves * self._room.psize // in_leaf)
                entries, have = self._size(table)
                for _ in range(2 + entries // count):  # once through the table, and into it again
                    if have <= leaves:
                        break
                    with suppress(_NothingGainedError):
                        self._pack_some(table, count)
                    _, have = self._size(table)
        except lmdb.MapFullError:
            self._full = True

    def _size(self, table: str) -> tuple[int, int]:
        """Entries and leaves."""
        with self._file.reading() as txn:
            stat = txn.stat(getattr(self._file, table))
            return stat["entries"], stat["leaf_pages"]

    def _pack_some(self, table: str, count: int) -> None:
        db = getattr(self._file, table)
        with self._file.writing() as txn:
            before = txn.stat(db)["leaf_pages"]
            part = self._part(txn, db, self._next.get(table, b"\0"), count)
            self._next[table] = part[-1][0] + b"\0" if len(part) == count else b"\0"
            for key, _ in reversed(part):
                txn.delete(key, db=db)
            for key, value in part:
                txn.put(key, value, db=db)
            if txn.stat(db)["leaf_pages"] >= before:
                raise _NothingGainedError

    @staticmethod
    def _part(
        txn: lmdb.Transaction, db: Any, start: bytes, count: int
    ) -> list[tuple[bytes, bytes]]:
        part: list[tuple[bytes, bytes]] = []
        cursor = txn.cursor(db=db)
        if cursor.set_range(start):
            for key, value in cursor:
                part.append((bytes(key), bytes(value)))
                if len(part) == count:
                    break
        return part

    def check(self, txn: lmdb.Transaction) -> None:
        """AssertionError if a table has more leaves than there is room for, unless an old snapshot
        kept the map full.
        """
        for table, (_, leaves) in self._room.leaves.items():
            have = txn.stat(getattr(self._file, table))["leaf_pages"]
            assert self._full or have <= leaves, f"{table} has {have} leaves, of {leaves} planned"
