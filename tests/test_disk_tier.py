"""The disk tier as its callers see it: round trips, restarts, limits, damage, faults."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import disk_child
import lmdb
import numpy as np
import pytest
import xxhash
from disk_child import CAPACITY, PAGE_BYTES, PLANES, key_of, page_of, parent_of, put
from disk_faults import FaultyTransaction, lmdb_error
from disk_memory import larger_than_memory

from kvtier.errors import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    DiskError,
    LayoutError,
    TierFullError,
)
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.payload import Payload
from kvtier.tiers.record import IndexEntry, piece_place, place_of
from kvtier.tiers.slab import SlabPayloads

DEADLINE_S = 20
PLACEMENTS: tuple[Payload, ...] = ("inline", "slab")
#: The placement that ``open_tier`` asks for; set by the fixture.
asked: list[Payload] = ["inline"]


@pytest.fixture(autouse=True, params=[*PLACEMENTS, "inline, larger than memory"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Payload:
    """Everything here is true of both placements, and where inline pages are read past the page cache."""
    asked[0] = request.param.partition(",")[0]
    if request.param not in PLACEMENTS:
        larger_than_memory(monkeypatch)
    return asked[0]


def open_tier(folder: Path | str, **options: Any) -> DiskTier:
    return disk_child.open_tier(folder, **{"payload": asked[0], **options})


def disk_data(folder: Path) -> list[Path]:
    """The files that hold pages."""
    return [folder / "data.mdb", *sorted(folder.glob("*.slab"))]


def read(tier: DiskTier, number: int, nbytes: int = PAGE_BYTES) -> bool:
    """Whether the page is a hit; a hit with other bytes than were put fails."""
    out = np.zeros(nbytes, np.uint8)
    hit = tier.read(key_of(number), out)
    assert not hit or np.array_equal(out, page_of(number, nbytes)), f"page {number} is wrong"
    return hit


def read_plane(tier: DiskTier, number: int, plane: int) -> bool:
    at, nbytes = PLANES[plane]
    out = np.zeros(nbytes, np.uint8)
    hit = tier.read_plane(key_of(number), plane, out)
    assert not hit or np.array_equal(out, page_of(number)[at : at + nbytes])
    return hit


def fill(tier: DiskTier, count: int, first: int = 0, **options: Any) -> None:
    for future in [put(tier, number, **options) for number in range(first, first + count)]:
        future.result(DEADLINE_S)


def pages_that_fit(tier: DiskTier) -> int:
    return tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)


def folder_bytes(folder: Path) -> int:
    """What ``du`` counts, folder included."""
    return 512 * sum(os.lstat(path).st_blocks for path in [folder, *folder.rglob("*")])


# ---------------------------------------------------------------- round trips and restarts


def test_pages_and_planes_come_back(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as tier:
        fill(tier, 10)
        assert len(tier) == 10
        assert tier.live_bytes == 10 * tier.stored_bytes_of(PAGE_BYTES)
        assert all(read(tier, number) for number in range(10))
        assert all(read_plane(tier, n, plane) for n in range(10) for plane in range(3))
        assert not read(tier, 10)
        outs = [np.zeros(2000, np.uint8) for _ in range(3)]
        assert tier.read_planes([key_of(3), key_of(77), key_of(5)], 1, outs) == [True, False, True]
        assert np.array_equal(outs[2], page_of(5)[2016:4016])
        tier.check()
        stats = tier.stats()
        assert (stats.puts, stats.entries, stats.damaged) == (10, 10, 0)
        assert (stats.reads, stats.hits, stats.misses) == (44, 42, 2)
        assert stats.bytes_written == 10 * PAGE_BYTES
    assert oct((tmp_path / "tier").stat().st_mode & 0o777) == "0o700"
    for file in (tmp_path / "tier").iterdir():
        assert oct(file.stat().st_mode & 0o777) == "0o600", file


def test_a_page_of_many_pieces(tmp_path: Path) -> None:
    nbytes, planes = 260_000, [(i * 26_000, 26_000) for i in range(10)]
    options = {"page_bytes": nbytes, "plane_ranges": planes, "capacity_bytes": 8 << 20}
    with open_tier(tmp_path, **options) as tier:
        for number in range(4):
            put(tier, number, data=page_of(number, nbytes))
        tier.flush()
        assert all(read(tier, number, nbytes) for number in range(4))
        for plane, (at, size) in enumerate(planes):
            out = np.zeros(size, np.uint8)
            assert tier.read_plane(key_of(2), plane, out)
            assert np.array_equal(out, page_of(2, nbytes)[at : at + size])
        tier.delete([key_of(3)]).result(DEADLINE_S)
        tier.check()


@pytest.mark.parametrize("durability", ["durable", "relaxed"])
def test_a_restart_keeps_index_and_bytes(tmp_path: Path, durability: str) -> None:
    with open_tier(tmp_path, durability=durability) as tier:
        fill(tier, 9)
        before = list(tier.records())
    with open_tier(tmp_path, durability=durability) as tier:
        assert list(tier.records()) == before
        assert [(r.key, r.parent, r.depth) for r in before] == [
            (key_of(n), *parent_of(n)) for n in range(9)
        ]
        assert {r.identity for r in before} == {b"identity"}
        assert {r.layout for r in before} == {b"layout"}
        assert {r.nbytes for r in before} == {PAGE_BYTES}
        assert sum(r.stored_bytes for r in before) == tier.live_bytes
        assert tier.stats().opened.kept == 9
        assert all(read(tier, number) for number in range(9))
        tier.check()


def test_parents_come_before_children_even_if_stored_again_later(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
        tier.delete([key_of(0)])
        fill(tier, 1)
    with open_tier(tmp_path) as tier:
        assert [r.key for r in tier.records()] == [key_of(n) for n in range(4)]


def test_ephemeral_pages_and_unusable_suffixes_end_with_the_tier(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 8)
        fill(tier, 4, first=8, ephemeral=True)
        tier.delete([key_of(5)]).result(DEADLINE_S)
        assert read(tier, 9)
    with open_tier(tmp_path) as tier:
        assert {r.key for r in tier.records()} == {key_of(n) for n in range(5)}
        opened = tier.stats().opened
        assert (opened.ephemeral, opened.orphans) == (4, 2)
        tier.check()


def test_a_put_replaces_and_deletes_are_ordered_with_puts(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, 0, data=page_of(99))
        put(tier, 0)
        put(tier, 4)
        tier.delete([key_of(4), key_of(77)])
        put(tier, 8)
        tier.delete([key_of(8)])
        put(tier, 8)
        tier.check()
        assert [read(tier, n) for n in (0, 4, 8)] == [True, False, True]
        assert key_of(4) not in tier
        assert tier.stored_bytes(key_of(4)) == 0
        assert tier.stored_bytes(key_of(8)) == tier.stored_bytes_of(PAGE_BYTES)


def test_many_keys_are_deleted_by_one_call(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 60)
        tier.delete([key_of(n) for n in range(60)]).result(DEADLINE_S)
        assert len(tier) == 0
        tier.delete([]).result(DEADLINE_S)
        tier.check()


# ---------------------------------------------------------------- limits


def test_the_folder_never_passes_its_capacity(tmp_path: Path) -> None:
    """Restarts of a full tier under churn, then smaller, then larger."""
    number = 0
    live: list[int] = []
    for size in [CAPACITY] * 4 + [1 << 20, 3 << 20]:
        with open_tier(tmp_path, capacity_bytes=size, durability="relaxed") as tier:
            assert folder_bytes(tmp_path) <= size
            live = [n for n in live if key_of(n) in tier]
            assert len(live) == len(tier) == min(len(live), pages_that_fit(tier))
            for _ in range(pages_that_fit(tier)):
                if len(live) == pages_that_fit(tier):
                    tier.delete([key_of(live.pop(number % len(live)))])
                put(tier, number, parent=None, depth=0)
                live.append(number)
                number += 1
            tier.check()
            assert folder_bytes(tmp_path) <= size
            assert tier.stats().map_full == 0
            assert all(read(tier, n) for n in live)
        assert folder_bytes(tmp_path) <= size


def test_a_put_beyond_the_limit_is_refused_and_harmless(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        full = pages_that_fit(tier)
        fill(tier, full)
        with pytest.raises(TierFullError, match="delete pages first") as caught:
            put(tier, full).result(DEADLINE_S)
        assert (caught.value.tier, caught.value.needed_bytes) == (
            "disk",
            tier.stored_bytes_of(PAGE_BYTES),
        )
        fill(tier, 4)  # replacing is not growing
        tier.delete([key_of(0)])
        put(tier, full).result(DEADLINE_S)
        tier.check()


def test_the_smallest_capacity_is_named_and_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give it at least ([0-9.]+) KiB") as caught:
        open_tier(tmp_path, capacity_bytes=100_000)
    need = float(str(caught.value).split("at least ")[1].split(" KiB")[0]) * 1024
    with open_tier(tmp_path, capacity_bytes=round(need)) as tier:
        fill(tier, 1)
        assert folder_bytes(tmp_path) <= need


def test_a_full_map_fails_the_put_and_nothing_else(tmp_path: Path) -> None:
    """An old snapshot keeps freed pages from being used, so the map runs full for real."""
    with open_tier(tmp_path) as tier:
        full = pages_that_fit(tier)
        fill(tier, full)
        stored = list(range(full))
        refused = None
        with tier._file.reading():
            for number in range(full, 3 * full):
                tier.delete([key_of(stored[0])]).result(DEADLINE_S)
                stored.pop(0)
                refused = put(tier, number, parent=None, depth=0).exception(DEADLINE_S)
                if refused is not None:
                    break
                stored.append(number)
            assert isinstance(refused, TierFullError)
            assert "snapshot" in str(refused)
            assert all(read(tier, n) for n in stored)
        put(tier, 3 * full, parent=None, depth=0).result(DEADLINE_S)
        assert all(read(tier, n) for n in [*stored, 3 * full])
        assert (tier.stats().map_full >= 1) == (asked[0] == "inline")
        tier.check()


# ---------------------------------------------------------------- damage


def alter_file(folder: Path, find: bytes, at: int) -> None:
    """Flip a bit ``at`` bytes behind the only place where ``find`` is in the files."""
    places = [(path, path.read_bytes()) for path in disk_data(folder)]
    assert sum(raw.count(find) for _, raw in places) == 1
    path, raw = next((path, raw) for path, raw in places if find in raw)
    where = raw.index(find) + at
    with open(path, "r+b") as file:
        file.seek(where)
        file.write(bytes([raw[where] ^ 4]))


@pytest.mark.parametrize("plane", [0, 1, 2])
def test_damage_in_one_plane_leaves_the_others_readable(tmp_path: Path, plane: int) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
    at, nbytes = PLANES[plane]
    alter_file(tmp_path, page_of(2)[at : at + 64].tobytes(), nbytes - 1)
    reports: list[tuple[bytes, str]] = []
    with open_tier(tmp_path, on_damage=lambda key, why: reports.append((key, why))) as tier:
        assert [read_plane(tier, 2, p) for p in range(3) if p != plane] == [True, True]
        assert not read_plane(tier, 2, plane)
        assert key_of(2) not in tier
        assert reports == [(key_of(2), f"plane {plane} does not match its checksum")]
        assert tier.stats().damaged == 1
        tier.check()
        assert len(tier) == 3
        assert not read(tier, 2)
        put(tier, 2).result(DEADLINE_S)
        assert read(tier, 2)
        assert all(read_plane(tier, 2, p) for p in range(3))


def test_a_whole_page_is_verified_between_its_planes_too(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 1)
    alter_file(tmp_path, page_of(0)[:64].tobytes(), 2005)
    with open_tier(tmp_path) as tier:
        assert all(read_plane(tier, 0, p) for p in range(3))
        assert not read(tier, 0)
        tier.check()


class Raw:
    """The database in a transaction behind the tier's back."""

    def __init__(self, tier: DiskTier, txn: Any) -> None:
        self.txn, self.index, self.pages = txn, tier._file.index, tier._file.pages
        self._records = tier._commits.records

    def place(self, number: int) -> bytes:
        """Where a page's index entry is."""
        return self._records[key_of(number)].place

    def piece(self, number: int) -> bytes:
        """Where the first piece of its payload is, if it is in the database."""
        return piece_place(self._records[key_of(number)].sequence, 0)

    def entry(self, number: int) -> bytes:
        return bytes(self.txn.get(self.place(number), db=self.index))


