"""The writer thread: a bounded queue of changes, committed in groups, in the order they came."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtier.errors import ClosedError, DeadlineExceededError
from kvtier.tiers.record import Bytes
from kvtier.units import format_size


@dataclass(eq=False, slots=True)
class Put:
    """Store a page."""

    key: bytes
    parent: bytes | None
    depth: int
    identity: bytes
    data: Bytes
    ephemeral: bool
    future: Future[None] = field(default_factory=Future)
    #: The page's checksums, where they are computed before its group is written.
    sums: Future[tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(eq=False, slots=True)
class Delete:
    """Remove pages; unknown keys are skipped."""

    keys: tuple[bytes, ...]
    future: Future[None] = field(default_factory=Future)
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Discard:
    """Remove a page that proved damaged, unless its index entry is no longer the one that was
    seen.
    """

    key: bytes
    seen: bytes | None
    future: Future[None] = field(default_factory=Future)
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Note:
    """Store a text beside the pages, or remove it."""

    name: bytes
    text: bytes | None
    future: Future[None] = field(default_factory=Future)
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Sync:
    """Everything before it is durable once it is done."""

    future: Future[None] = field(default_factory=Future)
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Look:
    """Call ``look`` while nothing is being written."""

    look: Callable[[], None]
    future: Future[None] = field(default_factory=Future)
    nbytes: int = 0


Op = Put | Delete | Discard | Note | Sync | Look
#: Applies a group of changes; one outcome for each, ``None`` for done.
Apply = Callable[[list[Op]], list[Exception | None]]


class Writer:
    """Runs ``apply`` on groups of queued changes in one thread until it is closed.

    A future is resolved in the writer thread, after the group that holds its change was committed.
    Work queued while a group is being committed forms the next one, so groups grow with the load.

    Args:
        apply: commits a group. Whatever it raises fails the group's futures; the thread goes on.
        queue_bytes: payload bytes that may wait or be in work; one put is always accepted.
        batch_puts, batch_deletes: pages that a group may store and remove.
        puts_now: pages that the next group may store, where that is less than ``batch_puts``.
        prepare: called with each put as it is queued; must return at once.
        idle: called when nothing was queued for ``idle_s``; must not raise.
    """

    def __init__(
        self,
        apply: Apply,
        *,
        queue_bytes: int,
        batch_puts: int,
        batch_deletes: int,
        puts_now: Callable[[], int] | None = None,
        prepare: Callable[[Put], None] | None = None,
        idle: Callable[[], None] | None = None,
        idle_s: float = 1.0,
    ) -> None:
        self._apply = apply
        self._prepare = prepare
        self._idle = idle
        self._idle_s = idle_s
        self._limit = queue_bytes
        self._batch_puts = batch_puts
        self._batch_deletes = batch_deletes
        self._puts_now = puts_now
        self._cond = threading.Condition()
        self._queue: deque[Op] = deque()
        self._in_work: list[Op] = []
        self._bytes = 0
        self._peak = 0
        self._closing = False
        self._drain_until = float("inf")
        self._thread = threading.Thread(target=self._run, name="kvtier-disk-writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait or are in work."""
        return self._bytes

    @property
    def peak_bytes(self) -> int:
        """The largest ``queued_bytes`` so far."""
        return self._peak

    def submit(self, op: Op, timeout_s: float) -> None:
        """Queue a change; waits while the queue is full.

        Raises:
            DeadlineExceededError: still full after ``timeout_s``; nothing was queued.
            ClosedError: the writer is closed.
        """
        with self._cond:
            # Called from a future's callback the wait could only end by its deadline: nobody else
            # commits.
            wait_s = 0.0 if threading.current_thread() is self._thread else max(0.0, timeout_s)
            if not self._cond.wait_for(lambda: self._closing or self._fits(op), wait_s):
                raise DeadlineExceededError(
                    f"the disk tier's write queue of {format_size(self._limit)} stayed full for "
                    f"{wait_s:.1f} s; write less, raise queue_bytes or use a faster disk"
                )
            if self._closing:
                raise ClosedError("the disk tier is closed; nothing was written")
            if self._prepare is not None and isinstance(op, Put):
                self._prepare(op)
            self._queue.append(op)
            self._bytes += op.nbytes
            self._peak = max(self._peak, self._bytes)
            self._cond.notify_all()

    def _fits(self, op: Op) -> bool:
        return op.nbytes == 0 or self._bytes == 0 or self._bytes + op.nbytes <= self._limit

    def close(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """Commit what is queued, as far as the time goes, and end the thread.

        Returns:
            Keys of puts that were not acknowledged (their futures fail, except of a group that is
            still being committed), and whether the thread ended.
        """
        with self._cond:
            self._closing = True
            # The last fifth of the time is for the group that is in work when draining must stop.
            self._drain_until = time.monotonic() + 0.8 * timeout_s
            self._cond.notify_all()
        self._thread.join(max(0.0, timeout_s))
        with self._cond:
            rest = list(self._queue)
            self._queue.clear()
            stuck = list(self._in_work)
        for op in rest:
            if not op.future.done() and op.future.set_running_or_notify_cancel():
                op.future.set_exception(
                    ClosedError("the disk tier was closed before this change was written")
                )
        return [
            op.key for op in (*stuck, *rest) if isinstance(op, Put)
        ], not self._thread.is_alive()

    def _run(self) -> None:
        for batch in self._batches():
            try:
                outcomes = self._apply(batch)
            except Exception as error:
                outcomes = [error] * len(batch)
            self._finish(batch, outcomes)

    def _batches(self) -> Iterator[list[Op]]:
        while True:
            batch: list[Op] = []
            with self._cond:
                self._cond.wait_for(
                    lambda: self._queue or self._closing,
                    self._idle_s if self._idle is not None else None,
                )
                if self._queue or self._closing:
                    if not self._queue or time.monotonic() >= self._drain_until:
                        return
                    batch = self._take()
                    self._in_work = batch
            if batch:
                yield batch
            elif self._idle is not None:
                self._idle()

    def _take(self) -> list[Op]:
        batch: list[Op] = []
        puts = deletes = 0
        most = self._batch_puts
        if self._puts_now is not None:
            most = max(1, min(most, self._puts_now()))
        while self._queue:
            op = self._queue[0]
            puts += isinstance(op, Put)
            deletes += len(op.keys) if isinstance(op, Delete) else isinstance(op, Discard)
            if batch and (puts > most or deletes > self._batch_deletes):
                break
            self._queue.popleft()
            batch.append(op)
            if isinstance(op, Sync | Note | Look):
                break
        # From here on a future can no longer be cancelled.
        running = [op for op in batch if op.future.set_running_or_notify_cancel()]
        self._bytes -= sum(op.nbytes for op in batch) - sum(op.nbytes for op in running)
        return running

    def next_puts(self, most: int) -> list[Put]:
        """Up to ``most`` puts that the next group will begin with; they stay queued and may still be
        cancelled.
        """
        puts: list[Put] = []
        deletes = 0
        with self._cond:
            for op in self._queue:
                deletes += len(op.keys) if isinstance(op, Delete) else isinstance(op, Discard)
                if isinstance(op, Sync | Note | Look) or deletes > self._batch_deletes:
                    break
                if isinstance(op, Put) and not op.future.cancelled():
                    if len(puts) == min(most, self._batch_puts):
                        break
                    puts.append(op)
        return puts

    def _finish(self, batch: list[Op], outcomes: list[Exception | None]) -> None:
        with self._cond:
            self._in_work = []
            self._bytes -= sum(op.nbytes for op in batch)
            self._cond.notify_all()
        for op, error in zip(batch, outcomes, strict=True):
            if error is None:
                op.future.set_result(None)
            else:
                op.future.set_exception(error)
