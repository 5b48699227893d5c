"""The disk tier: pages in an LMDB-indexed folder that survive a restart, each verified at every read.

What it promises: after a put is acknowledged as durable, the page is returned byte for byte until it
is evicted or deleted, across kill -9 and power loss (``durability="relaxed"`` may lose what was
written in the last two seconds or the last 32 commits, to a power cut only). A page that was not
acknowledged is wholly there or wholly absent. Nothing else is ever returned. The folder never takes
more than ``capacity_bytes``.

LMDB decides what is stored, where, and what may be written: keys, records, uses and notes change in
its transactions. The bytes are in slots of preallocated slab files, or, for small pages and where it
is asked for, in the database itself (see ``payload``). A page that fails its checksums is counted,
reported, removed, and can be stored again. A database whose tree is damaged starts empty at the next
open; while it is open, LMDB may also end the process on such damage (it maps the file into memory).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import lmdb

from kvtier.errors import ClosedError, ConfigError, DeadlineExceededError
from kvtier.tiers.commit import Committer
from kvtier.tiers.disk_open import open_folder
from kvtier.tiers.disk_pages import flat
from kvtier.tiers.disk_stats import DiskStats, count
from kvtier.tiers.disk_tools import DiskTools
from kvtier.tiers.disk_wish import Evict, Wish
from kvtier.tiers.folder_info import require_info, require_store
from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_pages import tree_problems
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Payload
from kvtier.tiers.read_ahead import warn_of_read_ahead
from kvtier.tiers.record import KEY_MAX, Bytes, DiskRecord
from kvtier.tiers.usage import UsageBook
from kvtier.tiers.writer import Delete, Discard, Look, Note, Put, Sync, Writer

Durability = Literal["durable", "relaxed"]

#: From this page size on checksums are computed beside the writer, while the group before is
#: written; below, handing the work over costs more than the work.
_SUM_BESIDE_BYTES = 64 << 10


@dataclass(frozen=True)
class CloseReport:
    """How closing went.

    Attributes:
        dropped: keys of puts that were not acknowledged in time. They may or may not be found at
            the next open.
        clean: whether the threads ended and the folder is closed. If not, a disk operation or a
            read hangs; the folder stays locked until this process ends.
    """

    dropped: list[bytes]
    clean: bool


class DiskTier(DiskTools):
    """Pages of one layout in a folder. All methods may be called from any thread.

    Args:
        path: the folder; made (mode 0700) if missing. One tier writes to it at a time.
        layout_digest: ``PageLayout.digest``; a folder with pages of another layout is refused.
        page_bytes: bytes of a page.
        plane_ranges: ``(offset, nbytes)`` of each plane in a page, ascending.
        capacity_bytes: what the folder may take on disk, reserved at once where the file system
            can. A smaller value than before evicts pages and shrinks the files.
        payload: ``slab`` keeps the bytes in slots of files beside the database, ``inline`` in it.
            ``None``: as the folder has it, a new one slabs for pages of 32 KiB and more.
        durability: ``durable`` syncs every commit; ``relaxed`` lets a power cut undo what was
            written in the last two seconds or the last 32 commits.
        queue_bytes: payload that may wait for the writer; beyond it ``put`` blocks.
        batch_bytes: payload of one transaction at most (less in a small tier).
        segment_bytes: size of a slab file, for a new folder.
        timeout_s: deadline of ``put``, ``flush`` and ``close`` where none is given.
        on_damage: called with the key and the reason when a read finds a page damaged, in the
            reading thread.
        layout_info: the layout in readable form, kept for tools.
        evict: chooses the pages to give up at a lowered capacity; without it, those used longest
            ago, leaves first.

    Raises:
        ConfigError: an argument is unusable, the capacity is too small for one page, or the folder
            holds pages of another layout or placement.
        DiskError: the folder is in use, not writable, of another version, or the disk is full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout_digest: bytes,
        page_bytes: int,
        plane_ranges: Sequence[tuple[int, int]],
        capacity_bytes: int,
        payload: Payload | None = None,
        durability: Durability = "durable",
        queue_bytes: int = 64 << 20,
        batch_bytes: int = 16 << 20,
        segment_bytes: int = 1 << 30,
        timeout_s: float = 30.0,
        on_damage: Callable[[bytes, str], None] | None = None,
        layout_info: Mapping[str, Any] | None = None,
        evict: Evict | None = None,
    ) -> None:
        if durability not in ("durable", "relaxed"):
            raise ConfigError(f"durability is {durability!r}; use durable or relaxed")
        if payload not in (None, "slab", "inline"):
            raise ConfigError(f"payload is {payload!r}; use slab, inline or None")
        if not 1 <= len(layout_digest) <= KEY_MAX:
            raise ConfigError(
                f"layout_digest has {len(layout_digest)} bytes; it must have 1 to {KEY_MAX}"
            )
        shape = PageShape(page_bytes, plane_ranges)
        self._timeout_s = timeout_s
        self._on_damage = on_damage
        self._closed: CloseReport | None = None
        opened = open_folder(
            Path(path),
            Wish(
                shape=shape,
                layout=layout_digest,
                payload=payload,
                capacity_bytes=capacity_bytes,
                batch_bytes=batch_bytes,
                segment_bytes=segment_bytes,
                durable=durability == "durable",
                layout_info=layout_info,
                evict=evict,
                patience_s=timeout_s,
            ),
        )
        self._lock, self._room, self._report = opened.lock, opened.room, opened.report
        self._commits = Committer(
            opened.file,
            opened.payloads,
            opened.room,
            layout_digest,
            opened.records,
            opened.usage,
            durable=durability == "durable",
            timeout_s=timeout_s,
            following=lambda most: self._writer.next_puts(most),
        )
        self._sums = (
            IoPool(1, "kvtier-disk-sums") if shape.page_bytes >= _SUM_BESIDE_BYTES else None
        )
        super().__init__(opened.file, opened.payloads, shape, opened.info)
        self._writer = Writer(
            self._commits.apply,
            queue_bytes=queue_bytes,
            batch_puts=self._room.batch_puts,
            batch_deletes=self._room.batch_deletes,
            puts_now=self._batch_puts_now,
            prepare=self._start_sums if self._sums is not None else None,
            idle=self._commits.idle,
        )
        if opened.info.payload == "inline" and not opened.file.places.usable:
            warn_of_read_ahead(self.path, self.live_capacity_bytes)

    @classmethod
    def open_existing(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int | None = None,
        durability: Durability = "durable",
        timeout_s: float = 30.0,
    ) -> Self:
        """The tier of a folder that says itself what it holds, to change it with a tool.

        Args:
            capacity_bytes: ``None``: as it was opened last.

        Raises:
            DiskError: there is no store in the folder, it is in use, or of another version.
        """
        folder = Path(path)
        file = LmdbFile(folder, map_bytes=require_store(folder), durable=True, read_only=True)
        try:
            info = require_info(file)
        finally:
            file.close(timeout_s)
        return cls(
            folder,
            layout_digest=info.layout_digest,
            page_bytes=info.page_bytes,
            plane_ranges=info.plane_ranges,
            capacity_bytes=capacity_bytes or info.capacity_bytes,
            durability=durability,
            timeout_s=timeout_s,
        )

    # ------------------------------------------------------------------ looking

    @property
    def live_capacity_bytes(self) -> int:
        """What the ``stored_bytes`` of all pages may add up to."""
        return self._room.live_capacity_bytes

    @property
    def live_bytes(self) -> int:
        """What the stored pages are charged with now; changes that are still queued do not
        count.
        """
        return self._commits.live_bytes

    def __len__(self) -> int:
        return len(self._commits.records)

    def __contains__(self, key: object) -> bool:
        """Whether a committed, so far undamaged page is there. Looks in memory only."""
        return isinstance(key, bytes) and self._commits.shows(key)

    def stored_bytes(self, key: bytes) -> int:
        """What a stored page is charged with; 0 if it is not there."""
        record = self._commits.records.get(key)
        return 0 if record is None else record.stored_bytes

    def stored_bytes_of(self, nbytes: int) -> int:
        """What a payload of ``nbytes`` would be charged with: its slot, or its map pages and its
        share of the index.
        """
        return self._room.stored_bytes_of(nbytes)

    @property
    def note_bytes(self) -> int:
        """The longest state or description that a tier of this capacity keeps."""
        return self._room.note_bytes

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages were used, though not read from here; they move back in the order of eviction."""
        self._commits.usage.touch((key for key in keys if key in self._commits.records), hits=0)

    # ------------------------------------------------------------------ writing

    def put(
        self,
        key: bytes,
        *,
        parent: bytes | None,
        depth: int,
        identity: bytes,
        data: Bytes,
        ephemeral: bool = False,
        timeout_s: float | None = None,
    ) -> Future[None]:
        """Queue a page, uint8 ``[page_bytes]``, to be stored; a page of that key is replaced.

        ``data`` is not copied: it must not change before the future is resolved. Changes take
        effect in the order of the calls. The future resolves when the page is committed (see
        ``durability``), or fails with DiskError or TierFullError; then the page is as it was
        before, and the put may be repeated. It may be cancelled until its group is being written.
        Callbacks run in the writer thread.

        Raises:
            DeadlineExceededError: the queue stayed full for ``timeout_s``.
            LayoutError: ``data`` is not a contiguous uint8 array of ``page_bytes``.
            ConfigError: the key, the digests or the depth are unusable.
            ClosedError: after ``close``.
        """
        self._require_open()
        for name, value, shortest in (
            ("key", key, 1),
            ("parent", parent, 1),
            ("identity", identity, 0),
        ):
            if value is None and name == "parent":
                continue
            if not isinstance(value, bytes) or not shortest <= len(value) <= KEY_MAX:
                raise ConfigError(f"{name} is {value!r}; it must be {shortest} to {KEY_MAX} bytes")
        if (parent is None) != (depth == 0) or not 0 <= depth < 1 << 32:
            raise ConfigError(
                f"depth is {depth} with parent {parent!r}; depth 0 and no parent belong together"
            )
        data = flat(data, self._shape.page_bytes, "data", writable=False)
        op = Put(key, parent, depth, identity, data, ephemeral)
        self._writer.submit(op, self._timeout_s if timeout_s is None else timeout_s)
        return op.future

    def _batch_puts_now(self) -> int:
        ready = self._payloads.ready
        return self._room.batch_puts if ready is None else ready

    def _start_sums(self, op: Put) -> None:
        assert self._sums is not None
        op.sums = self._sums.submit(lambda: self._shape.checksums(op.key, op.data))

    def delete(self, keys: Sequence[bytes]) -> Future[None]:
        """Queue pages for removal; unknown keys are skipped. Ordered with puts; never waits for the
        queue.

        The future is resolved when all are gone. If a part fails, the others may be gone.
        """
        self._require_open()
        at_once = self._room.batch_deletes
        parts = [
            Delete(tuple(keys[at : at + at_once])) for at in range(0, max(1, len(keys)), at_once)
        ]
        done = parts[0].future if len(parts) == 1 else _all_of([part.future for part in parts])
        for part in parts:
            self._writer.submit(part, 0.0)
        return done

    def _note(self, name: bytes, text: bytes | None) -> Future[None]:
        op = Note(name, text)
        self._writer.submit(op, 0.0)
        return op.future

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every change queued before is committed or has failed, and make it durable in
        any mode.

        Raises:
            DeadlineExceededError: it takes longer than ``timeout_s``; the changes are still being
            written.
            DiskError: the folder could not be synced.
        """
        self._require_open()
        op = Sync()
        self._writer.submit(op, 0.0)
        self._wait(op.future, timeout_s)

    def _wait(self, done: Future[None], timeout_s: float | None) -> None:
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            done.result(wait_s)
        except FutureTimeoutError:
            raise DeadlineExceededError(
                f"{self._writer.queued_bytes} queued bytes were not written within {wait_s:.1f} s; "
                "they still are being written"
            ) from None

    # ------------------------------------------------------------------ the end

    def close(self, timeout_s: float | None = None) -> CloseReport:
        """Write what is queued, as far as the time goes, and give the folder back. A second call
        reports again.
        """
        self._require_own_process()
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        with self._closing:
            if self._closed is None:
                with suppress(ClosedError):
                    self._writer.submit(Sync(), 0.0)
                dropped, clean = self._writer.close(wait_s)
                if clean:
                    try:
                        self._file.close(deadline - time.monotonic())
                        left = max(0.5, deadline - time.monotonic())
                        clean = self._payloads.close(left)
                        clean &= self._sums is None or self._sums.close(left)
                    except DeadlineExceededError:
                        clean = False
                if clean:
                    self._lock.release(clean=not dropped)
                self._closed = CloseReport(dropped, clean)
            return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> DiskStats:
        """Counts since open. Also works after ``close``."""
        return count(
            self._commits,
            self._reader.counts,
            self._writer,
            live_capacity_bytes=self.live_capacity_bytes,
            data_path=self._file.path,
            slab_bytes=self._payloads.disk_bytes(),
            opened=self._report,
        )

    def check(self) -> None:
        """Recount the books from the folder, after a flush; AssertionError if they are wrong."""
        self.flush()
        self._commits.check()

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _look(
        self, keys: Sequence[bytes], settled: bool
    ) -> Iterator[tuple[lmdb.Transaction, Sequence[bytes | None]]]:
        if not settled:
            places = [self._commits.place(key) for key in keys]
            with self._file.reading() as txn:
                yield txn, places
            return
        with ExitStack() as ending:
            # The lock comes before the snapshot: who waits for it must not keep the database from
            # being reopened.
            self._commits.wait(self._timeout_s)
            try:
                places = [self._commits.place(key) for key in keys]
                txn = ending.enter_context(self._file.reading())
            finally:
                self._commits.lock.release()
            yield txn, places

    def _damaged(self, key: bytes, seen: bytes, reason: str) -> None:
        self._commits.hide(key)
        with suppress(ClosedError):
            self._writer.submit(Discard(key, seen), 0.0)
        if self._on_damage is not None:
            self._on_damage(key, reason)

    def _snapshot(self) -> tuple[dict[bytes, DiskRecord], UsageBook]:
        with self._commits.lock:
            return dict(self._commits.records), self._commits.usage

    def _used(self, keys: Sequence[bytes], hits: int) -> None:
        self._commits.usage.touch(keys, hits=hits)

    def _still_stored(self, key: bytes, record: DiskRecord) -> bool:
        # A damaged page is hidden at once, a page that was removed is in no book.
        now = self._commits.records.get(key)
        return now is None or now.sequence == record.sequence

    def _tree_problems(self) -> list[str]:
        found: list[str] = []
        look = Look(lambda: found.extend(tree_problems(self._file.path)))
        self._writer.submit(look, 0.0)
        self._wait(look.future, None)
        return found

    def _require_open(self) -> None:
        self._require_own_process()
        if self._closed is not None:
            raise ClosedError(f"the disk tier at {self._file.folder} is closed")


def _all_of(futures: Sequence[Future[None]]) -> Future[None]:
    """A future that is resolved after the last of ``futures``, which are resolved in order; first
    error wins.
    """
    whole: Future[None] = Future()
    whole.set_running_or_notify_cancel()

    def finish(_: Future[None]) -> None:
        errors = [future.exception() for future in futures]
        first = next((error for error in errors if error is not None), None)
        if first is None:
            whole.set_result(None)
        else:
            whole.set_exception(first)

    futures[-1].add_done_callback(finish)
    return whole
