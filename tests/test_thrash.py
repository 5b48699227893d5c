"""The thrash guard: a tier whose pages are never asked for in time is not written to any more."""

from __future__ import annotations

import warnings
from contextlib import closing

from store_model import IDENTITY, Config, device, open_store

from kvtier.errors import OffloadWarning
from kvtier.session.session import Session
from kvtier.store.store import TieredStore
from kvtier.store.thrash import ThrashGuard


def test_it_closes_after_so_many_writes_without_a_hit_and_opens_with_the_first() -> None:
    guard = ThrashGuard(10, turnovers=4, least=20, probe=4)
    for _ in range(39):
        assert guard.admit()
        guard.wrote()
    guard.wrote()
    assert guard.closed
    assert [guard.admit() for _ in range(8)] == [False, False, False, True] * 2
    guard.hit()
    assert not guard.closed
    assert guard.admit()


def test_a_hit_in_between_keeps_it_open() -> None:
    guard = ThrashGuard(1, turnovers=1, least=10)
    for turn in range(100):
        if turn % 9 == 0:
            guard.hit()
        assert guard.admit()
        guard.wrote()


def _put_single_pages(store: TieredStore, keys: list[bytes]) -> None:
    for key in keys:
        slot = store.take_tails(1, owner="test")[0]
        written = store.device.compute_stream().record()
        page, _ = store.seal(
            slot, key=key, parent=None, identity=IDENTITY.digest, written=written, owner="test"
        )
        store.disown([page], "test")


def test_a_store_stops_copying_to_a_host_tier_that_thrashes_and_says_so_once() -> None:
    with closing(device()) as card, open_store(Config(vram=2, host=3), card) as store:
        keys = [bytes([n]) * 32 for n in range(200)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _put_single_pages(store, keys[:100])
            store.poll()
        said = [w for w in caught if issubclass(w.category, OffloadWarning)]
        assert len(said) == 1
        assert "the host tier of 3 pages" in str(said[0].message)
        before = store.stats().tiers["host"].pages_in
        _put_single_pages(store, keys[100:132])
        assert store.stats().tiers["host"].pages_in - before == 2
        # A page in it is asked for after all: it opens again.
        assert _hit_in_host(store, keys)
        before = store.stats().tiers["host"].pages_in
        _put_single_pages(store, keys[132:140])
        assert store.stats().tiers["host"].pages_in - before == 8


def test_pages_that_somebody_owns_are_never_turned_away() -> None:
    with closing(device()) as card, open_store(Config(vram=2, host=3), card) as store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadWarning)
            _put_single_pages(store, [bytes([n]) * 32 for n in range(100)])
            store.poll()
        assert store._placement.host_guard.closed
        with Session(store, IDENTITY) as session:
            session.reserve(8)
            session.extend(8, list(range(8)))
            session.seal()
            session.reserve(4)  # the third page of two in VRAM: one has to go to host RAM
            assert sorted(session.lease()[0].tiers()) == ["host", "vram"]


def _hit_in_host(store: TieredStore, keys: list[bytes]) -> bool:
    for key in keys:
        with store.match([key], promote=False) as lease:
            if lease.tiers() == ["host"]:
                return True
    return False