def raw_write(tier: DiskTier, change: Callable[[Raw], None]) -> None:
    """Change the database behind the tier's back."""
    tier.flush()
    with tier._file.writing() as txn:
        change(Raw(tier, txn))


def test_every_byte_of_an_index_entry_counts(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 2)
        with tier._file.reading() as txn:
            length = len(Raw(tier, txn).entry(1))
        for at in range(length):

            def flip(raw: Raw, at: int = at) -> None:
                entry = bytearray(raw.entry(1))
                entry[at] ^= 0x10
                raw.txn.put(raw.place(1), bytes(entry), db=raw.index)

            raw_write(tier, flip)
            assert not read(tier, 1)
            assert not read_plane(tier, 1, 0)
            put(tier, 1).result(DEADLINE_S)
            assert read(tier, 1)
        assert tier.stats().damaged == length
        tier.check()


def slots_of(tier: DiskTier, *numbers: int) -> list[int]:
    with tier._file.reading() as txn:
        raw = Raw(tier, txn)
        found = [IndexEntry.decode(raw.place(n), raw.entry(n)) for n in numbers]
    assert all(entry.slot is not None for entry in found)
    return [entry.slot for entry in found if entry.slot is not None]


def swap_payloads(tier: DiskTier) -> None:
    if not isinstance(tier._payloads, SlabPayloads):
        raw_write(tier, swap_pieces)
        return
    a, b = slots_of(tier, 0, 4)
    with open(tier.path / "pages-00000.slab", "r+b") as file:
        size = tier.info.slot_bytes
        first, second = (os.pread(file.fileno(), size, slot * size) for slot in (a, b))
        os.pwrite(file.fileno(), second, a * size)
        os.pwrite(file.fileno(), first, b * size)


