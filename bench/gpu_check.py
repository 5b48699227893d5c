"""Everything that only a card can prove, in one go, as a table. Under ten minutes.

1. All tests marked ``cuda``: the same bodies as on the emulated device.
2. Copies through ``CudaDevice``: one page, pieces of 64 KiB and of 8 KiB, both directions, pinned and
   pageable, each beside the prior that the cost model plans with.
3. Both directions at once, and copies beside kernels.

Run on a machine with a GPU: ``python bench/gpu_check.py``. Exit status 1 if a test failed. With
``--device emulated`` the script itself can be tried without one; the numbers are simulated then.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.devices import open_device
from kvtier.devices.base import Buffer, Device, Range
from kvtier.devices.cards import Direction, LinkModel, find_card
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError, OffloadWarning
from kvtier.units import format_size

ROOT = Path(__file__).resolve().parent.parent
MiB = 2**20
TOTAL_S = 560.0
TESTS_S = 420.0
TIMEOUT_S = 60.0

Parts = list[tuple[Range, Range]]


@dataclass(frozen=True)
class Line:
    """A row of the table: GB/s measured and by the prior."""

    what: str
    measured: float
    prior: float | None


def run_tests(deadline: float) -> tuple[int, int, int]:
    """(passed, failed, skipped) of the tests marked ``cuda``; prints what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", f"--junitxml={report}", "tests"]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=min(TESTS_S, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            print(f"the tests did not end within {TESTS_S:.0f} s")
            return 0, 1, 0
        if not report.is_file():
            print(done.stdout[-2000:], done.stderr[-2000:])
            return 0, 1, 0
        cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    for case in failed:
        print(f"failed: {case.get('classname')}::{case.get('name')}")
    return len(cases) - len(failed) - skipped, len(failed), skipped


class Copies:
    """Times copies on one device."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.vram = device.alloc(2 * nbytes)
        self.pinned = device.alloc_host(nbytes)
        self.up, self.down = device.stream("h2d"), device.stream("d2h")
        self.now: Callable[[], float] = time.perf_counter
        if isinstance(device, EmulatedDevice):
            self.now = lambda: device.now_s

    def parts(self, host: Buffer, piece: int, *, down: bool, at: int = 0) -> Parts:
        """Pieces that are apart in VRAM and close together in host memory."""
        pairs = []
        for n in range(host.nbytes // piece):
            vram = self.vram.range(at + 2 * n * piece, at + (2 * n + 1) * piece)
            there = host.range(n * piece, (n + 1) * piece)
            pairs.append((there, vram) if down else (vram, there))
        return pairs

    def rate(self, parts: Parts, *, down: bool, repeat: int = 8) -> float:
        """Bytes per second of ``repeat`` copies in a row, after one to warm up."""
        stream = self.down if down else self.up
        self.device.copy(stream, parts)
        self.device.synchronize(TIMEOUT_S)
        began = self.now()
        for _ in range(repeat):
            self.device.copy(stream, parts)
        self.device.synchronize(TIMEOUT_S)
        return repeat * sum(source.nbytes for _, source in parts) / (self.now() - began)

    def both(self, repeat: int = 8) -> float:
        """Bytes per second of both directions together."""
        half = self.nbytes // 2
        ups = [(self.vram.range(0, half), self.pinned.range(0, half))]
        downs = [(self.pinned.range(half, 2 * half), self.vram.range(half, 2 * half))]
        self.device.synchronize(TIMEOUT_S)
        began = self.now()
        for _ in range(repeat):
            self.device.copy(self.up, ups)
            self.device.copy(self.down, downs)
        self.device.synchronize(TIMEOUT_S)
        return repeat * 2 * half / (self.now() - began)


def copy_lines(device: Device, link: LinkModel | None) -> list[Line]:
    """One row a kind of copy."""
    nbytes = 64 * MiB
    copies = Copies(device, nbytes)
    lines = []
    for down in (False, True):
        for piece in (nbytes, 64 * 1024, 8 * 1024):
            count = nbytes // piece
            parts = copies.parts(copies.pinned, piece, down=down)
            name: Direction = "d2h" if down else "h2d"
            prior = nbytes / link.device_s(name, nbytes, count) if link is not None else None
            what = f"{name}, pinned, {count:,} piece(s) of {format_size(piece)}"
            lines.append(Line(what, copies.rate(parts, down=down), prior))
    both = 2 * link.h2d * link.duplex if link is not None else None
    lines.append(Line("both directions at once, pinned", copies.both(), both))
    if not isinstance(device, EmulatedDevice):
        lines.append(pageable_line(device, copies, link))
    return lines


def pageable_line(device: Device, copies: Copies, link: LinkModel | None) -> Line:
    """Ordinary memory, staged by the driver; torch copies it, since the store never does."""
    source = torch.empty(copies.nbytes, dtype=torch.uint8)
    target = copies.vram.raw()[: copies.nbytes]
    target.copy_(source)
    began = time.perf_counter()
    for _ in range(8):
        target.copy_(source)
    device.synchronize(TIMEOUT_S)
    rate = 8 * copies.nbytes / (time.perf_counter() - began)
    return Line("h2d, pageable", rate, link.rate("h2d", 1 << 30, 1, False) if link else None)


def prior_of(device: Device) -> LinkModel | None:
    """The link that the cost model assumes for this card, None if the table lacks it."""
    if isinstance(device, EmulatedDevice):
        return device.link
    name = device.name.partition(" ")[2]
    for trial in (name, f"{name} 141GB", f"{name} 80GB"):
        try:
            return find_card(trial).link_model()
        except ConfigError:
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or emulated")
    parser.add_argument("--no-tests", action="store_true", help="copies only")
    args = parser.parse_args()
    deadline = time.monotonic() + TOTAL_S
    try:
        device = open_device(args.device)
    except ConfigError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    print(f"device: {device.name}, {format_size(device.capacity_bytes)} for the arena")
    simulated = isinstance(device, EmulatedDevice)
    with warnings.catch_warnings():
        warnings.simplefilter("default", OffloadWarning)
        lines = copy_lines(device, prior_of(device))
    device.close()
    unit = "simulated" if simulated else "measured"
    print(f"\n{'copy':<44} {unit:>10} {'prior':>8}   GB/s")
    for line in lines:
        prior = f"{line.prior / 1e9:8.2f}" if line.prior is not None else "       -"
        print(f"{line.what:<44} {line.measured / 1e9:10.2f} {prior}")
    failed = 0
    if not args.no_tests:
        passed, failed, skipped = run_tests(deadline)
        print(f"\ntests marked cuda: {passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
