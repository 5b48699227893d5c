"""The Chrome trace of an emulated device."""

import json
from pathlib import Path

import pytest

from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.faults import Faults
from kvtier.errors import CopyFailedError

MiB = 2**20


def traced(path: Path) -> tuple[EmulatedDevice, list[dict]]:
    device = EmulatedDevice(faults=Faults().fail_copy("d2h"))
    up, down, compute = device.stream("h2d"), device.stream("d2h"), device.compute_stream()
    vram, host = device.alloc(4 * MiB), device.alloc_host(4 * MiB)
    device.copy(up, [(vram.range(), host.range())])
    for stream in (compute, device.stream("other")):
        stream.wait(up.record())
        device.launch(stream, f"kernel on {stream.name}", lambda: None, reads=[vram.range()])
    down.wait(up.record())
    device.copy(down, [(host.range(), vram.range())])
    with pytest.raises(CopyFailedError):
        device.synchronize(1)
    device.write_trace(path)
    return device, json.loads(path.read_text())["traceEvents"]


def test_every_operation_has_a_row_a_stream_and_a_row_an_engine(tmp_path: Path) -> None:
    device, events = traced(tmp_path / "trace.json")
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    work = [e for e in events if e["ph"] == "X"]
    assert len(work) == 2 * len(device.trace) == 8
    streams = {rows[e["pid"], e["tid"]] for e in work if e["pid"] == 2}
    engines = {rows[e["pid"], e["tid"]] for e in work if e["pid"] == 1}
    assert streams == {"h2d", "d2h", "compute", "other"}
    assert engines == {"h2d", "d2h", "vram", "vram 2"}, "two kernels at once have two rows"
    up = next(e for e in work if e["name"] == "h2d")
    entry = next(t for t in device.trace if t.name == "h2d")
    assert up["dur"] == pytest.approx((entry.end_s - entry.start_s) * 1e6)
    assert up["args"]["bytes"] == 4 * MiB
    assert up["args"]["GB/s"] == pytest.approx(13, rel=0.05)
    assert [e["name"] for e in work if e["args"].get("error")] == ["d2h", "d2h"]


def test_events_of_a_row_do_not_overlap(tmp_path: Path) -> None:
    _, events = traced(tmp_path / "trace.json")
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in rows.values():
        for (_, stop), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= stop - 1e-6
