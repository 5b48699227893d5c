"""What breaks under the store: copies, writes, records, memory; and orders that go missing."""

from __future__ import annotations

import errno
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from session_steps import TOKENS, Sequence
from store_model import (
    IDENTITY,
    PAGE,
    Config,
    FailingDisk,
    as_page,
    assert_empty,
    chain,
    close_clean,
    damage,
    device,
    noise,
    open_store,
    put_chain,
    read_all,
)

import kvtier.mover
import kvtier.store.placement
import kvtier.store.residence
import kvtier.tiers.memory
from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.faults import Faults
from kvtier.devices.handles import EmulatedStream
from kvtier.errors import (
    CopyFailedError,
    DeadlineExceededError,
    DeviceOOMError,
    DiskError,
    OffloadWarning,
    PageLostError,
    RaceError,
    TierFullError,
)
from kvtier.mover import Mover

# What warns is often a loop of calls.
# ruff: noqa: PT031

pytestmark = pytest.mark.filterwarnings("ignore::kvtier.errors.OffloadWarning")

ALL = Config(vram=3, host=3, disk=60)


def no_space() -> DiskError:
    return DiskError(errno.ENOSPC, "no space left on device", "data.mdb")


# ------------------------------------------------------------------ copies


def test_a_put_whose_copy_to_vram_fails_stores_nothing_and_can_be_repeated() -> None:
    faults = Faults()
    store = open_store(Config(vram=3), device(faults))
    (key,) = chain(1)
    faults.fail_copy("h2d")
    with pytest.raises(CopyFailedError):
        put_chain(store, [key])
    assert not store.contains(key)
    put_chain(store, [key])
    assert read_all(store, [key]) == 1
    close_clean(store)


def test_a_promotion_that_fails_leaves_the_page_on_disk_and_readable(tmp_path: Path) -> None:
    faults = Faults()
    config = Config(vram=3, disk=60)
    keys = chain(3)
    with open_store(config, device(), tmp_path) as store:
        put_chain(store, keys)
    store = open_store(config, device(faults), tmp_path)
    faults.fail_copy("h2d", 2)
    with store.match(keys) as lease:
        assert lease.tiers() == ["vram", "disk", "vram"]
    assert read_all(store, keys) == 3
    close_clean(store)


def test_a_read_whose_copy_fails_takes_another_copy_of_the_page(tmp_path: Path) -> None:
    faults = Faults()
    config = Config(vram=3, disk=60)
    keys = chain(2)
    store = open_store(config, device(faults), tmp_path)
    put_chain(store, keys)
    store.flush()
    with store.match(keys) as lease:
        assert lease.tiers() == ["vram", "vram"]
        faults.fail_copy("d2h")
        assert lease.read(0).numpy().tobytes() == noise(keys[0])
    close_clean(store)


def test_a_read_whose_copy_fails_is_an_error_and_the_page_stays() -> None:
    faults = Faults()
    store = open_store(Config(vram=3), device(faults))
    keys = chain(1)
    put_chain(store, keys)
    with store.match(keys) as lease:
        faults.fail_copy("d2h")
        with pytest.raises(PageLostError, match="copy out of VRAM failed"):
            lease.read(0)
        assert lease.read(0).numpy().tobytes() == noise(keys[0])
    close_clean(store)


def test_pages_that_cannot_be_copied_out_give_way_to_new_ones(tmp_path: Path) -> None:
    faults = Faults(copy_failure_rate=0.0)
    store = open_store(Config(vram=2, disk=60, disk_write="write_back"), device(faults), tmp_path)
    for number in range(2):
        put_chain(store, chain(1, number))
    for nth in range(1, 20):
        faults.fail_copy("d2h", nth)
    for number in range(2, 5):
        put_chain(store, chain(1, number))
        store.check()
    faults._failing.clear()
    found = [number for number in range(5) if read_all(store, chain(1, number))]
    assert 4 in found
    assert len(found) == 2
    close_clean(store)


def test_an_owned_page_that_cannot_be_copied_out_stays_and_its_owner_is_named() -> None:
    faults = Faults()
    store = open_store(Config(vram=2, host=4), device(faults))
    one = Sequence(store)
    one.append([1] * 2 * TOKENS, 0)
    one.session.seal()
    for nth in range(1, 9):
        faults.fail_copy("d2h", nth)
    two = Sequence(store)
    with pytest.raises(TierFullError, match="copies failed") as caught:
        two.append([0], 0)
    assert caught.value.holders == {one.session.owner: 2}
    faults._failing.clear()
    one.check()
    two.append([0], 0)
    one.check()
    one.session.close()
    two.session.close()
    close_clean(store)


