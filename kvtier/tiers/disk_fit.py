"""Fitting the files of a folder to a lowered limit, without passing the old one on the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from kvtier.errors import DiskError
from kvtier.tiers.aligned import aligned_buffer
from kvtier.tiers.disk_sort import remove
from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.lmdb_shrink import move
from kvtier.tiers.page_tree import with_followers
from kvtier.tiers.record import Bytes, DiskRecord, IndexEntry
from kvtier.tiers.slab import SlabPayloads


def fit_slots(
    file: LmdbFile,
    payloads: Callable[[int], SlabPayloads],
    records: dict[bytes, DiskRecord],
    room: Room,
    patience_s: float,
) -> None:
    """Move pages out of the slots behind the new end, so that the files can be cut there.

    A page that cannot be read any more is removed with those that follow it.

    Args:
        payloads: the placement for a number of slots.
        records: what is stored; follows.
        patience_s: how long to wait for readers of slots that are needed.

    Raises:
        DiskError: they went on; nothing is lost, and opening may be tried again.
    """
    high = [r for r in records.values() if r.slot is not None and r.slot >= room.slots]
    if high:
        slabs = payloads(1 + max(record.slot for record in high if record.slot is not None))
        for start in range(0, len(high), room.batch_puts):
            part = [r for r in high[start : start + room.batch_puts] if r.key in records]
            _move_slots(file, slabs, records, part, room, patience_s)
    # Slots that are cut off must not be named by an index that a power cut brings back.
    file.sync()


def _move_slots(
    file: LmdbFile,
    payloads: SlabPayloads,
    records: dict[bytes, DiskRecord],
    part: list[DiskRecord],
    room: Room,
    patience_s: float,
) -> None:
    lost: list[bytes] = []
    pages: list[tuple[DiskRecord, Bytes]] = []
    for record in part:
        assert record.slot is not None
        page = aligned_buffer(room.slot_bytes)[: room.shape.page_bytes]
        try:
            payloads.files.read_cold(record.slot, page)
            pages.append((record, page))
        except OSError:
            lost.append(record.key)
    targets = payloads.take(len(pages), patience_s, below=room.slots)
    if len(targets) < len(pages):
        raise DiskError(
            errno.EBUSY,
            f"shrinking to {room.slots} slots needs slots that process "
            f"{', '.join(map(str, file.old_readers())) or '?'} still reads; end that reader and "
            "open the folder again",
            str(file.folder),
        )
    for error in payloads.files.write(targets, [page for _, page in pages]):
        if error is not None:
            raise error
    payloads.sync()
    with file.writing() as txn:
        for (record, _), slot in zip(pages, targets, strict=True):
            raw = txn.get(record.place, db=file.index)
            assert raw is not None
            entry = IndexEntry.decode(record.place, bytes(raw))._replace(slot=slot)
            txn.put(record.place, entry.encode(), db=file.index)
    for (record, _), slot in zip(pages, targets, strict=True):
        records[record.key] = record._replace(slot=slot)
    gone = with_followers(records, lost)
    remove(file, [records[key].place for key in gone[::-1]], room.batch_deletes)
    for key in gone:
        del records[key]


def fit_file(file: LmdbFile, room: Room, durable: bool) -> LmdbFile:
    """The same content in a database file of ``room.map_bytes``."""
    size = os.stat(file.path).st_size
    if size <= room.map_bytes and file.map_bytes == room.map_bytes:
        return file
    fits = file.used_bytes <= room.map_bytes
    file.close(0.0)
    if not fits:
        stored = max(room.page_stored_bytes - room.slot_bytes, 2048)
        at_once = max(1, min(room.batch_puts, room.batch_deletes))
        move(file.folder, room.map_bytes, stored, at_once)
    elif size > room.map_bytes:
        os.truncate(file.path, room.map_bytes)
    return LmdbFile(file.folder, map_bytes=room.map_bytes, durable=durable)
