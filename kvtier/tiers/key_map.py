"""Where the pages of a folder are in its index, for a process that does not write to it.

The index is in the order of the puts, so what came since the last look is behind the last entry that
was seen: looking again is one step in the index, and each entry is looked at once. A put that is
newer has a larger number even if the newest pages are gone and the writer was started again since.
"""

from __future__ import annotations

import threading

import lmdb

from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.record import key_at

#: The map is made anew when it holds this many pages more than twice those that are stored.
_SLACK = 1024


class KeyMap:
    """The place of each page by its key. Calls are made under ``lock``, which is held from before a
    snapshot begins: then no call comes with an older snapshot than the one before.
    """

    def __init__(self, file: LmdbFile) -> None:
        self._file = file
        self._places: dict[bytes, bytes] = {}
        self._last = b""
        self._opened = 0
        self.lock = threading.Lock()

    def follow(self, txn: lmdb.Transaction) -> None:
        """Know everything that is in a snapshot. What is known besides is gone."""
        if self._opened != self._file.opened:
            self._forget()
        self._scan(txn)
        if len(self._places) > 2 * txn.stat(self._file.index)["entries"] + _SLACK:
            self._forget()
            self._scan(txn)

    def place(self, txn: lmdb.Transaction, key: bytes) -> bytes | None:
        """Where the entry of a page is in the snapshot that was followed; ``None`` if it is gone."""
        place = self._places.get(key)
        if place is not None and txn.get(place, db=self._file.index) is None:
            del self._places[key]
            return None
        return place

    def _forget(self) -> None:
        self._places = {}
        self._last = b""
        self._opened = self._file.opened

    def _scan(self, txn: lmdb.Transaction) -> None:
        cursor = txn.cursor(db=self._file.index)
        if not cursor.set_range(self._last + b"\0"):
            return
        for place_view, raw in cursor:
            place = bytes(place_view)
            key = key_at(place, bytes(raw))
            if key is not None:
                self._places[key] = self._last = place
