"""Who may be inside while a database is unmapped."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.errors import DeadlineExceededError
from kvtier.tiers.gate import Gate

DEADLINE_S = 20.0


def test_owners_are_alone_and_readers_are_side_by_side() -> None:
    gate, lock = Gate(DEADLINE_S), threading.Lock()
    inside = {"reader": 0, "owner": 0}
    seen: set[tuple[int, int]] = set()

    def visit(who: str) -> None:
        with lock:
            inside[who] += 1
            seen.add((inside["reader"], inside["owner"]))
        time.sleep(0.0005)
        with lock:
            inside[who] -= 1

    def read() -> None:
        for _ in range(30):
            with gate:
                visit("reader")

    def own() -> None:
        for _ in range(10):
            with gate.alone(DEADLINE_S):
                visit("owner")

    together = threading.Barrier(2, timeout=DEADLINE_S)

    def meet() -> None:
        with gate:
            together.wait()

    for works in ([meet, meet], [read, read, read, own, own]):
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    assert seen
    assert all(owners == 0 or (readers, owners) == (0, 1) for readers, owners in seen)


def test_an_owner_gets_in_though_another_one_gave_up() -> None:
    gate = Gate(DEADLINE_S)
    reading, leave, tried = threading.Event(), threading.Event(), threading.Event()
    owned: list[bool] = []

    def read() -> None:
        with gate:
            reading.set()
            leave.wait(DEADLINE_S)

    def own() -> None:
        with gate.alone(DEADLINE_S):
            owned.append(leave.is_set())

    def give_up() -> None:
        with pytest.raises(DeadlineExceededError, match="1 reads did not end"), gate.alone(0.05):
            pass
        tried.set()

    threads = [threading.Thread(target=work) for work in (read, own, give_up)]
    threads[0].start()
    assert reading.wait(DEADLINE_S)
    for thread in threads[1:]:
        thread.start()
    assert tried.wait(DEADLINE_S)
    began = time.monotonic()
    leave.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert owned == [True]
    assert time.monotonic() - began < DEADLINE_S / 2, "nobody told the owner"
    with gate:
        pass
