"""Cards by numbers, scale, no payload, engines, slow links and stale events."""

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_device_contract import FakeCuda, open_faked

from kvtier.devices import open_device
from kvtier.devices.batch import find_batch_copy
from kvtier.devices.cards import DEFAULT_CARD, LinkModel, find_card
from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.faults import Faults
from kvtier.devices.spec import parse_card
from kvtier.errors import ConfigError, CopyFailedError, OffloadWarning, RaceError

MiB = 2**20
NUMBERS = "vram=16GB,bandwidth=288GB/s,flops=44T,link=pinned,rate=13GB/s,duplex=0.85,engines=2"


def test_a_card_by_numbers() -> None:
    spec = parse_card(NUMBERS)
    assert spec.card.vram_bytes == 16 * 10**9
    assert spec.card.memory_bandwidth == 288e9
    assert spec.card.bf16_flops == 44e12
    assert (spec.link.h2d, spec.link.duplex, spec.link.engines) == (13e9, 0.85, 2)
    device = open_device(f"emulated:{NUMBERS}")
    assert device.capacity_bytes == 16 * 10**9
    device.close()


def test_a_name_with_other_numbers() -> None:
    card = find_card(DEFAULT_CARD)
    assert parse_card(DEFAULT_CARD).card == card
    fallback = parse_card(f"{DEFAULT_CARD},link=fallback")
    assert fallback.link.h2d == card.link("fallback").rate
    given_rate = parse_card(f"{DEFAULT_CARD},link=fallback,rate=3GB/s")
    assert given_rate.link.h2d == 3e9
    assert given_rate.card.link("pinned").rate == 13e9
    pageable = parse_card(f"{DEFAULT_CARD},link=pageable,rate=3GB/s").link
    assert pageable.rate("h2d", MiB, pinned=False) == 3e9
    assert parse_card(f"{DEFAULT_CARD},vram=8GiB").card.vram_bytes == 8 * 2**30
    assert parse_card(f"{DEFAULT_CARD},pcie=5x16").link.h2d == 50e9


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("vram=16GB", "bandwidth"),
        ("bandwidth=1GB/s,rate=1GB/s", "vram"),
        ("vram=16GB,bandwidth=288GB/s", "rate or pcie"),
        (f"{DEFAULT_CARD},link=usb", "link"),
        (f"{DEFAULT_CARD},vran=8GB", "vram"),
        (f"{DEFAULT_CARD},rate=fast", "rate"),
        (f"{DEFAULT_CARD},rate=0", "rate"),
        (f"{DEFAULT_CARD},flops=many", "flops"),
        (f"{DEFAULT_CARD},engines=3", "engines"),
        (f"{DEFAULT_CARD},duplex=1.5", "duplex"),
        (f"{DEFAULT_CARD},pcie=x8", "pcie"),
        (f"{DEFAULT_CARD},vram=", "vram"),
        (f"{DEFAULT_CARD},vram=1GB,vram=2GB", "twice"),
    ],
)
def test_a_wrong_field_is_named(text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        parse_card(text)


def test_a_pageable_card_pins_nothing() -> None:
    device = EmulatedDevice(f"{DEFAULT_CARD},link=pageable")
    with pytest.warns(OffloadWarning, match="4.1 GB/s"):
        assert device.alloc_host(MiB).kind == "pageable"


def program(device: EmulatedDevice, unit: int) -> list[float]:
    """Copies and kernels whose sizes are multiples of ``unit``; the time after each wait."""
    up, down, compute = device.stream("h2d"), device.stream("d2h"), device.compute_stream()
    host, vram = device.alloc_host(256 * unit), device.alloc(256 * unit)
    times = []
    pieces = [
        (vram.range(2 * n * unit, (2 * n + 1) * unit), host.range(n * unit, (n + 1) * unit))
        for n in range(64)
    ]
    device.copy(up, pieces)
    compute.wait(up.record())
    device.launch(compute, "k", lambda: None, reads=[vram.range(0, 128 * unit)])
    down.wait(compute.record())
    device.copy(down, [(host.range(), vram.range())])
    for stream in (up, compute, down):
        stream.synchronize(10)
        times.append(device.now_s)
    device.compute(compute, "layer", nbytes=1000 * unit, flops=1e9 * unit)
    compute.synchronize(10)
    return [*times, device.now_s]


@pytest.mark.parametrize("piece", [8 * 1024, 64 * 1024])
def test_a_scaled_card_with_scaled_data_takes_the_same_time(piece: int) -> None:
    full = EmulatedDevice()
    small = EmulatedDevice(scale=1 / 64)
    assert small.capacity_bytes == full.capacity_bytes // 64
    assert program(small, piece // 64) == pytest.approx(program(full, piece), rel=1e-9)


def test_without_payload_times_races_and_limits_are_the_same() -> None:
    bytes_, none = EmulatedDevice(), EmulatedDevice(payload=False)
    assert program(none, 4096) == pytest.approx(program(bytes_, 4096), rel=1e-12)
    assert none.torch_device.type == "meta"
    big = none.alloc(15 * 2**30)
    assert big.raw().shape == (15 * 2**30,)
    host = none.alloc_host(200 * 2**30)
    none.copy(none.stream("h2d"), [(big.range(0, MiB), host.range(0, MiB))])
    with pytest.raises(RaceError):
        none.use(none.compute_stream(), "attention", reads=[big.range(5, 6)])
    with pytest.raises(RaceError):
        none.free(big)
    none.synchronize(1)
    ran: list[int] = []
    none.launch(none.compute_stream(), "k", lambda: ran.append(1), writes=[big.range()])
    none.synchronize(10)
    assert not ran
    none.free(big)
    with pytest.raises(RaceError, match="after it was freed"):
        big.raw()


def test_a_failed_copy_is_told_without_payload_too() -> None:
    device = EmulatedDevice(payload=False, faults=Faults().fail_copy("h2d"))
    vram, host = device.alloc(8).range(), device.alloc_host(8).range()
    device.copy(device.stream("h2d"), [(vram, host)])
    with pytest.raises(CopyFailedError):
        device.stream("h2d").synchronize(1)


def test_reserved_memory_counts_and_gives_nothing() -> None:
    device = EmulatedDevice(vram_bytes=MiB)
    weights, there = device.reserve(MiB - 8), device.alloc(8)
    assert device.used_bytes == MiB
    paged_out = device.reserve(64, host=True)
    assert device.host_bytes == 64
    there.raw().zero_()
    device.copy(device.stream("x"), [(there.range(), paged_out.range(0, 8))])
    device.synchronize(1)
    assert (there.raw() == 0xFF).all()
    device.free(weights)
    device.free(paged_out)
    assert (device.used_bytes, device.host_bytes) == (8, 0)


def both_ways(engines: int) -> float:
    link = LinkModel(h2d=1e9, d2h=1e9, start_s=0, per_piece_s=0, duplex=1.0, engines=engines)
    device = EmulatedDevice(link=link)
    host, vram = device.alloc_host(2 * 10**7), device.alloc(2 * 10**7)
    half = 10**7
    device.copy(device.stream("h2d"), [(vram.range(0, half), host.range(0, half))])
    device.copy(device.stream("d2h"), [(host.range(half), vram.range(half))])
    began = device.now_s
    device.synchronize(10)
    return device.now_s - began


def test_one_copy_engine_takes_turns() -> None:
    assert both_ways(2) == pytest.approx(0.01, rel=0.01)
    assert both_ways(1) == pytest.approx(0.02, rel=0.01)


def copy_seconds(device: EmulatedDevice) -> float:
    stream = device.stream("h2d")
    vram, host = device.alloc(MiB).range(), device.alloc_host(MiB).range()
    began = device.now_s
    device.copy(stream, [(vram, host)])
    stream.synchronize(10)
    return device.now_s - began


def test_a_link_slows_to_a_tenth_from_a_copy_on() -> None:
    device = EmulatedDevice(faults=Faults().slow_link("h2d", nth=3, copies=2))
    times = [copy_seconds(device) for _ in range(5)]
    assert times[0] == pytest.approx(times[1]) == pytest.approx(times[4])
    assert times[2] == pytest.approx(times[3])
    assert times[2] - times[0] == pytest.approx(9 * MiB / 13e9)


def test_a_link_slows_by_probability_with_a_seed() -> None:
    def slow(seed: int) -> list[bool]:
        device = EmulatedDevice(faults=Faults(seed, slow_rate=0.3))
        return [copy_seconds(device) > 3e-4 for _ in range(60)]

    assert slow(1) == slow(1) != slow(2)
    assert 8 <= sum(slow(1)) <= 30
    for wrong in ({"slow_rate": 2.0}, {"slow_factor": 0.5}, {"slow_factor": math.inf}):
        with pytest.raises(ConfigError):
            Faults(**wrong)
    with pytest.raises(ConfigError, match="slowdown"):
        Faults().slow_link("h2d", 0.0)


def test_a_wait_bound_to_a_stale_event_is_called_that() -> None:
    device = EmulatedDevice()
    up, compute = device.stream("h2d"), device.compute_stream()
    vram, host = device.alloc(64), device.alloc_host(64)
    device.copy(up, [(vram.range(0, 8), host.range(0, 8))])
    event = up.record()
    device.copy(up, [(vram.range(8, 16), host.range(8, 16))])
    compute.wait(event)
    device.use(compute, "first", reads=[vram.range(0, 8)])
    with pytest.raises(RaceError, match=r"ends with its operation 1.*operation 2.*stale"):
        device.use(compute, "second", reads=[vram.range(8, 16)])


@pytest.mark.parametrize(
    "wrong", [{"scale": 0.0}, {"scale": 2.0}, {"efficiency": 0.0}, {"clock": "sun"}]
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EmulatedDevice(**wrong)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 6)), max_size=12))
def test_copies_of_many_parts_move_what_single_ones_do(moves: list[tuple[int, int, int]]) -> None:
    """Merging neighbours and ordering parts changes no byte, and overlaps are refused."""
    device = EmulatedDevice()
    host, vram = device.alloc_host(40), device.alloc(40)
    device.host(host.range(), write=True).copy_(torch.arange(40, dtype=torch.uint8))
    wanted = torch.full((40,), 0xFF, dtype=torch.uint8)
    covered: list[int] = []
    for to, of, size in moves:
        wanted[to : to + size] = torch.arange(of, of + size, dtype=torch.uint8)
        covered += range(to, to + size)
    parts = [(vram.range(t, t + n), host.range(o, o + n)) for t, o, n in moves]
    if len(set(covered)) < len(covered):
        with pytest.raises(RaceError, match="overlap"):
            device.copy(device.stream("h2d"), parts)
        return
    device.copy(device.stream("h2d"), parts)
    device.synchronize(1)
    assert torch.equal(vram.raw(), wanted)


