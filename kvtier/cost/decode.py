"""The time of one decode step, from the bytes it reads and where they are.

    t = t0 + W_vram / (eta BW) + W_off / B_link + KV_hot / (eta BW) + KV_cold by mode

layer by layer, because copies of one layer run beside the compute of another. Mode
``exact-stream``: while layer l computes, the cold pages of layer l+1 arrive, so the step takes

    x_0 + sum over l of max(c_l, x_(l+1), h_(l+1)) + c_last

with c the compute of a layer (its weights, its KV, the kernels' start), x its copy and h the
submission of that copy by the host. ``cold_start=False`` leaves out x_0: the first layer's pages
were fetched during the step before. A pageable copy blocks its caller, so there the step is the sum
of all c and x. What lies on disk is read by the host before its copy can start, so that time is
part of h. Weights behind the link are touched by the kernels that need them: their time is
added, never hidden; that is what makes the driver's fallback a cliff.

Gathering pages into staging memory reads and writes the hot KV once more before attention reads it
(``hot_passes`` = 3); what arrived by copy is only read (``cold_passes`` = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cost.cliff import Level, level
from kvtier.cost.links import DISK_RATE, LinkPath
from kvtier.devices.cards import KERNEL_START_S, VRAM_EFFICIENCY, Card

#: Seconds of a step that no layer explains: launches, sampling, scheduling. About 3 ms for vLLM on
#: an H100 (30B MoE), 3.2 ms for a 32B model on an RTX PRO 6000 (llama.cpp 28196), 4-5 ms for
#: nano-vLLM with 128 sequences.
STEP_S = 3e-3

#: Kernels of a layer: append and gather, attention, the rest.
KERNELS = 3


@dataclass(frozen=True)
class LayerLoad:
    """Bytes that one layer reads in a step, all sequences together.

    Attributes:
        weights: in VRAM. off: weights behind the link.
        hot, cold: KV in VRAM, KV behind the link.
        pieces: contiguous runs of bytes that ``cold`` comes in.
        disk: the part of ``cold`` that is read from disk first, in bytes there.
        coded: what ``cold`` is on the link, if it is kept in fewer bits and decoded in VRAM; None: as it is.
    """

    weights: float = 0.0
    off: float = 0.0
    hot: float = 0.0
    cold: float = 0.0
    pieces: int = 0
    disk: float = 0.0
    coded: float | None = None


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and of its parts; parts that overlap add up to more.

    Attributes:
        seconds: the step.
        compute_s: all kernels. copy_s: cold KV on the link. off_s: weights over the link.
        host_s: submission of the copies. disk_s: reads from disk. fixed_s: what no layer explains.
        cpu_s: attention by the processor.
    """

    seconds: float
    compute_s: float
    copy_s: float
    off_s: float
    host_s: float
    disk_s: float
    fixed_s: float
    cpu_s: float = 0.0

    @property
    def bound(self) -> str:
        """What the step waits for most: ``memory``, ``link``, ``disk``, ``cpu`` or ``host``."""
        parts = {
            "memory": self.compute_s,
            "link": self.copy_s + self.off_s,
            "disk": self.disk_s,
            "cpu": self.cpu_s,
            "host": self.host_s + self.fixed_s,
        }
        return max(parts, key=lambda name: parts[name])

    def tokens_per_s(self, sequences: int = 1) -> float:
        return sequences / self.seconds


def step_time(
    layers: Sequence[LayerLoad],
    card: Card,
    link: LinkPath,
    *,
    efficiency: float = VRAM_EFFICIENCY,
    step_s: float = STEP_S,
    hot_passes: float = 3.0,
    cold_passes: float = 1.0,
    cold_start: bool = True,
    disk_rate: float = DISK_RATE,
) -> StepTime:
    """See the module.

    Args:
        layers: what each layer reads.
        card: whose memory bandwidth counts, times ``efficiency``.
        link: the path of everything that is not in VRAM.
        step_s: fixed cost of a step.
        disk_rate: bytes/s at which the host reads what lies on disk.
    """
    rate = card.memory_bandwidth * efficiency
    compute = [
        KERNELS * KERNEL_START_S
        + (layer.weights + layer.off + hot_passes * layer.hot + cold_passes * layer.cold) / rate
        for layer in layers
    ]
    copy = [
        link.seconds(layer.cold, layer.pieces)
        if layer.coded is None
        # Decoded on the stream of the copy: codes are read and KV is written.
        else link.seconds(layer.coded, layer.pieces) + (layer.coded + layer.cold) / rate
        for layer in layers
    ]
    off = [link.seconds(layer.off) for layer in layers]
    host = [link.host_seconds(layer.pieces) if layer.cold else 0.0 for layer in layers]
    disk = [layer.disk / disk_rate for layer in layers]
    total = sum(off)
    if link.blocks:
        total += sum(compute) + sum(copy) + sum(host) + sum(disk)
    else:
        total += (disk[0] + max(copy[0], host[0]) if cold_start else 0.0) + compute[-1]
        for c, x, h, d in zip(compute, copy[1:], host[1:], disk[1:], strict=False):
            total += max(c, x, h + d)
    return StepTime(total + step_s, sum(compute), sum(copy), sum(off), sum(host), sum(disk), step_s)


@dataclass(frozen=True)
class Slowdown:
    """A step compared with the same step with everything in VRAM."""

    step: StepTime
    baseline: StepTime

    @property
    def factor(self) -> float:
        return self.step.seconds / self.baseline.seconds

    @property
    def level(self) -> Level:
        return level(self.factor)


def all_in_vram(layers: Sequence[LayerLoad]) -> list[LayerLoad]:
    """The same step with nothing behind the link."""
    return [
        LayerLoad(weights=layer.weights + layer.off, hot=layer.hot + layer.cold) for layer in layers
    ]
