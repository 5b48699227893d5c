"""Small operations under pytest-benchmark: ``pytest bench/micro.py --benchmark-only``.

For comparing two versions on one machine (``--benchmark-save``, ``--benchmark-compare``); absolute numbers say
little. What the store costs beside its limits is printed by ``bench/store.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.devices.emulated import EmulatedDevice
from kvtier.keys import page_keys
from kvtier.layout import LayerLayout, PageLayout
from kvtier.policy import PageFacts, load_policy
from kvtier.store.store import TieredStore

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
        policy.touch([key])
        if len(policy) > 10_000:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)

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