class FakeRuntime:
    """What of ``cuda.bindings.runtime`` a batch copy needs."""

    class cudaMemcpyAttributes:
        srcAccessOrder = None

    class cudaMemcpySrcAccessOrder:
        cudaMemcpySrcAccessOrderStream = 1

    def __init__(self, result: tuple[int, ...] = (0,)) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.result = result

    def cudaMemcpyBatchAsync(self, *arguments: object) -> tuple[int, ...]:
        dsts, srcs, sizes, count, _attrs, indices, number, stream = arguments
        self.calls.append((dsts, srcs, sizes, count, indices, number, stream))
        return self.result


def test_a_batch_is_one_call() -> None:
    runtime = FakeRuntime()
    batch = find_batch_copy(runtime)
    assert batch is not None
    assert batch([1, 2], [3, 4], [5, 6], 7)
    assert runtime.calls == [([1, 2], [3, 4], [5, 6], 2, [0], 1, 7)]


def test_a_batch_that_the_driver_refuses_is_not_done() -> None:
    batch = find_batch_copy(FakeRuntime((801, 0)))
    assert batch is not None
    assert not batch([1], [2], [3], 4)
    assert find_batch_copy(object()) is None


@pytest.mark.parametrize(("piece", "calls"), [(64 * 1024, 1), (1024, 0)])
def test_cuda_copies_large_pieces_in_a_batch_and_small_ones_by_kernel(
    piece: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By size of the pieces; proves the calls, not the card."""
    batches: list[int] = []
    small: list[int] = []

    def batch(dsts: list[int], srcs: list[int], sizes: list[int], stream: int) -> bool:
        batches.append(len(sizes))
        for dst, src, size in zip(dsts, srcs, sizes, strict=True):
            ctypes.memmove(dst, src, size)
        return True

    device = open_faked(monkeypatch, FakeCuda())
    monkeypatch.setattr(device, "_batch", batch)
    monkeypatch.setattr(device, "_small_copy", lambda pieces, *_: bool(small.append(len(pieces))))
    host, vram = device.alloc_host(8 * piece), device.alloc(8 * piece)
    values = torch.randint(0, 256, (8 * piece,), dtype=torch.uint8)
    device.host(host.range(), write=True).copy_(values)
    parts = [
        (vram.range(at * piece, (at + 1) * piece), host.range(of * piece, (of + 1) * piece))
        for at, of in ((0, 5), (3, 1), (7, 2))
    ]
    device.copy(device.stream("h2d"), parts)
    for to, source in parts:
        assert torch.equal(to.raw(), source.raw())
    assert (batches, small) == ([3] * calls, [3] * (1 - calls))
    device.copy(device.stream("h2d"), parts[:1])
    assert len(batches) == calls, "one piece is one DMA"
    device.close()
