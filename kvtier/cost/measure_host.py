"""What the processor and the memory of this machine do, measured.

Memory is read and copied by as many threads as there are cores. The rate at which a processor uses
weights where they are is that of a matrix-vector product; the rate of attention over host RAM is that of
the kernels' torch reference over pages, the same code that runs where no kernel can.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier.cost.profile import Measurement, middle
from kvtier.cost.trials import Tick, shares, trials
from kvtier.processors import processors

MiB = 2**20

#: Bytes that are read: several times the last-level cache of most machines.
MEMORY_BYTES = 512 * MiB
QUICK_BYTES = 256 * MiB

#: Attention: shape of Llama-3-8B's layers.
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE_TOKENS, PAGES = 64, 64

#: Layers attended to in turn, so that caches do not hold them.
LAYERS_IN_TURN = 8

#: A step of a model: layers, and small operations in each.
LAYERS, OPERATIONS = 32, 10


def measure_memory(seconds: float, quick: bool, tick: Tick) -> list[Measurement]:
    """Reads and copies, bytes/s of all cores together. A copy of n bytes counts as n."""
    cores = processors()
    nbytes = QUICK_BYTES if quick else MEMORY_BYTES
    part = nbytes // cores // 8
    source = np.ones(part * cores, np.float64).reshape(cores, part)
    target = np.zeros_like(source)
    first, second = shares(2, tick)
    with ThreadPoolExecutor(cores) as pool:
        read = trials(lambda: list(pool.map(np.sum, source)), seconds / 2, first)
        copied = trials(lambda: list(pool.map(np.copyto, target, source)), seconds / 2, second)
    size = f"{source.nbytes / MiB:.0f} MiB by {cores} threads"
    return [
        middle("memory_read", (source.nbytes / s for s in read), "bytes/s", f"sum of {size}"),
        middle("memory_copy", (source.nbytes / s for s in copied), "bytes/s", f"copy of {size}"),
    ]


def measure_weights(seconds: float, quick: bool, tick: Tick) -> list[Measurement]:
    """Bytes/s of weights that the processor computes with where they are, by a matrix-vector product. The
    cost model takes it as a rate and a share of it; the share is 1 here and has the band."""
    import torch

    side = 4096 if quick else 8192
    matrix = torch.ones(side, side)
    vector = torch.ones(side)
    times = trials(lambda: torch.mv(matrix, vector), seconds, tick)
    nbytes = matrix.numel() * 4
    how = f"float32 matrix-vector product of {nbytes / MiB:.0f} MiB, {torch.get_num_threads()} threads"
    rate = middle("cpu_weights", (nbytes / s for s in times), "bytes/s", how)
    low, high = rate.low / rate.value, rate.high / rate.value
    return [rate, Measurement("cpu_share", 1.0, "share of peak", f"band of: {how}", low, high)]


def measure_attention(seconds: float, tick: Tick) -> list[Measurement]:
    """Attention of a decode step over pages in host RAM by the kernels' reference, bytes/s of KV."""
    import torch

    from kvtier.kernels.attention import attention_reference
    from kvtier.kernels.table import PageTable

    plane = PAGE_TOKENS * KV_HEADS * DIM * 2
    layers = [torch.zeros(2 * plane * PAGES, dtype=torch.uint8) for _ in range(LAYERS_IN_TURN)]
    tables = []
    for slab in layers:
        slab.view(torch.bfloat16).fill_(0.01)
        starts = [(0, 2 * plane * n) for n in range(PAGES)]
        tables.append(PageTable([slab], starts, page_bytes=2 * plane, page_tokens=PAGE_TOKENS))
    query = torch.full((HEADS, DIM), 0.01, dtype=torch.bfloat16)
    in_turn = itertools.cycle(tables)

    def attend() -> object:
        return attention_reference(query, next(in_turn), 0, plane, KV_HEADS, DIM, DIM**-0.5)

    times = trials(attend, seconds, tick)
    how = (
        f"attention of {HEADS} heads over {PAGES * PAGE_TOKENS:,} tokens of bf16 KV in host pages, torch "
        f"reference, {torch.get_num_threads()} threads"
    )
    nbytes = layers[0].numel()
    return [middle("cpu_attention", (nbytes / s for s in times), "bytes/s", how)]


def measure_step(seconds: float, tick: Tick) -> list[Measurement]:
    """What a decode step costs before it reads a byte, on the processor: Python and torch calls."""
    import torch

    one = torch.ones(8)

    def step() -> None:
        for _ in range(LAYERS * OPERATIONS):
            one.add_(0)

    times = trials(step, seconds, tick)
    how = f"{LAYERS} layers of {OPERATIONS} operations on 8 numbers"
    return [middle("cpu_step", times, "s", how)]