def swap_pieces(raw: Raw) -> None:
    a, b = raw.piece(0), raw.piece(4)
    first, second = raw.txn.get(a, db=raw.pages), raw.txn.get(b, db=raw.pages)
    raw.txn.put(a, second, db=raw.pages)
    raw.txn.put(b, first, db=raw.pages)


def swap_entries(raw: Raw) -> None:
    first, second = raw.entry(0), raw.entry(4)
    raw.txn.put(raw.place(0), second, db=raw.index)
    raw.txn.put(raw.place(4), first, db=raw.index)


def truncate(raw: Raw) -> None:
    for number in (0, 4):
        key = raw.piece(number)
        raw.txn.put(key, raw.txn.get(key, db=raw.pages)[:-1], db=raw.pages)


def lose_payload(raw: Raw) -> None:
    for number in (0, 4):
        raw.txn.delete(raw.piece(number), db=raw.pages)


def cut_payloads(tier: DiskTier) -> None:
    if not isinstance(tier._payloads, SlabPayloads):
        raw_write(tier, truncate)
        return
    a, b = slots_of(tier, 0, 4)
    with open(tier.path / "pages-00000.slab", "r+b") as file:
        for slot in (a, b):
            os.pwrite(file.fileno(), bytes(100), slot * tier.info.slot_bytes + PAGE_BYTES - 100)


