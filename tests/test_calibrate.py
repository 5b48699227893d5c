"""``kvtier calibrate``: what it measures, that it ends, and that it leaves nothing behind."""

from __future__ import annotations

import json
import mmap
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.cost import calibrate as whole
from kvtier.cost import measure_disk as disk
from kvtier.cost import measure_host as host
from kvtier.cost.calibrate import calibrate
from kvtier.cost.measure_card import measure_links
from kvtier.cost.profile import Profile, load_profile, this_machine
from kvtier.cost.trials import shares, trials
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError, OffloadWarning

HOST = {"memory_read", "memory_copy", "cpu_weights", "cpu_share", "cpu_attention", "cpu_step"}
DISK = {"disk_write_buffered", "disk_read", "disk_read_cold", "disk_read_warm"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiny sizes and times: what is measured is the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(whole, "SECONDS", dict.fromkeys(whole.SECONDS, (0.02, 0.02)))
    monkeypatch.setattr(disk, "QUICK_BYTES", 32 << 20)
    monkeypatch.setattr(disk, "FILE_BYTES", 32 << 20)
    monkeypatch.setattr(host, "QUICK_BYTES", 8 << 20)
    monkeypatch.setattr(host, "PAGES", 4)


def test_it_measures_this_machine(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    got = calibrate(tmp_path / "kv", quick=True, progress=lambda *at: seen.append(at))
    names = {one.name for one in got.measurements}
    assert names >= HOST | DISK
    assert ("disk_write" in names) != ("O_DIRECT" in got.left_out)
    for one in got.measurements:
        assert 0 < one.low <= one.value <= one.high
        assert one.how
    assert got.quick
    assert got.machine.cpu == this_machine().cpu
    assert list((tmp_path / "kv").iterdir()) == []
    done = [share for _, share in seen]
    assert done == sorted(done)
    assert (done[0], seen[-1]) == (0, ("done", 1.0))
    assert {step for step, _ in seen} >= {"disk", "memory", "processor", "attention", "step"}


def test_without_a_gpu_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    got = calibrate(tmp_path, quick=True)
    assert got.left_out["GPU"] == "there is none that torch can use"
    assert not any("pinned" in one.name or "vram" in one.name for one in got.measurements)
    assert got.machine.gpu == ""


def test_a_gpu_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver without a device behind it: the rest of the profile is there all the same."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("P", (), {"total_memory": 1 << 37})
    )
    if torch.backends.cuda.is_built():
        pytest.skip("this torch would find its driver")
    got = calibrate(tmp_path, quick=True)
    assert "GPU" in got.left_out
    assert {one.name for one in got.measurements} >= HOST


@pytest.mark.parametrize("card", ["rtx-4060-ti-16gb", "h100-sxm5-80gb"])
def test_constants_of_a_link_are_found_again(card: str) -> None:
    """On an emulated card the right answer is known: the model that times its copies."""
    device = EmulatedDevice(f"{card},vram=16GB")
    got = {
        one.name: one.value
        for one in measure_links(device, 0.0, lambda done: None, now=lambda: device.now_s)
    }
    link = device.link
    device.close()
    for name, rate in (("h2d", link.h2d), ("d2h", link.d2h)):
        assert got[f"pinned_{name}"] == pytest.approx(rate, rel=0.01)
        start = link.submit_s + link.per_call_s + link.start_s
        assert got[f"pinned_{name}_start"] == pytest.approx(start, rel=0.05)
        piece = 16 * 1024
        slow = min(rate, link.small_piece_rate) if name == "h2d" else rate
        wanted = link.per_piece_s + piece / slow - piece / rate  # h2d: the small-piece cliff
        assert got[f"pinned_{name}_piece"] == pytest.approx(wanted, rel=0.01)


def test_memory_that_cannot_be_pinned_gives_no_rate() -> None:
    device = EmulatedDevice("vram=1GB,bandwidth=300GB/s,rate=10GB/s,link=pageable")
    with pytest.warns(OffloadWarning, match="could not be pinned"):
        assert measure_links(device, 0.0, lambda done: None, now=lambda: device.now_s) == []
    device.close()


# Disk


def test_a_full_disk_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "SPARE_BYTES", 1 << 60)
    found, left_out = disk.measure_disk(tmp_path, 0.02, True, lambda done: None)
    assert found == []
    assert "needed" in left_out["disk"]


