"""Faults of another KV cache, each of which must not be ours.

All were seen on LMCache 0.5.6 without a GPU; what they lead to there stands in the second column.

====  ==========================================================  ============================================
 no.  there                                                       here
====  ==========================================================  ============================================
  1   after a restart none of the pages on disk is found          test_01_a_restart_keeps_the_index
  2   after a restart the disk holds twice the limit              test_02_a_restart_keeps_the_limit
  3   a file cut in half is a hit, with another page's memory     test_03_a_cut_file_is_a_miss
  4   64 overwritten bytes are a hit                              test_04_overwritten_bytes_are_a_miss
  5   a get of a deleted file raises KeyError                     test_05_a_get_of_a_deleted_file_is_a_miss
  6   an eviction of a deleted file raises out of put             test_06_deleted_files_do_not_stop_evictions
  7   after a write error the page can never be stored again      test_07_a_write_error_can_be_repeated
  8   16 puts, 16 removes: the next put is refused                test_08_removed_bytes_are_given_back
  9   a prefetch without room returns stale memory as pages       test_09_a_prefetch_returns_no_stale_memory
 10   ... and then every call hangs                               test_10_after_a_prefetch_all_calls_work
 11   a put while a write is in flight raises KeyError            test_11_a_put_while_a_write_is_in_flight
 12   with all pages pinned, allocating never returns             test_12_all_pinned_is_an_error_in_time
 13   models org/m and org-m overwrite each other                 test_13_similar_names_are_different_models
 14   a put into a full tier costs time in its size               test_14_a_put_costs_the_same_in_a_large_tier
 15   a burst is dropped without an error                         test_15_a_burst_is_kept_or_counted
 16   an error in the policy kills the eviction thread            test_16_an_error_in_the_policy_passes
====  ==========================================================  ============================================

The rest of the damage, write errors and kills is in ``test_disk_damage``, ``test_disk_write_errors`` and
``test_disk_crash``.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_child import CAPACITY, PAGE_BYTES, PLACEMENTS, key_of, open_tier, page_of, put
from store_model import (
    IDENTITY,
    PAGE,
    Config,
    as_page,
    chain,
    close_clean,
    device,
    noise,
    open_store,
    put_chain,
    read_all,
)
from test_disk_limit import on_disk

from kvtier.errors import DiskError, TierFullError
from kvtier.keys import page_keys
from kvtier.store.store import TieredStore

PAGES = [2 * 4 * n for n in range(4)]  # first pages, each of a sequence of its own
both_placements = pytest.mark.parametrize("payload", PLACEMENTS)


def read(tier: Any, number: int) -> bool:
    """Whether page ``number`` is a hit; then it must be right."""
    out = np.full(PAGE_BYTES, 0xA5, np.uint8)
    hit = tier.read(key_of(number), out)
    assert not hit or np.array_equal(out, page_of(number))
    return hit


def filled(folder: Path, payload: str) -> dict[str, int]:
    """A closed tier with PAGES; sizes of its files."""
    with open_tier(folder, payload=payload) as tier:
        for number in PAGES:
            put(tier, number).result(30)
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def payload_at(folder: Path, number: int) -> tuple[Path, int]:
    """Where the newest copy of a page's payload is."""
    what = page_of(number)[:512].tobytes()
    places = [
        (path, raw.rfind(what)) for path in folder.iterdir() if what in (raw := path.read_bytes())
    ]
    assert len(places) == 1
    return places[0]


@both_placements
def test_01_a_restart_keeps_the_index(tmp_path: Path, payload: str) -> None:
    filled(tmp_path, payload)
    for _ in range(3):
        with open_tier(tmp_path, payload=payload) as tier:
            assert all(read(tier, number) for number in PAGES)


