"""The disk tier: pages in an LMDB database that survive a restart, each verified at every read.

What it promises: a put that was acknowledged is there after a kill -9, and with
``durability="durable"`` after a power cut too (``"relaxed"`` may lose the last commit then); a page
comes back byte for byte as it was put, or it is a miss; the folder never takes more than
``capacity_bytes``.

A group of puts is one transaction, so no page is ever half there. A page that fails its checksums
is counted, reported, removed, and can be stored again. A database whose tree is damaged starts
empty at the next open; while it is open, LMDB may also end the process on such damage (it maps the
file into memory).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from kvtier.errors import ClosedError, ConfigError, DeadlineExceededError, DiskError, LayoutError
from kvtier.tiers.lmdb_commit import Committer
from kvtier.tiers.lmdb_open import OpenReport, open_folder
from kvtier.tiers.lmdb_read import Reader
from kvtier.tiers.lmdb_tree import oldest_first
from kvtier.tiers.record import KEY_MAX, Bytes, DiskRecord, PageShape
from kvtier.tiers.writer import Delete, Discard, Put, Sync, Writer

Durability = Literal["durable", "relaxed"]


@dataclass(frozen=True)
class DiskStats:
    """Counts since open; sizes in bytes.

    Attributes:
        entries, live_bytes, live_capacity_bytes: pages stored now, what they are charged with, and
            its limit.
        puts, deletes, bytes_written: committed changes; ``bytes_written`` counts payload.
        reads, hits, misses, bytes_read: page and plane reads; a damaged page counts as a miss.
        damaged: pages that failed verification at a read.
        commits, commit_errors: transactions committed, groups of changes that failed.
        map_full: groups that did not fit the map in one transaction.
        queue_bytes, queue_peak_bytes: payload that waits for its commit now, and at most.
        file_bytes: size of the database file.
        opened: what opening the folder found.
    """

    entries: int
    live_bytes: int
    live_capacity_bytes: int
    puts: int
    deletes: int
    bytes_written: int
    reads: int
    hits: int
    misses: int
    bytes_read: int
    damaged: int
    commits: int
    commit_errors: int
    map_full: int
    queue_bytes: int
    queue_peak_bytes: int
    file_bytes: int
    opened: OpenReport


@dataclass(frozen=True)
class CloseReport:
    """How closing went.

    Attributes:
        dropped: keys of puts that were not acknowledged in time. They may or may not be found at
            the next open.
        clean: whether the thread ended and the database is closed. If not, a disk operation or a
            read hangs; the folder stays locked until this process ends.
    """

    dropped: list[bytes]
    clean: bool


class DiskTier:
    """Pages of one layout in a folder. All methods may be called from any thread.

    Args:
        path: the folder; made (mode 0700) if missing. One tier writes to it at a time.
        layout_digest: ``PageLayout.digest``; a folder with pages of another layout is refused.
        page_bytes: bytes of a page.
        plane_ranges: ``(offset, nbytes)`` of each plane in a page, ascending.
        capacity_bytes: what the folder may take on disk, reserved at once where the file system
            can. A smaller value than before evicts the oldest leaves and shrinks the file; while it
            is being copied for that, the old and the new file exist side by side.
        durability: ``durable`` syncs every commit; ``relaxed`` lets a power cut undo the last one.
        queue_bytes: payload that may wait for the writer; beyond it ``put`` blocks.
        batch_bytes: payload of one transaction at most (less in a small tier).
        timeout_s: deadline of ``put``, ``flush`` and ``close`` where none is given.
        on_damage: called with the key and the reason when a read finds a page damaged, in the
            reading thread.

    Raises:
        ConfigError: an argument is unusable, the capacity is too small for one page, or the folder
            holds pages of another layout.
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
        durability: Durability = "durable",
        queue_bytes: int = 64 << 20,
        batch_bytes: int = 16 << 20,
        timeout_s: float = 30.0,
        on_damage: Callable[[bytes, str], None] | None = None,
    ) -> None:
        if durability not in ("durable", "relaxed"):
            raise ConfigError(f"durability is {durability!r}; use durable or relaxed")
        if not 1 <= len(layout_digest) <= KEY_MAX:
            raise ConfigError(
                f"layout_digest has {len(layout_digest)} bytes; it must have 1 to {KEY_MAX}"
            )
        self._shape = PageShape(page_bytes, plane_ranges)
        self._pid = os.getpid()
        self._timeout_s = timeout_s
        self._on_damage = on_damage
        opened = open_folder(
            Path(path),
            shape=self._shape,
            layout=layout_digest,
            capacity_bytes=capacity_bytes,
            batch_bytes=batch_bytes,
            durable=durability == "durable",
        )
        self._file, self._lock, self._room, self._report = (
            opened.file,
            opened.lock,
            opened.room,
            opened.report,
        )
        self._commits = Committer(self._file, self._room, layout_digest, opened.records, timeout_s)
        self._writer = Writer(
            self._commits.apply,
            queue_bytes=queue_bytes,
            batch_puts=self._room.batch_puts,
            batch_deletes=self._room.batch_deletes,
        )
        self._reader = Reader(self._file, self._commits, self._shape, self._discard)
        self._closing = threading.Lock()
        self._closed: CloseReport | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self._file.folder

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
        """What a payload of ``nbytes`` would be charged with: its map pages and its share of the
        index.
        """
        return self._room.stored_bytes_of(nbytes)

    def records(self) -> Iterator[DiskRecord]:
        """All stored pages, oldest first and parents before children, as they are at the call."""
        self._require_open()
        with self._commits.lock:
            records = dict(self._commits.records)
        return oldest_first(records)

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
        data = _flat(data, self._shape.page_bytes, "data", writable=False)
        op = Put(key, parent, depth, identity, data, ephemeral)
        self._writer.submit(op, self._timeout_s if timeout_s is None else timeout_s)
        return op.future

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

    def read(self, key: bytes, out: Bytes) -> bool:
        """Read a page into ``out``, uint8 ``[page_bytes]``. True only after every byte was
        verified.

        On False the page is not there or was damaged, and ``out`` holds nothing meaningful.

        Raises:
            DiskError: the system refuses to read; the page may still be good.
            LayoutError, ClosedError.
        """
        self._require_open()
        out = _flat(out, self._shape.page_bytes, "out", writable=True)
        return self._reader.page(key, out)

    def read_plane(self, key: bytes, plane: int, out: Bytes) -> bool:
        """Read one plane into ``out``, uint8 of the plane's size, verified by its own checksum. As
        ``read``.
        """
        return self.read_planes([key], plane, [out])[0]

    def read_planes(self, keys: Sequence[bytes], plane: int, outs: Sequence[Bytes]) -> list[bool]:
        """The same plane of many pages, in one snapshot; one answer a page, as ``read_plane``.

        Space that is freed meanwhile cannot be reused before the call ends, so read some MiB a
        call.
        """
        self._require_open()
        if not 0 <= plane < len(self._shape.planes):
            raise LayoutError(
                f"plane {plane} does not exist; a page has {len(self._shape.planes)} planes"
            )
        if len(keys) != len(outs):
            raise LayoutError(f"{len(keys)} keys and {len(outs)} outputs; there must be one a key")
        outs = [_flat(out, self._shape.planes[plane][1], "out", writable=True) for out in outs]

        return self._reader.planes(keys, plane, outs)

    def _discard(self, key: bytes, seen: bytes, reason: str) -> None:
        self._commits.hide(key)
        with suppress(ClosedError):
            self._writer.submit(Discard(key, seen), 0.0)
        if self._on_damage is not None:
            self._on_damage(key, reason)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every change queued before is committed or has failed, and make it durable in
        any mode.

        Raises:
            DeadlineExceededError: it takes longer than ``timeout_s``; the changes are still being
            written.
            DiskError: the database could not be synced.
        """
        self._require_open()
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        op = Sync()
        self._writer.submit(op, 0.0)
        try:
            op.future.result(wait_s)
        except FutureTimeoutError:
            raise DeadlineExceededError(
                f"{self._writer.queued_bytes} queued bytes were not written within {wait_s:.1f} s; "
                "they still are being written"
            ) from None

    def close(self, timeout_s: float | None = None) -> CloseReport:
        """Write what is queued, as far as the time goes, and give the folder back. A second call
        reports again.
        """
        self._require_own_process()
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        with self._closing:
            if self._closed is None:
                dropped, clean = self._writer.close(wait_s)
                if clean:
                    try:
                        self._file.close(deadline - time.monotonic())
                        self._lock.release()
                    except DeadlineExceededError:
                        clean = False
                self._closed = CloseReport(dropped, clean)
            return self._closed

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> DiskStats:
        """Counts since open. Also works after ``close``."""
        counts = self._commits.counts
        try:
            file_bytes = os.stat(self._file.path).st_size
        except OSError:
            file_bytes = 0
        reads = self._reader.counts
        return DiskStats(
            entries=len(self),
            live_bytes=self.live_bytes,
            live_capacity_bytes=self.live_capacity_bytes,
            puts=counts.puts,
            deletes=counts.deletes,
            bytes_written=counts.bytes_written,
            reads=reads.reads,
            hits=reads.hits,
            misses=reads.reads - reads.hits,
            bytes_read=reads.bytes_read,
            damaged=reads.damaged,
            commits=counts.commits,
            commit_errors=counts.commit_errors,
            map_full=counts.map_full,
            queue_bytes=self._writer.queued_bytes,
            queue_peak_bytes=self._writer.peak_bytes,
            file_bytes=file_bytes,
            opened=self._report,
        )

    def check(self) -> None:
        """Recount the books from the database, after a flush; AssertionError if they are wrong."""
        self.flush()
        self._commits.check()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise DiskError(
                errno.EPERM,
                f"it was opened by process {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}; open tiers after the fork, or start children with spawn",
                str(self._file.folder),
            )

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


def _flat(array: Bytes, nbytes: int, name: str, *, writable: bool) -> Bytes:
    """``array`` as ``[nbytes]``, the same memory; LayoutError if that is not what it is."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.nbytes != nbytes:
        what = (
            f"{array.dtype} of {array.nbytes} bytes"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise LayoutError(f"{name} is {what}; it must be a uint8 array of {nbytes} bytes")
    if not array.flags.c_contiguous or (writable and not array.flags.writeable):
        raise LayoutError(f"{name} must be contiguous{' and writable' if writable else ''}")
    return array.reshape(-1)
