"""Rows of ``cliff_points.csv``: tokens/s with weights or KV off the card.

What is predicted follows from the columns alone: how the slow bytes are reached (``mechanism``), which
they are (``what_is_slow``), how many (``slow_fraction`` of ``bytes_read_per_token_gb``, sizes in the
text, or what does not fit in the free memory), and how fast (the link class, or rates in the text).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from kvtier.cost.constants import Constants
from kvtier.cost.lint import plausibility
from kvtier.cost.models import ModelShape
from kvtier.cost.prefill import prefill_flops, vram_constant
from kvtier.cost.slow_links import slow_link
from kvtier.cost.split import prefer
from kvtier.devices.cards import Card
from points.outcome import Outcome, unusable
from points.text import (
    card_of,
    dense,
    dram_peak,
    find,
    harmonic,
    is_server,
    model_of,
    number,
    numbers,
    params_of,
)  # fmt: skip

GB = 1e9

#: Bits a weight of the output layer takes in K-quants: Q6_K.
OUTPUT_BITS = 6.5625

#: Tokens that llama.cpp is assumed to have allocated KV for where the row does not tell.
ALLOCATED = 32768

#: Bytes of compute buffers beside weights and KV.
BUFFERS = 1e9

#: Names of models that read a part of their weights a token: "30B-A3B", "E2B", "MoE".
SPARSE = re.compile(r"\b[ae]\d+(\.\d+)?b\b|\bmoe\b|mixtral", re.IGNORECASE)

Row = Mapping[str, str]
Predict = Callable[[Constants], float]


class MissingError(Exception):
    """An input that the prediction needs is not in the row."""


def predict(row: Row, constants: Constants) -> Outcome:
    """The rate after offloading, in tokens/s."""
    key = row["id"]
    measured = number(row["after_tps"])
    if not measured:
        return unusable(key, "after_tps is not stated")
    facts = Facts(row)
    flagged = facts.lint(measured)
    if flagged:
        return Outcome(key, "flagged", "tokens/s", measured, why=flagged)
    try:
        rule, seconds = facts.rule()
        likely, slow, fast = (1 / seconds(c) for c in (constants, constants.slow, constants.fast))
    except MissingError as error:
        return unusable(key, str(error))
    return Outcome(
        key, "point", "tokens/s", measured, likely, min(slow, likely), max(fast, likely), rule
    )


class Facts:
    """What a row says, in bytes, bytes/s and tokens; None where it does not."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.how = row["mechanism"].lower()
        self.slow = row["what_is_slow"].lower()
        self.host = row["host_memory"]
        self.link = row["host_link"]
        self.card: Card | None = card_of(row["gpu"])
        rates = numbers(row["gpu_mem_bw_gbs"])
        rate = harmonic(rates)
        self.gpu_bw = rate * GB if rate else (self.card.memory_bandwidth if self.card else None)
        self.model: ModelShape | None = model_of(row["model"])
        self.weights = _gb(number(row["weights_gb"]))
        self.read = _gb(number(row["bytes_read_per_token_gb"]))
        if self.read is None and not SPARSE.search(row["model"]):
            self.read = self.weights
        self.before = number(row["before_tps"])
        # A rate of another model or another setting is described beside it.
        self.own_before = self.before if not re.search(r"[(a-z]", row["before_tps"]) else None
        self.batch = int(number(row["batch"]) or 1)
        context = row["context_tokens"]
        self.prompt, self.new = find(r"(\d+) in\b", context), find(r"(\d+) out\b", context)
        depth = number(context)
        if context.startswith("<"):
            depth = (depth or 0) / 2
        if "generated" in context and depth:
            depth /= 2  # a run starts empty: the mean depth is half the last one
        self.context = depth
        self.server = is_server(self.card, f"{self.host} {self.link}")

    # inputs with a reason

    def need(self, value: float | None, what: str) -> float:
        if value is None:
            raise MissingError(f"{what} is not stated")
        return value

    @property
    def fraction(self) -> float | None:
        text = self.row["slow_fraction"].strip()
        if text.startswith("all ") and not self.slow.startswith("kv"):
            return 1.0
        return number(text) if re.fullmatch(r"[\d.]+", text) else None

    def tier_bytes(self, tier: str) -> float | None:
        """Bytes in ``RAM`` or on ``disk`` as sizes or as shares of the weights."""
        text = f"{self.row['what_is_slow']} ; {self.row['slow_fraction']}"
        size = find(rf"([\d.]+) GB (?:in |on )?{tier}", text)
        if size:
            return size * GB
        part = find(rf"{tier} ([\d.]+)", self.row["slow_fraction"])
        return part * self.weights if part and self.weights else None

    def kv_bytes(self) -> float:
        """KV that a step reads: as stated, or from the model and the context."""
        text = f"{self.row['what_is_slow']} ; {self.row['slow_fraction']}"
        size = find(r"([\d.]+) GB", text)
        if size:
            stated = find(r"at ([\d,]+)", text)
            return size * GB * (self.context / stated if stated and self.context else 1)
        context = self.need(self.context, "context")
        growing = find(r"([\d,]+) B/token", text)
        if growing:
            return growing * context + (find(r"([\d.]+) MB", text) or 0) * 1e6
        if self.model is None:
            raise MissingError("the model's geometry is not known, so neither are its KV bytes")
        return self.batch * self.model.read_kv_bytes(context)

    def layers(self) -> int:
        """Attention layers, as the row's model text counts them or from the table."""
        counted = re.search(r"(\d+) growing layers.*?\+ (\d+)", self.row["model"])
        if counted:
            return int(counted.group(1)) + int(counted.group(2))
        return self.model.attention_layers if self.model else 32

    def base_seconds(self, constants: Constants, part: float = 1.0) -> float:
        """Seconds of the part of a step that stays in VRAM."""
        if self.own_before:
            return part / self.own_before
        read = self.need(self.read, "weights_gb") * part
        card = self.card
        eta = constants[vram_constant(card) if card else "vram_efficiency"]
        return constants["step_s"] + read / (self.need(self.gpu_bw, "gpu_mem_bw_gbs") * eta)

    # rules

    def rule(self) -> tuple[str, Predict]:
        """Name and formula of what the row describes: seconds of a step, per token."""
        kv = self.slow.startswith("kv") or "kv on host" in self.slow
        if "vs" in self.how.split() or " vs" in self.slow:
            raise MissingError("two mechanisms are compared and neither has a size; ordering only")
        if "spilled layers" in self.slow:
            return "whole layers on the processor, by what fits", self._spilled
        if "stream_kv" in self.how:
            return "KV over the links, layer by layer", self._streamed_kv
        if kv and "cpu_attention" in self.how:
            return "the processor attends to the KV", self._cpu_attention
        if "fallback" in self.how or "unknown" in self.how:
            return "weights over a pageable or fallback link", self._staged
        if "pageable" in self.how or self.how.startswith("pinned_stream"):
            if "uva" in self.how or (self.tier_bytes("RAM") is None and self.fraction is None):
                raise MissingError("the bytes that cross the link a token are not stated")
            return "weights layer by layer from RAM and disk", self._layerwise
        if "cpu_compute" in self.how:
            return "layers computed by the processor", self._cpu_layers
        raise MissingError(f"mechanism {self.row['mechanism']!r} has no formula")

    def _staged(self, constants: Constants) -> float:
        part = self.need(self.fraction, "the share that is off the card")
        off = part * self.need(self.read, "bytes_read_per_token_gb")
        return self.base_seconds(constants, 1 - part) + off / constants["fallback_bw"]

    def _cpu_layers(self, constants: Constants) -> float:
        part = self.need(self.fraction, "the share of layers that is off the card")
        read = self.need(self.read, "bytes_read_per_token_gb")
        off = part * read
        if part and "output layer on cpu" in self.slow and self.model and self.model.output_params:
            output = self.model.output_params * OUTPUT_BITS / 8
            off = part * (read - output) + output
        return self.base_seconds(constants, 1 - off / read) + off / self.cpu_rate(constants)

    def cpu_rate(self, constants: Constants) -> float:
        peak = dram_peak(self.host) or dram_peak(self.link)
        self.need(peak, "the bandwidth of the host's memory")
        known = constants.with_value("dram_bw", peak or 0.0)
        return slow_link("cpu", self.card, known, server=self.server).likely

    def _layerwise(self, constants: Constants) -> float:
        """One pass over the weights gives a token to each sequence; the prompt is a pass too."""
        ram = self.tier_bytes("RAM")
        if ram is None:
            ram = self.need(self.fraction, "the share in RAM") * self.need(
                self.weights, "weights_gb"
            )
        disk = self.tier_bytes("disk") or 0.0
        stays = self.need(self.weights, "weights_gb") - ram - disk
        card = self.card
        eta = constants[vram_constant(card) if card else "vram_efficiency"]
        bandwidth = self.need(self.gpu_bw, "gpu_mem_bw_gbs") * eta
        if self.how.startswith("pinned"):
            pinned = find(r"([\d.]+) GB/s", self.link)
            if pinned is None and card is None:
                raise MissingError("the card's link is not known")
            rate = pinned * GB if pinned else slow_link("pinned", card, constants).likely
            rate *= constants["weight_stream_efficiency"]
        else:
            desktop = card is not None and re.match(r"RTX|GTX|TITAN", card.name)
            rate = constants["desktop_pageable_bw" if desktop else "pageable_bw"]
        # Streamed weights are written to VRAM and then read there like all others.
        one = constants["step_s"] + (stays + ram + disk) / bandwidth + ram / rate
        one += disk / constants["framework_disk_bw"]
        if not (self.prompt and self.new):
            return one / self.batch
        params = params_of(self.row["model"])
        model = self.model or (dense(params) if params else None)
        if model is None or card is None or card.bf16_flops is None:
            raise MissingError("the prompt's operations are not known, and the rate includes them")
        work = prefill_flops(model, self.prompt)
        prompt = work.matrix / constants["matrix_efficiency"]
        prompt += work.attention / constants["attention_efficiency"]
        total = self.new * one + self.batch * prompt / card.bf16_flops
        return total / (self.batch * self.new)

    def _cpu_attention(self, constants: Constants) -> float:
        self.need(self.own_before, "the rate with KV in VRAM")
        name = "server_cpu_attention_bw" if self.server else "cpu_attention_bw"
        handed = self.layers() * constants["handover_s"]
        return self.base_seconds(constants) + self.kv_bytes() / constants[name] + handed

    def _streamed_kv(self, constants: Constants) -> float:
        self.need(self.own_before, "the rate with KV in VRAM")
        rate = harmonic([float(n) for n in re.findall(r"([\d.]+) GB/s", self.link)])
        if rate is None:
            if self.card is None:
                raise MissingError("the link's rate is not stated")
            rate = slow_link("pinned", self.card, constants).likely / GB
        handed = self.layers() * constants["handover_s"]
        return self.base_seconds(constants) + self.kv_bytes() / (rate * GB) + handed

    def _spilled(self, constants: Constants) -> float:
        """Whole layers with their KV leave the card until the rest fits (llama.cpp ``--fit``)."""
        free = find(r"([\d,]+) MiB free", self.row["gpu"])
        room = self.need(free, "the free memory of the card") * 2**20 - BUFFERS
        weights = self.need(self.weights, "weights_gb")
        context = self.need(self.context, "context")
        if self.model is None:
            raise MissingError("the model's geometry is not known")
        count = len(self.model.layers)
        kv = self.model.token_bytes() / count
        layer = weights / count
        out = max(0.0, count - room / (layer + kv * max(ALLOCATED, context)))
        eta = constants["vram_efficiency"]
        seconds = constants["step_s"] + (count - out) * layer / (
            self.need(self.gpu_bw, "gpu_mem_bw_gbs") * eta
        )
        name = "server_cpu_attention_bw" if self.server else "cpu_attention_bw"
        seconds += out * (layer / self.cpu_rate(constants) + constants["handover_s"])
        return seconds + out * kv * context / constants[name]

    # lint

    def lint(self, measured: float) -> str:
        """Why the measured rate cannot be, or nothing. Peak rates, so that only the impossible is
        called so."""
        if self.read is None or self.gpu_bw is None or self.new:
            return ""
        read, fast = self.read / GB, self.gpu_bw / GB
        if self.own_before:
            # The rate with everything in VRAM has a roofline too.
            whole = plausibility(weights_gb=read, claimed_tps=self.own_before, gpu_gbs=fast)
            if not whole.plausible:
                return f"before offloading: {whole.text}"
        part = self.fraction
        if part is None:
            return ""
        slow = dram_peak(self.host) if "cpu" in self.how else self._bus_peak()
        if part and slow is None:
            return ""
        verdict = plausibility(
            weights_gb=read, claimed_tps=measured, gpu_gbs=fast, gpu_fraction=1 - part,
            cpu_gbs=(slow or GB) / GB, batch=self.batch,
        )  # fmt: skip
        return "" if verdict.plausible else verdict.text

    def _bus_peak(self) -> float | None:
        """What the host link promises, in bytes/s."""
        stated = find(r"([\d.]+) GB/s theoretical", self.link)
        if stated:
            return stated * GB
        return self.card.bus_rate if self.card else None


