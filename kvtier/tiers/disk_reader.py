"""Reading a folder beside the tier that writes to it, in the same machine's other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import lmdb

from kvtier.errors import ClosedError, DeadlineExceededError, DiskError
from kvtier.tiers.disk_pages import DiskPages
from kvtier.tiers.disk_reads import ReadCounts
from kvtier.tiers.folder_info import FolderInfo, require_info, require_store
from kvtier.tiers.folder_lock import writer_of
from kvtier.tiers.inline import InlinePayloads
from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.key_map import KeyMap
from kvtier.tiers.lmdb_file import DATA, FileDamagedError, LmdbFile
from kvtier.tiers.lmdb_pages import tree_problems
from kvtier.tiers.page_cache import free_memory_bytes
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Payloads
from kvtier.tiers.record import Bytes, DiskRecord, IndexEntry, RecordError
from kvtier.tiers.slab import SlabPayloads
from kvtier.tiers.slab_file import SlabFiles
from kvtier.tiers.usage import UsageBook, Use

_READ_THREADS = 2


class DiskReader(DiskPages):
    """The committed pages of a folder, while another process writes to it or nobody does.

    Every lookup is a snapshot of the index of that moment. Slots that a reader's snapshot names are
    not written again before it has ended, even if the writer removes the page; a writer that finds
    no other slot waits for it and then refuses the put, naming the reader's process. A reader that
    dies is forgotten by the writer's next look. Nothing is changed: uses are not recorded, damaged
    pages are misses and stay.

    Args:
        path: the folder.
        timeout_s: deadline of ``close``.

    Raises:
        DiskError: there is no store in the folder, it is of another version, or it is open in this
            process already (read through that tier).
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = 30.0) -> None:
        folder = Path(path)
        self._timeout_s = timeout_s
        self._closed = False
        size = require_store(folder)
        if problems := _tree_problems(folder):
            raise FileDamagedError(f"{folder / DATA} is damaged: {problems[0]}")
        file = LmdbFile(folder, map_bytes=size, durable=True, read_only=True)
        try:
            info = require_info(file)
            shape = PageShape(info.page_bytes, info.plane_ranges)
            self._slabs, payloads = _payloads(file, info, shape)
        except BaseException:
            file.close(0.0)
            raise
        self._map = KeyMap(file)
        super().__init__(file, payloads, shape, info)

    def __len__(self) -> int:
        self._require_open()
        self._follow()
        with self._file.reading() as txn:
            return int(txn.stat(self._file.index)["entries"])

    def __contains__(self, key: object) -> bool:
        """Whether a committed page is there now."""
        self._require_open()
        self._follow()
        if not isinstance(key, bytes):
            return False
        with self._look([key], True) as (_, (place,)):
            return place is not None

    def read_pages(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[bool]:
        """As ``DiskTier.read_pages``."""
        self._require_open()
        self._follow()
        hits = super().read_pages(keys, outs)
        missed = [at for at, hit in enumerate(hits) if not hit]
        if missed and self._slabs is not None and self._slabs.follow():
            # The writer has made or replaced files since.
            again = super().read_pages([keys[at] for at in missed], [outs[at] for at in missed])
            for at, hit in zip(missed, again, strict=True):
                hits[at] = hit
        return hits

    def read_planes(self, keys: Sequence[bytes], plane: int, outs: Sequence[Bytes]) -> list[bool]:
        """As ``DiskTier.read_planes``."""
        self._require_open()
        self._follow()
        if self._slabs is not None:
            self._slabs.follow()
        return super().read_planes(keys, plane, outs)

    def stats(self) -> ReadCounts:
        """Reads so far."""
        return self._reader.counts

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the folder go; whether it could be done in time."""
        self._require_own_process()
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        with self._closing:
            if not self._closed:
                self._closed = True
                try:
                    self._file.close(wait_s)
                except DeadlineExceededError:
                    return False
                return self._payloads.close(max(0.5, deadline - time.monotonic()))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _follow(self) -> None:
        """Go on with the file that is in the folder now, and with all of it."""
        if self._file.replaced:
            self._file.reopen(self._timeout_s)
        try:
            with self._file.reading():
                pass
        except lmdb.MapResizedError:
            self._file.follow_size(self._timeout_s)

    @contextmanager
    def _look(
        self, keys: Sequence[bytes], settled: bool
    ) -> Iterator[tuple[lmdb.Transaction, Sequence[bytes | None]]]:
        with ExitStack() as ending:
            with self._map.lock:
                txn = ending.enter_context(self._file.reading())
                self._map.follow(txn)
                places = [self._map.place(txn, key) for key in keys]
            yield txn, places

    def _damaged(self, key: bytes, seen: bytes, reason: str) -> None:
        pass

    def _used(self, keys: Sequence[bytes], hits: int) -> None:
        pass

    def _still_stored(self, key: bytes, record: DiskRecord) -> bool:
        with self._file.reading() as txn:
            return txn.get(record.place, db=self._file.index) is not None

    def _snapshot(self) -> tuple[dict[bytes, DiskRecord], UsageBook]:
        self._follow()
        records: dict[bytes, DiskRecord] = {}
        uses: dict[bytes, Use] = {}
        stored = self._info.slot_bytes or self._info.page_bytes
        with self._file.reading() as txn:
            raw_uses = {bytes(place): bytes(raw) for place, raw in txn.cursor(db=self._file.use)}
            for place_view, raw in txn.cursor(db=self._file.index):
                place = bytes(place_view)
                try:
                    record = IndexEntry.decode(place, bytes(raw)).record(stored)
                except RecordError:
                    continue
                records[record.key] = record
                use = Use.decode(place, raw_uses.get(place, b""))
                if use is not None:
                    uses[record.key] = use
        return records, UsageBook(uses)

    def _tree_problems(self) -> list[str]:
        return _tree_problems(self._file.folder)

    def _require_open(self) -> None:
        self._require_own_process()
        if self._closed:
            raise ClosedError(f"the reader of {self._file.folder} is closed")


def _tree_problems(folder: Path) -> list[str]:
    # Of a file that is being written the walk sees a mixture of two trees.
    return tree_problems(folder / DATA) if writer_of(folder) is None else []


def _payloads(
    file: LmdbFile, info: FolderInfo, shape: PageShape
) -> tuple[SlabFiles | None, Payloads]:
    if info.payload == "inline":
        beyond = 2 * file.map_bytes > free_memory_bytes()
        pool = IoPool(_READ_THREADS, "kvtier-disk-read") if beyond else None
        return None, InlinePayloads(file, shape, pool)
    reads = IoPool(_READ_THREADS, "kvtier-disk-read")
    files = SlabFiles(
        file.folder,
        slot_bytes=info.slot_bytes,
        page_bytes=info.page_bytes,
        per_segment=info.segment_bytes // info.slot_bytes,
        reads=reads,
        writes=None,
        writable=False,
        cache_reads=False,
    )
    try:
        files.open_found()
    except OSError as error:
        reads.close(1.0)
        raise DiskError(f"the slab files of {file.folder} cannot be read: {error}") from error
    return files, SlabPayloads(file, shape, files, None, reads=reads, writes=None)