@pytest.mark.parametrize("direction", ["h2d", "d2d"])
def test_a_crop_whose_copy_fails_changes_nothing(direction: Any, tmp_path: Path) -> None:
    faults = Faults()
    store = open_store(Config(vram=3, host=3), device(faults))
    one = Sequence(store)
    one.append([1] * 2 * TOKENS, 0)
    one.session.seal()
    if direction == "h2d":
        assert store.demote(one.session.pages[0].key)
    faults.fail_copy(direction)
    with pytest.raises(CopyFailedError):
        one.crop(2)
    one.check()
    one.crop(2)
    one.check()
    one.session.close()
    close_clean(store)


def test_a_fork_whose_copy_fails_changes_nothing() -> None:
    faults = Faults()
    store = open_store(Config(vram=4), device(faults))
    one = Sequence(store)
    one.append([1] * 6, 0)
    faults.fail_copy("d2d")
    with pytest.raises(CopyFailedError):
        one.fork()
    assert store.stats().owners == 1
    one.check()
    two = one.fork()
    two.check()
    one.session.close()
    two.session.close()
    close_clean(store)


def test_a_host_slot_whose_last_copy_failed_can_be_used_again() -> None:
    faults = Faults()
    store = open_store(Config(vram=3, host=1), device(faults))
    one = Sequence(store)
    one.append([1] * TOKENS, 0)
    one.session.seal()
    assert store.demote(one.session.pages[0].key)
    faults.fail_copy("h2d")
    with pytest.raises(CopyFailedError):
        one.crop(2)
    one.session.close()
    put_chain(store, chain(1))
    assert read_all(store, chain(1)) == 1
    close_clean(store)


def test_a_copy_that_never_ends_meets_the_deadline_and_closing_says_so() -> None:
    faults = Faults()
    store = open_store(Config(vram=1, host=2, host_write="write_back"), device(faults))
    one = Sequence(store)
    one.append([1] * TOKENS, 0)
    one.session.seal()
    faults.stall_copy("d2h", 1e6)
    with pytest.raises(DeadlineExceededError):
        store.take_tails(1, timeout_s=0.2)
    store.check()
    one.session.close()
    dropped = store.close(0.2)
    assert any("still under way" in text for text in dropped)


# ------------------------------------------------------------------ memory


def test_vram_that_is_smaller_than_promised_shrinks_the_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvtier.tiers.memory, "SLAB_BYTES", PAGE)
    store = open_store(Config(vram=30), on := device())
    taken = on.alloc(on.capacity_bytes - 10 * PAGE)
    with pytest.warns(OffloadWarning, match="stays at 8 of 30 pages"):
        for number in range(20):
            put_chain(store, chain(1, number))
        assert store.stats().tiers["vram"].pages == 8
    with pytest.raises(TierFullError):
        store.take_tails(9)
    store.give_tails(store.take_tails(8), [])
    on.free(taken)
    close_clean(store)


def test_slots_are_taken_all_or_none_when_vram_shrinks_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvtier.tiers.memory, "SLAB_BYTES", PAGE)
    store = open_store(Config(vram=30), on := device())
    taken = on.alloc(on.capacity_bytes - 10 * PAGE)
    with pytest.raises(TierFullError):
        store.take_tails(20)
    store.check()
    assert store.stats().tiers["vram"].used_bytes == 0
    on.free(taken)
    close_clean(store)


def test_no_vram_at_all_is_a_clear_error_and_not_the_end() -> None:
    store = open_store(Config(vram=3), device(Faults().fail_alloc()))
    with pytest.raises(DeviceOOMError):
        put_chain(store, chain(1))
    put_chain(store, chain(1))
    assert read_all(store, chain(1)) == 1
    close_clean(store)


def test_memory_that_cannot_be_pinned_is_a_warning(tmp_path: Path) -> None:
    store = open_store(ALL, device(Faults().refuse_pinning()), tmp_path)
    with pytest.warns(OffloadWarning, match="could not be pinned"):
        put_chain(store, chain(8))
    assert read_all(store, chain(8)) == 8
    close_clean(store)


# ------------------------------------------------------------------ disk


