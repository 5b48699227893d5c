"""Tokens/s of decoding by where weights and KV are and what a step reads of them.

    t = t0 + n t_seq + W_vram/(eta BW) + W_off/B_link + KV_hot/(eta BW) + what the mode adds

Copies and the processor run beside kernels: ``kvtier.cost.decode`` and ``kvtier.cost.in_place`` have the times of a layer.

The modes are in ``kvtier.cost.workload``. How many sequences fit in each, and what that gains, is
``kvtier.cost.batches``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import get_args

from kvtier.cost.basis import Basis
from kvtier.cost.churn import Locality, Traffic, traffic
from kvtier.cost.cliff import Level, level
from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.decode import KERNELS, LayerLoad, step_time
from kvtier.cost.in_place import InPlaceLoad, in_place_time
from kvtier.cost.links import LinkPath, link_path
from kvtier.cost.prefill import vram_constant
from kvtier.cost.slow_links import SlowLink, slow_link
from kvtier.cost.workload import Mode, Workload, kv_read, kv_split, read_weights
from kvtier.devices.cards import KERNEL_START_S
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class DecodeEstimate:
    """Predicted decoding.

    Attributes:
        tps: tokens/s of all sequences. low, high: the band of the link class and the constants.
        seconds: a step. baseline_tps: everything in VRAM, exact, same batch.
        parts: seconds by part; parts that overlap add up to more than ``seconds``.
        exact: whether the tokens are those of full attention.
    """

    mode: Mode
    batch: int
    tps: float
    low: float
    high: float
    seconds: float
    baseline_tps: float
    parts: dict[str, float]
    exact: bool
    basis: Basis = field(repr=False)

    @property
    def slowdown(self) -> float:
        """Factor over everything in VRAM at the same batch."""
        return self.baseline_tps / self.tps

    @property
    def level(self) -> Level:
        return level(self.slowdown)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    def contains(self, tps: float) -> bool:
        return self.low <= tps <= self.high

    def to_json(self) -> dict[str, object]:
        return {
            "mode": self.mode,
            "batch": self.batch,
            "tps": self.tps,
            "low_tps": self.low,
            "high_tps": self.high,
            "step_s": self.seconds,
            "baseline_tps": self.baseline_tps,
            "slowdown": self.slowdown,
            "level": self.level,
            "exact": self.exact,
            "parts_s": dict(self.parts),
            "basis": self.basis.to_json(),
        }


def decode_estimate(
    work: Workload, mode: Mode = "vram", *, constants: Constants = DEFAULTS
) -> DecodeEstimate:
    """Predict decoding.

    Raises:
        ConfigError: no such mode, or a share off the card where the mode has no place for it.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode {mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
    if mode in ("vram", "evict") and work.kv_off:
        raise ConfigError(
            f"kv_off is {work.kv_off:g}, but mode {mode} keeps KV in VRAM; use kv-stream, kv-cpu or "
            "select"
        )
    weights = slow_link(work.weights_link, work.card, constants, server=work.server)
    kv = slow_link(work.kv_link, work.card, constants)
    parts = _parts(work, mode, constants, weights.likely, kv.likely)
    slowest = _parts(work, mode, constants.slow, weights.low, kv.low)
    fastest = _parts(work, mode, constants.fast, weights.high, kv.high)
    resident = replace(work, weights_off=0.0, kv_off=0.0)
    baseline = parts if resident == work and mode == "vram" else _parts(
        resident, "vram", constants, weights.likely, kv.likely
    )  # fmt: skip
    seconds = parts.pop("step")
    batch = work.batch
    return DecodeEstimate(
        mode=mode,
        batch=batch,
        tps=batch / seconds,
        low=batch / slowest["step"],
        high=batch / fastest["step"],
        seconds=seconds,
        baseline_tps=batch / (baseline.get("step") or seconds),
        parts=parts,
        exact=mode not in ("select", "evict"),
        basis=_basis(work, mode, constants, weights, kv),
    )


def _basis(
    work: Workload, mode: Mode, constants: Constants, weights: SlowLink, kv: SlowLink
) -> Basis:
    names = [vram_constant(work.card), "step_s", "sequence_s"]
    links = []
    extra = []
    if work.weights_off:
        links.append(f"weights: {weights}")
        extra += list(weights.constants)
    if work.kv_off and mode in ("kv-stream", "select"):
        links.append(f"KV: {kv}")
        extra += list(kv.constants)
    if mode == "kv-cpu":
        names += ["server_cpu_attention_bw" if work.server else "cpu_attention_bw", "handover_s"]
        links.append("KV: the processor attends to it")
    if mode in ("select", "evict"):
        names.append("selection_s")
    if mode == "select" and work.kv_off:
        names += ["handover_s", *(["selection_churn"] if work.selection.locality is None else [])]
        names += ["cpu_attention_bw"] if work.selection.dense else []
    if work.gpus > 1:
        names.append("split_s")
    if work.model.experts:
        names.append("expert_spread")
    return Basis(
        inputs={
            "model": work.model.name, "card": work.card.name, "context": work.context,
            "batch": work.batch, "weight_bits": work.weight_bits, "kv_dtype": work.kv_dtype,
            "weights_off": work.weights_off, "kv_off": work.kv_off, "gpus": work.gpus,
            "weights_read": read_weights(work, constants),
            "kv_read": kv_read(work, mode), "mode": mode,
        },
        formula="t0 + n t_seq + W_vram/(eta BW) + W_off/B + KV_hot/(eta BW) + KV by mode",
        constants=(*constants.pick(*names), *extra),
        link="; ".join(links),
        command=(
            f"kvtier stress --card {work.card.slug} --model {work.model.slug} "
            f"--contexts {work.context} --sessions {work.batch} (emulated card); llama-bench -d "
            f"{work.context} on the card itself"
        ),
    )  # fmt: skip


def _parts(
    work: Workload, mode: Mode, constants: Constants, weight_rate: float, kv_rate: float
) -> dict[str, float]:
    """Seconds by part, and ``step`` for the whole."""
    efficiency = constants[vram_constant(work.card)]
    rate = work.card.memory_bandwidth * efficiency
    read = read_weights(work, constants)
    kv = kv_read(work, mode)
    off = work.weights_off * read
    fixed = constants["step_s"] + work.batch * constants["sequence_s"]
    if work.gpus > 1:
        fixed += constants["split_s"]
    if mode in ("select", "evict"):
        fixed += constants["selection_s"]
    layers = max(1, work.model.attention_layers)
    kernels = layers * KERNELS * KERNEL_START_S
    parts = {
        "fixed": fixed,
        "weights in VRAM": (read - off) / rate,
        "weights off the card": off / weight_rate,
    }
    if mode == "kv-stream" and work.kv_off:
        # Copies of one layer run beside the kernels of another: kvtier.cost.decode.
        path, disk_rate = _way(work, constants, kv_rate)
        pieces = max(1, round(work.batch * work.kv_off * work.context / work.page_tokens))
        cold = kv / layers * work.kv_off
        layer = LayerLoad(
            weights=(read - off) / layers,
            hot=kv / layers - cold,
            cold=cold,
            pieces=pieces,
            disk=cold if disk_rate else 0.0,
            coded=None if work.on_link == 1 else cold * work.on_link,
        )
        step = step_time(
            [layer] * layers, work.card, path, efficiency=efficiency, step_s=fixed,
            hot_passes=work.hot_passes, disk_rate=disk_rate or constants["disk_bw"],
        )  # fmt: skip
        if disk_rate:
            parts["KV from disk"] = step.disk_s
        parts["KV over the link"] = step.copy_s
        parts["KV in VRAM"] = step.compute_s - parts["weights in VRAM"]
        parts["step"] = step.seconds + parts["weights off the card"]
        return parts
    if mode in ("kv-cpu", "select") and work.kv_off:
        path, disk_rate = _way(work, constants, kv_rate)
        loads, moved, pages = _in_place(work, mode, constants, layers, (read - off) / layers)
        name = "server_cpu_attention_bw" if work.server else "cpu_attention_bw"
        step = in_place_time(
            loads, work.card, path, cpu_rate=constants[name], handover_s=constants["handover_s"],
            moved=moved, moved_pieces=pages, efficiency=efficiency, step_s=fixed,
            disk_rate=disk_rate or constants["disk_bw"],
        )  # fmt: skip
        if step.cpu_s:
            parts["KV on the processor"] = step.cpu_s
        if mode == "select":
            parts["KV over the link"] = step.copy_s + step.host_s
            if disk_rate:
                over = moved + sum(one.ahead + one.late for one in loads)
                parts["KV from disk"] = over / disk_rate
        parts["kernels"] = kernels
        parts["KV in VRAM"] = step.compute_s - kernels - parts["weights in VRAM"]
        parts["step"] = (
            step.seconds + parts["weights off the card"] + parts.get("KV from disk", 0.0)
        )
        return parts
    passes = work.hot_passes if mode == "kv-stream" else 1.0
    parts["KV in VRAM"] = (passes * kv + _gathered(work, mode)) / rate
    parts["kernels"] = kernels
    parts["step"] = sum(parts.values())
    return parts


def _gathered(work: Workload, mode: Mode) -> float:
    """Bytes that a selecting step moves in VRAM beyond those that it reads, all of them being there."""
    chosen = work.selection
    if mode != "select" or not chosen.gathered or chosen.tokens >= work.context:
        return 0.0
    found = selection_traffic(work)
    plane = work.model.read_kv_bytes(chosen.page_tokens, work.kv_dtype) / kv_split(work)
    return 2 * work.batch * found.planes * plane * (1 - chosen.dense)


def selection_traffic(work: Workload, constants: Constants = DEFAULTS) -> Traffic:
    """What a selector moves for one sequence in a layer and step, in pages of ``work.selection``: from its budget,
    its churn and the share of the KV that is in VRAM."""
    chosen = work.selection
    locality = chosen.locality or Locality(churn=constants["selection_churn"])
    budget = chosen.tokens / chosen.page_tokens
    pages = work.context / chosen.page_tokens
    return traffic(
        pages, budget, 1 - work.kv_off, locality, always=chosen.always * budget, heads=chosen.heads,
        guessed=chosen.guessed, vram_pages=max(1.0, pages * (1 - work.kv_off)),
    )  # fmt: skip


def _in_place(
    work: Workload, mode: Mode, constants: Constants, layers: int, weights: float
) -> tuple[list[InPlaceLoad], float, int]:
    """Layers that read pages where they are; bytes and number of the pages that move to VRAM before a step."""
    split, batch, chosen = kv_split(work), work.batch, work.selection
    whole = batch * work.model.read_kv_bytes(work.context, work.kv_dtype) / split / layers
    cold = whole * work.kv_off
    # Coded pages are decoded into other memory and read from there, all at the rate of attention.
    cpu = cold if work.on_link == 1 else cold * (2 + work.on_link)
    full = InPlaceLoad(weights=weights, kv=whole - cold, cpu=cpu, handovers=batch)
    if mode == "kv-cpu" or chosen.tokens >= work.context:
        return [full] * layers, 0.0, 0
    found = selection_traffic(work, constants)
    plane = work.model.read_kv_bytes(chosen.page_tokens, work.kv_dtype) / split / layers
    pages = math.ceil(work.context / chosen.page_tokens)
    key = 1.0 if work.model.count("latent") else 0.5
    gathered = 2 * (found.planes - found.missing) if chosen.gathered else 0.0
    ahead, late = batch * found.ahead, batch * found.late
    some = InPlaceLoad(
        weights=weights,
        summaries=batch * pages * chosen.summaries * key * plane / chosen.page_tokens,
        kv=batch * (gathered + found.read) * plane,
        ahead=ahead * plane * work.on_link, ahead_pieces=math.ceil(ahead),
        late=late * plane * work.on_link, late_pieces=math.ceil(late),
        submissions=batch * ((ahead > 0) + (late > 0)),
    )  # fmt: skip
    dense = round(chosen.dense * layers)
    moved = batch * found.moved
    raised = moved * plane * layers * work.raised
    return [full] * dense + [some] * (layers - dense), raised, math.ceil(moved)


def selection_off(work: Workload, constants: Constants = DEFAULTS) -> tuple[float, float]:
    """Bytes of KV that a step of mode ``select`` brings over the link, and that the processor attends to in layers that
    read every page; all sequences."""
    if not work.kv_off:
        return 0.0, 0.0
    layers = max(1, work.model.attention_layers)
    loads, moved, _ = _in_place(work, "select", constants, layers, 0.0)
    return moved + sum(one.ahead + one.late for one in loads), sum(one.cpu for one in loads)


def _way(work: Workload, constants: Constants, kv_rate: float) -> tuple[LinkPath, float | None]:
    """The link of cold KV to VRAM, and the rate of the disk if it lies there."""
    if work.kv_link == "disk":
        pinned = slow_link("pinned", work.card, constants)
        return link_path(work.card, "pinned", pinned.likely), kv_rate
    return link_path(work.card, work.kv_link, kv_rate), None  # type: ignore[arg-type]
