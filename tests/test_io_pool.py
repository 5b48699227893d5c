"""The threads that read beside the thread that asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.io_pool import IoPool

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def pool() -> Iterator[IoPool]:
    pool = IoPool(3, "test-io")
    yield pool
    assert pool.close(DEADLINE_S)


@given(calls=st.integers(0, 40), threads=st.none() | st.integers(0, 5))
def test_every_call_is_made_once_and_none_goes_on(
    pool: IoPool, calls: int, threads: int | None
) -> None:
    made: list[int] = []

    def call(number: int) -> None:
        time.sleep(0)
        made.append(number)

    pool.run([partial(call, number) for number in range(calls)], threads)
    assert sorted(made) == list(range(calls))


@pytest.mark.parametrize("threads", [0, 1, 2, None])
def test_as_many_threads_as_asked_for(pool: IoPool, threads: int | None) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with lock:
            inside -= 1

    wanted = 1 + (3 if threads is None else threads)
    pool.run([call] * 40, threads)
    assert most <= wanted
    together = threading.Barrier(wanted, timeout=DEADLINE_S)

    def meet() -> None:
        together.wait()

    pool.run([meet] * wanted, threads)


@given(fails=st.sets(st.integers(0, 19), min_size=1), threads=st.sampled_from([0, 1, None]))
def test_the_first_error_ends_the_rest(pool: IoPool, fails: set[int], threads: int | None) -> None:
    running: set[int] = set()
    failed: list[int] = []

    def call(number: int) -> None:
        running.add(number)
        try:
            time.sleep(0)
            if number in fails:
                failed.append(number)
                raise OSError(number, "no")
        finally:
            running.discard(number)

    with pytest.raises(OSError) as raised:
        pool.run([partial(call, number) for number in range(20)], threads)
    assert not running, "a call goes on after the end"
    assert raised.value.errno in failed
    assert len(failed) <= 1 + (3 if threads is None else threads)
    pool.run([lambda: None] * 4)  # the threads live on


def test_who_asks_does_it_all_if_the_threads_are_busy(pool: IoPool) -> None:
    go_on = threading.Event()
    held = [pool.submit(lambda: go_on.wait(DEADLINE_S)) for _ in range(3)]
    try:
        who: set[str] = set()
        pool.run([lambda: who.add(threading.current_thread().name)] * 5)
        assert who == {threading.current_thread().name}
    finally:
        go_on.set()
    assert all(future.result(DEADLINE_S) for future in held)


def test_many_ask_at_once(pool: IoPool) -> None:
    def ask(made: list[int]) -> None:
        for _ in range(50):
            pool.run([partial(made.append, number) for number in range(5)])

    made: list[list[int]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=ask, args=(one,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert all(sorted(one) == sorted([*range(5)] * 50) for one in made)


def test_an_interrupt_while_a_thread_is_woken_loses_no_thread() -> None:
    class Interrupted(list[threading.Lock]):
        left = 1

        def pop(self, *at: Any) -> threading.Lock:  # type: ignore[override]
            if self.left:
                self.left = 0
                raise KeyboardInterrupt
            return super().pop(*at)

    pool = IoPool(1, "test-io")
    assert pool.submit(lambda: 1).result(DEADLINE_S) == 1
    with pool._lock:
        pool._idle = Interrupted(pool._idle)
    for _ in range(20):  # until it has gone to sleep again
        try:
            pool.submit(lambda: 2).result(DEADLINE_S)
        except KeyboardInterrupt:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("nothing was interrupted")
    assert pool.submit(lambda: 3).result(DEADLINE_S) == 3
    assert pool.close(DEADLINE_S)
