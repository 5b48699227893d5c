"""The on-disk record: whatever is altered is noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.lmdb_tree import oldest_first, usable, victims
from kvtier.tiers.record import (
    PIECE_BYTES,
    DiskRecord,
    IndexEntry,
    PageShape,
    RecordError,
    entry_bytes,
    plane_sum,
)

KEY = b"k" * 32
ENTRY = IndexEntry(b"p" * 32, 7, b"identity", b"layout", True, 1000, 42, 1_700_000_000, (1, 2, 3))

digests = st.binary(min_size=1, max_size=32)
u64 = st.integers(0, 2**64 - 1)
entries = st.builds(
    IndexEntry,
    parent=st.none() | digests,
    depth=st.integers(0, 2**32 - 1),
    identity=digests,
    layout=digests,
    ephemeral=st.booleans(),
    nbytes=u64,
    sequence=u64,
    created_ns=u64,
    sums=st.lists(u64, max_size=20).map(tuple),
)


@given(digests, entries)
def test_an_entry_comes_back_as_it_was(key: bytes, entry: IndexEntry) -> None:
    raw = entry.encode(key)
    assert IndexEntry.decode(key, raw) == entry
    assert len(raw) <= entry_bytes(len(entry.sums))


@given(digests, entries, st.data())
def test_any_altered_byte_is_noticed(key: bytes, entry: IndexEntry, data: st.DataObject) -> None:
    raw = bytearray(entry.encode(key))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        IndexEntry.decode(key, bytes(raw))


def test_any_other_length_is_noticed() -> None:
    raw = ENTRY.encode(KEY)
    for stop in range(len(raw)):
        with pytest.raises(RecordError):
            IndexEntry.decode(KEY, raw[:stop])
    with pytest.raises(RecordError):
        IndexEntry.decode(KEY, raw + b"\0")


def test_an_entry_belongs_to_its_key() -> None:
    with pytest.raises(RecordError, match="checksum"):
        IndexEntry.decode(b"K" * 32, ENTRY.encode(KEY))
    # The key's length is sealed too: bytes cannot slide between key and entry.
    with pytest.raises(RecordError):
        IndexEntry.decode(KEY[:-1], ENTRY.encode(KEY))


def test_another_version_is_named() -> None:
    raw = bytearray(ENTRY.encode(KEY))
    raw[4] += 1
    with pytest.raises(RecordError, match="version 2"):
        IndexEntry.decode(KEY, bytes(raw))


def test_no_parent_differs_from_an_empty_one() -> None:
    root = dataclasses.replace(ENTRY, parent=None)
    assert IndexEntry.decode(KEY, root.encode(KEY)).parent is None


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


def test_a_circle_of_parents_is_unusable() -> None:
    assert usable([record(1, 2, 1, 1), record(2, 1, 1, 2)]) == {}
