"""A few threads that do the tier's I/O and checksums beside the thread that asked for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
        #: A lock that is held for each thread that has nothing to do; releasing it wakes the thread. The one
        #: that had work last comes last, and gets the next: pages shared with one thread came faster than
        #: with several in turn (measured).
        self._idle: list[threading.Lock] = []
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(threads)
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
        job = _Job(calls)
        most = len(self._threads) if threads is None else min(threads, len(self._threads))
        try:
            for _ in range(min(most, len(calls) - 1)):
                self._put(job.help)
            job.make()
        finally:
            job.settle()
        if job.error is not None:
            raise job.error

    def close(self, timeout_s: float) -> bool:
        """End the threads after what is queued; whether all ended in time."""
        for _ in self._threads:
            self._put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _put(self, call: Callable[[], None] | None) -> None:
        self._calls.append(call)
        with self._lock:
            if self._idle:
                # In this order an interrupt in between loses no thread.
                wake = self._idle[-1]
                if wake.locked():
                    wake.release()
                self._idle.pop()

    def _work(self) -> None:
        wake = threading.Lock()
        wake.acquire()
        while True:
            call = self._next(wake)
            if call is None:
                return
            call()
            # The next wait must not keep a page's memory alive.
            del call

    def _next(self, wake: threading.Lock) -> Callable[[], None] | None:
        while True:
            with self._lock:
                if wake in self._idle:  # who woke it was interrupted
                    self._idle.remove(wake)
                if self._calls:
                    return self._calls.popleft()
                self._idle.append(wake)
            wake.acquire()


class _Job:
    """Calls that several threads take from, one at a time. A page in memory is read in less time than
    futures take for it."""

    __slots__ = ("_closed", "_ended", "_helping", "_left", "_lock", "error")

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self._left = deque(calls)
        self._lock = threading.Lock()
        #: Threads of the pool that are at it.
        self._helping = 0
        self._closed = False
        self._ended = threading.Lock()
        self._ended.acquire()
        #: The first one of a call.
        self.error: BaseException | None = None

    def make(self) -> None:
        """Make calls until none is left to begin; an error leaves none."""
        while True:
            try:
                call = self._left.popleft()
            except IndexError:
                return
            try:
                call()
            except BaseException as error:
                self.error = self.error or error
                self._left.clear()

    def help(self) -> None:
        """As ``make``, for a thread of the pool; nothing if it comes too late."""
        with self._lock:
            if self._closed:
                return
            self._helping += 1
        try:
            self.make()
        finally:
            with self._lock:
                self._helping -= 1
                if self._closed and not self._helping:
                    self._ended.release()

    def settle(self) -> None:
        """Begin nothing more, and return when all that was begun has ended: it writes into the caller's memory.
        An interrupt waits until then."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._left.clear()
                with self._lock:
                    self._closed = True
                    if not self._helping:
                        break
                self._ended.acquire()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _run(call: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