def lose_payloads(tier: DiskTier) -> None:
    if not isinstance(tier._payloads, SlabPayloads):
        raw_write(tier, lose_payload)
        return
    a, b = slots_of(tier, 0, 4)
    with open(tier.path / "pages-00000.slab", "r+b") as file:
        for slot in (a, b):
            os.pwrite(file.fileno(), bytes(tier.info.slot_bytes), slot * tier.info.slot_bytes)


def lose_entry(raw: Raw) -> None:
    for number in (0, 4):
        raw.txn.delete(raw.place(number), db=raw.index)


def move_entries(raw: Raw) -> None:
    """Whole and sealed, but under the numbers of other puts."""
    for number in (0, 4):
        raw.txn.put(place_of(1000 + number), raw.entry(number), db=raw.index)
        raw.txn.delete(raw.place(number), db=raw.index)


def replace_entries(raw: Raw) -> None:
    """Each of the two pages has the entry of a third one."""
    for number in (0, 4):
        raw.txn.put(raw.place(number), raw.entry(8), db=raw.index)


def change_entries(change: Callable[[Raw], None]) -> Callable[[DiskTier], None]:
    return lambda tier: raw_write(tier, change)


LOSE_ENTRY, MOVE_ENTRY = change_entries(lose_entry), change_entries(move_entries)


