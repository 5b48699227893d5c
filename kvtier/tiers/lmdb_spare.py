"""Puts must not take the last pages of a map: removing pages takes some too."""

from __future__ import annotations

import lmdb

from kvtier.tiers.lmdb_file import LmdbFile

#: Map pages that a removal may take.
_PAGES = 24
#: A snapshot of so many transactions ago keeps more from being used again than there is room for.
_OLD_TXNS = 3


def require_spare(file: LmdbFile, txn: lmdb.Transaction) -> None:
    """MapFullError unless some map pages are left behind what a transaction has changed so far.

    Looks only where the map is almost full and an old snapshot is still read.
    """
    if 8 * file.used_bytes < 7 * file.map_bytes:
        return
    oldest = file.oldest_reader()
    if oldest is None or oldest + _OLD_TXNS > file.last_txn:
        return
    names = [b"spare%d" % number for number in range(_PAGES)]
    for name in names:
        txn.put(name, bytes(file.psize - 16), db=file.notes)
    for name in names:
        txn.delete(name, db=file.notes)
