"""Small operations under pytest-benchmark: ``pytest bench/micro.py --benchmark-only``.

For comparing two versions on one machine (``--benchmark-save``, ``--benchmark-compare``); absolute numbers say
little. What the store and its disk cost beside their limits is printed by ``bench/store.py`` and
``bench/disk.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.devices.emulated import EmulatedDevice
from kvtier.keys import page_keys
from kvtier.layout import LayerLayout, PageLayout
from kvtier.policy import PageFacts, load_policy
from kvtier.store.store import TieredStore
from kvtier.tiers.disk import DiskTier

IDENTITY = b"i" * 32
LAYOUT = PageLayout([LayerLayout.attention(4, 64, "float16")] * 8, page_tokens=16)
PAGES = 64


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    room = PAGES * LAYOUT.page_bytes
    device = EmulatedDevice(check_races=False)
    with TieredStore(
        LAYOUT, device=device, vram=room, host=room, disk=8 * room, path=tmp_path
    ) as opened:
        yield opened
    device.close()


def keys_of(sequence: int) -> list[bytes]:
    return page_keys(IDENTITY, [sequence, *range(PAGES * 16 - 1)], 16)


def put_all(store: TieredStore, keys: list[bytes], page: torch.Tensor) -> None:
    for parent, key in zip([None, *keys], keys, strict=False):
        store.put(key, page, parent=parent, identity=IDENTITY)


def test_keys_of_a_thousand_pages(benchmark: Any) -> None:
    tokens = list(range(16_000))
    assert len(benchmark(page_keys, IDENTITY, tokens, 16)) == 1000


@pytest.mark.parametrize("name", ["lru", "mass"])
def test_policy_insert_touch_evict(benchmark: Any, name: str) -> None:
    policy = load_policy(name, leaf_first=True)
    numbers = itertools.count()

    def turn() -> None:
        key = next(numbers).to_bytes(8, "big")
        policy.insert(PageFacts(key, None, 0, 1))
        policy.use([key])
        if len(policy) > 10_000:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim, evicted=True)

    benchmark(turn)


def test_put_a_sequence(benchmark: Any, store: TieredStore) -> None:
    page = torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8)
    sequences = itertools.count()
    benchmark(lambda: put_all(store, keys_of(next(sequences)), page))


def test_match_a_sequence(benchmark: Any, store: TieredStore) -> None:
    keys = keys_of(0)
    put_all(store, keys, torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8))
    store.flush()

    def match() -> int:
        with store.match(keys) as lease:
            return len(lease)

    assert benchmark(match) == PAGES


def test_read_a_page(benchmark: Any, store: TieredStore) -> None:
    keys = keys_of(0)
    put_all(store, keys, torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8))
    out = torch.empty(LAYOUT.page_bytes, dtype=torch.uint8)
    with store.match(keys) as lease:
        benchmark(lease.read, PAGES - 1, out)


# ---------------------------------------------------------------- the disk tier alone

DISK_PAGE = 512 * 1024


@pytest.fixture(params=["slab", "inline"])
def full_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[DiskTier, int]]:
    """A full tier, and the number of its pages; their keys are ``disk_key(0)`` and so on."""
    with DiskTier(
        tmp_path,
        layout_digest=b"bench",
        page_bytes=DISK_PAGE,
        plane_ranges=[(0, DISK_PAGE)],
        capacity_bytes=64 << 20,
        payload=request.param,
    ) as tier:
        count = tier.live_capacity_bytes // tier.stored_bytes_of(DISK_PAGE)
        for number in range(count):
            disk_put(tier, number)
        tier.flush()
        yield tier, count


def disk_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def disk_put(tier: DiskTier, number: int) -> Any:
    data = np.zeros(DISK_PAGE, np.uint8)
    return tier.put(disk_key(number), parent=None, depth=0, identity=IDENTITY, data=data)


def test_disk_put_again(benchmark: Any, full_tier: tuple[DiskTier, int]) -> None:
    tier, count = full_tier
    numbers = itertools.cycle(range(count))
    benchmark(lambda: disk_put(tier, next(numbers)).result())


def test_disk_get(benchmark: Any, full_tier: tuple[DiskTier, int]) -> None:
    tier, count = full_tier
    numbers, out = itertools.cycle(range(count)), np.zeros(DISK_PAGE, np.uint8)
    assert benchmark(lambda: tier.read(disk_key(next(numbers)), out))


def test_disk_lookup(benchmark: Any, full_tier: tuple[DiskTier, int]) -> None:
    tier, count = full_tier
    key = disk_key(count - 1)
    assert benchmark(lambda: key in tier)


def test_disk_evict_and_put(benchmark: Any, full_tier: tuple[DiskTier, int]) -> None:
    tier, count = full_tier
    oldest = itertools.count()

    def turn() -> None:
        number = next(oldest)
        tier.delete([disk_key(number)])
        disk_put(tier, number + count).result()

    benchmark(turn)