@both_placements
def test_02_a_restart_keeps_the_limit(tmp_path: Path, payload: str) -> None:
    for restart in range(3):
        with open_tier(tmp_path, payload=payload) as tier:
            room = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
            tier.delete([record.key for record in tier.records()][room // 2 :][::-1]).result(30)
            free = room - len(tier)
            for number in range(free):
                put(tier, restart * 4000 + 4 * number)
            with pytest.raises(TierFullError):
                put(tier, 40_000).result(30)
        assert max(on_disk(tmp_path)) <= CAPACITY


@both_placements
def test_03_a_cut_file_is_a_miss(tmp_path: Path, payload: str) -> None:
    filled(tmp_path, payload)
    path, at = payload_at(tmp_path, PAGES[2])
    os.truncate(path, at + PAGE_BYTES // 2)
    # A cut database is given up as a whole, with a warning.
    said = pytest.warns(match="starts empty") if payload == "inline" else nullcontext()
    with said, open_tier(tmp_path, payload=payload) as tier:
        assert not read(tier, PAGES[2])
        for number in PAGES:
            read(tier, number)
        put(tier, PAGES[2]).result(30)
        assert read(tier, PAGES[2])


@both_placements
def test_04_overwritten_bytes_are_a_miss(tmp_path: Path, payload: str) -> None:
    filled(tmp_path, payload)
    path, at = payload_at(tmp_path, PAGES[1])
    with open(path, "r+b") as file:
        file.seek(at + 100)
        file.write(bytes(64))
    reports: list[bytes] = []
    with open_tier(
        tmp_path, payload=payload, on_damage=lambda key, why: reports.append(key)
    ) as tier:
        assert not read(tier, PAGES[1])
        assert reports == [key_of(PAGES[1])]
        assert tier.stats().damaged == 1
        assert sum(read(tier, number) for number in PAGES) == len(PAGES) - 1
        put(tier, PAGES[1]).result(30)
        assert read(tier, PAGES[1])


@both_placements
def test_05_a_get_of_a_deleted_file_is_a_miss(tmp_path: Path, payload: str) -> None:
    """Every file but the lock that says that a tier is using the folder."""
    for name in filled(tmp_path / "0", payload):
        folder = tmp_path / name
        filled(folder, payload)
        (folder / name).unlink()
        with open_tier(folder, payload=payload) as tier:
            for number in PAGES:
                read(tier, number)
                put(tier, number).result(30)
                assert read(tier, number)


@both_placements
def test_06_deleted_files_do_not_stop_evictions(tmp_path: Path, payload: str) -> None:
    """Files that go while the tier is open: what was there is read or missed, a put is acknowledged or
    an error that says so, and a delete does not raise out of anything."""
    for name in filled(tmp_path / "0", payload):
        folder = tmp_path / name
        filled(folder, payload)
        tier = open_tier(folder, payload=payload)
        (folder / name).unlink()
        for number in PAGES:
            read(tier, number)
        for future in (tier.delete([key_of(PAGES[0])]), put(tier, PAGES[1])):
            error = future.exception(30)
            assert error is None or isinstance(error, DiskError), error
        tier.close()
        with open_tier(folder, payload=payload) as tier:
            put(tier, PAGES[3]).result(30)
            assert read(tier, PAGES[3])


CONFIG = Config(vram=2, host=2, disk=60)


def test_07_a_write_error_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(vram=4, host=4, disk=60)
    store = open_store(config, device(), tmp_path)
    disk = store._placement.disk
    assert disk is not None
    keys = chain(3)

    def fails(*_: object, **__: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(DiskError(errno.EFBIG, "File too large"))
        return future

    with monkeypatch.context() as patch:
        patch.setattr(disk, "put", fails)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            put_chain(store, keys)
            assert store.flush() == 3
            store.poll()
        assert any("could not be written to disk" in str(one.message) for one in said)
        assert store.stats().tiers["disk"].pages == 0
        assert read_all(store, keys) == 3
    assert store.flush() == 0
    assert store.stats().tiers["disk"].pages == 3
    close_clean(store)
    with open_store(config, device(), tmp_path) as store:
        assert read_all(store, keys) == 3


@both_placements
def test_08_removed_bytes_are_given_back(tmp_path: Path, payload: str) -> None:
    with open_tier(tmp_path, payload=payload, capacity_bytes=1 << 20) as tier:
        room = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
        for turn in range(3):
            for number in range(room):
                put(tier, 4 * number)
            tier.flush()
            assert len(tier) == room, turn
            tier.delete([key_of(4 * number) for number in range(room)]).result(30)
            assert tier.live_bytes == len(tier) == 0
        put(tier, 0).result(30)
        tier.check()


def too_much_to_prefetch(folder: Path) -> tuple[TieredStore, list[bytes]]:
    """Six pages on disk, and two slots above it of which one is held."""
    store = open_store(CONFIG, device(), folder)
    keys = chain(6)
    put_chain(store, keys)
    store.close()
    return open_store(Config(vram=1, host=1, disk=60), device(), folder), keys


def test_09_a_prefetch_returns_no_stale_memory(tmp_path: Path) -> None:
    store, keys = too_much_to_prefetch(tmp_path)
    with store.match(keys) as lease:
        assert len(lease) == 6
        for index, key in enumerate(keys):
            assert lease.read(index).numpy().tobytes() == noise(key)
    close_clean(store)


def test_10_after_a_prefetch_all_calls_work(tmp_path: Path) -> None:
    store, keys = too_much_to_prefetch(tmp_path)
    for _ in range(20):
        assert store.prefetch(keys, timeout_s=30) == 6
        assert read_all(store, keys) == 6
    more = chain(6, number=1)
    put_chain(store, more)
    assert store.flush() == 0
    assert read_all(store, more) == 6
    close_clean(store)


def test_11_a_put_while_a_write_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the page that is being written, and of pages that push it out of the tiers above."""
    store = open_store(CONFIG, device(), tmp_path)
    disk = store._placement.disk
    assert disk is not None
    honest, go, late = disk.put, threading.Event(), []

    def slow(*args: Any, **options: Any) -> Future[None]:
        future: Future[None] = Future()

        def finish() -> None:
            assert go.wait(30)
            done.result(30)
            future.set_result(None)

        done = honest(*args, **options)
        late.append(threading.Thread(target=finish))
        late[-1].start()
        return future

    with monkeypatch.context() as patch:
        patch.setattr(disk, "put", slow)
        keys = chain(2)
        put_chain(store, keys)
        put_chain(store, keys)
        threading.Timer(0.05, go.set).start()
        others = [chain(2, number=number) for number in range(1, 6)]
        for sequence in others:
            put_chain(store, sequence)
            put_chain(store, keys)
        assert store.flush() == 0
    for thread in late:
        thread.join(30)
    assert all(read_all(store, sequence) == 2 for sequence in [keys, *others])
    close_clean(store)


def test_12_all_pinned_is_an_error_in_time() -> None:
    for config in (Config(vram=2), Config(vram=2, host=2)):
        store = open_store(config, device())
        keys = chain(2)
        put_chain(store, keys)
        with store.match(keys) as lease:
            assert len(lease) == 2
            with pytest.raises(TierFullError, match="held"):
                put_chain(store, chain(8, number=1))
        put_chain(store, chain(2, number=2))
        close_clean(store)


def test_13_similar_names_are_different_models(tmp_path: Path) -> None:
    store = open_store(CONFIG, device(), tmp_path)
    names = ["org/m", "org-m", "org_m", "org.m", "org m", "org//m", "orgm", "org/m/", "ORG/m"]
    keys = {}
    for name in names:
        identity = replace(IDENTITY, model=name)
        (key,) = page_keys(identity, [1, 2, 3, 4], 4)
        keys[name] = key
        store.put(key, as_page(noise(name)), identity=identity.digest)
    assert store.flush() == 0
    for name, key in keys.items():
        with store.match([key]) as lease:
            assert lease.read(0).numpy().tobytes() == noise(name)
    close_clean(store)


def calls_of(work: Callable[[], None], start: Callable[[], Any]) -> int:
    """Python calls that ``work`` makes in this thread and in those that ``start`` has started."""
    count = [0]

    def profile(frame: Any, event: str, arg: Any) -> None:
        count[0] += event in ("call", "c_call")

    threading.setprofile(profile)
    try:
        start()
        before = count[0]
        sys.setprofile(profile)
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return count[0] - before


@both_placements
def test_14_a_put_costs_the_same_in_a_large_tier(tmp_path: Path, payload: str) -> None:
    """Counted in calls, not in seconds: puts and deletes in a full tier of 50 and of 800 pages."""
    calls = [
        calls_of_changes(tmp_path / str(pages), payload, pages, capacity)
        for pages, capacity in ((50, 1 << 20), (800, 10 << 20))
    ]
    assert calls[1] < 1.3 * calls[0], calls


def calls_of_changes(folder: Path, payload: str, pages: int, capacity: int) -> int:
    """Calls of 20 deletes and puts in a tier of ``pages`` pages."""
    options: dict[str, Any] = {
        "payload": payload,
        "capacity_bytes": capacity,
        "durability": "relaxed",
    }
    with open_tier(folder, **options) as tier:
        for number in range(pages):
            put(tier, 4 * number)
    tiers: list[Any] = []

    def start() -> None:
        tiers.append(open_tier(folder, **options))
        list(tiers[0].records())

    def work() -> None:
        for number in range(20):
            tiers[0].delete([key_of(4 * number)])
            put(tiers[0], 40_000 + 4 * number).result(30)

    calls = calls_of(work, start)
    tiers[0].close()
    return calls


def test_15_a_burst_is_kept_or_counted(tmp_path: Path) -> None:
    """50 pages into two slots: with a disk all are kept, without one the newest; the books say it."""
    sequences = [chain(1, number=number) for number in range(50)]
    for disk in (60, 0):
        store = open_store(Config(vram=2, host=2, disk=disk), device(), tmp_path)
        for sequence in sequences:
            put_chain(store, sequence)
        store.flush()
        kept = sum(read_all(store, sequence) for sequence in sequences)
        tiers = store.stats().tiers
        assert kept == (50 if disk else 2)
        for tier in tiers.values():
            assert tier.pages_in - tier.pages_out == tier.pages
        close_clean(store)


def test_16_an_error_in_the_policy_passes(tmp_path: Path) -> None:
    """It reaches the caller, and nobody else; no thread dies of it."""
    store = open_store(Config(vram=2), device())
    put_chain(store, chain(2))
    policy = store._directory.policies["vram"]
    honest = policy.victim

    def broken() -> bytes | None:
        raise RuntimeError("a bug in the policy")

    policy.victim = broken  # type: ignore[method-assign]
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="a bug in the policy"):
        put_chain(store, chain(1, number=1))
    policy.victim = honest  # type: ignore[method-assign]
    assert threading.active_count() == threads
    put_chain(store, chain(1, number=1))
    assert read_all(store, chain(1, number=1)) == 1
    assert store.stats().tiers["vram"].used_bytes <= 2 * PAGE
    close_clean(store)
