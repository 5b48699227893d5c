"""The index is in the order of the puts: who looks a page up finds it wherever it has been put since,
and entries that lie elsewhere than they should are nobody's."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from disk_child import CAPACITY, PAGE_BYTES, PLANES, key_of, open_tier, page_of, put
from disk_faults import FaultyTransaction, lmdb_error
from disk_process import memory_folder
from test_disk_shared import DEADLINE_S, OtherProcess, other_process

from kvtier.errors import DeadlineExceededError, DiskError, TierFullError
from kvtier.tiers import key_map
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_reader import DiskReader
from kvtier.tiers.key_map import KeyMap
from kvtier.tiers.lmdb_packing import Packer
from kvtier.tiers.payload import Payload
from kvtier.tiers.record import IndexEntry, place_of


@pytest.fixture(params=["inline", "slab"])
def placement(request: pytest.FixtureRequest) -> Payload:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder / "tier"


def put_now(tier: DiskTier, *numbers: int, version: int = 0) -> None:
    futures = [put(tier, n, parent=None, depth=0, version=version) for n in numbers]
    for future in futures:
        future.result(DEADLINE_S)


def version_of(tier: DiskTier | DiskReader, number: int, versions: int = 3) -> int | None:
    """Which version of a page is read; ``None`` for a miss. Other bytes than were put fail."""
    out = np.zeros(PAGE_BYTES, np.uint8)
    if not tier.read(key_of(number), out):
        return None
    found = [v for v in range(versions) if np.array_equal(out, page_of(number, version=v))]
    assert found, f"page {number} has other bytes than were ever put"
    return found[0]


Stored = dict[str, list[tuple[bytes, bytes]]]


def stored_of(tier: DiskTier, number: int) -> Stored:
    """What the tables hold of a page."""
    place = tier._commits.records[key_of(number)].place
    with tier._file.reading() as txn:
        raw = txn.get(place, db=tier._file.index)
        pieces = [(key, bytes(value)) for key, value in tier._file.pieces(txn, place)]
    return {"index": [(place, bytes(raw))], "pages": pieces}


def write_back(tier: DiskTier, stored: Stored) -> None:
    with tier._file.writing() as txn:
        for table, values in stored.items():
            for key, value in values:
                txn.put(key, value, db=getattr(tier._file, table))


# ---------------------------------------------------------------- entries in other places


def test_of_two_entries_for_one_page_the_newer_stays(folder: Path, placement: Payload) -> None:
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, 0, 1, version=1)
        old = stored_of(tier, 0)
        put_now(tier, 0, version=2)
        put_now(tier, 2)
        tier.flush()
        write_back(tier, old)
    with open_tier(folder, payload=placement) as tier:
        opened = tier.stats().opened
        assert (opened.kept, opened.damaged) == (3, 1)
        assert [version_of(tier, n) for n in (0, 1, 2)] == [2, 1, 0]
        tier.check()  # the other is gone, and its slot is free
        full = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
        put_now(tier, *range(3, full))
        tier.check()
        assert [version_of(tier, n) for n in (0, 1, 2)] == [2, 1, 0]
    with open_tier(folder, payload=placement) as tier:
        assert tier.stats().opened.damaged == 0


def test_of_two_entries_for_one_slot_the_newer_stays(folder: Path) -> None:
    with open_tier(folder, payload="slab") as tier:
        put_now(tier, 0)
        old, slot = stored_of(tier, 0), tier._commits.records[key_of(0)].slot
        tier.delete([key_of(0)]).result(DEADLINE_S)
        number = 0
        while all(record.slot != slot for record in tier.records()):
            tier.delete([key_of(number)])
            number += 1
            put_now(tier, number)
        tier.flush()
        write_back(tier, old)
    with open_tier(folder, payload="slab") as tier:
        assert tier.stats().opened.damaged == 1
        assert [version_of(tier, n) for n in (0, number)] == [None, 0]
        tier.check()


def test_the_use_of_a_page_that_is_gone_does_not_stay(folder: Path, placement: Payload) -> None:
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, 0, 1)
        assert version_of(tier, 0) == version_of(tier, 1) == 0
        tier.flush()
        with tier._file.writing() as txn:
            txn.delete(tier._commits.records[key_of(0)].place, db=tier._file.index)
    with open_tier(folder, payload=placement) as tier:
        assert {entry.key: entry.hits for entry in tier.entries()} == {key_of(1): 1}
        tier.check()


def test_a_reader_is_not_misled_by_an_entry_in_another_place(
    folder: Path, placement: Payload
) -> None:
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, 0, 1)
        (place, raw), *_ = stored_of(tier, 0)["index"]
        entry = IndexEntry.decode(place, raw)
        resealed = entry._replace(sequence=2000).encode()
        with tier._file.writing() as txn:
            # One as it is, one cut off, one whose own number is right but whose place is not.
            for number, value in ((1000, raw), (1001, raw[:-1]), (1002, resealed)):
                txn.put(place_of(number), value, db=tier._file.index)
    with DiskReader(folder) as reader:
        assert key_of(0) in reader
        assert [version_of(reader, n) for n in (0, 1, 2)] == [0, 0, None]
        assert [record.key for record in reader.records()] == [key_of(0), key_of(1)]
        assert reader.verify().damaged == []


# ---------------------------------------------------------------- a commit of unknown end


@pytest.mark.parametrize("error", [lmdb.PanicError, lmdb.Error])
def test_what_a_failed_commit_left_in_the_file_is_removed(
    folder: Path, placement: Payload, monkeypatch: pytest.MonkeyPatch, error: type[lmdb.Error]
) -> None:
    """The commit says that it failed, and is in the file all the same."""
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, 0)
        begin = tier._file.begin_write

        class Landing(FaultyTransaction):
            def commit(self) -> None:
                self._txn.commit()
                monkeypatch.setattr(tier._file, "begin_write", begin)
                raise lmdb_error(error, "mdb_txn_commit: Input/output error", 5)

        monkeypatch.setattr(tier._file, "begin_write", lambda: Landing(begin(), lambda what: None))
        first = put(tier, 1, parent=None, depth=0, version=1)
        assert (first.exception(DEADLINE_S) is None) == (error is lmdb.PanicError)
        put_now(tier, 1, version=2)
        assert [version_of(tier, n) for n in (0, 1)] == [0, 2]
        tier.check()
    with open_tier(folder, payload=placement) as tier:
        assert tier.stats().opened.damaged == 0
        assert [version_of(tier, n) for n in (0, 1)] == [0, 2]
        tier.check()


# ---------------------------------------------------------------- reading while pages are replaced


def test_a_page_that_is_replaced_before_the_snapshot_is_found(
    folder: Path, placement: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, 0)
        reading, left = tier._file.reading, [2]

        @contextmanager
        def late() -> Iterator[Any]:
            if threading.current_thread() is threading.main_thread() and left[0]:
                left[0] -= 1
                put_now(tier, 0, version=2 - left[0])
            with reading() as txn:
                yield txn

        monkeypatch.setattr(tier._file, "reading", late)
        assert version_of(tier, 0) == 2
        left[0] = 1
        out = np.zeros(PLANES[1][1], np.uint8)
        assert tier.read_plane(key_of(0), 1, out)
        stats = tier.stats()
        assert (stats.reads, stats.hits, stats.damaged) == (2, 2, 0)


def test_a_page_that_is_replaced_before_the_books_are_is_found(
    folder: Path, placement: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, 0)
        commits = tier._commits
        close_books, wait = commits._close_books, commits.wait
        committed, go_on = threading.Event(), threading.Event()

        def late(group: Any) -> None:
            committed.set()
            assert go_on.wait(DEADLINE_S)
            close_books(group)

        def waiting(timeout_s: float) -> None:
            go_on.set()
            wait(timeout_s)

        monkeypatch.setattr(commits, "_close_books", late)
        monkeypatch.setattr(commits, "wait", waiting)
        again = put(tier, 0, parent=None, depth=0, version=1)
        assert committed.wait(DEADLINE_S)
        try:
            assert version_of(tier, 0) == 1
        finally:
            go_on.set()
        again.result(DEADLINE_S)


def test_pages_that_are_replaced_all_the_time_are_never_missed(
    folder: Path, placement: Payload
) -> None:
    numbers, rounds = range(4), 300
    with open_tier(folder, payload=placement, durability="relaxed") as tier:
        put_now(tier, *numbers)
        failures: list[str] = []
        done = threading.Event()
        reads = [0, 0]

        def read(reader: int) -> None:
            outs = [np.zeros(PAGE_BYTES, np.uint8) for _ in numbers]
            versions = {n: [page_of(n, version=v) for v in range(3)] for n in numbers}
            while not done.is_set() and not failures:
                hits = tier.read_pages([key_of(n) for n in numbers], outs)
                reads[reader] += 1
                for n, hit, out in zip(numbers, hits, outs, strict=True):
                    if not hit or not any(np.array_equal(out, page) for page in versions[n]):
                        failures.append(f"page {n}: {'other bytes' if hit else 'a miss'}")

        threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(rounds):
                put_now(tier, *numbers, version=turn % 3)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert all(reads)
        assert tier.stats().damaged == 0
        tier.check()


def test_a_read_does_not_wait_for_a_commit_for_ever(folder: Path, placement: Payload) -> None:
    """Only one whose page is not in its place waits at all."""
    with open_tier(folder, payload=placement, timeout_s=0.05) as tier:
        put_now(tier, 0, 1)
        with tier._file.writing() as txn:
            txn.delete(tier._commits.records[key_of(0)].place, db=tier._file.index)
        with tier._commits.lock:  # as while a commit hangs
            assert version_of(tier, 1) == 0
            with pytest.raises(DeadlineExceededError, match="commit"):
                version_of(tier, 0)
        assert version_of(tier, 0) is None


# ---------------------------------------------------------------- readers in other processes


def hits(other: OtherProcess, numbers: range) -> set[int]:
    return {n for n, hit in zip(numbers, other.read(list(numbers)), strict=True) if hit}


def test_a_reader_follows_a_writer_that_was_started_again(folder: Path, placement: Payload) -> None:
    """The newest pages are removed before the restart: the next ones are newer still."""
    numbers = range(30)
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, *range(10))
        with other_process(folder) as other:
            assert hits(other, numbers) == set(range(10))
            tier.delete([key_of(n) for n in range(3, 10)]).result(DEADLINE_S)
            tier.close()
            for start in (10, 12):
                with open_tier(folder, payload=placement) as tier:
                    put_now(tier, *range(start, start + 2))
                    tier.delete([key_of(start)]).result(DEADLINE_S)
                    put_now(tier, 0)
            assert hits(other, numbers) == {0, 1, 2, 11, 13}


def test_a_reader_follows_a_folder_that_was_emptied(folder: Path, placement: Payload) -> None:
    """The puts are counted from the beginning again."""
    with open_tier(folder, payload=placement) as tier:
        put_now(tier, *range(10))
    with other_process(folder) as other:
        assert hits(other, range(12)) == set(range(10))
        (folder / "garbage").write_bytes(bytes(range(256)) * 64)
        (folder / "garbage").rename(folder / "data.mdb")
        with pytest.warns(RuntimeWarning, match="starts empty"):
            tier = open_tier(folder, payload=placement)
        with tier:
            put_now(tier, 1, 11)
            assert hits(other, range(12)) == {1, 11}


@pytest.mark.parametrize("seed", range(2))
def test_a_reader_follows_everything(folder: Path, placement: Payload, seed: int) -> None:
    """Puts, replacements, removals, restarts and other limits, in any order."""
    rng = random.Random(seed)
    numbers = range(40)
    stored: set[int] = set()
    tier = open_tier(folder, payload=placement)
    with other_process(folder) as other:
        for _ in range(80):
            what = rng.choice(["put", "put", "again", "delete", "newest", "reopen"])
            some = rng.sample(numbers, rng.randrange(1, 5))
            if what == "put":
                put_now(tier, *some)
                stored.update(some)
            elif what == "again":
                put_now(tier, *(n for n in some if n in stored))
            elif what == "delete":
                tier.delete([key_of(n) for n in some]).result(DEADLINE_S)
                stored.difference_update(some)
            elif what == "newest":
                records = sorted(tier._commits.records.values(), key=lambda r: r.sequence)
                gone = [record.key for record in records[-3:]]
                tier.delete(gone).result(DEADLINE_S)
                stored = {n for n in stored if key_of(n) not in gone}
            else:
                tier.close()
                size = rng.choice([CAPACITY, 2 * CAPACITY, CAPACITY // 2])
                tier = open_tier(folder, payload=placement, capacity_bytes=size)
            assert {key_of(n) for n in stored} == {record.key for record in tier.records()}
            assert hits(other, numbers) == stored, f"after {what}"
    tier.close()


def test_the_map_of_a_reader_does_not_grow_with_what_was_ever_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_map, "_SLACK", 4)
    with open_tier(folder, payload="inline") as tier:
        known = KeyMap(tier._file)
        for first in range(0, 400, 10):
            put_now(tier, *range(first, first + 10))
            with known.lock, tier._file.reading() as txn:
                known.follow(txn)
                assert known.place(txn, key_of(first)) is not None
                assert known.place(txn, key_of(first - 1)) is None
                assert len(known._places) <= 2 * len(tier) + 4
            tier.delete([key_of(n) for n in range(first, first + 10)]).result(DEADLINE_S)


# ---------------------------------------------------------------- leaves

#: Small pages with long entries.
SMALL: dict[str, Any] = {
    "page_bytes": 300,
    "plane_ranges": [(0, 300)],
    "layout_digest": bytes(32),
}
#: So that some hundred pages fit.
SMALL_CAPACITY = {"inline": 1 << 20, "slab": 4 << 20}


def churn(tier: DiskTier, turns: int, rng: random.Random) -> list[int]:
    """Fill the tier, then replace its pages, most of them young: what stays is of all ages, and lies
    far apart.
    """
    room = tier.live_capacity_bytes // tier.stored_bytes_of(300)
    live: list[int] = []
    data = page_of(0, 300)
    number = 0
    for turn in range(turns):
        gone = []
        for _ in range(len(live) + 40 - room):
            first = max(0, len(live) - room // 3) if rng.random() < 0.8 else 0
            gone.append(live.pop(rng.randrange(first, len(live))))
        if turn % 4 == 0 and live:
            tier.read(key_of(rng.choice(live)), np.zeros(300, np.uint8))
        tier.delete([key_of(n) for n in gone])
        futures = [
            tier.put(key_of(n), parent=None, depth=0, identity=bytes(32), data=data)
            for n in range(number, number + 40)
        ]
        live += range(number, number + 40)
        number += 40
        for future in futures:
            future.result(DEADLINE_S)
    return live


@pytest.mark.parametrize("relaxed", [False, True])
def test_pages_that_die_in_any_order_do_not_fill_the_map(
    folder: Path, placement: Payload, relaxed: bool
) -> None:
    options = {**SMALL, "payload": placement, "capacity_bytes": SMALL_CAPACITY[placement]}
    options["durability"] = "relaxed" if relaxed else "durable"
    with open_tier(folder, **options) as tier:
        live = churn(tier, 150, random.Random(1))
        tier.check()  # no table has more leaves than there is room for
        assert tier.stats().map_full == 0
        assert {record.key for record in tier.records()} == {key_of(n) for n in live}
        out = np.zeros(300, np.uint8)
        assert all(tier.read(record.key, out) for record in tier.records())
        assert np.array_equal(out, page_of(0, 300))
    with open_tier(folder, **options) as tier:
        assert len(tier) == len(live)
        tier.check()


def test_packing_moves_nothing_and_can_fail(
    folder: Path, placement: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the same pages take too many leaves; an error in it is counted and harmless."""
    options = {**SMALL, "payload": placement, "capacity_bytes": SMALL_CAPACITY[placement]}
    with open_tier(folder, **options) as tier:
        with monkeypatch.context() as patch:

            def fail(packer: Packer) -> None:
                raise DiskError(5, "injected", "")

            patch.setattr(Packer, "pack", fail)
            churn(tier, 60 if placement == "inline" else 240, random.Random(2))
            assert tier.stats().commit_errors > 0
            with pytest.raises(AssertionError, match=r"leaves, of \d+ planned"):
                tier.check()
        records, entries = dict(tier._commits.records), list(tier.entries())
        tier.check()  # packs
        assert tier._commits.records == records
        assert list(tier.entries()) == entries


@pytest.mark.parametrize("nbytes", [300, 2000, 6016, 9000])
def test_pages_can_be_removed_from_a_map_that_takes_no_more(folder: Path, nbytes: int) -> None:
    """Whatever it is that takes the room which an old snapshot does not give back."""
    options: dict[str, Any] = {"page_bytes": nbytes, "plane_ranges": [(0, nbytes)]}
    data = page_of(0, nbytes)
    with open_tier(folder, payload="inline", **options) as tier:

        def try_put(number: int) -> BaseException | None:
            return put(tier, number, parent=None, depth=0, data=data).exception(DEADLINE_S)  # type: ignore[no-any-return]

        full = tier.live_capacity_bytes // tier.stored_bytes_of(nbytes)
        assert [try_put(n) for n in range(full)] == [None] * full
        with tier._file.reading():
            for number in range(full, 3 * full):
                tier.delete([key_of(number - full)]).result(DEADLINE_S)
                refused = try_put(number)
                if refused is not None:
                    break
            assert isinstance(refused, TierFullError)
        assert try_put(3 * full) is None
        tier.check()
