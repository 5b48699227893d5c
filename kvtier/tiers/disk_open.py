"""Opening a folder to write: lock, check, read the index, drop what is unusable, fit it to the
limit, reserve the space.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import lmdb

from kvtier.errors import ConfigError, DiskError
from kvtier.tiers.aligned import round_up
from kvtier.tiers.disk_fit import fit_file, fit_slots
from kvtier.tiers.disk_sort import choose, remove, remove_strays
from kvtier.tiers.disk_wish import OpenReport, Wish
from kvtier.tiers.folder_info import NOTE, FolderInfo, read_info
from kvtier.tiers.folder_lock import FolderLock
from kvtier.tiers.inline import InlinePayloads
from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.lmdb_file import (
    DAMAGE,
    DATA,
    LOCK_TABLE,
    FileDamagedError,
    ForeignFileError,
    LmdbFile,
    disk_error,
    sync_folder,
)
from kvtier.tiers.lmdb_pages import tree_problems
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.lmdb_shrink import MOVING, finish_move
from kvtier.tiers.page_cache import free_memory_bytes
from kvtier.tiers.payload import SLAB_FROM_BYTES, Payload, Payloads
from kvtier.tiers.record import DiskRecord
from kvtier.tiers.slab import SlabPayloads
from kvtier.tiers.slab_file import SlabFiles
from kvtier.tiers.slab_room import plan_slab, plan_slab_beside
from kvtier.tiers.slab_segments import segment_paths
from kvtier.tiers.slab_slots import SlotAllocator
from kvtier.tiers.usage import UsageBook

#: A file that was closed in good order is checked up to this size; damage to a larger one is found
#: by ``verify``, or by LMDB.
_CHECK_BYTES = 1 << 30
_READ_THREADS = 4
_WRITE_THREADS = 2


@dataclass
class OpenedFolder:
    """An open folder; the caller closes ``payloads`` and ``file`` and then releases ``lock``."""

    file: LmdbFile
    lock: FolderLock
    payloads: Payloads
    room: Room
    info: FolderInfo
    records: dict[bytes, DiskRecord]
    usage: UsageBook
    report: OpenReport


def open_folder(folder: Path, wish: Wish) -> OpenedFolder:
    """Open or make the tier in ``folder``; keeps what it can and stays within the capacity.

    A database that is damaged as a whole is deleted, not set aside: beside a new one it would pass
    the limit, and it holds nothing that cannot be computed again.

    Raises:
        ConfigError: the capacity is too small for one page, or the folder holds pages of another
            layout or placement; nothing was changed.
        DiskError: the folder is in use, not writable, of another version, or the disk is full.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, "making the folder", folder) from error
    lock = FolderLock(folder)
    opening = _Opening(folder, wish, lock)
    try:
        try:
            return opening.run()
        except (FileDamagedError, ForeignFileError) as error:
            opening.undo()
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
            for name in (DATA, LOCK_TABLE):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / MOVING, ignore_errors=True)
            opening = _Opening(folder, wish, lock)
            opened = opening.run()
            opened.report = replace(opened.report, emptied=str(error))
            return opened
    except BaseException as error:
        opening.undo()
        lock.release()
        if isinstance(error, lmdb.Error | OSError) and not isinstance(error, DiskError):
            raise disk_error(error, "opening the disk tier", folder) from error
        raise


