"""The store and its policies: what they are told, and that they keep what they learnt."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store_model import IDENTITY, PAGE, Config, device, open_store

from kvtier.errors import KvtierError, OffloadWarning
from kvtier.policy import Request
from kvtier.session.session import Session
from kvtier.store.hints import STATE_BYTES, restore_policies, save_policies
from kvtier.store.store import TieredStore
from kvtier.tiers.disk import DiskTier


def put_chain(store: TieredStore, name: str, pages: int, **options: Any) -> list[bytes]:
    """A sequence of pages, each of its own bytes."""
    keys = [f"{name}{n}".encode().ljust(32, b".") for n in range(pages)]
    for n, key in enumerate(keys):
        data = torch.full((PAGE,), n, dtype=torch.uint8)
        store.put(
            key,
            data,
            parent=keys[n - 1] if n else None,
            identity=IDENTITY.digest,
            **options,
        )
    return keys


def test_a_sequence_put_page_by_page_goes_from_its_tail(tmp_path: Path) -> None:
    """Also where writes to disk hold each page for a moment, in the order from the root."""
    with closing(device()) as card:
        with open_store(Config(vram=2, host=6, disk=60), card, tmp_path) as store:
            old, new = put_chain(store, "a", 3), put_chain(store, "b", 3)
            store.flush()
            policy = store._directory.policies["host"]
            assert not policy.leaf_first
            gone = []
            for key in policy.victims(6 * PAGE):
                gone.append(key)
                policy.pin(key)
            for key in gone:
                policy.unpin(key, used=False)
            assert gone == old[::-1] + new[::-1]
            assert policy.victim() == old[2]


def test_hints_reach_the_policy_of_each_tier(tmp_path: Path) -> None:
    config = Config(vram=1, host=4, policy="priority")
    with closing(device()) as card:
        with open_store(config, card) as store:
            high = put_chain(store, "a", 2, request=Request(priority=5))
            low = put_chain(store, "b", 2, request=Request(priority=1))
            store.match(low).close()
            assert store._directory.policies["host"].victim() == low[1]
            store.match(low, request=Request(priority=9)).close()
            assert store._directory.policies["host"].victim() == high[1]


def test_a_page_keeps_its_hints_when_it_moves_down() -> None:
    with closing(device()) as card:
        with open_store(Config(vram=1, host=3, policy="ttl:seconds=inf"), card) as store:
            short = Request(ttl_s=1e-9)
            with Session(store, IDENTITY, request=short) as session:
                session.reserve(4)
                session.extend(4, [1, 2, 3, 4])
                session.seal()
                key = session.pages[0].key
            put_chain(store, "b", 2)
            assert store.demote(key)
            assert store._directory.policies["host"].victim() == key


def test_a_session_that_has_ended_goes_first_with_ttl() -> None:
    with closing(device()) as card:
        with open_store(Config(vram=4, policy="ttl:seconds=1e6"), card) as store:
            sessions = []
            for n in range(3):
                session = Session(store, IDENTITY, name=f"s{n}")
                session.reserve(4)
                session.extend(4, [n] * 4)
                session.seal()
                sessions.append(session)
            keys = [session.pages[0].key for session in sessions]
            sessions[1].close(ended=True)
            for session in (sessions[0], sessions[2]):
                session.close()
            assert store._directory.policies["vram"].victim() == keys[1]


def test_attention_mass_reaches_the_policies() -> None:
    with closing(device()) as card:
        with open_store(Config(vram=1, host=4, policy="mass"), card) as store:
            a, b = put_chain(store, "a", 1), put_chain(store, "b", 1)
            for _ in range(5):
                store.attended([*a, *b, b"unknown"], [0.1, 0.9, 0.0])
            assert store._directory.policies["host"].victim() == a[0]
            with pytest.raises(KvtierError, match="mass"):
                store.attended(a, [float("nan")])


# state


class Keeper:
    """What a disk tier does for the policies, in memory."""

    note_bytes = STATE_BYTES

    def __init__(self) -> None:
        self.blob: bytes | None = None
        self.error: Exception | None = None

    def save_policy(self, blob: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.blob = blob

    def load_policy(self) -> bytes | None:
        return self.blob


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    keeper = Keeper()
    monkeypatch.setattr(DiskTier, "save_policy", lambda self, blob: keeper.save_policy(blob))
    monkeypatch.setattr(DiskTier, "load_policy", lambda self: keeper.load_policy())
    return keeper


def test_the_order_on_disk_survives_a_restart(keeper: Keeper, tmp_path: Path) -> None:
    config = Config(vram=1, host=2, disk=8)
    with closing(device()) as card:
        with open_store(config, card, tmp_path) as store:
            a, b = put_chain(store, "a", 2), put_chain(store, "b", 2)
            store.flush()
            store.match(a).close()
        assert keeper.blob is not None
        with open_store(config, card, tmp_path) as store:
            assert store._directory.policies["disk"].victim() == b[1]
            store.remove([b[0]])
            assert store._directory.policies["disk"].victim() == a[1]


def test_a_damaged_state_is_told_and_harms_nothing(keeper: Keeper, tmp_path: Path) -> None:
    config = Config(vram=1, host=2, disk=8)
    with closing(device()) as card:
        with open_store(config, card, tmp_path) as store:
            put_chain(store, "a", 2)
        assert keeper.blob is not None
        keeper.blob = keeper.blob[:-3]
        store = open_store(config, card, tmp_path)
        with pytest.warns(OffloadWarning, match="state of the policies is damaged"):
            store.poll()
        assert store._directory.policies["disk"].victim() is not None
        store.close()


def test_another_policy_starts_anew_without_a_word(keeper: Keeper, tmp_path: Path) -> None:
    config = Config(vram=1, host=2, disk=8)
    with closing(device()) as card:
        with open_store(config, card, tmp_path) as store:
            put_chain(store, "a", 2)
        with open_store(replace(config, policy="fifo"), card, tmp_path) as store:
            store.poll()


def test_a_state_that_cannot_be_saved_is_told() -> None:
    from kvtier.policies.lru import LRU

    keeper = Keeper()
    keeper.error = KvtierError("no room")
    assert save_policies({"disk": LRU(leaf_first=True)}, keeper) == [
        "what the policies learnt could not be saved: no room"
    ]


def test_a_state_that_is_too_large_keeps_the_hottest_pages() -> None:
    import os

    from kvtier.policies.lru import LRU

    keys = [os.urandom(32) for _ in range(60_000)]
    policy, other = LRU(leaf_first=False), LRU(leaf_first=False)
    policy.access(keys, len(keys))
    other.access(keys[::-1], len(keys))
    keeper = Keeper()
    assert save_policies({"disk": policy}, keeper) == []
    assert keeper.blob is not None
    assert STATE_BYTES // 3 < len(keeper.blob) <= STATE_BYTES
    assert restore_policies({"disk": other}, keeper) == []
    hottest = list(other._queue)[-10_000:]
    assert hottest == list(policy._queue)[-10_000:]
