"""What the GPU of this machine and its link to host memory do, measured through ``Device``.

A copy takes ``t0 + n c + bytes / BW``. BW is the slope between a large and a middling copy, so t0 does not
touch it; t0 is what a copy of 4 KiB takes; c is what a copy in n pieces takes longer than one of the same
bytes in one piece, per piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.cost.measure_host import LAYERS, OPERATIONS
from kvtier.cost.profile import Measurement, middle
from kvtier.cost.trials import Tick, shares, trials
from kvtier.devices.cards import Card

if TYPE_CHECKING:
    from kvtier.devices.base import Buffer, Device, Range

MiB = 2**20
LARGE, MIDDLE, SMALL = 64 * MiB, 8 * MiB, 4096

#: A copy in pieces: 16 MiB in 1,024 of them, each half of what is around it.
PIECES, PIECE = 1024, 16 * 1024
TIMEOUT_S = 60.0

#: Side of the bf16 matrix of a matrix-vector product: 512 MiB.
SIDE = 16384


def measure_links(
    device: Device,
    seconds: float,
    tick: Tick,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> list[Measurement]:
    """Pinned copies in both directions: BW, t0 and c of each.

    Args:
        now: the clock of the device; an emulated one has its own.
    """
    vram = device.alloc(LARGE)
    host = device.alloc_host(LARGE)
    try:
        if host.kind != "pinned":
            return []
        found: list[Measurement] = []
        for down, each in zip((False, True), shares(2, tick), strict=True):
            found += _link(device, vram, host, down, seconds / 2, each, now)
        return found
    finally:
        device.synchronize(TIMEOUT_S)
        device.free(vram)
        device.free(host)


def _link(
    device: Device,
    vram: Buffer,
    host: Buffer,
    down: bool,
    seconds: float,
    tick: Tick,
    now: Callable[[], float],
) -> list[Measurement]:
    name = "d2h" if down else "h2d"
    stream = device.stream(name)
    ticks = shares(4, tick)

    def timed(parts: list[tuple[Range, Range]]) -> list[float]:
        def work() -> None:
            device.copy(stream, parts)
            device.synchronize(TIMEOUT_S)

        return trials(work, seconds / 4, next(ticks), now=now)

    def one(nbytes: int) -> list[tuple[Range, Range]]:
        pair = vram.range(0, nbytes), host.range(0, nbytes)
        return [pair[::-1] if down else pair]

    spread = []
    for n in range(PIECES):
        there = vram.range(2 * n * PIECE, (2 * n + 1) * PIECE)
        here = host.range(n * PIECE, (n + 1) * PIECE)
        spread.append((here, there) if down else (there, here))
    large, medium, small, pieces = (
        timed(one(LARGE)),
        timed(one(MIDDLE)),
        timed(one(SMALL)),
        timed(spread),
    )
    base = sorted(medium)[len(medium) // 2]
    moved = LARGE - MIDDLE
    slopes = [moved / (s - base) for s in large if s > base] or [LARGE / s for s in large]
    rate = middle(
        f"pinned_{name}", slopes, "bytes/s", "pinned copies of 64 MiB less those of 8 MiB"
    )
    start = middle(
        f"pinned_{name}_start", small, "s", "a pinned copy of 4 KiB, submitted and awaited"
    )
    whole = start.value + PIECES * PIECE / rate.value
    each = [(s - whole) / PIECES for s in pieces]
    found = [rate, start]
    if min(each) > 0:
        how = f"{PIECES:,} pieces of 16 KiB, less one copy of as many bytes"
        found.append(middle(f"pinned_{name}_piece", each, "s", how))
    return found


def measure_pageable(seconds: float, tick: Tick) -> list[Measurement]:
    """Copies from and to memory that is not pinned, which the driver stages; torch makes them, since no
    part of the store does."""
    import torch

    here = torch.zeros(LARGE, dtype=torch.uint8)
    there = torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
    found = []
    for name, into, source, each in zip(
        ("h2d", "d2h"), (there, here), (here, there), shares(2, tick), strict=True
    ):

        def work(into: torch.Tensor = into, source: torch.Tensor = source) -> None:
            into.copy_(source)
            torch.cuda.synchronize()

        times = trials(work, seconds / 2, each)
        how = "copies of 64 MiB of memory that is not pinned"
        found.append(middle(f"pageable_{name}", (LARGE / s for s in times), "bytes/s", how))
    return found


def measure_card(card: Card | None, seconds: float, tick: Tick) -> list[Measurement]:
    """Reads of VRAM by a matrix-vector product, as decoding makes them, and what a step costs before it
    reads a byte. Without a ``card`` of the table there is no peak to compare with."""
    import torch

    matrix = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    vector = torch.zeros(SIDE, dtype=torch.bfloat16, device="cuda")
    first, second = shares(2, tick)

    def read() -> None:
        torch.mv(matrix, vector)
        torch.cuda.synchronize()

    times = trials(read, seconds / 2, first)
    nbytes = matrix.numel() * 2
    how = f"bf16 matrix-vector product of {nbytes / MiB:.0f} MiB"
    rate = middle("vram_read", (nbytes / s for s in times), "bytes/s", how)
    found = [rate]
    if card is not None:
        peak = card.memory_bandwidth
        share = [min(1.0, value / peak) for value in (rate.low, rate.value, rate.high)]
        found.append(Measurement("vram_share", share[1], "share of peak", how, share[0], share[2]))
    one = torch.ones(8, device="cuda")

    def step() -> None:
        for _ in range(LAYERS * OPERATIONS):
            one.add_(0)
        torch.cuda.synchronize()

    times = trials(step, seconds / 2, second)
    how = f"{LAYERS} layers of {OPERATIONS} kernels on 8 numbers, launched one by one, and awaited"
    found.append(middle("gpu_step", times, "s", how))
    return found
