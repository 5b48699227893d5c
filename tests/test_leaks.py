"""Nothing is left behind: hundreds of sessions, opened, forked, cropped, abandoned and closed."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import psutil
from session_steps import TOKENS, Sequence
from store_model import IDENTITY, Config, assert_empty, close_clean, device, open_store

from kvtier.errors import TierFullError
from kvtier.session.session import Session
from kvtier.store.store import TieredStore


def live_through(store: TieredStore, sessions: int, seed: int) -> None:
    rng = random.Random(seed)
    open_: list[Sequence] = []
    for _ in range(sessions):
        one = Sequence(store)
        open_.append(one)
        try:
            one.restore([rng.randrange(2) for _ in range(rng.randrange(1, 12))])
            one.append([rng.randrange(2) for _ in range(rng.randrange(1, 9))], rng.randrange(2))
            if rng.random() < 0.3:
                open_.append(one.fork())
            if rng.random() < 0.3:
                one.crop(rng.randrange(len(one.tokens)))
            if rng.random() < 0.3:
                one.session.lease()  # a step that is given up
        except TierFullError:
            pass
        while len(open_) > rng.randrange(3):
            open_.pop(rng.randrange(len(open_))).session.close()
    for one in open_:
        one.session.close()


def test_hundreds_of_sessions_leave_nothing_held(tmp_path: Path) -> None:
    store = open_store(Config(vram=8, host=4, disk=60), device(), tmp_path, check=False)
    live_through(store, 200, seed=0)
    assert_empty(store)
    close_clean(store)


def test_memory_comes_back(tmp_path: Path) -> None:
    process = psutil.Process()
    threads = threading.active_count()
    used = []
    for number in range(6):
        on = device(trace_limit=1)
        store = open_store(Config(vram=8, host=4, disk=60), on, tmp_path, check=False)
        live_through(store, 100, seed=number)
        close_clean(store)
        on.close()
        del store, on
        gc.collect()
        used.append(process.memory_info().rss)
    # The first rounds warm up caches and arenas.
    assert used[-1] - used[1] < 8 << 20, [u >> 20 for u in used]
    assert threading.active_count() <= threads


def test_a_session_that_was_forgotten_does_not_keep_others_from_moving_its_pages() -> None:
    store = open_store(Config(vram=2, host=4), device())
    one = Sequence(store)
    one.append([1] * 2 * TOKENS, 0)
    one.session.seal()
    one.session.lease()
    compute = store.device.compute_stream()
    one.session.rest(compute.name, compute.record())
    pages, owner = one.session._owned(0), one.session.owner
    del one
    gc.collect()
    store.give_tails(store.take_tails(2), [])
    assert all(sorted(page.copies) == ["host"] for page in pages)
    store.disown(pages, owner)
    close_clean(store)


def test_a_session_in_a_closed_store_closes_in_any_state() -> None:
    store = open_store(Config(vram=4), on := device())
    full, idle, empty = Sequence(store), Sequence(store), Session(store, IDENTITY)
    full.append([1] * 5, 0)
    full.session.lease()
    idle.append([0], 0)
    store.close()
    on.close()
    for session in (full.session, idle.session, empty):
        session.close()
        session.close()
