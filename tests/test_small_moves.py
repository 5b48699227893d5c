"""Several small pieces are copied by one kernel; proved with a faked card, and on a real one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_device_contract import TIMEOUT_S, FakeCuda, FakeEvent, host_bytes, open_faked, pattern
from test_device_contract import read_back as read

from kvtier.devices import cuda, small
from kvtier.devices.base import Range
from kvtier.devices.cuda import CudaDevice
from kvtier.kernels import move_pieces
from kvtier.kernels.launch import launcher_for

KiB = 1024


class ReferenceLauncher:
    """Launches of ``move_pieces`` run its reference at once, on the memory that stands for the card's."""

    multiprocessors = 2

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.blocks: list[int] = []
        self.broken = False

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        if self.broken:
            raise RuntimeError("too many resources requested for launch")
        assert name == "move_pieces"
        *lists, count = arguments
        assert all(len(values) == count for values in lists)
        self.counts.append(int(count))
        self.blocks.append(grid[0] * grid[1])
        move_pieces(*lists)


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def launcher() -> ReferenceLauncher:
    return ReferenceLauncher()


@pytest.fixture
def device(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCuda, launcher: ReferenceLauncher
) -> Iterator[CudaDevice]:
    monkeypatch.setattr(cuda, "launcher_for", lambda at: launcher)
    opened = open_faked(monkeypatch, fake)
    monkeypatch.setattr(opened, "_batch", None)
    yield opened
    opened.close()


def scattered(
    to: Any, of: Any, sizes: Sequence[int], gaps: Sequence[int]
) -> list[tuple[Range, Range]]:
    """Parts behind each other with uneven gaps, in the opposite order on the other side."""
    parts, at, begin = [], 0, of.nbytes
    for size, gap in zip(sizes, gaps, strict=True):
        begin -= size + gap % 7
        parts.append((to.range(at + gap, at + gap + size), of.range(begin, begin + size)))
        at += size + gap
    return parts


SIZES = [1, 16, 4096, 5000, 77, 64, 31 * KiB, 3, 1024]
GAPS = [0, 16, 3, 1, 12, 64, 5, 0, 9]


def check_all_directions(device: CudaDevice) -> None:
    values = pattern(64 * KiB)
    host, first, second = host_bytes(device, values), device.alloc(64 * KiB), device.alloc(64 * KiB)
    back = host_bytes(device, torch.zeros_like(values))
    stream = device.stream("moves")
    expected = [torch.zeros_like(values) for _ in range(3)]
    for vram in (first, second):
        device.copy(stream, [(vram.range(), back.range())])
    chain = [(first, host), (second, first), (back, second)]
    before = values
    for (to, of), after in zip(chain, expected, strict=True):
        parts = scattered(to, of, SIZES, GAPS)
        device.copy(stream, parts)
        for dst, src in parts:
            after[dst.start : dst.stop] = before[src.start : src.stop]
        before = after
    stream.synchronize(TIMEOUT_S)
    assert torch.equal(read(device, first, stream), expected[0])
    assert torch.equal(read(device, second, stream), expected[1])
    assert torch.equal(device.host(back.range()), expected[2])


def test_one_launch_a_copy_in_every_direction(
    device: CudaDevice, launcher: ReferenceLauncher
) -> None:
    check_all_directions(device)
    assert launcher.counts == [len(SIZES)] * 3


@pytest.mark.cuda
def test_a_card_moves_small_pieces_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    real = launcher_for(torch.device("cuda", 0))
    assert real is not None, "no kernels on this card"
    launch = real.launch

    def counted(name: str, *rest: Any, **named: Any) -> None:
        launched.append(name)
        launch(name, *rest, **named)

    monkeypatch.setattr(real, "launch", counted)
    device = CudaDevice(0, vram_bytes=16 * 2**20)
    try:
        check_all_directions(device)
        assert launched == ["move_pieces"] * 3
    finally:
        device.close()


@pytest.mark.cuda
def test_lists_are_reused_safely_on_a_card() -> None:
    """Hundreds of copies in flight on two streams, more than there are lists for."""
    device = CudaDevice(0, vram_bytes=64 * 2**20)
    try:
        values = pattern(64 * KiB)
        host = host_bytes(device, values)
        streams = [device.stream("one"), device.stream("two")]
        targets = [device.alloc(64 * KiB) for _ in range(200)]
        for number, vram in enumerate(targets):
            parts = scattered(vram, host, SIZES, GAPS)
            device.copy(streams[number % 2], parts)
        device.synchronize(TIMEOUT_S)
        for vram in targets:
            got = read(device, vram, streams[0])
            for dst, src in scattered(vram, host, SIZES, GAPS):
                assert torch.equal(got[dst.start : dst.stop], values[src.start : src.stop])
    finally:
        device.close()


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 40)), min_size=2, max_size=20))
def test_any_pieces_land_where_they_belong(
    device: CudaDevice, launcher: ReferenceLauncher, rows: list[tuple[int, int]]
) -> None:
    room = sum(size + gap + 7 for size, gap in rows)
    values, stream = pattern(room), device.stream("moves")
    host, vram = host_bytes(device, values), device.alloc(room)
    blank = host_bytes(device, torch.zeros_like(values))
    device.copy(stream, [(vram.range(), blank.range())])
    parts = scattered(vram, host, *zip(*rows, strict=True))
    device.copy(stream, parts)
    expected = torch.zeros_like(values)
    for dst, src in parts:
        expected[dst.start : dst.stop] = values[src.start : src.stop]
    assert torch.equal(read(device, vram, stream), expected)
    for buffer in (host, vram, blank):
        device.free(buffer)


