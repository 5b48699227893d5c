"""A few threads that do the tier's I/O and checksums beside the thread that asked for them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

#: Processors that this process may use.
PROCESSORS = len(os.sched_getaffinity(0))


class IoPool:
    """Runs calls in daemon threads: a disk that hangs must not keep the process from ending, which
    the threads of ``concurrent.futures`` would.

    Args:
        threads: calls that run at once.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None] | None] = deque()
        self._workers = [_Worker() for _ in range(threads)]
        #: The thread that had work last comes last, and gets the next: it and its processor still
        #: know what to do, and wake in half of the time (measured).
        self._idle = list(self._workers)
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=name, daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; its outcome is the future's."""
        future: Future[T] = Future()
        self._put(lambda: _run(call, future))
        return future

    def run(self, calls: Sequence[Callable[[], None]], threads: int | None = None) -> None:
        """Make calls in this thread and the pool's, until all have ended. The first error ends the
        rest and is raised. Not for calls that use the pool themselves.

        Args:
            threads: of the pool's, at most; all if ``None``.
        """
        if not calls:
            return
        job = _Job(calls)
        most = len(self._threads) if threads is None else min(threads, len(self._threads))
        for _ in range(min(most, len(calls) - 1)):
            self._put(job.work)
        job.work()
        job.wait()

    def close(self, timeout_s: float) -> bool:
        """End the threads after what is queued; whether all ended in time."""
        for _ in self._threads:
            self._put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _put(self, call: Callable[[], None] | None) -> None:
        with self._lock:
            if not self._idle:
                self._calls.append(call)
                return
            worker = self._idle.pop()
        worker.call = call
        worker.wake.release()

    def _run(self, worker: _Worker) -> None:
        while True:
            worker.wake.acquire()
            call, worker.call = worker.call, None
            while call is not None:
                call()
                # The next wait must not keep a page's memory alive.
                call = None
                with self._lock:
                    if not self._calls:
                        self._idle.append(worker)
                        break
                    call = self._calls.popleft()
            else:
                return


class _Worker:
    """What a thread is to do next. ``wake`` is held while there is nothing."""

    __slots__ = ("call", "wake")

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class _Job:
    """Calls that several threads take from, one at a time. A page in memory is read in less time than
    futures take for it."""

    __slots__ = ("_ended", "_error", "_left", "_lock", "_unfinished")

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self._left = deque(calls)
        self._unfinished = len(calls)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def work(self) -> None:
        """Make calls until none is left to begin."""
        while True:
            try:
                call = self._left.popleft()
            except IndexError:
                return
            ended = 1
            try:
                call()
            except BaseException as error:
                self._error = self._error or error
                ended += self._drop()
            with self._lock:
                self._unfinished -= ended
                if not self._unfinished:
                    self._ended.release()

    def _drop(self) -> int:
        """Begin nothing more; how many calls that leaves out."""
        dropped = 0
        with suppress(IndexError):
            while True:
                self._left.popleft()
                dropped += 1
        return dropped

    def wait(self) -> None:
        """Until all that was begun has ended: it writes into the caller's memory. Raises the first
        error."""
        self._ended.acquire()
        if self._error is not None:
            raise self._error


def _run(call: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
