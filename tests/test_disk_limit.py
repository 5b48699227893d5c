"""The folder never holds more than its limit: over restarts, other limits, and in between."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from disk_child import CHAIN, PAGE_BYTES, PLACEMENTS, key_of, open_tier, page_of, parent_of, put
from disk_process import memory_folder

from kvtier.errors import TierFullError
from kvtier.tiers.aligned import aligned_buffer

LIMITS = [2 << 20, 2 << 20, 1 << 20, 3 << 20, 1536 << 10]


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder / "tier"


def on_disk(folder: Path) -> tuple[int, int]:
    """What ``du`` and ``du --apparent-size`` count: blocks and bytes of all files and folders."""
    blocks = apparent = 0
    for root, _, names in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in names)):
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # between two looks
                continue
            blocks += 512 * status.st_blocks
            apparent += status.st_size
    return blocks, apparent


class Watch:
    """Looks at a folder all the time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.most = (0, 0)
        self.looks = 0

    def look(self) -> None:
        blocks, apparent = on_disk(self._folder)
        self.most = max(self.most[0], blocks), max(self.most[1], apparent)
        self.looks += 1


@contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    watch, stop = Watch(folder), threading.Event()

    def run() -> None:
        while not stop.wait(0.002):
            watch.look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
        watch.look()


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_twenty_restarts_of_a_full_tier(folder: Path, payload: str) -> None:
    """With smaller and larger limits in between; the tier is full and churned after each."""
    number, before = 0, 0
    for restart in range(20):
        limit = LIMITS[restart % len(LIMITS)]
        with watched(folder) as opening:
            tier = open_tier(folder, capacity_bytes=limit, payload=payload)
        # A smaller limit is fitted while it opens: until then the folder is as large as it was, and
        # payloads that lie in the database are copied for it.
        copied = limit if payload == "inline" else 0
        assert max(opening.most) <= max(limit, before) + copied
        with watched(folder) as working, tier:
            assert max(on_disk(folder)) <= limit
            room = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
            assert room * PAGE_BYTES > limit // 4, "most of the limit is not for pages"
            for _ in range(3):  # each a third of a turnover at least
                live = [record.key for record in tier.records()]
                tier.delete([live.pop() for _ in range(len(live) // 3)])
                for _ in range((room - len(live)) // CHAIN * CHAIN):
                    put(tier, number)
                    number += 1
                tier.flush()
            tier.check()
            assert tier.stats().map_full == 0
            out = page_of(0)
            for record in tier.records():
                assert tier.read(record.key, out)
            assert len(tier) > room - CHAIN - 1
        assert max(working.most) <= limit, f"{working.most} with a limit of {limit}"
        assert max(on_disk(folder)) <= limit
        before = limit


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_a_limit_that_shrinks_and_grows_keeps_the_newest_pages(folder: Path, payload: str) -> None:
    with open_tier(folder, capacity_bytes=3 << 20, payload=payload) as tier:
        room = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES) // CHAIN * CHAIN
        for number in range(room):
            put(tier, number)
    with open_tier(folder, capacity_bytes=1 << 20, payload=payload) as tier:
        kept = {record.key for record in tier.records()}
        assert 0 < len(kept) < room
        assert max(on_disk(folder)) <= 1 << 20
        for number in range(room):
            parent, _ = parent_of(number)
            if key_of(number) in kept:
                assert parent is None or parent in kept, "a page without its prefix"
        assert key_of(room - 1) in kept
    with open_tier(folder, capacity_bytes=3 << 20, payload=payload) as tier:
        assert {record.key for record in tier.records()} == kept
        for number in range(room, room + 2 * CHAIN):
            put(tier, number).result(30)
        tier.check()


@pytest.mark.parametrize(
    ("page_bytes", "capacity"),
    [
        (4096, 2 << 20),
        (4096, 12 << 20),
        (16 << 10, 5 << 20),
        (512 << 10, 9 << 20),
        (2 << 20, 18 << 20),
    ],
)
def test_as_many_pages_as_the_plan_says_are_held_and_replaced(
    folder: Path, page_bytes: int, capacity: int
) -> None:
    planes = [(i * page_bytes // 4, page_bytes // 4) for i in range(4)]
    data = [page_of(seed, page_bytes) for seed in range(3)]
    out = aligned_buffer(page_bytes)
    options = {"page_bytes": page_bytes, "plane_ranges": planes, "capacity_bytes": capacity}
    with open_tier(folder, payload="slab", **options) as tier:
        count = tier.live_capacity_bytes // tier.stored_bytes_of(page_bytes)
        last = 2 * count
        for start, end in ((0, count), (count, last)):
            futures = []
            for number in range(start, end):
                if start:
                    futures.append(tier.delete([key_of(number - count)]))
                futures.append(
                    put(tier, number, parent=None, depth=0, data=data[number % 3], timeout_s=60)
                )
            for future in futures:
                future.result(60)
            tier.flush()
        for number in range(count, last):
            assert tier.read(key_of(number), out)
            assert np.array_equal(out, data[number % 3])
        tier.flush()  # stores the last use of each
        assert on_disk(folder)[0] <= capacity
        assert tier.stats().map_full == 0
        assert len(tier) == count
        with pytest.raises(TierFullError):
            put(tier, last, parent=None, depth=0, data=data[0]).result(60)
        tier.check()
    assert on_disk(folder)[0] <= capacity
