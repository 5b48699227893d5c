"""Opening a folder: lock, read the index, drop what is unusable, fit it to the limit, reserve the
space.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import lmdb

from kvtier.errors import ConfigError, DiskError
from kvtier.tiers.lmdb_file import (
    DAMAGE,
    DATA,
    LOCK_TABLE,
    FileDamagedError,
    FolderLock,
    ForeignFileError,
    LmdbFile,
    disk_error,
    sync_folder,
)
from kvtier.tiers.lmdb_room import Room, map_bytes_of
from kvtier.tiers.lmdb_tree import usable, victims
from kvtier.tiers.record import DiskRecord, IndexEntry, PageShape, RecordError
from kvtier.units import format_size

_COMPACT = "compact.tmp"


@dataclass(frozen=True)
class OpenReport:
    """What opening a folder found, in pages.

    Attributes:
        kept: pages that are usable.
        damaged: index entries that were not readable.
        ephemeral: pages that were stored for the time until close only.
        orphans: pages whose parent is gone.
        evicted: pages that did not fit a lowered capacity.
        emptied: why the whole file was given up, or ``None``.
    """

    kept: int = 0
    damaged: int = 0
    ephemeral: int = 0
    orphans: int = 0
    evicted: int = 0
    emptied: str | None = None


@dataclass
class OpenedFolder:
    """An open folder; the caller closes ``file`` and then releases ``lock``."""

    file: LmdbFile
    lock: FolderLock
    room: Room
    records: dict[bytes, DiskRecord]
    report: OpenReport


def open_folder(
    folder: Path,
    *,
    shape: PageShape,
    layout: bytes,
    capacity_bytes: int,
    batch_bytes: int,
    durable: bool,
) -> OpenedFolder:
    """Open or make the tier in ``folder``; keeps what it can and stays within ``capacity_bytes``.

    A database that is damaged as a whole is deleted, not set aside: beside a new one it would pass
    the limit, and it holds nothing that cannot be computed again.

    Raises:
        ConfigError: the capacity is too small for one page, or the folder holds pages of another
            layout; nothing was changed.
        DiskError: the folder is in use, not writable, of another version, or the disk is full.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, "making the folder", folder) from error
    lock = FolderLock(folder)
    file: LmdbFile | None = None
    try:
        shutil.rmtree(folder / _COMPACT, ignore_errors=True)
        plan = partial(
            Room.plan, capacity_bytes=capacity_bytes, batch_bytes=batch_bytes, shape=shape
        )
        try:
            file, room, records, report = _recover(folder, capacity_bytes, durable, layout, plan)
        except (FileDamagedError, ForeignFileError) as error:
            if not lock.owned:
                raise DiskError(
                    error.errno or errno.EIO,
                    f"{error}; it was not made here, so it is left alone: choose another folder",
                ) from error
            warnings.warn(
                f"{error}; its pages are lost and the disk tier starts empty",
                RuntimeWarning,
                stacklevel=3,
            )
            (folder / DATA).unlink(missing_ok=True)
            (folder / LOCK_TABLE).unlink(missing_ok=True)
            file, room, records, report = _recover(folder, capacity_bytes, durable, layout, plan)
            report = replace(report, emptied=str(error))
        lock.claim()
        file = _fit(file, room.map_bytes, durable)
        file.reserve()
        sync_folder(folder)
        return OpenedFolder(file, lock, room, records, report)
    except BaseException as error:
        if file is not None:
            file.close(0.0)
        lock.release()
        if isinstance(error, lmdb.Error | OSError) and not isinstance(error, DiskError):
            raise disk_error(error, "opening the disk tier", folder) from error
        raise


