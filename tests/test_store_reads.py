"""Pages that are only on disk come up several at once: the longest good prefix, in the room there is, and nothing is
kept of what was not good."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_model import (
    PAGE,
    PLACEMENTS,
    Config,
    assert_empty,
    chain,
    close_clean,
    damage,
    device,
    folder,
    noise,
    open_store,
    put_chain,
    read_all,
)

from kvtier.errors import DeadlineExceededError, DiskError
from kvtier.store import reads
from kvtier.tiers.disk import DiskTier

AT_ONCE = 5


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_READ_BYTES", AT_ONCE * PAGE)


class Spy:
    """How many pages each read of a tier asked for; ``fails`` is raised by the call of that number."""

    def __init__(self, disk: DiskTier) -> None:
        self.asked: list[int] = []
        self.fails: int | None = None
        self._read = disk.read_pages
        disk.read_pages = self.read  # type: ignore[method-assign]

    def read(self, keys: Sequence[bytes], outs: Sequence[np.ndarray]) -> list[bool]:
        self.asked.append(len(keys))
        if self.fails == len(self.asked):
            raise DiskError(5, "EIO", "there")
        return self._read(keys, outs)


def reopened(config: Config, path: str | Path, pages: int) -> tuple[Any, list[bytes], Spy]:
    keys = chain(pages)
    with open_store(config, device(), path) as store:
        put_chain(store, keys)
    store = open_store(config, device(), path)
    assert store._placement.disk is not None
    return store, keys, Spy(store._placement.disk)


@given(
    pages=st.integers(1, 24),
    bad=st.sets(st.integers(0, 23), max_size=3),
    vram=st.integers(1, 6),
    host=st.sampled_from([0, 1, 3, 40]),
    promote=st.booleans(),
    payload=st.sampled_from(PLACEMENTS),
)
@settings(max_examples=40)
def test_the_longest_good_prefix_comes_up_as_far_as_there_is_room(
    pages: int, bad: set[int], vram: int, host: int, promote: bool, payload: Any
) -> None:
    config = Config(vram=vram, host=host, disk=60, payload=payload)
    with folder() as path:
        store, keys, spy = reopened(config, path, pages)
        for index in bad:
            if index < pages:
                assert damage(store, keys[index])
        good = min([pages, *(index for index in bad if index < pages)])
        with store.match(keys, promote=promote) as lease:
            assert lease.keys == keys[:good]
            tiers = [copy.tier for copy in lease.copies]
            for index, key in enumerate(lease.keys):
                assert lease.read(index).numpy().tobytes() == noise(key)
        room = [("vram", vram), ("host", host), ("disk", pages)] if promote else [("disk", pages)]
        expected = [tier for tier, slots in room for _ in range(slots)][:good]
        assert tiers == expected
        batches = -(-min(pages, good + 1) // AT_ONCE)
        assert spy.asked[:batches] == [
            min(AT_ONCE, pages - start) for start in range(0, batches * AT_ONCE, AT_ONCE)
        ]
        read = min(pages, batches * AT_ONCE)
        lost = len([index for index in bad if index < read])
        assert store.stats().damaged == lost
        assert store.stats().links["disk->host"].copies >= read - lost
        # What is damaged, and what follows it, is gone; it can be stored again.
        assert not any(store.contains(key) for key in keys[good:])
        put_chain(store, keys)
        assert read_all(store, keys) == pages
        close_clean(store)


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_disk_that_refuses_leaves_nothing_behind(
    promote: bool, fails: int, tmp_path: Path
) -> None:
    store, keys, spy = reopened(Config(vram=2, host=4, disk=60), tmp_path, 15)
    spy.fails = fails
    with pytest.raises(DiskError, match="EIO"):
        store.match(keys, promote=promote)
    assert_empty(store)
    store.check()
    assert store._placement.bounce.used_pages == 0
    assert read_all(store, keys) == 15
    close_clean(store)


def test_what_came_up_first_makes_no_room_for_what_follows(tmp_path: Path) -> None:
    """Else a prompt that is larger than host memory would be read through it and leave only its end there."""
    store, keys, _ = reopened(Config(vram=1, host=7, disk=60), tmp_path, 20)
    with store.match(keys):
        pass
    placed = {
        tier: [k for k in keys if tier in store._directory.pages[k].copies]
        for tier in ("vram", "host")
    }
    assert placed == {"vram": keys[:1], "host": keys[1:8]}
    close_clean(store)


@pytest.mark.parametrize("refused", [False, True])
def test_nobody_makes_room_for_what_is_not_good(refused: bool, tmp_path: Path) -> None:
    config = Config(vram=1, host=8, disk=60)
    wanted, others = chain(16), chain(9, 1)
    with open_store(config, device(), tmp_path) as store:
        put_chain(store, wanted)
        put_chain(store, others)
    store = open_store(config, device(), tmp_path)
    assert store._placement.disk is not None
    assert read_all(store, others) == 9
    before = store.stats().tiers["host"].pages
    if refused:
        spy = Spy(store._placement.disk)
        spy.fails = 1
        with pytest.raises(DiskError):
            store.match(wanted)
    else:
        assert damage(store, wanted[2])
        with store.match(wanted) as lease:
            assert len(lease) == 2
    host = [key for key in others if "host" in store._directory.pages[key].copies]
    assert len(host) == before - (0 if refused else 2)
    close_clean(store)


def test_a_key_that_is_given_twice(tmp_path: Path) -> None:
    store, keys, _ = reopened(Config(vram=3, host=3, disk=60), tmp_path, 3)
    asked = [keys[0], keys[0], keys[1], keys[1], keys[0]]
    with store.match(asked) as lease:
        assert lease.keys == asked
        for index, key in enumerate(asked):
            assert lease.read(index).numpy().tobytes() == noise(key)
    close_clean(store)


@pytest.mark.parametrize("promote", [False, True])
def test_a_slow_disk_does_not_outlast_the_deadline(promote: bool, tmp_path: Path) -> None:
    store, keys, spy = reopened(Config(vram=2, host=40, disk=60), tmp_path, 30)
    read = spy._read

    def slow(keys: Sequence[bytes], outs: Sequence[np.ndarray]) -> list[bool]:
        time.sleep(0.2)
        return read(keys, outs)

    spy._read = slow
    with pytest.raises(DeadlineExceededError, match="from disk"):
        store.match(keys, promote=promote, timeout_s=0.3)
    assert len(spy.asked) <= 3
    spy._read = read
    assert read_all(store, keys) == 30
    close_clean(store)


def test_what_is_read_again_comes_into_the_page_cache(tmp_path: Path) -> None:
    """Where the whole store fits the memory that is free, the second way up is as fast as a copy."""
    store, keys, _ = reopened(Config(vram=1, host=16, disk=60, payload="slab"), tmp_path, 12)
    assert store._placement.disk is not None
    payloads: Any = store._placement.disk._payloads
    files = payloads.files
    found = []
    for _ in range(2):
        for segment in files.segments:
            os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_all(store, keys) == 12
        found.append(sum(files.cached(slot, 1) for slot in range(files.slots)))
        for key in keys[::-1]:
            while store.demote(key):
                pass
    assert found[0] == 0 or not files.direct
    assert found[1] >= 12
    close_clean(store)


def test_an_interrupt_leaves_nobody_writing_into_slots_that_were_given_back(tmp_path: Path) -> None:
    child = Path(__file__).with_name("interrupt_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(tmp_path)], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