@pytest.mark.parametrize("at_call", [True, False])
@pytest.mark.parametrize("disk_write", ["write_back", "write_through"])
@pytest.mark.parametrize("host", [0, 2])
def test_a_full_file_system_costs_pages_and_nothing_else(
    at_call: bool, disk_write: Any, host: int, tmp_path: Path
) -> None:
    store = open_store(
        Config(vram=2, host=host, disk=60, disk_write=disk_write), device(), tmp_path
    )
    failing = FailingDisk(store)
    keys = chain(2)
    put_chain(store, keys)
    (failing.at_call if at_call else failing.later).extend(no_space() for _ in range(50))
    with pytest.warns(OffloadWarning, match="no space left"):
        for number in range(1, 6):
            put_chain(store, chain(1, number))
            store.check()
        store.poll()
    failing.at_call.clear()
    failing.later.clear()
    assert read_all(store, chain(1, 5)) == 1
    read_all(store, keys)
    more = chain(4, 9)
    put_chain(store, more)
    assert store.flush() == 0
    assert read_all(store, more) == 4
    close_clean(store)


def test_flush_counts_what_a_failing_disk_did_not_take(tmp_path: Path) -> None:
    store = open_store(Config(vram=9, disk=60, disk_write="write_back"), device(), tmp_path)
    failing = FailingDisk(store)
    keys = chain(3)
    put_chain(store, keys)
    failing.at_call.append(no_space())
    # The first page fails, and without it the two others are not safe either.
    assert store.flush() == 3
    with pytest.warns(OffloadWarning, match="no space left"):
        assert store.flush() == 0
    close_clean(store)


def test_flush_counts_what_a_small_disk_cannot_hold(tmp_path: Path) -> None:
    store = open_store(Config(vram=9, disk=3, disk_write="write_back"), device(), tmp_path)
    placement = store._placement
    assert placement.disk is not None
    room = placement.disk.live_capacity_bytes // placement.stored_bytes
    assert room < 8
    put_chain(store, chain(8))
    assert store.flush() == 8 - room
    assert read_all(store, chain(8)) == 8
    close_clean(store)


def test_an_owned_page_survives_a_disk_that_fails(tmp_path: Path) -> None:
    store = open_store(Config(vram=2, disk=60, disk_write="write_back"), device(), tmp_path)
    failing = FailingDisk(store)
    one = Sequence(store)
    one.append([1] * 2 * TOKENS, 0)
    one.session.seal()
    failing.later.extend(no_space() for _ in range(9))
    with pytest.raises(TierFullError, match=one.session.owner):
        store.take_tails(1)
    one.check()
    failing.later.clear()
    store.give_tails(store.take_tails(2), [])
    one.check()
    one.session.close()
    close_clean(store)


class HeldDisk:
    """A disk that acknowledges nothing until it is told to."""

    def __init__(self, store: Any) -> None:
        self.futures: list[Future[None]] = []
        self.full = False
        self.waits: list[float] = []
        store._placement.disk.put = self.put

    def put(self, key: bytes, *, timeout_s: float, **options: Any) -> Future[None]:
        self.waits.append(timeout_s)
        if self.full:
            raise DeadlineExceededError("the queue stayed full")
        self.futures.append(Future())
        return self.futures[-1]


def test_a_blocked_disk_meets_the_deadline_and_the_books_still_add_up(tmp_path: Path) -> None:
    store = open_store(Config(vram=2, disk=60), device(), tmp_path)
    held = HeldDisk(store)
    put_chain(store, chain(2))
    with pytest.raises(DeadlineExceededError):
        store.put(chain(1, 5)[0], as_page(noise(1)), identity=IDENTITY.digest, timeout_s=0.1)
    with pytest.raises(DeadlineExceededError):
        store.flush(0.1)
    store.check()
    assert read_all(store, chain(2)) == 2
    for future in held.futures:
        future.set_result(None)
    store.poll()
    store.check()
    assert store.stats().tiers["disk"].pages == 2


def test_a_full_queue_delays_a_write_and_does_not_fail_it(tmp_path: Path) -> None:
    store = open_store(Config(vram=4, disk=60), device(), tmp_path)
    held = HeldDisk(store)
    held.full = True
    put_chain(store, chain(2))
    store.poll()
    assert set(held.waits) == {0.0}, "a call that must not wait did"
    with pytest.raises(DeadlineExceededError):
        store.flush(0.05)
    held.full = False
    store.poll()
    for future in held.futures:
        future.set_result(None)
    store.poll()
    stats = store.stats()
    assert stats.tiers["disk"].pages == 2
    assert not stats.warnings


