"""What the store may rely on: one set of test bodies, each run on every device."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from kvtier.devices import cuda, open_device
from kvtier.devices.base import Buffer, Device, Stream
from kvtier.devices.cuda import CudaDevice
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import (
    ClosedError,
    ConfigError,
    CopyFailedError,
    DeadlineExceededError,
    DeviceOOMError,
    OffloadWarning,
)

MiB = 2**20
TIMEOUT_S = 30.0


class FakeStream:
    """A CUDA stream on the CPU, on which everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = id(self)

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.recorded


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


class FakeCuda:
    """What ``CudaDevice`` calls in ``torch.cuda``, without a card: it proves the calls, not the card."""

    Stream = FakeStream
    Event = FakeEvent
    OutOfMemoryError = MemoryError

    def __init__(self, pin_error: int = 0) -> None:
        self.current = [FakeStream(torch.device("cpu"))]
        self.pinned: set[int] = set()
        self.pin_error = pin_error

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 8 * 2**30, 16 * 2**30

    def get_device_name(self, index: int) -> str:
        return "Fake"

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current[-1]

    def cudart(self) -> "FakeCuda":
        return self

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        assert pointer not in self.pinned
        if not self.pin_error:
            self.pinned.add(pointer)
        return self.pin_error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.pinned.remove(pointer)
        return 0


