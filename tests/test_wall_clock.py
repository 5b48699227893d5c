"""The emulated device in wall time: a thread really waits, and the semantics are the same."""

import math
import threading
import time
from pathlib import Path

import pytest
import torch

from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.faults import Faults
from kvtier.errors import ConfigError, DeadlineExceededError, DeadlockError, RaceError
from kvtier.layout import LayerLayout, PageLayout
from kvtier.store.store import TieredStore

MiB = 2**20


def test_a_copy_really_takes_its_time_and_ends_without_being_asked() -> None:
    device = EmulatedDevice(clock="wall", dilation=20.0)
    host, vram = device.alloc_host(26 * 10**6), device.alloc(26 * 10**6)
    device.host(host.range(), write=True).fill_(7)
    began = time.monotonic()
    device.copy(device.stream("h2d"), [(vram.range(), host.range())])
    event = device.stream("h2d").record()
    assert not event.done()
    assert int(vram.raw()[0]) == 0xFF
    while int(vram.raw()[-1]) != 7 and time.monotonic() < began + 10:
        time.sleep(0.005)
    assert time.monotonic() - began >= 20 * 26e6 / 13e9
    assert event.done()
    device.close()
    assert not any(thread.name == "kvtier-wall-clock" for thread in threading.enumerate())


def test_threads_wait_beside_each_other_and_races_are_found() -> None:
    device = EmulatedDevice(clock="wall", dilation=5.0)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = device.stream(f"s{number}")
            host, vram = device.alloc_host(MiB), device.alloc(MiB)
            for step in range(10):
                device.host(host.range(), write=True).fill_(step)
                device.copy(stream, [(vram.range(), host.range())])
                with pytest.raises(RaceError):
                    device.host(host.range(), write=True)
                stream.synchronize(5)
                device.use(stream, "check", reads=[vram.range()])
                assert (vram.raw() == step).all()
                stream.synchronize(5)
            device.free(vram)
            device.free(host)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert device.used_bytes == 0
    device.close()


def test_waits_have_deadlines_and_what_never_ends_is_a_deadlock() -> None:
    device = EmulatedDevice(
        clock="wall", faults=Faults().stall_copy("h2d", 30.0).stall_copy("d2h", math.inf)
    )
    host, vram = device.alloc_host(16), device.alloc(16)
    device.copy(device.stream("h2d"), [(vram.range(0, 8), host.range(0, 8))])
    with pytest.raises(DeadlineExceededError):
        device.stream("h2d").synchronize(0.05)
    device.close()
    device = EmulatedDevice(clock="wall", faults=Faults().stall_copy("d2h", math.inf))
    host, vram = device.alloc_host(16), device.alloc(16)
    device.copy(device.stream("d2h"), [(host.range(), vram.range())])
    with pytest.raises(DeadlockError, match="d2h"):
        device.stream("d2h").synchronize(60)
    device.close()


def test_a_store_with_a_disk_works_in_wall_time(tmp_path: Path) -> None:
    """Real threads: the clock's, the disk's writer, and the caller's."""
    layout = PageLayout([LayerLayout.attention(2, 16, "float16")] * 2, page_tokens=16)
    size = layout.page_bytes
    device = EmulatedDevice(clock="wall", dilation=10.0)
    pages = [torch.full((size,), number, dtype=torch.uint8) for number in range(24)]
    keys = [bytes([number]) * 32 for number in range(24)]
    with TieredStore(
        layout, device=device, vram=8 * size, host=8 * size, disk="64MiB", path=tmp_path
    ) as store:
        for number, page in enumerate(pages):
            above = keys[number - 1] if number else None
            store.put(keys[number], page, parent=above, identity=b"i" * 16)
        store.flush()
        with store.match(keys) as lease:
            assert len(lease) == 24
            for number in range(24):
                assert torch.equal(lease.read(number), pages[number])
        store.check()
    device.close()


def test_host_work_takes_its_time() -> None:
    device = EmulatedDevice(clock="wall", dilation=10.0)
    began = time.monotonic()
    device.host_work(0.005)
    assert time.monotonic() - began >= 0.05
    device.close()
    with pytest.raises(ConfigError, match="dilation"):
        EmulatedDevice(clock="wall", dilation=0.0)
