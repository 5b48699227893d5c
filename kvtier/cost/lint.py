"""Whether a claimed speed is possible at all.

No decode step can be shorter than the bytes that it reads over the peak bandwidth of the memory they
are in, no load shorter than its bytes over the peak of the bus, and no prefill shorter than its
operations over the peak of the card. A claim above that is wrong or misses bytes that are read. A
prefill can also be too slow to be true: when even the largest model that fits in the card would have
been done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.cost.basis import Basis
from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.streaming import not_negative, share
from kvtier.errors import ConfigError

#: Claims are rounded numbers: this much above the roofline is still called possible.
ROUNDING = 0.01


@dataclass(frozen=True)
class Verdict:
    """A claim and its roofline, in the same unit.

    Attributes:
        limit: what nothing can exceed; of a time, what nothing can fall below.
        claimed: as claimed.
        plausible: whether the claim lies on the possible side.
        exceeds: ``claimed / limit`` for a rate, ``limit / claimed`` for a time; above 1 is beyond it.
        text: one sentence.
    """

    limit: float
    claimed: float
    plausible: bool
    exceeds: float
    text: str
    basis: Basis = field(repr=False)

    @property
    def max_tps(self) -> float:
        """``limit`` of a claim in tokens/s."""
        return self.limit

    def to_json(self) -> dict[str, object]:
        return {
            "limit": self.limit,
            "claimed": self.claimed,
            "plausible": self.plausible,
            "exceeds": self.exceeds,
            "text": self.text,
            "basis": self.basis.to_json(),
        }


def plausibility(
    *,
    weights_gb: float,
    claimed_tps: float,
    gpu_gbs: float,
    gpu_fraction: float = 1.0,
    cpu_gbs: float | None = None,
    kv_gb: float = 0.0,
    batch: float = 1,
) -> Verdict:
    """Lint a claimed decode rate.

    Args:
        weights_gb: weights read a step, in GB. claimed_tps: tokens/s claimed, all sequences.
        gpu_gbs: peak bandwidth of the card. gpu_fraction: share of the weights it holds.
        cpu_gbs: peak rate of what holds the others: DRAM, or the bus if they are copied.
        kv_gb: KV in VRAM that a step reads. batch: sequences; each gives a token a step.

    Raises:
        ConfigError: a value is out of range, or ``cpu_gbs`` is missing and needed.
    """
    not_negative(weights_gb=weights_gb, claimed_tps=claimed_tps, kv_gb=kv_gb)
    share(gpu_fraction=gpu_fraction)
    for name, value in (("gpu_gbs", gpu_gbs), ("cpu_gbs", cpu_gbs), ("batch", batch)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; give a number > 0")
    seconds = (weights_gb * gpu_fraction + kv_gb) / gpu_gbs
    where = f"{weights_gb * gpu_fraction + kv_gb:.4g} GB at {gpu_gbs:g} GB/s"
    off = weights_gb * (1 - gpu_fraction)
    if off > 0:
        if cpu_gbs is None:
            raise ConfigError(
                f"cpu_gbs is missing; {1 - gpu_fraction:.0%} of the weights are not on the card"
            )
        seconds += off / cpu_gbs
        where += f" and {off:.4g} GB at {cpu_gbs:g} GB/s"
    if not seconds > 0:
        raise ConfigError("weights_gb is 0; give the GB that a step reads")
    basis = Basis(
        {"weights_gb": weights_gb, "gpu_fraction": gpu_fraction, "gpu_gbs": gpu_gbs,
         "cpu_gbs": cpu_gbs, "kv_gb": kv_gb, "batch": batch},
        "batch / (bytes over peak bandwidth of each place)",
        command="llama-bench, with the placement of the claim",
    )  # fmt: skip
    return rate_verdict(batch / seconds, claimed_tps, "tokens/s", f"to read {where}", basis)


def load_plausibility(*, nbytes: float, claimed_s: float, peak_bw: float) -> Verdict:
    """Lint a claimed time to bring ``nbytes`` to the card over a bus of ``peak_bw`` bytes/s."""
    not_negative(nbytes=nbytes)
    if not (claimed_s > 0 and peak_bw > 0):
        raise ConfigError(f"claimed_s is {claimed_s}, peak_bw {peak_bw}; give numbers > 0")
    basis = Basis({"nbytes": nbytes, "peak_bw": peak_bw}, "bytes over the peak of the bus")
    return time_verdict(
        nbytes / peak_bw, claimed_s,
        f"to move {nbytes / 1e9:.3g} GB over a bus of {peak_bw / 1e9:.4g} GB/s", basis,
    )  # fmt: skip


def prefill_plausibility(
    *,
    tokens: float,
    claimed_s: float,
    peak_flops: float,
    flops: float | None = None,
    vram_bytes: float | None = None,
    constants: Constants = DEFAULTS,
) -> Verdict:
    """Lint a claimed time to first token from nothing.

    With ``flops`` known, the claim is compared with their roofline. If the model is not known, only
    the other side can be checked: the largest 16-bit model that the card holds, at the slow end of
    the efficiencies, would have been done in ``limit`` seconds.

    Args:
        flops: operations of the prefill. vram_bytes: memory of the card, if they are not known.
    """
    if not (claimed_s > 0 and peak_flops > 0 and tokens > 0):
        raise ConfigError(
            f"tokens is {tokens}, claimed_s {claimed_s}, peak_flops {peak_flops}; give numbers > 0"
        )
    inputs = {"tokens": tokens, "peak_flops": peak_flops, "flops": flops, "vram_bytes": vram_bytes}
    if flops is not None:
        basis = Basis(inputs, "operations over the peak of the card")
        return time_verdict(
            flops / peak_flops, claimed_s,
            f"for {flops / 1e12:.3g} TFLOP at {peak_flops / 1e12:.4g} TFLOPS", basis,
        )  # fmt: skip
    if vram_bytes is None:
        raise ConfigError("flops and vram_bytes are both missing; give one of them")
    efficiency = constants.get_constant("matrix_efficiency")
    slowest = vram_bytes * tokens / (peak_flops * efficiency.low)
    params = claimed_s * peak_flops * efficiency.low / (2 * tokens)
    plausible = claimed_s <= slowest * (1 + ROUNDING)
    text = (
        f"{claimed_s:.4g} s is {'possible' if plausible else 'implausibly slow'}: the largest "
        f"16-bit model that the card holds takes at most {slowest:.3g} s, this needs one of "
        f"{params / 1e9:.3g}e9 parameters"
    )
    basis = Basis(inputs, "2 P T / (efficiency x peak), P = VRAM / 2 bytes", (efficiency,))
    return Verdict(slowest, claimed_s, plausible, claimed_s / slowest, text, basis)


def rate_verdict(limit: float, claimed: float, unit: str, why: str, basis: Basis) -> Verdict:
    """A rate against the highest possible."""
    exceeds = claimed / limit
    if exceeds <= 1 + ROUNDING:
        text = f"{claimed:.4g} {unit} is possible: at most {limit:.3g} {unit} {why}"
        return Verdict(limit, claimed, True, exceeds, text, basis)
    text = (
        f"{claimed:.4g} {unit} is not possible: at most {limit:.3g} {unit} {why}; the claim is "
        f"{exceeds:.2f}x the roofline"
    )
    return Verdict(limit, claimed, False, exceeds, text, basis)


def time_verdict(limit: float, claimed: float, why: str, basis: Basis) -> Verdict:
    """Seconds against the fewest possible."""
    exceeds = limit / claimed
    if exceeds <= 1 + ROUNDING:
        text = f"{claimed * 1e3:.4g} ms is possible: at least {limit * 1e3:.3g} ms {why}"
        return Verdict(limit, claimed, True, exceeds, text, basis)
    text = (
        f"{claimed * 1e3:.4g} ms is not possible: at least {limit * 1e3:.3g} ms {why}; the claim "
        f"is {exceeds:.2f}x faster"
    )
    return Verdict(limit, claimed, False, exceeds, text, basis)
