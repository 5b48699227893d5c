"""The store's calls, one by one: what they return, refuse and promise."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from store_model import (
    IDENTITY,
    LAYOUT,
    PAGE,
    Config,
    as_page,
    assert_empty,
    chain,
    close_clean,
    device,
    noise,
    open_store,
    put_chain,
    read_all,
)

from kvtier.errors import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    LayoutError,
    TierFullError,
)
from kvtier.store.store import TieredStore

ALL = Config(vram=3, host=3, disk=60)


# ------------------------------------------------------------------ opening


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"vram": 0}, "vram is 0 bytes"),
        ({"vram": PAGE - 1}, "vram is"),
        ({"host": PAGE - 1}, "host is"),
        ({"disk": "8MiB"}, "no path is given"),
        ({"disk": 5000, "path": "."}, "cannot hold one page"),
        ({"host_write": "sometimes"}, "host_write"),
        ({"disk_write": "never"}, "disk_write"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"policy": "nosuch"}, "nosuch"),
        ({"policy": "opt"}, "'opt' has to know the future"),
    ],
)
def test_what_cannot_be_opened_is_named(
    options: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what):
        TieredStore(LAYOUT, device=device(), **{"vram": 4 * PAGE, **options})


def test_nothing_is_allocated_before_it_is_used(tmp_path: Path) -> None:
    store = open_store(ALL, on := device(), tmp_path)
    assert (on.used_bytes, on.host_bytes) == (0, 0)
    close_clean(store)


def test_a_store_that_cannot_be_opened_leaves_the_folder_free(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    put_chain(store, chain(2))
    close_clean(store)
    on = device()
    on.close()
    with pytest.raises(ClosedError):
        open_store(ALL, on, tmp_path)
    store = open_store(ALL, device(), tmp_path)
    assert read_all(store, chain(2)) == 2
    close_clean(store)


# ------------------------------------------------------------------ put


def test_put_takes_a_copy_and_says_whether_the_page_is_new() -> None:
    store = open_store(Config(vram=3, host=3), device())
    (key,) = chain(1)
    data = as_page(noise(key))
    assert store.put(key, data)
    data.zero_()
    assert not store.put(key, data)
    assert read_all(store, [key]) == 1
    close_clean(store)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(PAGE - 1, dtype=torch.uint8),
        torch.zeros(PAGE, dtype=torch.int8),
        torch.zeros(1, PAGE, dtype=torch.uint8),
    ],
)
def test_put_refuses_what_is_no_page(data: torch.Tensor) -> None:
    with open_store(Config(vram=3), device()) as store, pytest.raises(LayoutError):
        store.put(chain(1)[0], data)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"key": b""}, "key is"),
        ({"key": b"x" * 33}, "key is"),
        ({"key": "text"}, "key is"),
        ({"parent": b"unknown"}, "parent page"),
        ({"key": b"me", "parent": b"me"}, "not its parent"),
        ({"identity": b""}, "identity is"),
        ({"identity": b"x" * 33}, "identity is"),
    ],
)
def test_put_refuses_what_the_disk_could_not_keep_and_changes_nothing(
    options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    store = open_store(ALL, device(), tmp_path)
    arguments = {"key": chain(1)[0], "identity": IDENTITY.digest, **options}
    with pytest.raises(ConfigError, match=what):
        store.put(data=as_page(noise(1)), **arguments)
    assert store.stats().tiers["host"].pages == 0
    close_clean(store)


def test_a_full_tier_names_who_holds_it_at_once() -> None:
    store = open_store(Config(vram=3), device(), timeout_s=60.0)
    keys = chain(2)
    put_chain(store, keys)
    lease = store.match(keys)
    slots = store.take_tails(1, owner="somebody")
    began = time.monotonic()
    with pytest.raises(TierFullError, match="somebody") as caught:
        put_chain(store, chain(1, 5))
    assert time.monotonic() - began < 30
    assert caught.value.holders == {"leases and transfers": 2, "somebody": 1}
    assert (caught.value.tier, caught.value.needed_bytes) == ("vram", PAGE)
    store.give_tails(slots, [])
    lease.close()
    put_chain(store, chain(1, 5))
    close_clean(store)


def test_more_slots_than_the_tier_has_are_refused_at_once() -> None:
    with open_store(Config(vram=3), device()) as store:
        put_chain(store, chain(3))
        with pytest.raises(TierFullError, match="3 pages in all"):
            store.take_tails(4)
        assert read_all(store, chain(3)) == 3


@pytest.mark.parametrize("timeout_s", [-1.0, float("inf"), float("nan")])
def test_no_call_waits_without_a_deadline(timeout_s: float) -> None:
    with open_store(Config(vram=3), device()) as store, pytest.raises(ConfigError):
        store.match([], timeout_s=timeout_s)


def test_a_busy_store_meets_the_deadline() -> None:
    store = open_store(Config(vram=3), device())
    entered, leave = threading.Event(), threading.Event()

    def hog() -> None:
        with store._locked(10.0):
            entered.set()
            leave.wait(10.0)

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        assert entered.wait(10.0)
        with pytest.raises(DeadlineExceededError, match="busy"):
            store.match(chain(1), timeout_s=0.05)
    finally:
        leave.set()
        thread.join(10.0)
    close_clean(store)


# ------------------------------------------------------------------ moving


def test_match_finds_a_prefix_wherever_it_is(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    keys = chain(9)
    put_chain(store, keys)
    assert read_all(store, keys) == 9
    assert read_all(store, keys[:4] + chain(5, 8)) == 4
    assert read_all(store, []) == 0
    stats = store.stats()
    assert (stats.lookups, stats.lookup_pages, stats.hit_pages) == (3, 18, 13)
    assert sum(tier.hits for tier in stats.tiers.values()) == 13
    close_clean(store)


def test_a_leased_page_stays_where_it_is_under_pressure(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    keys = chain(4)
    put_chain(store, keys)
    with store.match(keys) as lease:
        tiers = lease.tiers()
        for number in range(1, 9):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store, "timeout_s", 5.0)
                try:
                    put_chain(store, chain(2, number))
                except TierFullError:
                    break
        assert lease.tiers() == tiers
        for index, key in enumerate(keys):
            assert lease.read(index).numpy().tobytes() == noise(key)
        for key in keys:
            assert not store.demote(key)
            assert store.remove([key]) == 0
    close_clean(store)


def test_demote_goes_down_tier_by_tier_and_stops_at_the_last(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    (key,) = chain(1)
    put_chain(store, [key])
    assert store.demote(key)
    with store.match([key], promote=False) as lease:
        assert lease.tiers() == ["disk"]
    assert not store.demote(key)
    assert not store.demote(chain(1, 3)[0])
    assert store.prefetch([key]) == 1
    with store.match([key], promote=False) as lease:
        assert lease.tiers() == ["vram"]
    assert store.demote(key)
    assert read_all(store, [key]) == 1
    close_clean(store)


def test_demote_never_drops_a_page() -> None:
    store = open_store(Config(vram=2, host=1), device())
    one = store.take_tails(1)
    put_chain(store, chain(1))
    held = store.match(chain(1), promote=False)
    page, _ = store.seal(
        one[0],
        key=chain(1, 2)[0],
        parent=None,
        identity=IDENTITY.digest,
        written=store.device.compute_stream().record(),
        owner="me",
    )
    store.disown([page], "me")
    assert not store.demote(page.key), "host RAM has no room for it"
    assert store.contains(page.key)
    held.close()
    close_clean(store)


def test_a_page_in_vram_survives_the_eviction_of_its_copy_in_host_ram(tmp_path: Path) -> None:
    store = open_store(Config(vram=3, host=1), device())
    slots = store.take_tails(1)
    page, _ = store.seal(
        slots[0],
        key=chain(1)[0],
        parent=None,
        identity=IDENTITY.digest,
        written=store.device.compute_stream().record(),
        owner="me",
    )
    store.disown([page], "me")
    with store._locked(5.0) as deadline:
        assert store._placement.demote(page, deadline)
        store._placement.drain(deadline)
    assert sorted(page.copies) == ["host", "vram"]
    put_chain(store, chain(1, 5))
    assert sorted(page.copies) == ["vram"]
    close_clean(store)


def test_remove_takes_what_follows_and_counts_each_key_once(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    keys = chain(5)
    put_chain(store, keys)
    assert store.remove([keys[2], keys[2], chain(1, 9)[0]]) == 1
    assert read_all(store, keys) == 2
    assert not any(store.contains(key) for key in keys[2:])
    close_clean(store)
    store = open_store(ALL, device(), tmp_path)
    assert read_all(store, keys) == 2
    close_clean(store)


def test_contains_is_no_use_of_a_page() -> None:
    store = open_store(Config(vram=2), device())
    first, second = chain(1, 1), chain(1, 2)
    put_chain(store, first)
    put_chain(store, second)
    assert store.contains(first[0])
    put_chain(store, chain(1, 3))
    assert not store.contains(first[0])
    assert store.contains(second[0])
    close_clean(store)


@pytest.mark.parametrize("disk_write", ["write_back", "write_through"])
@pytest.mark.parametrize("host", [0, 2])
def test_nothing_is_lost_over_a_restart(disk_write: Any, host: int, tmp_path: Path) -> None:
    config = Config(vram=2, host=host, disk=60, disk_write=disk_write)
    keys = [chain(6, number) for number in range(4)]
    store = open_store(config, device(), tmp_path)
    for sequence in keys:
        put_chain(store, sequence)
    close_clean(store)
    store = open_store(config, device(), tmp_path)
    for sequence in keys:
        assert read_all(store, sequence) == 6
    close_clean(store)


def test_write_through_makes_eviction_free(tmp_path: Path) -> None:
    config = Config(vram=3, host=3, disk=60, host_write="write_through")
    store = open_store(config, device(), tmp_path)
    page, _ = store.seal(
        store.take_tails(1)[0],
        key=chain(1)[0],
        parent=None,
        identity=IDENTITY.digest,
        written=store.device.compute_stream().record(),
        owner="me",
    )
    store.flush()
    assert sorted(page.copies) == ["disk", "host", "vram"]
    before = store.stats().links["vram->host"].copies
    assert store.demote(page.key)
    assert store.stats().links["vram->host"].copies == before
    store.disown([page], "me")
    close_clean(store)


# ------------------------------------------------------------------ leases


def test_a_closed_lease_cannot_be_read_and_closes_once() -> None:
    store = open_store(Config(vram=3), device())
    put_chain(store, chain(2))
    lease = store.match(chain(2))
    lease.close()
    lease.close()
    with pytest.raises(ClosedError):
        lease.read(0)
    assert_empty(store)
    close_clean(store)


def test_a_lease_closed_between_the_check_and_the_read_gives_no_bytes() -> None:
    store = open_store(Config(vram=1), device())
    put_chain(store, chain(1))
    lease = store.match(chain(1))
    lease.close()
    lease.closed = False  # what another thread saw before
    stale = lease.copies[0]
    lease.closed = True
    assert stale.holds == 0
    with pytest.raises(ClosedError):
        store.read_leased(lease, 0, as_page(noise(1)).numpy())
    close_clean(store)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(PAGE, dtype=torch.int8),
        torch.empty(PAGE + 1, dtype=torch.uint8),
        torch.empty(2 * PAGE, dtype=torch.uint8)[::2],
    ],
)
def test_a_read_refuses_a_buffer_that_does_not_fit(out: torch.Tensor) -> None:
    with open_store(Config(vram=3), device()) as store:
        put_chain(store, chain(1))
        with store.match(chain(1)) as lease, pytest.raises(LayoutError):
            lease.read(0, out)


# ------------------------------------------------------------------ closing


def test_after_close_every_call_says_so(tmp_path: Path) -> None:
    store = open_store(ALL, device(), tmp_path)
    put_chain(store, chain(1))
    lease = store.match(chain(1))
    assert store.close() == []
    assert store.close() == []
    for call in (
        lambda: store.put(chain(1)[0], as_page(noise(1)), identity=IDENTITY.digest),
        lambda: store.match(chain(1)),
        lambda: store.contains(chain(1)[0]),
        lambda: store.demote(chain(1)[0]),
        lambda: store.remove(chain(1)),
        lambda: store.prefetch(chain(1)),
        lambda: lease.read(0),
        store.flush,
        store.stats,
        store.poll,
    ):
        with pytest.raises(ClosedError):
            call()
    lease.close()
    store.check()


def test_a_store_without_a_disk_closes_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_store(Config(vram=2, host=2), device()) as store:
            put_chain(store, chain(2))


def test_closing_says_what_was_not_saved(tmp_path: Path) -> None:
    store = open_store(Config(vram=9, disk=2, disk_write="write_back"), device(), tmp_path)
    put_chain(store, chain(8))
    with pytest.warns(RuntimeWarning, match="could not be written"):
        store.__exit__(None, None, None)


# ------------------------------------------------------------------ threads


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_store(Config(vram=3, host=3, disk=60), device(), tmp_path)
    stop = time.monotonic() + 1.5
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            round_ = 0
            while time.monotonic() < stop:
                keys = chain(3, (number + round_) % 5)
                # Another thread may hold all, or have had the prefix dropped.
                with contextlib.suppress(TierFullError, ConfigError):
                    put_chain(store, keys)
                read_all(store, keys)
                round_ += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not errors, errors
    close_clean(store)


def test_a_match_brings_pages_from_host_ram_into_free_vram() -> None:
    with open_store(Config(vram=2, host=3), device()) as store:
        put_chain(store, chain(3))
        with store.match(chain(3)) as lease:
            assert lease.tiers() == ["vram", "vram", "host"]
            assert read_all(store, chain(3)) == 3