@pytest.mark.parametrize(
    "change",
    [
        swap_payloads,
        change_entries(swap_entries),
        change_entries(replace_entries),
        cut_payloads,
        lose_payloads,
        LOSE_ENTRY,
        MOVE_ENTRY,
    ],
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_changed_folder_gives_misses(
    tmp_path: Path, change: Callable[[DiskTier], None], restart: bool
) -> None:
    tier = open_tier(tmp_path)
    fill(tier, 1, first=0)
    fill(tier, 1, first=4)
    fill(tier, 1, first=8)
    tier.flush()
    change(tier)
    if restart:
        tier.close()
        tier = open_tier(tmp_path)
    assert [read(tier, n) for n in (0, 4, 8)] == [False, False, True]
    fill(tier, 1, first=0)
    fill(tier, 1, first=4)
    assert all(read(tier, n) for n in (0, 4, 8))
    if restart or change not in (LOSE_ENTRY, MOVE_ENTRY):
        tier.check()
    tier.close()


def test_payloads_without_an_entry_do_not_take_room(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 8)
        raw_write(tier, lose_entry)
    with open_tier(tmp_path) as tier:
        assert len(tier) == 0  # 0 and 4 were the first pages of all others
        tier.check()


def test_a_report_of_damage_does_not_hide_a_page_that_was_stored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 1)
        raw_write(tier, lambda raw: raw.txn.put(raw.place(0), b"nonsense", db=raw.index))
        with stalled(tier, monkeypatch):
            again = put(tier, 0)  # queued before the damage is noticed
            assert not read(tier, 0)
        again.result(DEADLINE_S)
        tier.flush()
        assert read(tier, 0)
        tier.check()