def test_large_pieces_of_a_mixed_copy_go_in_a_batch(
    device: CudaDevice, launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[int]] = []

    def batch(dsts: list[int], srcs: list[int], sizes: list[int], stream: int) -> bool:
        batches.append(sizes)
        for dst, src, size in zip(dsts, srcs, sizes, strict=True):
            ctypes.memmove(dst, src, size)
        return True

    monkeypatch.setattr(device, "_batch", batch)
    values = pattern(512 * KiB)
    host, vram = host_bytes(device, values), device.alloc(512 * KiB)
    parts = scattered(vram, host, [100, 32 * KiB, 32 * KiB - 1, 200 * KiB], [1, 2, 3, 4])
    device.copy(device.stream("h2d"), parts)
    for dst, src in parts:
        assert torch.equal(dst.raw(), src.raw())
    assert launcher.counts == [2]
    assert [sorted(sizes) for sizes in batches] == [[32 * KiB, 200 * KiB]]
    device.copy(device.stream("h2d"), scattered(vram, host, [100, 40 * KiB, 50 * KiB], [1, 2, 3]))
    assert launcher.counts == [2], "a single small piece is no reason for a launch"


def test_many_pieces_are_several_launches(device: CudaDevice, launcher: ReferenceLauncher) -> None:
    count = small.PIECES_A_LAUNCH + 100
    values = pattern(8 * count)
    host, vram = host_bytes(device, values), device.alloc(8 * count)
    gaps = [n % 3 for n in range(count)]
    parts = scattered(vram, host, [1] * count, gaps)
    device.copy(device.stream("h2d"), parts)
    got = vram.raw()
    assert all(got[dst.start] == values[src.start] for dst, src in parts)
    assert launcher.counts == [small.PIECES_A_LAUNCH, 100]
    assert max(launcher.blocks) <= small.LINK_BLOCKS


def test_lists_in_flight_are_not_touched(
    device: CudaDevice,
    launcher: ReferenceLauncher,
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, stream = pattern(64 * KiB), device.stream("h2d")
    host, vram = host_bytes(device, values), device.alloc(64 * KiB)
    parts = scattered(vram, host, SIZES, GAPS)
    device.copy(stream, parts)
    one = len(fake.pinned)
    device.copy(stream, parts)
    assert len(fake.pinned) == one, "what is done is used again"

    monkeypatch.setattr(FakeEvent, "query", lambda self: False)
    for _ in range(small.MAX_LISTS + 3):
        vram.raw().zero_()
        device.copy(stream, parts)
        for dst, src in parts:
            assert torch.equal(dst.raw(), src.raw())
    # The second copy of above is in flight from now on, too.
    assert len(launcher.counts) == 1 + small.MAX_LISTS
    assert len(fake.pinned) == one + small.MAX_LISTS - 1
    monkeypatch.setattr(FakeEvent, "query", lambda self: self.recorded)
    device.copy(stream, parts)
    assert len(launcher.counts) == 2 + small.MAX_LISTS
    assert device.used_bytes == vram.nbytes
    device.close()
    assert not fake.pinned


def test_lists_survive_a_launch_that_fails(
    device: CudaDevice, launcher: ReferenceLauncher, fake: FakeCuda
) -> None:
    host, vram = host_bytes(device, pattern(64 * KiB)), device.alloc(64 * KiB)
    parts = scattered(vram, host, SIZES, GAPS)
    launcher.broken = True
    for _ in range(2 * small.MAX_LISTS):
        with pytest.raises(RuntimeError, match="too many resources"):
            device.copy(device.stream("h2d"), parts)
    launcher.broken = False
    device.copy(device.stream("h2d"), parts)
    assert launcher.counts == [len(parts)]


@pytest.mark.parametrize("lacking", ["launcher_for", "reaches_host_memory"])
def test_without_kernels_the_copy_engine_does_it(
    device: CudaDevice,
    launcher: ReferenceLauncher,
    lacking: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, lacking, lambda at: None)
    check_all_directions(device)
    assert launcher.counts == []


def test_without_memory_for_lists_the_copy_engine_does_it(
    device: CudaDevice, launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def full(*arguments: Any, **named: Any) -> torch.Tensor:
        if named.get("dtype") is torch.int64:
            raise MemoryError
        return empty(*arguments, **named)

    monkeypatch.setattr(torch, "empty", full)
    check_all_directions(device)
    assert launcher.counts == []
