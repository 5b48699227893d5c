"""The on-disk record: whatever is altered is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.errors import ConfigError, LayoutError
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.page_shape import PIECE_BYTES, PageCheck, PageShape, plane_sum
from kvtier.tiers.page_tree import oldest_first, usable, victims, with_followers
from kvtier.tiers.record import (
    NO_SLOT,
    DiskRecord,
    IndexEntry,
    RecordError,
    entry_bytes,
    key_at,
    place_of,
)
from kvtier.tiers.slab_room import plan_slab
from kvtier.tiers.slab_slots import SlotAllocator
from kvtier.tiers.usage import UsageBook, Use

KEY = b"k" * 32
ENTRY = IndexEntry(
    KEY, b"p" * 32, 7, b"identity", b"layout", True, 1000, 42, 1_700_000_000, (1, 2, 3)
)

digests = st.binary(min_size=1, max_size=32)
u64 = st.integers(0, 2**64 - 1)
entries = st.builds(
    IndexEntry,
    key=digests,
    parent=st.none() | digests,
    depth=st.integers(0, 2**32 - 1),
    identity=digests,
    layout=digests,
    ephemeral=st.booleans(),
    nbytes=u64,
    sequence=u64,
    created_ns=u64,
    sums=st.lists(u64, max_size=20).map(tuple),
    slot=st.none() | st.integers(0, NO_SLOT - 1),
)


@given(entries)
def test_an_entry_comes_back_as_it_was(entry: IndexEntry) -> None:
    raw = entry.encode()
    assert IndexEntry.decode(entry.place, raw) == entry
    assert key_at(entry.place, raw) == entry.key
    assert len(raw) <= entry_bytes(len(entry.sums))


@given(entries, st.data())
def test_any_altered_byte_is_noticed(entry: IndexEntry, data: st.DataObject) -> None:
    raw = bytearray(entry.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        IndexEntry.decode(entry.place, bytes(raw))
    assert key_at(entry.place, bytes(raw)) is None


def test_any_other_length_is_noticed() -> None:
    raw = ENTRY.encode()
    for wrong in (*(raw[:stop] for stop in range(len(raw))), raw + b"\0"):
        with pytest.raises(RecordError):
            IndexEntry.decode(ENTRY.place, wrong)
        assert key_at(ENTRY.place, wrong) is None


@given(entries, u64)
def test_an_entry_belongs_in_its_place(entry: IndexEntry, sequence: int) -> None:
    raw = entry.encode()
    for place in (place_of(sequence), b"", entry.place[:-1], entry.place + b"\0"):
        if place != entry.place:
            with pytest.raises(RecordError, match="place of another"):
                IndexEntry.decode(place, raw)
            assert key_at(place, raw) is None


@given(u64, u64)
def test_places_are_in_the_order_of_the_puts(one: int, other: int) -> None:
    assert (place_of(one) < place_of(other)) == (one < other)


def test_the_lengths_of_the_keys_are_sealed() -> None:
    """Bytes cannot slide from one field into the next."""
    slid = ENTRY._replace(key=KEY + b"p", parent=b"p" * 31)
    assert len(slid.encode()) == len(ENTRY.encode())
    assert slid.encode()[-16:] != ENTRY.encode()[-16:]
    assert IndexEntry.decode(slid.place, slid.encode()) == slid


def test_another_version_is_named() -> None:
    for version in (2, 4):
        raw = bytearray(ENTRY.encode())
        raw[4] = version
        with pytest.raises(RecordError, match=f"has version {version}, this is version 3"):
            IndexEntry.decode(ENTRY.place, bytes(raw))


def test_no_parent_differs_from_an_empty_one() -> None:
    root = ENTRY._replace(parent=None)
    assert IndexEntry.decode(root.place, root.encode()).parent is None


@st.composite
def shapes(draw: st.DrawFn, max_plane: int = 60_000) -> PageShape:
    at, planes = 0, []
    for _ in range(draw(st.integers(1, 8))):
        at += draw(st.integers(0, 20))
        planes.append((at, draw(st.integers(1, max_plane))))
        at += planes[-1][1]
    return PageShape(at + draw(st.integers(0, 20)), planes)


@given(shapes())
def test_pieces_cover_the_page_and_hold_whole_planes(shape: PageShape) -> None:
    at = 0
    for piece in shape.pieces:
        assert piece.offset == at
        at = piece.stop
    assert at == shape.page_bytes
    for plane, (offset, nbytes) in enumerate(shape.planes):
        number, inner = shape.piece_of(plane)
        piece = shape.pieces[number]
        assert piece.offset + inner == offset
        assert inner + nbytes <= piece.nbytes
    if len(shape.pieces) > 1:
        # Reading a plane costs at most about one piece besides it.
        longest = max(nbytes for _, nbytes in shape.planes) + 20
        assert max(piece.nbytes for piece in shape.pieces) <= 1.5 * PIECE_BYTES + 2 * longest


@given(shapes(max_plane=200), st.data())
def test_any_altered_byte_of_a_page_is_noticed(shape: PageShape, data: st.DataObject) -> None:
    page = np.random.default_rng(0).integers(0, 256, shape.page_bytes, dtype=np.uint8)
    sums = shape.checksums(KEY, page)
    shape.verify(KEY, sums, page)
    at = data.draw(st.integers(0, shape.page_bytes - 1))
    page[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        shape.verify(KEY, sums, page)
    for plane, (offset, nbytes) in enumerate(shape.planes):
        part = page[offset : offset + nbytes]
        if offset <= at < offset + nbytes:
            with pytest.raises(RecordError):
                shape.verify_plane(KEY, sums, plane, part)
        else:
            shape.verify_plane(KEY, sums, plane, part)


@given(shapes(max_plane=200), st.data())
def test_a_page_is_checked_in_whatever_steps_it_arrives(
    shape: PageShape, data: st.DataObject
) -> None:
    page = np.random.default_rng(0).integers(0, 256, shape.page_bytes, dtype=np.uint8)
    sums = shape.checksums(KEY, page)
    stops = data.draw(st.lists(st.integers(0, shape.page_bytes), max_size=9).map(sorted))
    arrived = np.zeros_like(page)
    check = PageCheck(shape, KEY, sums, arrived)
    for stop in [*stops, shape.page_bytes]:
        arrived[:stop] = page[:stop]
        check.reach(stop)
    check.finish()
    at, nbytes = shape.planes[-1]
    arrived[at + nbytes - 1] ^= 1
    with pytest.raises(RecordError, match=f"plane {len(shape.planes) - 1} "):
        PageCheck(shape, KEY, sums, arrived).reach(shape.page_bytes)


def test_equal_bytes_have_other_sums_under_another_key_or_plane() -> None:
    data = np.zeros(100, np.uint8)
    sums = {plane_sum(key, plane, data) for key in (KEY, b"other") for plane in range(3)}
    assert len(sums) == 6


@pytest.mark.parametrize(
    "planes", [[], [(0, 60), (50, 10)], [(0, 101)], [(50, 10), (0, 10)], [(0, -1)]]
)
def test_planes_must_be_ascending_ranges_of_the_page(planes: list[tuple[int, int]]) -> None:
    with pytest.raises(LayoutError):
        PageShape(100, planes)


@given(shapes(), st.integers(8 << 20, 1 << 40), st.integers(1, 64 << 20))
def test_room_leaves_three_transactions_free(
    shape: PageShape, capacity: int, batch_bytes: int
) -> None:
    room = Room.plan(capacity_bytes=capacity, batch_bytes=batch_bytes, psize=4096, shape=shape)
    batch = room.batch_puts * shape.page_bytes
    assert room.map_bytes <= capacity
    assert room.live_capacity_bytes + 3 * batch <= room.map_bytes
    assert room.live_capacity_bytes % room.page_stored_bytes == 0
    assert room.stored_bytes_of(shape.page_bytes) == room.page_stored_bytes > shape.page_bytes
    assert room.batch_puts == 1 or batch <= batch_bytes


@given(shapes(), st.integers(8 << 20, 1 << 40), st.integers(1, 64 << 20))
def test_slots_and_their_index_share_the_folder(
    shape: PageShape, capacity: int, batch_bytes: int
) -> None:
    room = plan_slab(capacity_bytes=capacity, batch_bytes=batch_bytes, psize=4096, shape=shape)
    assert room.map_bytes + room.slots * room.slot_bytes <= capacity
    assert shape.page_bytes <= room.slot_bytes < shape.page_bytes + 4096
    assert room.slot_bytes <= room.live_capacity_bytes < room.slots * room.slot_bytes
    assert room.live_capacity_bytes % room.page_stored_bytes == 0


#: Bytes of a page from 4 KiB to 8 MiB, and planes in it.
page_shapes = st.builds(
    lambda pages, planes: PageShape(
        4096 * pages,
        [(i * (4096 * pages // planes), 4096 * pages // planes) for i in range(planes)],
    ),
    st.integers(0, 11).flatmap(lambda power: st.integers(1, 1 << power)),
    st.sampled_from([1, 2, 8]),
)
capacities = st.integers(20, 41).flatmap(lambda power: st.integers(1 << power, 2 << power))


def slab_bytes(shape: PageShape, capacity: int, batch_bytes: int) -> int:
    """Bytes of pages that fit; 0 if none does."""
    try:
        room = plan_slab(capacity_bytes=capacity, batch_bytes=batch_bytes, psize=4096, shape=shape)
    except ConfigError:
        return 0
    return room.live_capacity_bytes


@settings(max_examples=400)
@example(PageShape(4096, [(0, 4096)]), 264 << 20, 464 << 20, 16 << 20)
@example(PageShape(4096, [(0, 4096)]), (64 << 20) - 1, 1, 1 << 20)
@given(
    page_shapes,
    capacities,
    st.integers(0, 24).flatmap(lambda power: st.integers(0, 4096 << power)),
    st.sampled_from([1 << 20, 16 << 20, 64 << 20]),
)
def test_a_larger_folder_never_holds_fewer_pages_nor_a_smaller_share(
    shape: PageShape, capacity: int, more: int, batch_bytes: int
) -> None:
    larger = capacity + more
    before, after = (slab_bytes(shape, size, batch_bytes) for size in (capacity, larger))
    assert after >= before
    # The last slot may just not fit, and one more be kept free.
    assert after + 2 * shape.page_bytes >= before * larger / capacity * 0.9999


@settings(max_examples=400)
@given(page_shapes, capacities)
def test_pages_get_three_quarters_of_the_folder(shape: PageShape, capacity: int) -> None:
    capacity = max(capacity, 64 << 20, 32 * shape.page_bytes)
    share = slab_bytes(shape, capacity, 16 << 20) / capacity
    small = shape.page_bytes < 16 << 10 and capacity < 1 << 30
    assert share >= (0.7 if small else 0.75)
    if shape.page_bytes >= 64 << 10 and capacity >= 1 << 30:
        assert share >= 0.85


def test_the_smallest_folder_of_slots_is_named() -> None:
    shape = PageShape(2 << 20, [(0, 2 << 20)])
    plan = {"batch_bytes": 16 << 20, "psize": 4096, "shape": shape}
    with pytest.raises(ConfigError, match=r"give it at least ([0-9.]+) MiB") as caught:
        plan_slab(capacity_bytes=4 << 20, **plan)
    need = float(str(caught.value).split("at least ")[1].split(" MiB")[0])
    assert plan_slab(capacity_bytes=int(need * (1 << 20)), **plan).live_capacity_bytes == 2 << 20


class SlotMachine(RuleBasedStateMachine):
    """Slots against sets: a slot is written again only when nobody can still read what was in it."""

    SLOTS = 12

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(self.SLOTS, [0, 1], freed_by=5)
        self.used = {0, 1}
        self.staged: set[int] = set()
        self.waiting: dict[int, int] = dict.fromkeys(range(2, self.SLOTS), 5)
        self.free: set[int] = set()
        self.txn = 5

    @rule(count=st.integers(1, 6), below=st.none() | st.integers(1, 12))
    def take(self, count: int, below: int | None) -> None:
        got = self.slots.take(count, below)
        here = {slot for slot in self.free if below is None or slot < below}
        assert set(got) <= here
        assert len(got) == len(set(got)) == min(count, len(here))
        self.free -= set(got)
        self.staged |= set(got)

    @rule()
    def give(self) -> None:
        self.slots.give(self.staged)
        self.free |= self.staged
        self.staged = set()

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.used) or [None]), unique=True))
        freed = [slot for slot in gone if slot is not None]
        self.txn += 1
        self.slots.freed(self.txn, freed)
        self.used = (self.used - set(freed)) | self.staged
        self.staged = set()
        self.waiting |= dict.fromkeys(freed, self.txn)

    @rule(behind=st.integers(0, 3))
    def reclaim(self, behind: int) -> None:
        self.slots.reclaim(self.txn - behind)
        ready = {slot for slot, txn in self.waiting.items() if txn <= self.txn - behind}
        self.free |= ready
        for slot in ready:
            del self.waiting[slot]

    @invariant()
    def books(self) -> None:
        assert (self.slots.free, self.slots.pending) == (len(self.free), len(self.waiting))
        self.slots.check(self.used | self.staged)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_neighbouring_slots_are_taken_together() -> None:
    slots = SlotAllocator(20, [3, 9], freed_by=1)
    slots.reclaim(1)
    assert slots.take(8) == list(range(10, 18))
    assert slots.take(5) == list(range(4, 9))
    assert sorted(slots.take(9)) == [0, 1, 2, 18, 19]


def test_a_use_belongs_to_its_key() -> None:
    raw = Use(7, 1_700_000_000, 3).encode(KEY)
    assert Use.decode(KEY, raw) == Use(7, 1_700_000_000, 3)
    assert Use.decode(b"K" * 32, raw) is None
    assert Use.decode(KEY, raw[:-1]) is None
    for at in range(len(raw)):
        assert Use.decode(KEY, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]) is None


def test_uses_and_puts_have_one_order() -> None:
    first, second = record(1, None, 0, 4), record(2, None, 0, 6)
    book = UsageBook({first.key: Use(9, 99, 2)})
    book.start_behind(6)
    assert (book.order(first), book.order(second)) == (9, 6)
    assert book.of(second) == Use(6, 0, 0)
    book.touch([second.key], hits=1)
    assert book.order(second) > 9
    assert book.of(second).hits == 1
    assert book.unsaved == 1


def record(key: int, parent: int | None, depth: int, sequence: int) -> DiskRecord:
    up = None if parent is None else bytes([parent])
    return DiskRecord(bytes([key]), up, depth, 1, 10, b"i", b"l", False, sequence)


@st.composite
def forests(draw: st.DrawFn) -> list[DiskRecord]:
    """Up to 30 pages in any order of age; some name a parent that is not there."""
    n = draw(st.integers(0, 30))
    ages = draw(st.permutations(range(n)))
    records: list[DiskRecord] = []
    for i in range(n):
        parent = draw(st.none() | st.sampled_from([*range(i), 99]))
        known = {r.key: r for r in records}
        depth = 0 if parent is None else 1
        if parent is not None and bytes([parent]) in known:
            depth = known[bytes([parent])].depth + 1
        records.append(record(i, parent, depth, ages[i]))
    return draw(st.permutations(records)) if records else []


@given(forests(), st.integers(0, 300))
def test_what_parent_links_imply(records: list[DiskRecord], limit: int) -> None:
    kept = usable(records)
    for r in records:
        whole = r.parent is None or r.parent in kept
        assert (r.key in kept) == whole
    order = list(oldest_first(kept))
    assert sorted(r.key for r in order) == sorted(kept)
    place = {r.key: i for i, r in enumerate(order)}
    assert all(r.parent is None or place[r.parent] < place[r.key] for r in order)

    gone = victims(kept, limit)
    left = {key: r for key, r in kept.items() if key not in gone}
    assert len(left) * 10 <= limit
    assert not gone or (len(left) + 1) * 10 > limit
    assert usable(left.values()) == left
    for at, key in enumerate(gone):
        # Each victim was the oldest page without children at its turn.
        there = {k: r for k, r in kept.items() if k not in gone[:at]}
        parents = {r.parent for r in there.values()}
        assert there[key].sequence == min(
            r.sequence for r in there.values() if r.key not in parents
        )


@given(forests(), st.data())
def test_what_follows_goes_too(records: list[DiskRecord], data: st.DataObject) -> None:
    kept = usable(records)
    chosen = data.draw(st.lists(st.sampled_from(sorted(kept) or [b"none"]), unique=True))
    gone = with_followers(kept, chosen)
    assert set(chosen) & set(kept) <= set(gone)
    left = {key: r for key, r in kept.items() if key not in gone}
    assert usable(left.values()) == left
    for at in range(len(gone)):  # removed from the end on, no page is without its prefix
        assert set(usable([r for k, r in kept.items() if k not in gone[at:]])) == set(kept) - set(
            gone[at:]
        )


def test_a_circle_of_parents_is_unusable() -> None:
    assert usable([record(1, 2, 1, 1), record(2, 1, 1, 2)]) == {}