def _recover(
    folder: Path, capacity_bytes: int, durable: bool, layout: bytes, plan: Callable[..., Room]
) -> tuple[LmdbFile, Room, dict[bytes, DiskRecord], OpenReport]:
    """Open the database, read its index and remove what cannot stay.

    Raises:
        FileDamagedError: the database proved damaged on the way.
    """
    path = folder / DATA
    # A map as large as the file was, so that a lowered capacity leaves room to delete in.
    size = path.stat().st_size if path.exists() else 0
    map_bytes = max(map_bytes_of(capacity_bytes), size, 1 << 20)
    file = LmdbFile(folder, map_bytes=map_bytes, durable=durable)
    try:
        with file.reading() as txn:
            found = {bytes(key): bytes(raw) for key, raw in txn.cursor(db=file.index)}
        room = plan(psize=file.psize)
        records, report, drop = _choose(found, room, layout)
        _remove(file, drop, room.batch_deletes)
        _remove_strays(file, records, room)
    except (*DAMAGE, lmdb.BadTxnError) as error:
        file.close(0.0)
        raise FileDamagedError(f"{path} is damaged: {error}") from error
    except BaseException:
        file.close(0.0)
        raise
    return file, room, records, report


def _choose(
    found: dict[bytes, bytes], room: Room, layout: bytes
) -> tuple[dict[bytes, DiskRecord], OpenReport, list[bytes]]:
    """What to keep and what to remove of the index that was found."""
    damaged = other = ephemeral = 0
    good: list[DiskRecord] = []
    shared: dict[bytes, bytes] = {}
    for key, raw in found.items():
        try:
            entry = IndexEntry.decode(key, raw)
        except RecordError:
            damaged += 1
            continue
        if (
            entry.layout != layout
            or entry.nbytes != room.shape.page_bytes
            or len(entry.sums) != room.shape.sums
        ):
            other += 1
            continue
        if entry.ephemeral:
            ephemeral += 1
        else:
            record = entry.record(key, room.page_stored_bytes)
            identity = shared.setdefault(record.identity, record.identity)
            good.append(record._replace(identity=identity, layout=layout))
    if other:
        raise ConfigError(
            f"the folder of the disk tier holds {other} pages of another layout (model geometry, "
            "dtype or page_tokens); choose another folder for this layout, or remove that one"
        )
    kept = usable(good)
    orphans = len(good) - len(kept)
    evicted = victims(kept, room.live_capacity_bytes)
    for key in evicted:
        del kept[key]
    report = OpenReport(len(kept), damaged, ephemeral, orphans, len(evicted))
    return kept, report, [key for key in found if key not in kept]


def _remove(file: LmdbFile, keys: list[bytes], at_once: int) -> None:
    for start in range(0, len(keys), at_once):
        with file.writing() as txn:
            for key in keys[start : start + at_once]:
                file.remove(txn, key)
    if keys:
        file.tick()


def _remove_strays(file: LmdbFile, records: Iterable[bytes], room: Room) -> None:
    """Remove pieces without an index entry. Only a damaged entry leaves any, so the usual case is
    one count.
    """
    known = set(records)
    with file.reading() as txn:
        if txn.stat(file.pages)["entries"] == len(known) * len(room.shape.pieces):
            return
        keys = [bytes(key) for key in txn.cursor(db=file.pages).iternext(keys=True, values=False)]
    strays = [key for key in keys if key[:-2] not in known]
    for start in range(0, len(strays), room.batch_deletes):
        with file.writing() as txn:
            for key in strays[start : start + room.batch_deletes]:
                txn.delete(key, db=file.pages)


def _fit(file: LmdbFile, map_bytes: int, durable: bool) -> LmdbFile:
    """The same content in a file of at most ``map_bytes``.

    Where live pages lie behind the new limit the file is copied compactly beside itself and renamed
    over; until then both exist.
    """
    folder, path = file.folder, file.path
    if os.stat(path).st_size <= map_bytes and file.map_bytes == map_bytes:
        return file
    used = file.used_bytes
    if used > map_bytes:
        target = folder / _COMPACT
        target.mkdir(mode=0o700)
        try:
            file.env.copy(str(target), compact=True)
        except (lmdb.Error, OSError) as error:
            raise disk_error(
                error, f"compacting {format_size(used)} to fit {format_size(map_bytes)}", path
            ) from error
        os.chmod(target / DATA, 0o600)
        with open(target / DATA, "rb") as copy:
            os.fsync(copy.fileno())
        file.close(0.0)
        os.replace(target / DATA, path)
        shutil.rmtree(target, ignore_errors=True)
        sync_folder(folder)
    else:
        file.close(0.0)
        os.truncate(path, min(os.stat(path).st_size, map_bytes))
    return LmdbFile(folder, map_bytes=map_bytes, durable=durable)
