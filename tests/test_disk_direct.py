"""Inline pages that are read past the page cache, at their place in the database's file."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_child import key_of, page_of
from disk_memory import larger_than_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers import map_place
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_reader import DiskReader
from kvtier.tiers.map_place import MapPlaces

#: Values that LMDB keeps in pages of their own are longer than this; shorter ones are read from the map.
SHORT = 2048


@pytest.fixture(autouse=True)
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read past the page cache."""
    larger_than_memory(monkeypatch)
    done: list[int] = []
    read = MapPlaces._read_run

    def spy(self: MapPlaces, fd: int, run: Any) -> None:
        read(self, fd, run)
        done.append(sum(piece.out.nbytes for piece in run))

    monkeypatch.setattr(MapPlaces, "_read_run", spy)
    return done


def open_tier(folder: Path, planes: list[int], gap: int = 0, pages: int = 8) -> DiskTier:
    ranges, at = [], 0
    for nbytes in planes:
        ranges.append((at, nbytes))
        at += nbytes + gap
    return DiskTier(
        folder,
        layout_digest=b"layout",
        page_bytes=at,
        plane_ranges=ranges,
        capacity_bytes=(4 << 20) + 3 * pages * at,
        payload="inline",
    )


def put(tier: DiskTier, number: int, version: int = 0) -> None:
    nbytes = tier._shape.page_bytes
    tier.put(
        key_of(number), parent=None, depth=0, identity=b"i", data=page_of(number, nbytes, version)
    ).result(20)


SIZES = st.sampled_from([1, 100, SHORT, 4096, 65536, 65537, 100_000, 300_000])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    planes=st.lists(SIZES, min_size=1, max_size=5),
    gap=st.sampled_from([0, 1, 64]),
    limit=st.sampled_from([4096, 65536, 1 << 20]),
)
def test_pages_of_any_shape(
    planes: list[int],
    gap: int,
    limit: int,
    tmp_path_factory: pytest.TempPathFactory,
    direct_reads: list[int],
) -> None:
    """Whole pages, one and many a call, and single planes; whatever one read takes at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(map_place, "_READ_BYTES", limit)
        with open_tier(tmp_path_factory.mktemp("tier"), planes, gap) as tier:
            nbytes = tier._shape.page_bytes
            for number in range(5):
                put(tier, number)
            direct_reads.clear()
            out = np.zeros((5, nbytes), np.uint8)
            assert tier.read(key_of(3), out[3])
            assert (out[3] == page_of(3, nbytes)).all()
            if tier._file.places.usable and nbytes > 2 * SHORT:
                assert sum(direct_reads) == nbytes
            out[:] = 0
            assert all(tier.read_pages([key_of(n) for n in range(5)], list(out)))
            for number in range(5):
                assert (out[number] == page_of(number, nbytes)).all()
            for plane, (at, size) in enumerate(tier._shape.planes):
                part = np.zeros(size, np.uint8)
                assert tier.read_plane(key_of(2), plane, part)
                assert (part == page_of(2, nbytes)[at : at + size]).all()


def test_another_process_reads_so_too(tmp_path: Path, direct_reads: list[int]) -> None:
    with open_tier(tmp_path, [50_000]) as tier:
        put(tier, 1)
        usable = tier._file.places.usable
    with DiskReader(tmp_path) as reader:
        out = np.zeros(50_000, np.uint8)
        assert reader.read(key_of(1), out)
        assert (out == page_of(1, 50_000)).all()
    assert direct_reads == [50_000] * usable


def test_what_is_in_memory_is_read_there(
    tmp_path: Path, direct_reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_place, "in_memory", lambda address, nbytes: True)
    with open_tier(tmp_path, [50_000]) as tier:
        put(tier, 1)
        assert tier.read(key_of(1), np.zeros(50_000, np.uint8))
    assert not direct_reads


@pytest.mark.parametrize("how", ["fails", "is cut short", "brings other bytes"])
def test_a_read_that_goes_wrong_is_made_from_the_map(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is handed out, and the page is no miss for it."""

    calls: list[int] = []

    def wrong(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if how == "fails":
            raise OSError(5, "the drive says no")
        buffers[0][:] = bytes(len(buffers[0]))
        return len(buffers[0]) - 4096 * (how == "is cut short")

    class Os:
        preadv = staticmethod(wrong)

    with open_tier(tmp_path, [50_000, 70_000]) as tier:
        put(tier, 1)
        monkeypatch.setattr(map_place, "os", Os)
        out = np.zeros(120_000, np.uint8)
        for read in (
            lambda: tier.read(key_of(1), out),
            lambda: all(tier.read_pages([key_of(1)] * 2, [out, out])),
        ):
            out[:] = 0
            assert read()
            assert (out == page_of(1, 120_000)).all()
        assert tier.stats().damaged == 0
        assert bool(calls) == tier._file.places.usable
        monkeypatch.undo()


def test_pages_come_and_go_while_they_are_read(tmp_path: Path, direct_reads: list[int]) -> None:
    """Space that a removed page leaves is written again; a page that stays is always found, as it was put."""
    stays, nbytes = range(4), 90_000
    stop = threading.Event()
    wrong: list[str] = []

    def reader() -> None:
        out = np.zeros(nbytes, np.uint8)
        while not stop.is_set():
            for number in range(12):
                hit = tier.read(key_of(number), out)
                if hit and not (out == page_of(number, nbytes)).all():
                    wrong.append(f"page {number} has other bytes")
                if not hit and number in stays:
                    wrong.append(f"page {number} is gone")

    with open_tier(tmp_path, [60_000, 30_000], pages=12) as tier:
        for number in stays:
            put(tier, number)
        threads = [threading.Thread(target=reader) for _ in range(2)]
        for thread in threads:
            thread.start()
        for turn in range(40):
            for number in range(4, 12):
                if (turn + number) % 3:
                    tier.put(
                        key_of(number),
                        parent=None,
                        depth=0,
                        identity=b"i",
                        data=page_of(number, nbytes),
                    )
                else:
                    tier.delete([key_of(number)])
            tier.flush()
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not wrong
        assert tier.stats().damaged == 0
        assert bool(direct_reads) == tier._file.places.usable
