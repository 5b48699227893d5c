"""A session, call by call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from session_steps import TOKENS, Sequence, of_page, token_bytes
from store_model import (
    IDENTITY,
    Config,
    chain,
    close_clean,
    device,
    open_store,
    put_chain,
)

from kvtier.errors import ClosedError, ConfigError, IdentityError, PageLostError, TierFullError
from kvtier.keys import page_keys
from kvtier.session.session import Session

ALL = Config(vram=6, host=4, disk=60)


def test_an_identity_of_another_layout_is_refused() -> None:
    with open_store(Config(vram=2), device()) as store, pytest.raises(IdentityError):
        Session(store, replace(IDENTITY, layout_digest=b"x" * 32))


def test_a_sequence_comes_back_after_a_restart(tmp_path: Path) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    store = open_store(ALL, device(), tmp_path)
    one = Sequence(store)
    one.append(tokens, 0)
    one.session.close()
    close_clean(store)
    store = open_store(ALL, device(), tmp_path)
    two = Sequence(store)
    assert two.restore(tokens) == 0, "a page that was never sealed has no key"
    two.append(tokens, 0)
    assert two.session.seal() == 2
    two.session.close()
    close_clean(store)
    store = open_store(ALL, device(), tmp_path)
    three = Sequence(store)
    assert three.restore(tokens) == 8
    assert three.kv == two.kv[:8]
    three.append([9, 10], 1)
    three.check()
    three.session.close()
    close_clean(store)


@pytest.mark.parametrize(("tokens", "found"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_restore_leaves_a_token_for_the_model(tokens: int, found: int) -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one = Sequence(store)
    one.append([1] * 12, 0)
    one.session.seal()
    two = Sequence(store)
    assert two.restore([1] * tokens) == found
    for sequence in (one, two):
        sequence.session.close()
    close_clean(store)


ALL_IN_MEMORY = Config(vram=6, host=4)


def test_restore_is_for_an_empty_session_and_refuses_bad_tokens_without_a_trace() -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one = Sequence(store)
    with pytest.raises(ConfigError):
        one.session.restore([1, 2, -3])
    assert store.stats().leases == 0
    one.append([1], 0)
    with pytest.raises(ConfigError, match="already has 1 tokens"):
        one.session.restore([1, 2, 3])
    one.session.close()
    close_clean(store)


def test_two_sessions_with_equal_tokens_keep_their_own_numbers() -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one, two = Sequence(store), Sequence(store)
    tokens = [1] * 5
    one.append(tokens, 0)
    two.append(tokens, 1)
    one.session.seal()
    two.session.seal()
    assert one.session.pages[0] is one.session.public[0] is two.session.public[0]
    assert two.session.pages[0] is not two.session.public[0]
    assert two.session.pages[0].ephemeral
    one.check()
    two.check()
    with store.match(page_keys(IDENTITY, tokens, TOKENS)) as lease:
        page = lease.read(0).numpy().tobytes()
    assert of_page(page, 3) == token_bytes(tokens[:4], 0)
    private = two.session.pages[0].key
    one.session.close()
    two.check()
    two.session.close()
    assert not store.contains(private)
    assert store.contains(page_keys(IDENTITY, tokens, TOKENS)[0])
    close_clean(store)


def test_private_pages_do_not_outlive_the_process(tmp_path: Path) -> None:
    config = Config(vram=1, disk=60)
    store = open_store(config, device(), tmp_path)
    one = Sequence(store)
    one.append([1] * TOKENS, 0, named=False)
    one.session.seal()
    (page,) = one.session.pages
    store.give_tails(store.take_tails(1), [])
    assert sorted(page.copies) == ["disk"]
    one.check()
    store.close()  # as if the session had been forgotten
    store = open_store(config, device(), tmp_path)
    assert store.stats().tiers["disk"].pages == 0
    close_clean(store)


def test_a_sequence_of_unknown_tokens_is_never_found(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    one = Sequence(store)
    one.append([1] * TOKENS, 0)
    one.append([1] * TOKENS, 0, named=False)
    one.append([1] * TOKENS, 0)
    one.session.seal()
    one.check()
    with store.match(page_keys(IDENTITY, [1] * 12, TOKENS)) as lease:
        assert len(lease) == 1
    one.session.close()
    assert store.stats().tiers["vram"].pages == 1
    close_clean(store)


def test_a_fork_shares_sealed_pages_and_copies_the_rest() -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one = Sequence(store)
    one.append([1] * 9, 0)
    two = one.fork()
    assert two.session.pages == one.session.pages
    assert two.session.tails[0] is not one.session.tails[0]
    one.append([2] * 3, 0)
    two.append([3] * 3, 1)
    one.check()
    two.check()
    one.session.close()
    two.check()
    two.session.close()
    close_clean(store)


def test_a_crop_into_a_sealed_page_leaves_the_page_to_others(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    one = Sequence(store)
    one.append([1] * 8, 0)
    one.session.seal()
    two = one.fork()
    two.crop(6)
    two.append([2] * 3, 1)
    two.session.seal()
    one.check()
    two.check()
    assert two.session.pages[1].key == page_keys(IDENTITY, [1] * 6 + [2] * 2, TOKENS)[1]
    two.crop(0)
    two.append([1] * 2, 0)
    one.check()
    two.check()
    one.session.close()
    two.session.close()
    close_clean(store)


def test_a_crop_of_what_is_not_sealed_seals_nothing() -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one = Sequence(store)
    one.append([1] * 8, 0)
    one.crop(3)
    assert one.session.seal() == 0
    assert store.stats().tiers["vram"].pages == 0
    one.check()
    for length in (-1, 4):
        with pytest.raises(ConfigError, match="cannot crop"):
            one.session.crop(length)
    one.session.close()
    close_clean(store)


def test_extend_refuses_what_was_not_reserved_and_changes_nothing() -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one = Sequence(store)
    one.append([1] * 3, 0)
    with pytest.raises(ConfigError, match="reserve first"):
        one.session.extend(2, [1, 1])
    with pytest.raises(ConfigError, match="token ids"):
        one.session.extend(1, [1, 1])
    with pytest.raises(ConfigError):
        one.session.extend(1, [-1])
    assert one.session.length == 3
    one.append([1] * 2, 0)
    assert one.session.seal() == 1
    assert one.session.pages[0].key == page_keys(IDENTITY, [1] * 4, TOKENS)[0]
    one.check()
    one.session.close()
    close_clean(store)


def test_a_step_that_does_not_fit_names_the_sessions_and_changes_nothing() -> None:
    store = open_store(Config(vram=3), device())
    one, two = Sequence(store), Sequence(store)
    one.append([1] * 9, 0)
    with pytest.raises(TierFullError) as caught:
        two.append([1], 0)
    assert caught.value.holders == {one.session.owner: 3}
    one.crop(2)
    two.append([1], 0)
    for sequence in (one, two):
        sequence.check()
        sequence.session.close()
    close_clean(store)


def test_idle_sessions_give_way_to_the_one_that_works(tmp_path: Path) -> None:
    store = open_store(Config(vram=6, host=20), device())
    sequences = [Sequence(store) for _ in range(3)]
    for number in range(18):
        one = sequences[number % 3]
        one.append([number] * 3, 0)
        one.check()
    for one in sequences:
        one.check()
        one.session.close()
    close_clean(store)


def test_a_page_that_is_lost_to_all_is_sealed_again_by_the_next(tmp_path: Path) -> None:
    store = open_store(Config(vram=4, disk=60), device(), tmp_path)
    one, two = Sequence(store), Sequence(store)
    one.append([1] * TOKENS, 0)
    one.session.seal()
    two.append([1] * TOKENS, 1)
    (page,) = one.session.pages
    with store._locked(5.0) as deadline:
        store._placement.drain(deadline)
        for tier in ("disk", "vram"):
            store._placement.lose(page, tier)
    with pytest.raises(PageLostError):
        one.check()
    with pytest.raises(PageLostError):
        one.crop(2)
    two.session.seal()
    assert two.session.pages[0] is two.session.public[0] is page
    two.check()
    one.session.close()
    two.session.close()
    close_clean(store)


def test_a_closed_session_refuses_every_call() -> None:
    store = open_store(ALL_IN_MEMORY, device())
    one = Session(store, IDENTITY)
    one.close()
    for call in (
        lambda: one.restore([1]),
        lambda: one.reserve(1),
        lambda: one.extend(1, [1]),
        lambda: one.crop(0),
        one.lease,
        one.seal,
        one.fork,
    ):
        with pytest.raises(ClosedError):
            call()
    close_clean(store)


def test_a_lease_that_the_store_has_parked_is_taken_anew() -> None:
    store = open_store(Config(vram=2, host=4), device())
    one = Sequence(store)
    one.append([1] * TOKENS, 0)
    one.append([1], 0)
    first, _ = one.session.lease()
    assert one.session.lease() == (first, False)
    compute = store.device.compute_stream()
    one.session.rest(compute.name, compute.record())
    put_chain(store, chain(3))
    store.give_tails(store.take_tails(1), [])
    assert first.closed
    second, new = one.session.lease()
    assert new
    assert second.tiers() == ["host"]
    one.check()
    one.session.close()
    close_clean(store)
