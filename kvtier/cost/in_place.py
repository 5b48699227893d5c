"""The time of a decode step whose attention reads pages where they are, or some of them.

    t = t0 + sum over l of max(w_l + max(a_l, p_l), x_l) + y_l + h_l

with w the layer's weights and page summaries, a its KV in VRAM, p what the processor attends to in host
memory (its bytes over the rate at which it attends, and the handover of queries and results; it runs beside
a), x the copies of planes sent ahead, which run beside all of that, y those that are asked for only when the
layer has chosen, and h what the host takes to submit both: the choice is needed on the host, so nothing hides
that but the copies of other sequences, which it submits one after the other. A pageable copy blocks its caller, so there x is added too. What is only on disk is read
first. ``kvtier.cost.decode`` is the same for steps that gather all pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cost.decode import KERNELS, STEP_S, StepTime
from kvtier.cost.links import DISK_RATE, LinkPath
from kvtier.devices.cards import KERNEL_START_S, VRAM_EFFICIENCY, Card


@dataclass(frozen=True)
class InPlaceLoad:
    """Bytes of one layer in a step, all sequences together.

    Attributes:
        weights: in VRAM. off: weights behind the link.
        summaries: of pages, read to choose. kv: KV moved in VRAM, each pass over it counted.
        cpu: KV that the processor attends to. handovers: times that it is given a query.
        ahead, late: planes that cross the link before and after the layer's turn. ahead_pieces, late_pieces: the
            contiguous runs that they come in. submissions: times that copies are handed to the device.
        disk: what is read from disk first.
    """

    weights: float = 0.0
    off: float = 0.0
    summaries: float = 0.0
    kv: float = 0.0
    cpu: float = 0.0
    handovers: int = 0
    ahead: float = 0.0
    ahead_pieces: int = 0
    late: float = 0.0
    late_pieces: int = 0
    submissions: int = 0
    disk: float = 0.0


def in_place_time(
    layers: Sequence[InPlaceLoad],
    card: Card,
    link: LinkPath,
    *,
    cpu_rate: float,
    handover_s: float,
    moved: float = 0.0,
    moved_pieces: int = 0,
    efficiency: float = VRAM_EFFICIENCY,
    step_s: float = STEP_S,
    disk_rate: float = DISK_RATE,
) -> StepTime:
    """See the module.

    Args:
        card: whose memory bandwidth counts, times ``efficiency``.
        link: the path of planes and of weights off the card.
        cpu_rate: bytes/s at which the processor attends. handover_s: seconds a handover.
        moved: bytes of pages that move to VRAM before the step. moved_pieces: copies that they come in.
        step_s: fixed cost of a step.
    """
    rate = card.memory_bandwidth * efficiency
    # For each page that comes up one goes down, the next one beside it.
    moving = link.seconds(moved, moved_pieces) / link.model.duplex
    total = step_s + moving
    compute = off = cpu = host = disk = 0.0
    copy = moving
    for one in layers:
        weights = KERNELS * KERNEL_START_S + (one.weights + one.off + one.summaries) / rate
        device = one.kv / rate
        processor = one.cpu / cpu_rate + one.handovers * handover_s
        ahead = link.seconds(one.ahead, one.ahead_pieces)
        late = link.seconds(one.late, one.late_pieces)
        calls = one.ahead_pieces + one.late_pieces
        submit = one.submissions * link.model.submit_s + calls * link.model.per_call_s
        slow = link.seconds(one.off)
        read = one.disk / disk_rate
        beside = weights + max(device, processor)
        rows = one.submissions / max(1, (one.ahead > 0) + (one.late > 0))
        asked = max(late, submit) + min(late, submit) / max(1.0, rows)
        total += (beside + ahead if link.blocks else max(beside, ahead)) + asked
        total += slow + read
        compute += weights + device
        copy += ahead + late
        off += slow
        cpu += processor
        host += submit
        disk += read
    return StepTime(total, compute, copy, off, host, disk, step_s, cpu)