def test_a_folder_of_another_layout_is_refused_and_left_alone(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
    for options in ({"layout_digest": b"other"}, {"page_bytes": 7000}):
        with pytest.raises(ConfigError, match=r"holds 4 pages of another layout.*another folder"):
            open_tier(tmp_path, **options)
    with open_tier(tmp_path) as tier:
        assert all(read(tier, number) for number in range(4))
        tier.check()


def test_damaged_entries_are_dropped_at_open(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
        raw_write(tier, lambda raw: raw.txn.put(raw.place(2), b"nonsense", db=raw.index))
    with open_tier(tmp_path) as tier:
        opened = tier.stats().opened
        assert (opened.kept, opened.damaged, opened.orphans) == (2, 1, 1)
        tier.check()  # their payloads are gone too


@pytest.mark.parametrize("how", ["cut", "garbage", "empty meta", "first record"])
def test_a_damaged_file_starts_empty_and_says_so(tmp_path: Path, how: str) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 20)
    data = tmp_path / "data.mdb"
    if how == "first record":
        with (
            lmdb.open(str(tmp_path), max_dbs=4, lib_version=0) as env,
            env.begin(write=True) as txn,
        ):
            txn.delete(b"kvtier")
    elif how == "cut":
        os.truncate(data, 40_000)
    else:
        with open(data, "r+b") as file:
            file.write(np.random.default_rng(0).bytes(9000) if how == "garbage" else bytes(9000))
    with pytest.warns(RuntimeWarning, match="starts empty"):
        tier = open_tier(tmp_path)
    assert tier.stats().opened.emptied
    assert len(tier) == 0
    fill(tier, 4)
    assert all(read(tier, n) for n in range(4))
    assert folder_bytes(tmp_path) <= CAPACITY
    tier.close()


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "foreign"), lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"precious", b"data")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "data.mdb").write_bytes(b"precious" * 2000)
    for name in ("foreign", "garbage"):
        before = (tmp_path / name / "data.mdb").read_bytes()
        for _ in range(2):
            with pytest.raises(DiskError, match="choose another folder"):
                open_tier(tmp_path / name)
        assert (tmp_path / name / "data.mdb").read_bytes()[: len(before)] == before


def test_another_storage_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 1)
        with tier._file.writing() as txn:
            raw = txn.get(b"kvtier")
            body = raw[:8] + (99).to_bytes(4, "little")
            txn.put(b"kvtier", body + xxhash.xxh3_64_digest(body))
    with pytest.raises(DiskError, match=r"version 99.*reads 3.*delete"):
        open_tier(tmp_path)


# ---------------------------------------------------------------- faults


@contextmanager
def faults(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, times: int
) -> Iterator[None]:
    begin, left = tier._file.begin_write, [times]

    def faulty() -> Any:
        if left[0] == 0:
            return begin()
        left[0] -= 1
        if where == "begin":
            raise error

        def strike(at: str) -> None:
            if at == where:
                raise error

        return FaultyTransaction(begin(), strike)

    with monkeypatch.context() as patch:
        patch.setattr(tier._file, "begin_write", faulty)
        yield


@pytest.mark.parametrize("where", ["begin", "put", "commit"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (lmdb_error(lmdb.Error, "mdb_txn_commit: Input/output error", errno.EIO), errno.EIO),
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (lmdb.CorruptedError("mdb_put: MDB_CORRUPTED"), errno.EIO),
    ],
)
def test_a_failed_write_fails_its_put_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, code: int
) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
        with faults(tier, monkeypatch, where, error, 1):
            with pytest.raises(DiskError, match=str(tmp_path)) as caught:
                put(tier, 4).result(DEADLINE_S)
            assert caught.value.errno == code
            assert all(read(tier, n) for n in range(4))
            assert not read(tier, 4)
            put(tier, 4).result(DEADLINE_S)
        assert all(read(tier, n) for n in range(5))
        assert tier.stats().commit_errors == 1
        tier.check()


@pytest.mark.parametrize(("times", "works"), [(1, True), (2, True), (100, False)])
@pytest.mark.parametrize("where", ["put", "commit"])
def test_a_full_map_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, times: int, works: bool
) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
        with faults(tier, monkeypatch, where, lmdb.MapFullError("mdb_put: MDB_MAP_FULL"), times):
            if works:
                put(tier, 4).result(DEADLINE_S)
            else:
                with pytest.raises(TierFullError):
                    put(tier, 4).result(DEADLINE_S)
        assert read(tier, 4) == works
        assert all(read(tier, n) for n in range(4))
        tier.check()


