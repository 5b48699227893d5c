"""kill -9 at any moment: what was acknowledged is there and right, or went in the policy's order."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import disk_child
import pytest
import store_child
from disk_child import (
    CAPACITY,
    CHAIN,
    PLACEMENTS,
    RELAXED_TURNS,
    Note,
    Promise,
    key_of,
    open_tier,
)
from disk_process import Process
from store_model import PAGE, close_clean, device, open_store

from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import map_bytes_of

CASES = [
    {"payload": payload, "durability": durability}
    for payload in PLACEMENTS
    for durability in ("durable", "relaxed")
]
IDS = ["-".join(case.values()) for case in CASES]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process() as process:
        yield process


# ---------------------------------------------------------------- the tier


def kill_rounds(process: Process, folder: Path, options: dict[str, Any], kills: int) -> None:
    """One tier that is loaded, killed and looked at ``kills`` times. A kill loses nothing in any mode:
    what was written is in the operating system.
    """
    rng = random.Random(kills)
    promise = Promise(strict=True)
    there: dict[int, int] = {}
    numbers, versions, at_stake = 0, 1, 0
    for _ in range(kills):
        load = {**options, "first": numbers, "there": there}
        after, more_s = rng.randrange(1, 150), rng.random() * 0.01
        for line in process.run_and_kill("load", folder, load, after, more_s):
            note = Note.unpack(int(line))
            promise.note(note)
            numbers = max(numbers, note.number // CHAIN * CHAIN + CHAIN)
            versions = max(versions, note.version + 1)
        at_stake += promise.acknowledged()
        check = {**options, "numbers": numbers, "versions": versions, "use": False}
        report = process.check(folder, check)
        assert "died" not in report, report
        assert not report["emptied"]
        assert not report["wrong"]
        assert not report["damaged"]
        there = report["found"]
        assert not promise.broken(there), promise.broken(there)[:3]
        promise.settle(there)
    assert at_stake > 10 * kills, "hardly a page was at stake"


@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_kill_9_loses_nothing_that_was_acknowledged(
    process: Process, tmp_path: Path, options: dict[str, Any]
) -> None:
    kill_rounds(process, tmp_path / "tier", options, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_kill_9_many_times(process: Process, tmp_path: Path, options: dict[str, Any]) -> None:
    kill_rounds(process, tmp_path / "tier", options, 60)


def test_a_lost_and_a_wrong_page_break_the_promise() -> None:
    promise = Promise(strict=True)
    for note in (Note("putting", 1, 3), Note("put", 1, 3), Note("putting", 2, 0)):
        promise.note(note)
    assert not promise.broken({1: 3})
    assert not promise.broken({1: 3, 2: 0})
    assert len(promise.broken({})) == len(promise.broken({1: 2})) == 1
    assert len(promise.broken({1: 3, 5: 0})) == 1
    promise.note(Note("deleting", 1))
    assert not promise.broken({})
    assert not promise.broken({1: 3})
    promise.note(Note("deleted", 1))
    assert promise.broken({1: 3})


def test_a_relaxed_promise_holds_from_a_flush_or_some_turns_on() -> None:
    promise = Promise(strict=False)
    for note in (Note("putting", 1), Note("put", 1), Note("turn")):
        promise.note(note)
    assert not promise.broken({})
    for _ in range(RELAXED_TURNS):
        promise.note(Note("turn"))
    assert promise.broken({})
    for note in (Note("putting", 2), Note("put", 2)):
        promise.note(note)
    assert not promise.broken({1: 0})
    promise.note(Note("flushed"))
    assert promise.broken({1: 0})
    assert not promise.broken({1: 0, 2: 0})


# ---------------------------------------------------------------- evictions


def eviction_rounds(process: Process, folder: Path, kills: int) -> None:
    """A store that evicts: after a kill the least recently used sequences are gone, suffixes first."""
    rng = random.Random(kills)
    first, evicted = 0, 0
    for _ in range(kills):
        after, more_s = rng.randrange(40, 160), rng.random() * 0.01
        used: dict[int, None] = {}
        under_way = None
        for line in process.run_and_kill("evict", folder, {"first": first}, after, more_s):
            verb, number = line.split()
            under_way = int(number) if verb == "using" else None
            used.pop(int(number), None)
            if verb == "used":
                used[int(number)] = None
        there, pages = present(folder, range(max([first, *used, under_way or 0]) + 1))
        in_order = [there[number] for number in used]
        complete = [count == CHAIN for count in in_order]
        assert complete == sorted(complete), f"not the least recently used went: {in_order}"
        cut = [count for count in in_order if 0 < count < CHAIN]
        assert len(cut) <= 1, f"more than one sequence is cut: {in_order}"
        before = sum(there[number] for number in range(first))
        assert complete.count(False) == 0 or before == 0, "newer pages went before older ones"
        total = sum(there.values())
        assert total <= pages
        # Nothing goes that need not go: for the sequence under way room was made, and no more.
        if len(used) * CHAIN >= pages:
            assert total >= pages - CHAIN, f"{total} pages are left, {pages} have room"
        evicted += complete.count(False)
        first = max([first, *used, under_way or 0]) + 1
    assert evicted > kills


def present(folder: Path, sequences: range) -> tuple[dict[int, int], int]:
    """Pages of each sequence that are there, all read, never one without its prefix; and how many have
    room.
    """
    store = open_store(store_child.CONFIG, device(), folder)
    disk = store._placement.disk
    assert disk is not None
    room = disk.live_capacity_bytes // disk.stored_bytes_of(PAGE)
    there = {}
    for number in sequences:
        keys = [store_child.key_of(number, depth) for depth in range(CHAIN)]
        listed = [store.contains(key) for key in keys]
        assert listed == sorted(listed, reverse=True), "a page is there without its prefix"
        with store.match(keys, promote=False) as lease:
            there[number] = len(lease)
            assert len(lease) == sum(listed)
            for depth in range(len(lease)):
                assert (lease.read(depth) == store_child.page_of(number, depth)).all()
    stats = store.stats()
    assert stats.damaged == 0
    assert stats.tiers["disk"].pages == sum(there.values()), "pages that nobody put"
    close_clean(store)
    return there, room


def test_after_kill_9_pages_are_missing_in_the_order_of_the_policy(
    process: Process, tmp_path: Path
) -> None:
    eviction_rounds(process, tmp_path / "tier", 2)


@pytest.mark.nightly
def test_after_many_kills_pages_are_missing_in_the_order_of_the_policy(
    process: Process, tmp_path: Path
) -> None:
    eviction_rounds(process, tmp_path / "tier", 60)


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_kill_9_before_the_first_page_and_while_opening(tmp_path: Path, payload: str) -> None:
    for round_ in range(3):
        options = f'{{"durability": "durable", "payload": "{payload}"}}'
        child = subprocess.Popen(
            [sys.executable, disk_child.__file__, "load", str(tmp_path), options],
            stdout=subprocess.DEVNULL,
        )
        try:
            child.wait(0.15 + 0.05 * round_)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30)
        with open_tier(tmp_path, payload=payload) as tier:
            tier.check()
            tier.delete([record.key for record in tier.records()][::-1]).result(30)


def test_a_compaction_that_was_cut_off_leaves_the_old_file(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        disk_child.put(tier, 0).result(30)
    (tmp_path / "compact.tmp").mkdir()
    (tmp_path / "compact.tmp" / "data.mdb").write_bytes(b"half a copy")
    with open_tier(tmp_path) as tier:
        assert key_of(0) in tier
    assert not (tmp_path / "compact.tmp").exists()


def test_a_folder_whose_first_open_was_cut_off_is_usable(tmp_path: Path) -> None:
    # Killed after the database was made and before its space was reserved.
    LmdbFile(tmp_path, map_bytes=map_bytes_of(CAPACITY), durable=True).close(1.0)
    with open_tier(tmp_path) as tier:
        disk_child.put(tier, 0).result(30)
        tier.check()