def test_a_write_that_began_under_a_short_deadline_outlives_it(tmp_path: Path) -> None:
    store = open_store(Config(vram=4, disk=60), device(), tmp_path)
    (key,) = chain(1)
    store.put(key, as_page(noise(key)), identity=IDENTITY.digest, timeout_s=0.05)
    threading.Event().wait(0.1)
    assert store.flush() == 0
    assert not store.stats().warnings
    close_clean(store)


def test_private_pages_that_are_given_up_while_they_are_written_go_when_they_land(
    tmp_path: Path,
) -> None:
    store = open_store(Config(vram=2, disk=60), device(), tmp_path)
    held = HeldDisk(store)
    one = Sequence(store)
    one.append([1] * 2 * TOKENS, 0, named=False)
    one.session.seal()
    with pytest.raises(DeadlineExceededError):
        store.take_tails(2, timeout_s=0.1)
    assert len(held.futures) == 2
    one.session.close()
    for future in held.futures:
        future.set_result(None)
    store.poll()
    store.check()
    assert [tier.pages for tier in store.stats().tiers.values()] == [0, 0, 0]
    close_clean(store)


def test_all_bounce_slots_taken_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    store = open_store(Config(vram=2, disk=60), device(), tmp_path)
    put_chain(store, chain(1))
    store.flush()
    bounce = store._placement.bounce
    slots = [bounce.take() for _ in range(bounce.capacity_pages)]
    with pytest.raises(TierFullError, match="between VRAM and disk"):
        store.put(chain(1, 3)[0], as_page(noise(1)), identity=IDENTITY.digest)
    for slot in slots:
        assert slot is not None
        bounce.give(slot)
    put_chain(store, chain(1, 3))
    close_clean(store)


def test_warnings_as_errors_leave_nothing_half_done(tmp_path: Path) -> None:
    store = open_store(Config(vram=4, disk=60), device(), tmp_path)
    failing = FailingDisk(store)
    failing.later.append(no_space())
    put_chain(store, chain(1))
    with store._locked(10.0) as deadline:
        store._placement.drain(deadline)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OffloadWarning)
        with pytest.raises(OffloadWarning):
            store.match(chain(1))
        with store.match(chain(1)) as lease:
            assert len(lease) == 1
    assert_empty(store)
    close_clean(store)


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("host", [0, 3])
@pytest.mark.parametrize("promote", [True, False])
def test_a_damaged_record_ends_the_prefix_and_can_be_stored_again(
    host: int, promote: bool, tmp_path: Path
) -> None:
    config = Config(vram=3, host=host, disk=60)
    keys = chain(5)
    with open_store(config, device(), tmp_path) as store:
        put_chain(store, keys)
    data = tmp_path / "data.mdb"
    raw = bytearray(data.read_bytes())
    found, at = 0, -1
    while (at := raw.find(noise(keys[2])[:64], at + 1)) >= 0:
        raw[at + 5] ^= 0x10
        found += 1
    assert found
    data.write_bytes(raw)
    store = open_store(config, device(), tmp_path)
    assert store.contains(keys[4])
    with store.match(keys, promote=promote) as lease:
        assert len(lease) == 2
    stats = store.stats()
    assert (stats.damaged, stats.lost) == (1, 1)
    assert not store.contains(keys[3]), "a suffix is there without its prefix"
    assert read_all(store, keys) == 2
    put_chain(store, keys)
    assert read_all(store, keys) == 5
    close_clean(store)


def test_pages_behind_a_damaged_one_are_let_go_though_nobody_asked_for_them(
    tmp_path: Path,
) -> None:
    store = open_store(Config(vram=1, disk=60), device(), tmp_path)
    keys = chain(5)
    put_chain(store, keys)
    store.flush()
    assert store.demote(keys[4])
    assert damage(store, keys[2])
    assert read_all(store, keys[:3]) == 2
    assert [store.contains(key) for key in keys] == [True, True, False, False, False]
    close_clean(store)


