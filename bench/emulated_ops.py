"""Operations per CPU second of the emulated device, with and without race checks.

The store's pattern: a 64 MiB slab of 40 slots in VRAM and one in host memory; pages go up, are read
by attention, and go down again, ordered by events. Run: ``python bench/emulated_ops.py``;
exit status 1 if a line with race checks is under ``--least``.
"""

from __future__ import annotations

import argparse
import sys
import time

from kvtier.devices.base import Event
from kvtier.devices.emulated import EmulatedDevice

SLOTS = 40
SLAB_BYTES = 64 * 2**20
PAGE_BYTES = 4096
PITCH = SLAB_BYTES // SLOTS


def churn(steps: int, check_races: bool, planes: int) -> tuple[float, float]:
    """Operations per CPU second and virtual seconds of ``steps`` rounds of up, read and down."""
    device = EmulatedDevice(check_races=check_races)
    up, down, compute = device.stream("h2d"), device.stream("d2h"), device.compute_stream()
    vram, host = device.alloc(SLAB_BYTES), device.alloc_host(SLAB_BYTES)
    read_done: list[Event | None] = [None] * SLOTS
    down_done: list[Event | None] = [None] * SLOTS
    plane = PAGE_BYTES // planes
    operations = 0
    start = time.process_time()
    for step in range(steps):
        slot = step % SLOTS
        at = slot * PITCH
        for event in (read_done[slot], down_done[slot]):
            if event is not None:
                up.wait(event)
                operations += 1
        device.copy(
            up,
            [
                (vram.range(at + 2 * i * plane, at + (2 * i + 1) * plane),
                 host.range(at + 2 * i * plane, at + (2 * i + 1) * plane))
                for i in range(planes)
            ],
        )  # fmt: skip
        compute.wait(up.record())
        device.use(compute, "attention", reads=[vram.range(at, at + 2 * PAGE_BYTES)])
        read_done[slot] = compute.record()
        down.wait(up.record())
        device.copy(down, [(host.range(at, at + PAGE_BYTES), vram.range(at, at + PAGE_BYTES))])
        down_done[slot] = down.record()
        operations += 9
    device.synchronize(60)
    return operations / (time.process_time() - start), device.now_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--least", type=float, default=20_000)
    args = parser.parse_args()
    slow = False
    for planes in (1, 16):
        for check_races in (True, False):
            rate, seconds = churn(args.steps, check_races, planes)
            slow = slow or (check_races and rate < args.least)
            print(
                f"{planes:2d} planes a page, race checks {'on ' if check_races else 'off'}: "
                f"{rate:8,.0f} operations per CPU second ({seconds * 1e3:.1f} ms simulated)"
            )
    print(f"wanted with race checks: {args.least:,.0f}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