@pytest.mark.parametrize("times", [1, 2])
def test_a_panicked_environment_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 4)
        with faults(tier, monkeypatch, "begin", lmdb.PanicError("MDB_PANIC"), times):
            error = put(tier, 4).exception(DEADLINE_S)
        assert (error is None) == (times == 1)
        put(tier, 4).result(DEADLINE_S)
        assert all(read(tier, n) for n in range(5))
        tier.check()


def test_a_removed_folder_fails_puts_and_keeps_reads(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    fill(tier, 4)
    os.rename(tmp_path / "tier", tmp_path / "away")
    with pytest.raises(DiskError, match="moved or removed") as caught:
        put(tier, 4).result(DEADLINE_S)
    assert caught.value.errno == errno.ENOENT
    assert all(read(tier, n) for n in range(4))
    os.rename(tmp_path / "away", tmp_path / "tier")
    put(tier, 4).result(DEADLINE_S)
    shutil.rmtree(tmp_path / "tier")
    with pytest.raises(DiskError):
        put(tier, 5).result(DEADLINE_S)
    assert all(read(tier, n) for n in range(5))
    assert tier.close().clean


def test_no_space_is_found_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(DiskError, match="lower the tier's capacity") as caught:
            open_tier(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    with open_tier(tmp_path) as tier:
        assert folder_bytes(tmp_path) > CAPACITY // 2  # reserved
        fill(tier, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="file/tier"):
        open_tier(tmp_path / "file" / "tier")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write everywhere, so for a moment be somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_folder_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with unprivileged(), pytest.raises(DiskError, match="write access"):
            open_tier(Path(folder))


# ---------------------------------------------------------------- one writer, fork, close


def test_a_second_writer_is_refused_and_told_who(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        with pytest.raises(DiskError, match="in use by this process"):
            open_tier(tmp_path)
        child = subprocess.run(
            [sys.executable, disk_child.__file__, "open", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f"in use by process {os.getpid()}" in child.stdout, child.stderr
        fill(tier, 1)
    open_tier(tmp_path).close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_a_clear_error(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        fill(tier, 1)
        actions: list[Callable[[], object]] = [
            lambda: read(tier, 0),
            lambda: put(tier, 1),
            lambda: tier.delete([key_of(0)]),
            tier.flush,
            tier.close,
        ]
        pid = os.fork()
        if pid == 0:
            refused = 0
            for action in actions:
                try:
                    action()
                except DiskError as error:
                    refused += "forked child" in str(error)
                except BaseException:
                    pass
            os._exit(refused)
        end = time.monotonic() + DEADLINE_S
        status = (0, 0)
        while status[0] == 0 and time.monotonic() < end:
            status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        assert status[0] == pid
        assert os.waitstatus_to_exitcode(status[1]) == len(actions)
        assert read(tier, 0)
        put(tier, 1).result(DEADLINE_S)


def test_a_closed_tier_refuses_everything_and_close_repeats_itself(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 0)
    report = tier.close()
    assert (report.dropped, report.clean) == ([], True)
    assert tier.close() == report
    for action in (lambda: read(tier, 0), lambda: put(tier, 0), tier.flush, tier.records):
        with pytest.raises(ClosedError):
            action()  # type: ignore[operator]
    with open_tier(tmp_path) as tier:
        assert read(tier, 0)


@contextmanager
def stalled(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk hangs until the event is set or the block ends."""
    begin, go = tier._file.begin_write, threading.Event()

    def slow() -> Any:
        assert go.wait(DEADLINE_S)
        return begin()

    with monkeypatch.context() as patch:
        patch.setattr(tier._file, "begin_write", slow)
        try:
            yield go
        finally:
            go.set()


def test_close_is_bounded_when_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    with stalled(tier, monkeypatch):
        futures = [put(tier, n) for n in range(4)]
        report = tier.close(timeout_s=0.2)
        assert not report.clean
        assert report.dropped == [key_of(n) for n in range(4)]
        waiting = [future for future in futures if not future.done()]
        assert all(isinstance(f.exception(), ClosedError) for f in futures if f.done())
    wait(waiting, DEADLINE_S)  # the group in work still ends, one way or the other


def test_close_reports_what_it_had_no_time_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, batch_bytes=PAGE_BYTES)
    begin = tier._file.begin_write

    def slow() -> Any:
        time.sleep(0.02)
        return begin()

    with monkeypatch.context() as patch:
        patch.setattr(tier._file, "begin_write", slow)
        futures = [put(tier, n) for n in range(60)]
        report = tier.close(timeout_s=0.5)
    assert report.clean
    assert 0 < len(report.dropped) < 60
    written = [n for n, future in enumerate(futures) if future.exception() is None]
    assert [key_of(n) for n in range(60) if n not in written] == report.dropped
    with open_tier(tmp_path) as tier:
        assert all(read(tier, n) for n in written)
        assert not any(key in tier for key in report.dropped)


def test_a_full_queue_waits_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(tmp_path, queue_bytes=3 * PAGE_BYTES) as tier:
        with stalled(tier, monkeypatch) as go:
            for number in range(3):
                put(tier, number)
            with pytest.raises(DeadlineExceededError, match="queue_bytes"):
                put(tier, 3, timeout_s=0.05)
            with pytest.raises(DeadlineExceededError):
                tier.flush(timeout_s=0.05)
            go.set()
            fill(tier, 20)
        assert all(read(tier, n) for n in range(20))
        assert tier.stats().queue_peak_bytes <= 3 * PAGE_BYTES
        tier.check()


def test_a_pending_put_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tier(tmp_path) as tier:
        with stalled(tier, monkeypatch):
            put(tier, 0)
            futures = [put(tier, n) for n in range(4, 40, 4)]
            assert futures[-1].cancel()
        tier.check()
        assert not read(tier, 36)
        assert read(tier, 4)
        assert tier.stats().queue_bytes == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": np.zeros(PAGE_BYTES - 1, np.uint8)}, LayoutError),
        ({"data": np.zeros(PAGE_BYTES, np.int8)}, LayoutError),
        ({"data": np.zeros(2 * PAGE_BYTES, np.uint8)[::2]}, LayoutError),
        ({"parent": b"x" * 33}, ConfigError),
        ({"parent": None, "depth": 3}, ConfigError),
        ({"parent": b"x", "depth": 0}, ConfigError),
    ],
)
def test_unusable_arguments_are_refused_at_once(
    tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    with open_tier(tmp_path) as tier:
        with pytest.raises(error):
            put(tier, 1, **change)
        with pytest.raises(LayoutError):
            tier.read_plane(key_of(0), 3, np.zeros(1, np.uint8))
        with pytest.raises(LayoutError):
            tier.read(key_of(0), np.zeros(1, np.uint8))
        assert len(tier) == 0


# ---------------------------------------------------------------- threads


def test_readers_beside_the_writer_see_right_pages_or_none(tmp_path: Path) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    hits = [0, 0, 0]

    def reader(slot: int) -> None:
        rng = np.random.default_rng(slot)
        out = np.zeros(PAGE_BYTES, np.uint8)
        try:
            while not stop.is_set():
                number = int(rng.integers(0, 40))
                if slot == 0:
                    hits[slot] += read_plane(tier, number, int(rng.integers(0, 3)))
                elif tier.read(key_of(number), out):
                    assert np.array_equal(out, page_of(number))
                    hits[slot] += 1
        except BaseException as error:
            failures.append(error)

    with open_tier(tmp_path, durability="relaxed") as tier:
        fill(tier, 40)
        threads = [threading.Thread(target=reader, args=(slot,)) for slot in range(3)]
        for thread in threads:
            thread.start()
        rng = np.random.default_rng(9)
        for _ in range(150):
            number = int(rng.integers(0, 40))
            tier.delete([key_of(number)])
            put(tier, number).result(DEADLINE_S)
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not failures
        assert all(hits)
        assert tier.stats().damaged == 0
        assert tier.stats().map_full == 0
        tier.check()
