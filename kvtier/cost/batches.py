"""Gains at the same number of sequences, and gains from more of them: two comparisons, never one.

``select`` reads less but keeps everything, so its largest batch is that of ``vram``; ``evict`` keeps
less, so its batch may grow. ``matched_batch`` compares modes at one batch. ``largest_batch`` takes each
mode at its own largest, and splits its gain into the part that is reading less and the part that is
more sequences.

Eviction buys batch, selection buys bandwidth: of the published 12x of SnapKV over vLLM on an H100, 3.1x
is less to read at vLLM's 3 sequences and 3.9x is going from 3 to 30; Quest and OmniKV keep all KV, gain
1.5-2.6x, and stop at 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.modes import DecodeEstimate, decode_estimate
from kvtier.cost.workload import Mode, Workload, kept_bytes
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class BatchRow:
    """One line of a table of modes.

    Attributes:
        estimate: at ``estimate.batch`` sequences.
        reference: the mode ``vram`` that it is compared with, at its own batch.
        from_reading: factor at the reference's batch: what reading less (or slower) does.
        from_batch: the rest: what more (or fewer) sequences do. Product: ``gain``.
    """

    estimate: DecodeEstimate
    reference: DecodeEstimate
    from_reading: float
    from_batch: float

    @property
    def gain(self) -> float:
        return self.estimate.tps / self.reference.tps

    def to_json(self) -> dict[str, object]:
        return {
            "mode": self.estimate.mode,
            "batch": self.estimate.batch,
            "tps": self.estimate.tps,
            "reference_batch": self.reference.batch,
            "reference_tps": self.reference.tps,
            "gain": self.gain,
            "from_reading": self.from_reading,
            "from_batch": self.from_batch,
            "exact": self.estimate.exact,
        }


def matched_batch(
    work: Workload, modes: Sequence[Mode], *, constants: Constants = DEFAULTS
) -> list[BatchRow]:
    """Modes at the batch of ``work``, against all KV in VRAM at the same batch: no gain here comes
    from more sequences."""
    reference = decode_estimate(_resident(work), "vram", constants=constants)
    rows = []
    for mode in modes:
        estimate = decode_estimate(_for(work, mode), mode, constants=constants)
        rows.append(BatchRow(estimate, reference, estimate.tps / reference.tps, 1.0))
    return rows


def largest_batch(
    work: Workload,
    modes: Sequence[Mode],
    *,
    pool_bytes: float | None = None,
    constants: Constants = DEFAULTS,
) -> list[BatchRow]:
    """Each mode at the most sequences that its KV leaves room for, against ``vram`` at its most.

    Args:
        pool_bytes: memory for KV on each card; None: what weights and runtime leave.

    Raises:
        ConfigError: not even one sequence fits with all KV in VRAM.
    """
    pool = kv_pool(work, constants) if pool_bytes is None else pool_bytes
    most = largest(work, "vram", pool)
    if most < 1:
        raise ConfigError(
            f"a sequence of {work.context} tokens keeps {kept_bytes(work, 'vram') / 1e9:.3g} GB, "
            f"more than the {pool / 1e9:.3g} GB for KV; give fewer tokens or a smaller KV dtype"
        )
    reference = decode_estimate(_resident(replace(work, batch=most)), "vram", constants=constants)
    rows = []
    for mode in modes:
        count = largest(work, mode, pool)
        same = decode_estimate(_for(replace(work, batch=most), mode), mode, constants=constants)
        estimate = decode_estimate(
            _for(replace(work, batch=count), mode), mode, constants=constants
        )
        reading = same.tps / reference.tps
        rows.append(BatchRow(estimate, reference, reading, estimate.tps / same.tps))
    return rows


def kv_pool(work: Workload, constants: Constants = DEFAULTS) -> float:
    """Bytes for KV on each card: its usable share less weights and the runtime's reserve."""
    weights = work.model.weight_bytes(work.weight_bits) * (1 - work.weights_off) / work.gpus
    usable = work.card.vram_bytes * constants["usable_share"]
    return usable - weights - constants["runtime_reserve"]


def largest(work: Workload, mode: Mode, pool_bytes: float) -> int:
    """Most sequences of that mode in ``pool_bytes``. Selecting keeps all KV, so it is that of
    ``vram`` whatever the budget. Where tokens are dropped after the prompt was computed, one
    sequence needs room in full. KV off the card makes room in its modes."""
    off = work.kv_off if mode in ("kv-stream", "kv-cpu", "select") else 0.0
    whole, kept = kept_bytes(work, "vram"), kept_bytes(work, mode) * (1 - off)
    if mode == "evict":
        return int(max(0.0, pool_bytes - whole) // kept) + (pool_bytes >= whole)
    return int(max(0.0, pool_bytes) // kept) if kept > 0 else work.batch


def _resident(work: Workload) -> Workload:
    return replace(work, weights_off=0.0, kv_off=0.0)


def _for(work: Workload, mode: Mode) -> Workload:
    """The workload with KV off the card only where the mode has a place for it."""
    return replace(work, kv_off=0.0) if mode in ("vram", "evict") else work