def open_faked(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> CudaDevice:
    monkeypatch.setattr(cuda, "_cuda", fake)
    opened = CudaDevice(0, vram_bytes=64 * MiB)
    monkeypatch.setattr(opened, "_torch_device", torch.device("cpu"))
    return opened


@pytest.fixture(params=["emulated", "faked", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    opened: Device
    if request.param == "emulated":
        opened = EmulatedDevice(vram_bytes=64 * MiB)
    elif request.param == "faked":
        opened = open_faked(monkeypatch, FakeCuda())
    else:
        opened = CudaDevice(0, vram_bytes=64 * MiB)
    yield opened
    opened.close()


def host_bytes(device: Device, values: torch.Tensor) -> Buffer:
    buffer = device.alloc_host(values.numel())
    device.host(buffer.range(), write=True).copy_(values)
    return buffer


def read_back(device: Device, buffer: Buffer, stream: Stream) -> torch.Tensor:
    host = device.alloc_host(buffer.nbytes)
    device.copy(stream, [(host.range(), buffer.range())])
    stream.synchronize(TIMEOUT_S)
    return device.host(host.range()).clone()


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_bytes_go_up_and_come_back(device: Device) -> None:
    values = pattern(3 * MiB + 5)
    host, vram = host_bytes(device, values), device.alloc(values.numel())
    up = device.stream("h2d")
    device.copy(up, [(vram.range(), host.range())])
    device.stream("d2h").wait(up.record())
    assert torch.equal(read_back(device, vram, device.stream("d2h")), values)
    assert (host.kind, vram.kind, host.nbytes) == ("pinned", "vram", values.numel())
    assert vram.raw().device == device.torch_device


def test_a_part_of_a_buffer_moves_alone(device: Device) -> None:
    old, new = pattern(1000), pattern(1000, 1)
    host, vram, stream = host_bytes(device, old), device.alloc(1000), device.stream("h2d")
    device.copy(stream, [(vram.range(), host.range())])
    stream.synchronize(TIMEOUT_S)
    device.host(host.range(), write=True).copy_(new)
    device.copy(stream, [(vram.range(100, 200), host.range(300, 400))])
    expected = old.clone()
    expected[100:200] = new[300:400]
    assert torch.equal(read_back(device, vram, stream), expected)


@pytest.mark.parametrize("width", [64, 61])
@pytest.mark.parametrize("order", [1, -1])
def test_scattered_parts_land_where_they_belong(device: Device, width: int, order: int) -> None:
    """Equal pitches on the VRAM side, neighbours, and a straggler; in any order."""
    count, pitch = 9, 160
    values = pattern(2000)
    host, vram, stream = host_bytes(device, values), device.alloc(2000), device.stream("h2d")
    blank = host_bytes(device, torch.zeros(2000, dtype=torch.uint8))
    device.copy(stream, [(vram.range(), blank.range())])
    moves = [(i * pitch, i * width, width) for i in range(count)]
    # The source's pitch breaks, then the destination's; neighbours; one alone; none.
    moves += [(1440, 1200, width), (1603, 1200 + width, width), (1770, 1200 + 2 * width, width)]
    moves += [(1900, 1000, 20), (1920, 1020, 20), (1990, 1900, 7), (1850, 3, 0)]
    parts = [(vram.range(d, d + n), host.range(s, s + n)) for d, s, n in moves]
    device.copy(stream, parts[::order])
    expected = torch.zeros(2000, dtype=torch.uint8)
    for d, s, n in moves:
        expected[d : d + n] = values[s : s + n]
    assert torch.equal(read_back(device, vram, stream), expected)
    gathered = device.alloc_host(count * width)
    device.copy(
        stream,
        [
            (gathered.range(i * width, (i + 1) * width), vram.range(i * pitch, i * pitch + width))
            for i in range(count)
        ],
    )
    stream.synchronize(TIMEOUT_S)
    assert torch.equal(device.host(gathered.range()), values[: count * width])


def test_vram_to_vram(device: Device) -> None:
    values = pattern(4096)
    host, stream = host_bytes(device, values), device.stream("h2d")
    one, two = device.alloc(4096), device.alloc(4096)
    device.copy(stream, [(one.range(), host.range())])
    halves = [(0, 2048), (2048, 0)]
    device.copy(stream, [(two.range(d, d + 2048), one.range(s, s + 2048)) for d, s in halves])
    assert torch.equal(read_back(device, two, stream), values.roll(2048))


def test_a_launched_kernel_runs_in_stream_order(device: Device) -> None:
    values = pattern(4096)
    host, vram = host_bytes(device, values), device.alloc(4096)
    up, compute, down = device.stream("h2d"), device.stream("kernels"), device.stream("d2h")
    device.copy(up, [(vram.range(), host.range())])
    compute.wait(up.record())
    every = [vram.range()]
    for _ in range(3):
        device.launch(compute, "add", lambda: vram.raw().add_(1), reads=every, writes=every)
    down.wait(compute.record())
    assert torch.equal(read_back(device, vram, down), values + 3)


def test_torch_work_on_the_compute_stream_sees_and_is_seen(device: Device) -> None:
    values = pattern(4096)
    host, vram = host_bytes(device, values), device.alloc(4096)
    up, down, compute = device.stream("h2d"), device.stream("d2h"), device.compute_stream()
    device.copy(up, [(vram.range(), host.range())])
    compute.wait(up.record())
    device.use(compute, "invert", reads=[vram.range()], writes=[vram.range()])
    vram.raw().bitwise_not_()
    down.wait(compute.record())
    assert torch.equal(read_back(device, vram, down), ~values)


def test_on_redirects_the_compute_stream(device: Device) -> None:
    outside = device.compute_stream()
    side = device.stream("side")
    with device.on(side):
        vram = device.alloc(16)
        inside = device.compute_stream()
        device.use(inside, "fill", writes=[vram.range()])
        vram.raw().fill_(7)
    assert device.compute_stream() is outside
    assert torch.equal(read_back(device, vram, side), torch.full((16,), 7, dtype=torch.uint8))


def test_streams_have_names(device: Device) -> None:
    assert device.stream("h2d") is device.stream("h2d")
    assert device.stream("h2d") is not device.stream("d2h")
    assert device.stream("h2d").name == "h2d"


def test_an_event_is_done_after_it_was_waited_for(device: Device) -> None:
    host, vram = host_bytes(device, pattern(MiB)), device.alloc(MiB)
    stream = device.stream("h2d")
    device.copy(stream, [(vram.range(), host.range())])
    event = stream.record()
    event.synchronize(TIMEOUT_S)
    assert event.done()
    device.free(vram)
    device.free(host)
    device.copy(stream, [])
    device.synchronize(TIMEOUT_S)


def test_polling_an_event_ends(device: Device) -> None:
    host, vram = host_bytes(device, pattern(MiB)), device.alloc(MiB)
    device.copy(device.stream("h2d"), [(vram.range(), host.range())])
    event = device.stream("h2d").record()
    polls = 0
    while not event.done():
        polls += 1
        assert polls < 1_000_000
    device.free(vram)


def test_host_memory_is_fit_for_direct_io(device: Device) -> None:
    buffers = [device.alloc_host(nbytes) for nbytes in (1, 4096, 12_345, MiB)]
    assert [buffer.raw().data_ptr() % 4096 for buffer in buffers] == [0] * 4
    assert [buffer.raw().numel() for buffer in buffers] == [1, 4096, 12_345, MiB]
    for buffer in buffers:
        device.free(buffer)


def test_capacity_is_a_hard_limit_and_comes_back(device: Device) -> None:
    assert device.capacity_bytes == 64 * MiB
    first = device.alloc(40 * MiB)
    with pytest.raises(DeviceOOMError, match=r"40\.00 MiB.*24\.00 MiB of 64\.00 MiB"):
        device.alloc(40 * MiB)
    assert device.used_bytes == 40 * MiB
    device.free(first)
    assert device.used_bytes == 0
    device.free(device.alloc(64 * MiB))


def test_what_no_device_does_is_refused(device: Device) -> None:
    host, vram, stream = device.alloc_host(64), device.alloc(64), device.stream("h2d")
    with pytest.raises(ConfigError, match="32 bytes"):
        device.copy(stream, [(vram.range(0, 64), host.range(0, 32))])
    with pytest.raises(ConfigError, match="host to host"):
        device.copy(stream, [(host.range(0, 32), host.range(32, 64))])
    with pytest.raises(ConfigError, match="one copy a direction"):
        device.copy(
            stream,
            [(vram.range(0, 8), host.range(0, 8)), (host.range(8, 16), vram.range(8, 16))],
        )
    with pytest.raises(ConfigError, match="do not lie in"):
        device.copy(stream, [(vram.range(0, 65), host.range(0, 65))])
    with pytest.raises(ConfigError, match="cannot touch"):
        device.host(vram.range())
    with pytest.raises(ConfigError, match="0 bytes"):
        device.alloc(0)
    with pytest.raises(ConfigError, match="-1 bytes"):
        device.alloc_host(-1)


def test_what_belongs_to_another_device_is_refused(device: Device) -> None:
    other = EmulatedDevice(vram_bytes=MiB)
    foreign, mine = other.alloc(16), device.alloc(16)
    with pytest.raises(ConfigError, match="not a buffer of"):
        device.free(foreign)
    with pytest.raises(ConfigError, match="not a stream of"):
        device.copy(other.stream("h2d"), [(mine.range(), device.alloc_host(16).range())])
    with pytest.raises(ConfigError):
        device.stream("h2d").wait(other.stream("h2d").record())


def test_close_is_final_and_idempotent(device: Device) -> None:
    vram, host, stream = device.alloc(16), device.alloc_host(16), device.stream("h2d")
    device.copy(stream, [(vram.range(), host.range())])
    device.close()
    device.close()
    device.free(vram)
    assert device.used_bytes == 0
    for use in (lambda: device.alloc(1), lambda: device.stream("x"), lambda: device.synchronize(1)):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_devices_are_opened_by_name() -> None:
    assert open_device("emulated").name == "emulated rtx-4060-ti-16gb"
    assert open_device("emulated:RTX 4090").capacity_bytes == 24 * 2**30
    with pytest.raises(ConfigError, match="nearest"):
        open_device("emulated:rtx-9999")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card")
@pytest.mark.parametrize("index", [0, "1"])
def test_cuda_without_cuda_says_what_to_do(index: int | str) -> None:
    with pytest.raises(ConfigError, match=rf"cuda:{index}.*emulated"):
        CudaDevice(index)


def test_a_cuda_card_is_a_number() -> None:
    with pytest.raises(ConfigError, match="'first'"):
        CudaDevice("first")


def test_cuda_unpins_what_it_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    device = open_faked(monkeypatch, fake)
    first, second = device.alloc_host(100), device.alloc_host(MiB)
    assert (first.nbytes, len(fake.pinned)) == (100, 2)
    device.free(first)
    assert len(fake.pinned) == 1
    device.close()
    assert not fake.pinned
    with pytest.raises(ClosedError):
        second.raw()


def test_cuda_falls_back_to_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_faked(monkeypatch, FakeCuda(pin_error=2))
    with pytest.warns(OffloadWarning, match=r"1\.00 MiB.*CUDA error 2.*smaller"):
        assert device.alloc_host(MiB).kind == "pageable"
    assert device.alloc_host(MiB).kind == "pageable"
    device.close()


def test_cuda_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(cuda, "_cuda", fake)
    assert CudaDevice(0).capacity_bytes == pytest.approx(0.92 * 8 * 2**30)
    monkeypatch.setattr(fake, "mem_get_info", lambda index: (600 * MiB, 2**30))
    assert CudaDevice(0).capacity_bytes == 88 * MiB
    monkeypatch.setattr(fake, "mem_get_info", lambda index: (500 * MiB, 2**30))
    with pytest.raises(ConfigError, match=r"margin of 512\.00 MiB"):
        CudaDevice(0)
    with pytest.raises(ConfigError, match="cards 0 to 0"):
        CudaDevice(1)


def test_cuda_waits_have_deadlines_and_tell_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_faked(monkeypatch, FakeCuda())
    monkeypatch.setattr(FakeEvent, "query", lambda self: False)
    event = device.stream("h2d").record()
    assert not event.done()
    with pytest.raises(DeadlineExceededError, match=r"0\.01 s"):
        event.synchronize(0.01)

    def broken(self: FakeEvent) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeEvent, "query", broken)
    assert event.done()
    with pytest.raises(CopyFailedError, match="illegal memory access"):
        event.synchronize(1.0)