def _gb(value: float | None) -> float | None:
    return None if value is None else value * GB


def orderings(rows: Sequence[Row], constants: Constants) -> list[str]:
    """Where a row has the rates of two placements of one machine, which is faster by prediction and
    by measurement."""
    lines = []
    for row in rows:
        facts = Facts(row)
        if "spilled layers" not in facts.slow or not facts.before:
            continue
        outcome = predict(row, constants)
        if outcome.predicted is None or outcome.measured is None:
            continue
        said, seen = (
            "keep KV in VRAM" if rate < facts.before else "keep whole layers in VRAM"
            for rate in (outcome.predicted, outcome.measured)
        )
        lines.append(f"{row['id']}: predicted {said!r}, measured {seen!r}")
    for kv_out in rows:
        for out in rows:
            if not _same_machine(kv_out, out):
                continue
            fast = Facts(out)
            weights = fast.need(fast.weights, "weights_gb")
            # The least a host can do: two channels of DDR4.
            least = 1 / (fast.base_seconds(constants, 0.0) + weights / _least_cpu(constants))
            kv = predict(kv_out, constants).predicted or 0.0
            rates = {"kv_out": kv, "weights_out": least}
            seen = prefer({"kv_out": number(kv_out["after_tps"]) or 0.0,
                           "weights_out": number(out["after_tps"]) or 0.0})  # fmt: skip
            lines.append(
                f"{kv_out['id']} against {out['id']}: predicted {prefer(rates)!r} ({kv:.3g} against "
                f"at least {least:.3g} tokens/s), measured {seen!r}"
            )
    return lines


def _same_machine(kv_out: Row, out: Row) -> bool:
    """Whether one row has the KV off the card, the other the weights, and all else is equal."""
    return (
        kv_out is not out
        and all(kv_out[name] == out[name] for name in ("source", "gpu", "model", "context_tokens"))
        and (kv_out["what_is_slow"].lower(), out["what_is_slow"].lower()) == ("kv", "weights")
    )


def _least_cpu(constants: Constants) -> float:
    return slow_link("cpu", None, constants).low