def test_without_o_direct_reads_are_buffered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    found, left_out = disk.measure_disk(tmp_path, 0.05, True, lambda done: None)
    by_name = {one.name: one for one in found}
    assert "O_DIRECT" in left_out
    assert "disk_write" not in by_name
    assert "page cache was dropped" in by_name["disk_read"].how


def test_a_slow_disk_moves_fewer_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[int] = []
    real = os.pwrite

    def slow(fd: int, data: object, at: int) -> int:
        time.sleep(0.02)
        written.append(at)
        return real(fd, data, at)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(disk, "QUICK_BYTES", 256 << 20)
    disk.measure_disk(tmp_path, 0.05, True, lambda done: None)
    assert len(written) <= 2 * disk.SYNC_BYTES // disk.PIECE


def test_a_failing_disk_is_one_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(ConfigError, match=r"Input/output error.*--store"):
        disk.measure_disk(tmp_path, 0.02, True, lambda done: None)
    assert list(tmp_path.iterdir()) == []


def test_pieces_are_aligned_for_o_direct() -> None:
    import numpy as np

    for piece in disk._memory(2):
        assert np.frombuffer(piece, np.uint8).ctypes.data % mmap.PAGESIZE == 0
        assert any(piece[:64])


# Repetition


def test_trials_end_and_count() -> None:
    clock = iter(range(1000))
    ticks: list[float] = []
    calls: list[int] = []
    found = trials(lambda: calls.append(1), 10, ticks.append, now=lambda: float(next(clock)))
    assert len(calls) == len(found) + 1  # the first is not counted
    assert len(found) >= 3
    assert ticks == sorted(ticks)
    assert 0.5 < ticks[-1] <= 1
    assert len(trials(lambda: None, 0.0, ticks.append)) == 3


def test_shares_divide_a_step() -> None:
    seen: list[float] = []
    for each in shares(4, seen.append):
        each(0.0)
        each(1.0)
    assert seen == [0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1]


# The command


def test_the_command_stores_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.json"
    assert main(["calibrate", "--quick", "--store", str(tmp_path), "--profile", str(path)]) == 0
    out, err = capsys.readouterr()
    got = load_profile(path)
    assert isinstance(got, Profile)
    for words in ("memory_read", "GB/s", "disk_bw", "dram_bw", str(path), got.machine.cpu):
        assert words in out
    assert "measuring disk" in err
    assert (
        main(
            [
                "plan",
                "--model",
                "llama-3.1-8b",
                "--gpu",
                "rtx-4090",
                "--profile",
                str(path),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["profile"]["date"] == got.date


def test_json_is_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["calibrate", "--quick", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    path = Path(data.pop("path"))
    assert path == tmp_path / "cache" / "kvtier" / "profile.json"
    assert data == load_profile(path).to_json()
    assert data["format"] == 1


@pytest.mark.parametrize(
    "args",
    [
        ("--store", "/proc/nowhere"),
        ("--store", __file__),
        ("--profile", "/"),
        ("--store", "a\0b"),
        ("--profile", "a\0b"),
        ("--quickly",),
        ("extra",),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    assert main(["calibrate", "--quick", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    errors = [line for line in err.splitlines() if not line.startswith("measuring")]
    assert len(errors) == 1
    assert errors[0].startswith("kvtier calibrate: error: ")


@pytest.mark.cuda
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    got = calibrate(tmp_path, quick=True)
    names = {one.name for one in got.measurements}
    assert {"pinned_h2d", "pinned_d2h", "pageable_h2d", "vram_read", "gpu_step"} <= names
    by_name = {one.name: one.value for one in got.measurements}
    assert by_name["pinned_h2d"] > by_name["pageable_h2d"]
