"""A recorded trace, replayed with the same policy and sizes, gives the live store's own counts."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_model import IDENTITY, PAGE, Config, device, open_store

from kvtier.errors import TierFullError
from kvtier.policy import Request
from kvtier.replay.tier import replay_tier
from kvtier.replay.tiers import replay_tiers
from kvtier.store.store import TieredStore
from kvtier.trace.read import read_trace

DATA = torch.zeros(PAGE, dtype=torch.uint8)


def key(*path: int) -> bytes:
    """The key of a page by the turns that lead to it."""
    return b"/".join(b"%d" % step for step in path)


def conversations(seed: int, turns: int, longest: int) -> list[tuple[int, list[bytes]]]:
    """Turns of a few conversations that share first pages and now and then branch off."""
    rng = random.Random(seed)
    talks: list[list[int]] = [[rng.randrange(2)] for _ in range(5)]
    asked = []
    for _ in range(turns):
        who = rng.randrange(len(talks))
        talk = talks[who]
        if rng.random() < 0.15:
            del talk[rng.randrange(1, len(talk) + 1) :]
        talk += [rng.randrange(3) for _ in range(rng.randrange(3))]
        del talk[longest:]
        asked.append((who, [key(*talk[: n + 1]) for n in range(len(talk))]))
    return asked


def drive(store: TieredStore, traffic: list[tuple[int, list[bytes]]]) -> int:
    """Ask for every request, store what is missing; pages that found no room."""
    refused = 0
    for who, keys in traffic:
        with store.match(keys, request=Request(session=who)) as lease:
            found = len(lease)
            for at in range(found, len(keys)):
                parent = keys[at - 1] if at else None
                try:
                    store.put(keys[at], DATA, parent=parent, identity=IDENTITY.digest)
                except TierFullError:
                    refused += len(keys) - at
                    break
    return refused


@pytest.mark.parametrize("policy", ["lru", "fifo", "mq", "arc", "s3fifo", "gdsf", "lru:order=head"])
@pytest.mark.parametrize("tiers", [{"vram": 7}, {"vram": 3, "host": 8}, {"vram": 2, "host": 3}])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=4, deadline=None)
def test_hits_of_the_replay_are_those_of_the_store(
    policy: str, tiers: dict[str, int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with closing(device()) as card, open_store(Config(policy=policy, **tiers), card) as store:
        with store.record(path):
            refused = drive(store, conversations(seed, 60, 9))
        live = store.stats()
    cell = replay_tiers(
        read_trace(path),
        policy,
        {tier: pages * PAGE for tier, pages in tiers.items()},
        PAGE,
        born="host" if "host" in tiers else None,
        check=True,
    )
    assert cell.block_refs == live.lookup_pages
    assert cell.prefix_hits == live.hit_pages
    assert cell.refused == refused
    for tier in tiers:
        assert cell.tiers[tier].hits == live.tiers[tier].hits
        assert cell.tiers[tier].inserted == live.tiers[tier].pages_in
        assert cell.tiers[tier].resident == live.tiers[tier].pages
    # Where there is no host tier, ``put`` uploads over the link, which a replay does not count.
    for link in ("vram->host", "host->vram") if "host" in tiers else ():
        assert cell.link_bytes[link] == live.links[link].bytes


@pytest.mark.filterwarnings("ignore::kvtier.errors.OffloadWarning")
@pytest.mark.parametrize("seed", range(3))
def test_the_thrash_guard_closes_and_opens_the_host_tier_alike(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    rng = random.Random(seed)
    traffic = [(0, [key(n)]) for n in range(120)]
    for start in range(120, 420, 100):
        traffic += [(0, [key(n)]) for n in range(start, start + 90)]
        traffic += [(0, [key(start + 90 - rng.randrange(1, 60))]) for _ in range(40)]
    with closing(device()) as card, open_store(Config(vram=2, host=3), card) as store:
        store.record(folder / "t")
        for who, keys in traffic:  # through VRAM, as sessions store their pages
            with store.match(keys, promote=False, request=Request(session=who)) as lease:
                if len(lease):
                    continue
            slot = store.take_tails(1, owner="test")[0]
            written = store.device.compute_stream().record()
            page, _ = store.seal(
                slot, key=keys[0], parent=None, identity=IDENTITY.digest, written=written, owner="t"
            )
            store.disown([page], "t")
        live = store.stats()
    sizes = {"vram": 2 * PAGE, "host": 3 * PAGE}
    cell = replay_tiers(read_trace(folder / "t"), "lru", sizes, PAGE, check=True)
    assert live.warnings, "the guard never closed"
    assert cell.tiers["host"].hits > 0
    for tier in ("vram", "host"):
        assert cell.tiers[tier].hits == live.tiers[tier].hits
        assert cell.tiers[tier].inserted == live.tiers[tier].pages_in


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=6, deadline=None)
def test_with_a_disk_that_holds_all(
    policy: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    path = folder / "t.jsonl"
    # On a full disk what goes depends on which writes have ended, which a replay cannot know.
    config = Config(vram=2, host=3, disk=60, policy=policy)
    with closing(device()) as card, open_store(config, card, folder) as store:
        store.record(path)
        refused = 0
        for one in conversations(seed, 30, 7):
            refused += drive(store, [one])
            store.flush()
        live = store.stats()
        disk_pages = store._directory.policies["disk"].capacity
    sizes = {"vram": 2 * PAGE, "host": 3 * PAGE, "disk": disk_pages * PAGE}
    cell = replay_tiers(read_trace(path), policy, sizes, PAGE, born="host", check=True)
    assert cell.block_refs == live.lookup_pages
    assert cell.prefix_hits == live.hit_pages
    assert cell.tiers["vram"].hits == live.tiers["vram"].hits
    assert cell.refused == refused


@given(seed=st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_one_tier_is_the_plain_walk_while_every_request_fits(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with closing(device()) as card, open_store(Config(vram=9, policy="lru"), card) as store:
        store.record(path, salted=True)
        assert drive(store, conversations(seed, 80, 9)) == 0
        live = store.stats()
    cell = replay_tier(read_trace(path), "lru", 9)
    assert (cell.block_refs, cell.prefix_hits) == (live.lookup_pages, live.hit_pages)
