"""Moving a database into a smaller file within the bytes that it takes already.

LMDB never shrinks a file, and a compact copy beside the old one would pass the limit. So pages are
moved in steps: some are committed in the new file, then deleted from the old one, then what they
took there is given back to the file system. At any moment each page is in one of the two files, or
in both; a process that dies on the way is continued at the next open.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvtier.tiers.lmdb_file import DATA, LOCK_TABLE, FileDamagedError, LmdbFile, sync_folder
from kvtier.tiers.lmdb_pages import punch_unused, tree_problems

#: Sub-folder of the file that is being filled.
MOVING = "compact.tmp"


def finish_move(folder: Path, stored_bytes: int) -> None:
    """Continue a move that was cut off, or remove what never became one."""
    target = folder / MOVING / DATA
    if target.exists() and (folder / DATA).exists() and not tree_problems(target):
        try:
            move(folder, (folder / DATA).stat().st_size, stored_bytes, 1)
            return
        except FileDamagedError:
            pass  # nothing was moved before the new file was whole
    shutil.rmtree(folder / MOVING, ignore_errors=True)


def move(folder: Path, map_bytes: int, stored_bytes: int, batch_pages: int) -> None:
    """Move the closed database of ``folder`` into a new file for a map of ``map_bytes``.

    Args:
        stored_bytes: what a page takes in the file at most.
        batch_pages: pages that one transaction moves.
    """
    path, target = folder / DATA, folder / MOVING
    limit = path.stat().st_size
    target.mkdir(mode=0o700, exist_ok=True)
    left = True
    while left:
        punch_unused(path)
        spare = limit - _disk_bytes(path) - _disk_bytes(target / DATA)
        old = LmdbFile(folder, map_bytes=limit, durable=True)
        new: LmdbFile | None = None
        try:
            new = LmdbFile(target, map_bytes=map_bytes, durable=True)
            left = _move_some(old, new, max(1, spare // 2 // stored_bytes), batch_pages)
        finally:
            old.close(0.0)
            if new is not None:
                new.close(0.0)
    # A lock table of the old file would tell LMDB of transactions that the new one has not seen.
    (folder / LOCK_TABLE).unlink(missing_ok=True)
    os.replace(target / DATA, path)
    shutil.rmtree(target, ignore_errors=True)
    sync_folder(folder)


def _move_some(old: LmdbFile, new: LmdbFile, count: int, at_once: int) -> bool:
    """Move up to ``count`` pages; whether there may be more."""
    with old.reading() as txn:
        cursor = txn.cursor(db=old.index)
        places: list[bytes] = []
        for place in cursor.iternext(keys=True, values=False):
            places.append(bytes(place))
            if len(places) == count:
                break
    for start in range(0, len(places), at_once):
        part = places[start : start + at_once]
        with old.reading() as source, new.writing() as sink:
            for place in part:
                for here, there in ((old.index, new.index), (old.use, new.use)):
                    value = source.get(place, db=here)
                    if value is not None:
                        new.append(sink, there, place, value)
                for piece, value in old.pieces(source, place):
                    new.append(sink, new.pages, piece, value)
        with old.writing() as gone:
            for place in part:
                old.remove(gone, place)
    if len(places) == count:
        return True
    last_put = old.last_put()
    with old.reading() as source, new.writing() as sink:
        for name, text in source.cursor(db=old.notes):
            sink.put(bytes(name), text, db=new.notes)
        new.set_last_put(sink, last_put)
    return False


def _disk_bytes(path: Path) -> int:
    return 512 * path.stat().st_blocks if path.exists() else 0