def test_a_record_that_rots_under_a_lease_is_an_error_and_never_wrong_bytes(tmp_path: Path) -> None:
    config = Config(vram=1, disk=60)
    keys = chain(3)
    with open_store(config, device(), tmp_path) as store:
        put_chain(store, keys)
    store = open_store(config, device(), tmp_path)
    with store.match(keys, promote=False) as lease:
        assert lease.tiers() == ["disk", "disk", "disk"]
        assert damage(store, keys[1])
        with pytest.raises(PageLostError):
            lease.read(1)
        assert lease.read(2).numpy().tobytes() == noise(keys[2])
        # The page can come back while the lease still has what was below it.
        put_chain(store, keys)
        store.check()
    assert read_all(store, keys) == 3
    close_clean(store)


def test_a_page_that_comes_back_above_a_leased_one_on_disk_is_written_again(tmp_path: Path) -> None:
    config = Config(vram=2, disk=60, disk_write="write_back")
    keys = chain(2)
    with open_store(config, device(), tmp_path) as store:
        put_chain(store, keys)
    store = open_store(config, device(), tmp_path)
    with store.match(keys, promote=False) as lease:
        assert lease.tiers() == ["disk", "disk"]
        assert damage(store, keys[0])
        with pytest.raises(PageLostError):
            lease.read(0)
        put_chain(store, keys)
        assert store.flush() == 0
    close_clean(store)
    store = open_store(config, device(), tmp_path)
    assert read_all(store, keys) == 2
    close_clean(store)


def test_a_page_of_a_session_that_was_lost_is_an_error_and_can_be_put_again(tmp_path: Path) -> None:
    config = Config(vram=2, disk=60)
    store = open_store(config, device(), tmp_path)
    one = Sequence(store)
    one.append([1] * 3 * TOKENS if config.vram > 3 else [1] * 2 * TOKENS, 0)
    one.session.seal()
    keys = [page.key for page in one.session.pages]
    store.flush()
    contents = []
    with store.match(keys) as lease:
        contents = [lease.read(i).clone() for i in range(len(lease))]
    for key in reversed(keys):
        assert store.demote(key)
    assert damage(store, keys[0])
    assert read_nothing(store, keys)
    with pytest.raises(PageLostError):
        store.lease(one.session.pages)
    assert store.put(keys[0], contents[0], identity=IDENTITY.digest)
    one.check()
    one.session.close()
    close_clean(store)


def read_nothing(store: Any, keys: list[bytes]) -> bool:
    with store.match(keys) as lease:
        return len(lease) == 0


def test_what_only_a_lost_page_led_to_is_let_go_with_its_last_owner(tmp_path: Path) -> None:
    store = open_store(Config(vram=2, disk=60), device(), tmp_path)
    one = Sequence(store)
    one.append([1] * 2 * TOKENS, 0)
    one.session.seal()
    keys = [page.key for page in one.session.pages]
    store.flush()
    for key in reversed(keys):
        assert store.demote(key)
    assert damage(store, keys[0])
    assert read_nothing(store, keys)
    assert store.contains(keys[1])
    one.session.close()
    assert not store.contains(keys[1])
    close_clean(store)


def test_a_page_that_goes_between_the_question_and_the_lookup_is_a_shorter_prefix() -> None:
    store = open_store(Config(vram=2), device())
    keys = chain(2)
    put_chain(store, keys)
    assert store.contains(keys[1])
    put_chain(store, chain(1, 7))
    assert read_all(store, keys) == 1
    close_clean(store)


# ------------------------------------------------------------------ orders


