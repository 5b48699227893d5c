"""kill -9 at any moment: what was acknowledged is there and right, and nothing is half there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import disk_child
import numpy as np
import pytest
from disk_child import CAPACITY, CHAIN, PAGE_BYTES, key_of, open_tier, page_of

from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import map_bytes_of


class Journal:
    """What killed writers said they had done."""

    def __init__(self) -> None:
        self.acknowledged: set[int] = set()
        self.deleting: set[int] = set()
        self.last = -1

    def read(self, text: str) -> None:
        # A last line without its end may be cut: nobody has read that acknowledgement.
        for line in text[: text.rfind("\n") + 1].splitlines():
            verb, _, number = line.partition(" ")
            if verb == "put":
                self.acknowledged.add(int(number))
                self.last = max(self.last, int(number))
            else:
                self.deleting.add(int(number))

    @property
    def next_first(self) -> int:
        """The first page of a sequence that was never begun."""
        return (max(self.last, *self.deleting, 0) // CHAIN + 2 + disk_child.LIVE // CHAIN) * CHAIN


def write_and_kill(
    folder: Path, journal: Journal, durability: str, after: int, more_s: float
) -> None:
    """Start a writer, wait for ``after`` lines, then ``more_s`` longer, and kill it."""
    first = journal.next_first if journal.last >= 0 else 0
    command = [sys.executable, disk_child.__file__, "write", str(folder), str(first), durability]
    out = folder.with_suffix(".out")
    with open(out, "w") as file:
        child = subprocess.Popen(command, stdout=file)
    end = time.monotonic() + 60
    try:
        while out.read_bytes().count(b"\n") < after:
            assert child.poll() is None, f"the writer ended by itself with {child.returncode}"
            assert time.monotonic() < end, "the writer does not get on"
            time.sleep(0.001)
        time.sleep(more_s)
        assert child.poll() is None, f"the writer ended by itself with {child.returncode}"
    finally:
        child.kill()
        child.wait(30)
    journal.read(out.read_text())


def verify(folder: Path, journal: Journal) -> int:
    """Open what the killed process left and read all of it. Returns the number of pages."""
    with open_tier(folder) as tier:
        opened = tier.stats().opened
        assert opened.emptied is None
        assert opened.damaged == opened.orphans == opened.evicted == 0
        out = np.zeros(PAGE_BYTES, np.uint8)
        there = {record.key for record in tier.records()}
        for number in range(journal.next_first + 1000):
            key = key_of(number)
            if key in there:
                assert tier.read(key, out), f"page {number} is listed and not readable"
                assert np.array_equal(out, page_of(number)), f"page {number} is wrong"
                there.remove(key)
            elif number in journal.acknowledged:
                assert number in journal.deleting, f"page {number} was acknowledged and is lost"
        assert not there, "pages that nobody put"
        tier.check()
        assert tier.stats().damaged == 0
        return len(tier)


def kill_rounds(folder: Path, durability: str, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal()
    for _ in range(rounds):
        write_and_kill(folder, journal, durability, rng.randrange(1, 150), rng.random() * 0.01)
        before = len(journal.acknowledged)
        # Room for the next writer's pages, as it deletes only its own.
        assert verify(folder, journal) <= before + CHAIN
        with open_tier(folder) as tier:
            keys = [record.key for record in tier.records()]
            tier.delete(list(reversed(keys))).result(30)
        journal.deleting |= journal.acknowledged
    assert journal.acknowledged


@pytest.mark.parametrize("durability", ["durable", "relaxed"])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, durability: str) -> None:
    kill_rounds(tmp_path / "tier", durability, 4, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["durable", "relaxed"])
def test_kill_9_many_times(tmp_path: Path, durability: str) -> None:
    kill_rounds(tmp_path / "tier", durability, 60, seed=2)


def test_kill_9_before_the_first_page_and_while_opening(tmp_path: Path) -> None:
    for round_ in range(3):
        child = subprocess.Popen(
            [sys.executable, disk_child.__file__, "write", str(tmp_path), "0", "durable"],
            stdout=subprocess.DEVNULL,
        )
        try:
            child.wait(0.15 + 0.05 * round_)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30)
        with open_tier(tmp_path) as tier:
            tier.check()


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
