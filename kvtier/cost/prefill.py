"""How long a prompt takes to compute.

    t = (2 P T / matrix_efficiency + A / attention_efficiency) / peak + t0

with P the weights that an input token is multiplied with, T the prompt, and A the operations of
causal attention, ``2 w T^2`` a full layer of query width w = heads x head_dim: half of the T x T
scores, for QK and for PV, two operations each (Kaplan et al., arXiv 2001.08361, table 1, for the
matrix part). A sliding layer looks at its window only; a recurrent layer's scan is left out. In chunks,
each chunk reads all weights and the KV before it once more, and takes at least as long as reading
them. A prefill rate is never a decode rate: this file has no tokens/s of decoding in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cost.basis import Basis, Estimate, banded
from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.models import ModelShape
from kvtier.cost.streaming import not_negative
from kvtier.devices.cards import Card
from kvtier.errors import ConfigError

#: Query heads a KV head serves where the model does not tell: as in Llama 3 8B.
USUAL_GROUP = 4

#: Bits a weight takes in formats that int8 or fp4 units multiply.
LOW_BITS = 5.5


@dataclass(frozen=True)
class Operations:
    """FLOPs of a prefill: of matrix products and of attention.

    Attributes:
        assumed: what the model does not tell and was assumed, in words; empty if nothing.
    """

    matrix: float
    attention: float
    assumed: str = ""

    @property
    def total(self) -> float:
        return self.matrix + self.attention


def query_width(model: ModelShape) -> tuple[float, str]:
    """Query heads times their width (of MLA the mean of keys and values), and what was assumed to
    get it."""
    if model.query_width:
        return model.query_width, ""
    kv_width = max((layer.k for layer in model.layers), default=0)
    return USUAL_GROUP * kv_width, f"{USUAL_GROUP} query heads a KV head"


def prefill_flops(model: ModelShape, tokens: float, before: float = 0) -> Operations:
    """Operations to compute ``tokens`` tokens after ``before`` cached ones."""
    not_negative(tokens=tokens, before=before)
    width, assumed = query_width(model)
    end = before + tokens
    attention = 0.0
    for layer in model.layers:
        if layer.kind not in ("full", "sliding", "latent", "shared"):
            continue
        window = layer.window or end
        attention += 4 * width * (_seen(end, window) - _seen(before, window))
    return Operations(2 * model.active_prefill_params * tokens, attention, assumed)


def _seen(tokens: float, window: float) -> float:
    """Sum over tokens of how many each looks back at."""
    inside = min(tokens, window)
    return inside * inside / 2 + (tokens - inside) * window


def prefill_seconds(
    model: ModelShape,
    card: Card,
    tokens: float,
    constants: Constants,
    *,
    before: float = 0,
    chunk: float | None = None,
    weight_bits: float | None = None,
    kv_dtype: str = "bf16",
    gpus: int = 1,
) -> float:
    """Seconds; see ``prefill_time``."""
    if card.bf16_flops is None:
        raise ConfigError(
            f"card {card.name} has no FLOPS in the table; give a card with tflops to predict prefill"
        )
    if chunk is not None and not chunk >= 1:
        raise ConfigError(f"chunk is {chunk}; give 1 token or more")
    bits = model.native_bits if weight_bits is None else weight_bits
    low_bits = bits <= LOW_BITS and card.name.startswith("RTX ")
    matrix = constants["lowbit_matrix_efficiency" if low_bits else "matrix_efficiency"]
    peak = card.bf16_flops * gpus
    bandwidth = card.memory_bandwidth * constants[vram_constant(card)] * gpus
    weights = model.read_bytes(weight_bits, tokens)
    seconds, done = 0.0, float(before)
    end = before + tokens
    while done < end:
        size = min(chunk or tokens, end - done)
        work = prefill_flops(model, size, done)
        compute = (work.matrix / matrix + work.attention / constants["attention_efficiency"]) / peak
        read = (weights + model.read_kv_bytes(done, kv_dtype)) / bandwidth
        seconds += max(compute, read) + constants["step_s"]
        done += size
    if gpus > 1 and model.hidden:
        # Two all-reduces a layer of 16-bit activations, ring: 2 (n - 1) / n of them over the link.
        moved = 2 * len(model.layers) * tokens * model.hidden * 2 * 2 * (gpus - 1) / gpus
        seconds += moved / card.link("pinned").rate
    return seconds


def prefill_time(
    model: ModelShape,
    card: Card,
    tokens: float,
    *,
    before: float = 0,
    chunk: float | None = None,
    weight_bits: float | None = None,
    kv_dtype: str = "bf16",
    gpus: int = 1,
    constants: Constants = DEFAULTS,
) -> Estimate:
    """Seconds to compute a prompt: the time to first token without a cache.

    Args:
        tokens: to compute. before: tokens whose KV is in VRAM already.
        chunk: tokens of a pass; None: all in one.
        weight_bits: up to 5.5 bits count as products of low-bit units on GeForce cards.
        gpus: cards that split each layer, joined by the host link.

    Raises:
        ConfigError: a size is negative, or the card's FLOPS are unknown.
    """
    not_negative(tokens=tokens, before=before)

    def seconds(c: Constants) -> float:
        return prefill_seconds(
            model, card, tokens, c, before=before, chunk=chunk, weight_bits=weight_bits,
            kv_dtype=kv_dtype, gpus=gpus,
        )  # fmt: skip

    work = prefill_flops(model, tokens, before)
    basis = Basis(
        inputs={
            "model": model.name, "card": card.name, "tokens": tokens, "before": before,
            "chunk": chunk, "weight_bits": weight_bits, "gpus": gpus,
            "matrix_flop": work.matrix, "attention_flop": work.attention, "assumed": work.assumed,
            "peak_tflops": (card.bf16_flops or 0) / 1e12,
        },
        formula="(2 P T / matrix efficiency + attention / attention efficiency) / peak + t0",
        constants=constants.pick(
            "matrix_efficiency", "lowbit_matrix_efficiency", "attention_efficiency", "step_s"
        ),
        command="llama-bench -p TOKENS -n 0, or the engine's time to first token without a cache",
    )  # fmt: skip
    return banded(seconds, constants, "s", basis)


def vram_constant(card: Card) -> str:
    """Which efficiency a card's memory has: data centre cards with HBM reach more of their peak."""
    hbm = ("A100", "H100", "H200", "H20 ", "B200", "B300", "MI3", "V100")
    return "hbm_efficiency" if card.name.startswith(hbm) else "vram_efficiency"