def _without_after(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mover._start

    def unordered(self: Mover, stream: Any, link: Any, a: Any, b: Any, _: Any, done: Any) -> Any:
        return start(self, stream, link, a, b, None, done)

    monkeypatch.setattr(Mover, "_start", unordered)


def _nothing(*_: object) -> None:
    pass


def _without_waits_of(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Streams do not wait where ``function`` tells them to."""
    wait = EmulatedStream.wait

    def deaf(self: EmulatedStream, event: Any) -> None:
        if sys._getframe(1).f_code.co_name != function:
            wait(self, event)

    return lambda patch: patch.setattr(EmulatedStream, "wait", deaf)


ORDERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a copy waits for the write of its source": _without_after,
    "a copy waits for the former use of its target": lambda patch: patch.setattr(
        kvtier.mover, "order_behind", _nothing
    ),
    "the host waits for the former use of its slot": lambda patch: patch.setattr(
        kvtier.mover, "host_order_behind", _nothing
    ),
    "a private copy waits for the former use of its slot": lambda patch: patch.setattr(
        kvtier.store.placement, "order_behind", _nothing
    ),
    "a private copy waits for the write of its source": _without_waits_of("fill"),
    "a fork waits for the step that wrote its tails": _without_waits_of("fork"),
    "a slot remembers its last readers": lambda patch: patch.setattr(
        kvtier.store.residence, "events", lambda *_: []
    ),
}


def forked_and_cropped(on: EmulatedDevice, folder: Path) -> None:
    store = open_store(Config(vram=3, host=3, disk=60), on, folder)
    sequences = [Sequence(store)]
    for number in range(6):
        sequences[0].append([number] * 5, number)
        sequences.append(sequences[0].fork())
        sequences[-1].crop(3)
        sequences.pop(1).session.close()
        put_chain(store, chain(2, number))
        assert read_all(store, chain(2, number)) == 2
    for sequence in sequences:
        sequence.check()
        sequence.session.close()
    close_clean(store)


def a_page_read_by_a_step_makes_room_for_an_upload(on: EmulatedDevice, folder: Path) -> None:
    store = open_store(Config(vram=2, disk=60), on, folder)
    one = Sequence(store)
    one.append([1] * TOKENS, 0)
    one.append([1], 0)
    store.flush()
    one.append([1], 0)
    one.session.close()
    put_chain(store, chain(3))
    assert read_all(store, chain(3)) == 3
    close_clean(store)


def a_page_read_by_a_step_makes_room_for_the_host(on: EmulatedDevice, _: Path) -> None:
    scratch = on.alloc(PAGE)
    store = open_store(Config(vram=3, host=1), on)
    one = Sequence(store, scratch=scratch)
    one.append([1] * TOKENS, 0)
    one.session.seal()
    assert store.demote(one.session.pages[0].key)
    one.append([1], 0)
    one.session.close()
    put_chain(store, chain(1))
    assert read_all(store, chain(1)) == 1
    on.synchronize(10.0)
    on.free(scratch)
    close_clean(store)


def the_older_of_two_readers_ends_last(on: EmulatedDevice, _: Path) -> None:
    scratch = on.alloc(PAGE)
    store = open_store(Config(vram=6, host=1), on)
    one = Sequence(store, scratch=scratch)
    one.append([1] * TOKENS, 0)
    one.session.seal()
    assert store.demote(one.session.pages[0].key)
    two = one.fork()
    one.append([1], 0)
    two.append([1], 0)
    two.session.close()
    one.session.close()
    put_chain(store, chain(1))
    assert read_all(store, chain(1)) == 1
    on.synchronize(10.0)
    on.free(scratch)
    close_clean(store)


def two_threads_of_torch_work(on: EmulatedDevice, _: Path) -> None:
    store = open_store(Config(vram=3), on)
    one, two = Sequence(store), Sequence(store)
    two.append([1] * (TOKENS + 1), 0)
    with on.on(on.stream("another")):
        one.append([1], 0)
    one.session.close()
    three = two.fork()
    for sequence in (two, three):
        sequence.check()
        sequence.session.close()
    close_clean(store)


def private_copies_on_another_stream(on: EmulatedDevice, _: Path) -> None:
    store = open_store(Config(vram=6), on)
    one = Sequence(store)
    with on.on(on.stream("another")):
        one.append([1] * (TOKENS + 1), 0)
        one.session.seal()
    two = one.fork()
    with on.on(on.stream("another")):
        two.append([2] * TOKENS, 0)
        two.session.seal()
    two.crop(TOKENS + 2)
    for sequence in (one, two):
        sequence.check()
        sequence.session.close()
    close_clean(store)


def busy_day(folder: Path) -> None:
    """Calls that together need every order that the mover and the placement keep."""
    for number, part in enumerate(
        (
            forked_and_cropped,
            a_page_read_by_a_step_makes_room_for_an_upload,
            a_page_read_by_a_step_makes_room_for_the_host,
            the_older_of_two_readers_ends_last,
            two_threads_of_torch_work,
            private_copies_on_another_stream,
        )
    ):
        part(device(), folder / str(number))


def test_the_orders_that_are_kept_suffice(tmp_path: Path) -> None:
    busy_day(tmp_path)


@pytest.mark.parametrize("missing", ORDERS)
def test_without_any_one_of_them_there_is_a_race(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ORDERS[missing](monkeypatch)
    with pytest.raises(RaceError):
        busy_day(tmp_path)
