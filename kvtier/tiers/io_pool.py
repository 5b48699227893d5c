"""A few threads that do the tier's I/O and checksums beside the thread that asked for them."""

from __future__ import annotations

import queue
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
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; its outcome is the future's."""
        future: Future[T] = Future()

        self._calls.put(lambda: _run(call, future))
        return future

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls in this thread and the pool's, until all have ended. The first error ends the
        rest and is raised. Not for calls that use the pool themselves.
        """
        left = deque(calls)

        def work() -> None:
            while True:
                try:
                    call = left.popleft()
                except IndexError:
                    return
                try:
                    call()
                except BaseException:
                    left.clear()
                    raise

        beside = [self.submit(work) for _ in range(min(len(self._threads), len(calls) - 1))]
        try:
            work()
        finally:
            # They write into the caller's memory: they must end before this does. A thread that
            # has not begun by now has nothing left to do.
            errors = [None if future.cancel() else future.exception() for future in beside]
        for error in errors:
            if error is not None:
                raise error

    def close(self, timeout_s: float) -> bool:
        """End the threads after what is queued; whether all ended in time."""
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            del call  # the queue's next wait must not keep a page's memory alive


def _run(call: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