class _Opening:
    """One attempt to open; ``undo`` closes what it had opened."""

    def __init__(self, folder: Path, wish: Wish, lock: FolderLock) -> None:
        self.folder, self.wish, self.lock = folder, wish, lock
        self.path = folder / DATA
        self.file: LmdbFile | None = None
        self.slabs: SlabFiles | None = None
        self.pools: list[IoPool] = []

    def undo(self) -> None:
        if self.file is not None:
            self.file.close(0.0)
        for pool in self.pools:
            pool.close(1.0)
        if self.slabs is not None:
            self.slabs.close()

    # ------------------------------------------------------------------ steps

    def run(self) -> OpenedFolder:
        wish = self.wish
        finish_move(self.folder, 2 * wish.shape.page_bytes + 4096)
        self._require_sound_tree()
        # A map as large as the file was, so that a lowered capacity leaves room to delete in.
        size = self.path.stat().st_size if self.path.exists() else 0
        self.file = file = LmdbFile(self.folder, map_bytes=max(size, 1 << 20), durable=wish.durable)
        try:
            stored = read_info(file)
            with file.reading() as txn:
                found = {bytes(place): bytes(raw) for place, raw in txn.cursor(db=file.index)}
                uses = {bytes(place): bytes(raw) for place, raw in txn.cursor(db=file.use)}
            info = self._agree(stored, found)
            room = self._plan(info)
            if info.payload == "slab":
                self.slabs = self._slab_files(info)
            records, usage, report, drop = choose(
                found, uses, room, wish, slabs=self.slabs, last_put=file.last_put()
            )
            remove(file, drop, room.batch_deletes)
            remove_strays(file, records, room)
        except (*DAMAGE, lmdb.BadTxnError) as error:
            raise FileDamagedError(f"{self.path} is damaged: {error}") from error
        if self.slabs is not None:
            fit_slots(
                file,
                partial(self._slab_payloads, file, records),
                records,
                room,
                wish.patience_s,
            )
            self.slabs.cut(room.slots)
        elif self.lock.owned:
            for path in segment_paths(self.folder):
                path.unlink()
        self.lock.claim()
        self.file = file = fit_file(file, room, wish.durable)
        file.reserve()
        if self.slabs is not None:
            self.slabs.resize(room.slots)
        payloads = self._payloads(file, records, room)
        if info != stored:
            with file.writing() as txn:
                file.set_note(txn, NOTE, info.encode())
            file.sync()
        sync_folder(self.folder)
        return OpenedFolder(file, self.lock, payloads, room, info, records, usage, report)

    def _require_sound_tree(self) -> None:
        if not self.path.exists():
            return
        if self.lock.clean and self.path.stat().st_size > _CHECK_BYTES:
            return
        problems = tree_problems(self.path)
        if problems:
            raise FileDamagedError(f"{self.path} is damaged: {problems[0]}")

    def _agree(self, stored: FolderInfo | None, found: dict[bytes, bytes]) -> FolderInfo:
        """The geometry of the folder from now on. ConfigError if its pages are of another one."""
        wish, shape = self.wish, self.wish.shape
        payload: Payload = "slab" if shape.page_bytes >= SLAB_FROM_BYTES else "inline"
        segment_bytes = max(1, wish.segment_bytes // round_up(shape.page_bytes)) * round_up(
            shape.page_bytes
        )
        if stored is not None and found:
            payload, segment_bytes = stored.payload, stored.segment_bytes or segment_bytes
            if (stored.layout_digest, stored.page_bytes, stored.plane_ranges) != (
                wish.layout,
                shape.page_bytes,
                shape.planes,
            ):
                raise ConfigError(
                    f"the folder of the disk tier holds {len(found)} pages of another layout (model "
                    "geometry, dtype, page_tokens or codec); choose another folder for this layout, or "
                    "remove that one"
                )
            if wish.payload not in (None, payload):
                raise ConfigError(
                    f"the folder holds {len(found)} pages with payload={payload!r}, asked for is "
                    f"{wish.payload!r}; use that, choose another folder, or remove this one"
                )
        payload = wish.payload or payload
        old_info = stored.layout_info if stored is not None else {}
        return FolderInfo(
            layout_digest=wish.layout,
            page_bytes=shape.page_bytes,
            plane_ranges=shape.planes,
            payload=payload,
            capacity_bytes=wish.capacity_bytes,
            slot_bytes=round_up(shape.page_bytes) if payload == "slab" else 0,
            segment_bytes=segment_bytes if payload == "slab" else 0,
            layout_info=json.loads(json.dumps(wish.layout_info or old_info)),
        )

    def _plan(self, info: FolderInfo) -> Room:
        assert self.file is not None
        wish = self.wish
        sizes = {
            "capacity_bytes": wish.capacity_bytes,
            "batch_bytes": wish.batch_bytes,
            "psize": self.file.psize,
        }
        if info.payload == "inline":
            return Room.plan(shape=wish.shape, **sizes)
        anew = plan_slab(shape=wish.shape, **sizes)
        have, need = self.path.stat().st_size, anew.map_bytes
        # A file that is somewhat too large is not worth moving its content, unless pages pay for it.
        if need < have <= need + need // 4 + wish.capacity_bytes // 64:
            kept = plan_slab_beside(have, shape=wish.shape, **sizes)
            if kept is not None and 8 * kept.live_capacity_bytes >= 7 * anew.live_capacity_bytes:
                return kept
        return anew

    def _slab_files(self, info: FolderInfo) -> SlabFiles:
        reads, writes = (
            IoPool(_READ_THREADS, "kvtier-disk-read"),
            IoPool(_WRITE_THREADS, "kvtier-disk-write"),
        )
        self.pools = [reads, writes]
        files = SlabFiles(
            self.folder,
            slot_bytes=info.slot_bytes,
            page_bytes=info.page_bytes,
            per_segment=info.segment_bytes // info.slot_bytes,
            reads=reads,
            writes=writes,
            writable=True,
            cache_reads=self._fits_memory,
        )
        files.open_found()
        return files

    @property
    def _fits_memory(self) -> bool:
        """Whether the page cache may hold the whole store."""
        return 2 * self.wish.capacity_bytes <= free_memory_bytes()

    def _payloads(self, file: LmdbFile, records: dict[bytes, DiskRecord], room: Room) -> Payloads:
        if self.slabs is None:
            reads = None if self._fits_memory else IoPool(_READ_THREADS, "kvtier-disk-read")
            self.pools = [] if reads is None else [reads]
            return InlinePayloads(file, self.wish.shape, reads)
        return self._slab_payloads(file, records, room.slots)

    def _slab_payloads(
        self, file: LmdbFile, records: dict[bytes, DiskRecord], slots: int
    ) -> SlabPayloads:
        assert self.slabs is not None
        used = [r.slot for r in records.values() if r.slot is not None]
        return SlabPayloads(
            file,
            self.wish.shape,
            self.slabs,
            SlotAllocator(slots, used, file.last_txn),
            reads=self.pools[0],
            writes=self.pools[1],
        )
