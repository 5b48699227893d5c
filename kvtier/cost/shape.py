"""A model by its sizes: what a sequence keeps, which weights there are, and which a step reads.

Weights fall into four groups, because a decode step treats them differently:

* shared: read once a step, whatever the batch: attention, dense and shared MLPs, norms, the output head.
* experts: routed experts. A batch of B tokens that each pick k of E at random touches
  ``E (1 - (1 - k/E)^B)`` of them in expectation; only those are read.
* gathered: embedding tables. They are resident, but a step reads a row per token.
* idle: resident and not part of text decoding: vision towers, draft heads.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from kvtier.cost.geometry import KVBytes, LayerShape, layers_bytes, measure
from kvtier.cost.kv_dtype import KVDtype, kv_dtype
from kvtier.errors import ConfigError
from kvtier.layout import LayerLayout, PageLayout

#: KV dtype of a run -> element type of the layout, elements a byte holds. Two int4 share a uint8.
KV_DTYPES: dict[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 1),
    "fp8": ("float8_e4m3fn", 1),
    "int8": ("int8", 1),
    "int4": ("uint8", 2),
}

#: Bits a weight takes in llama.cpp's Q4_K_M: 4.92 GB for 8.03e9 parameters.
Q4_K_M_BITS = 4.9


@dataclass(frozen=True)
class StoredWeights:
    """Bytes of the weights as a file has them, scales and other metadata included.

    Attributes:
        shared, experts, gathered, idle: bytes of each group (see the module).
        source: what was measured.
    """

    shared: float
    experts: float = 0.0
    gathered: float = 0.0
    idle: float = 0.0
    source: str = "given"

    @property
    def total(self) -> float:
        return self.shared + self.experts + self.gathered + self.idle


@dataclass(frozen=True)
class ModelShape:
    """A model by its sizes.

    Attributes:
        layers: what each layer keeps of a sequence, in order where the source tells it.
        shared_params, expert_params, gathered_params, idle_params: weights by group.
        experts, experts_per_token: routed experts of a layer, and those a token uses; 0 if dense.
        prefill_params: weights an input token is computed with; 0: the same as an output token.
        stored: bytes as a file has them; None: only counts are known.
        hidden, intermediate, vocab: for activations and logits; 0 if unknown.
        query_width: heads times head_dim of an attention layer, for its FLOPs; of MLA the mean of
            what a query and what a value has. 0 if unknown.
        kv_heads: the most KV heads of a layer, for splitting over GPUs; 0 for MLA, whose latent is
            replicated.
        context: longest sequence the model was made for, 0 if unknown.
        source: where the numbers come from.
    """

    name: str
    layers: tuple[LayerShape, ...]
    shared_params: float
    expert_params: float = 0.0
    gathered_params: float = 0.0
    idle_params: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    prefill_params: float = 0.0
    stored: StoredWeights | None = None
    hidden: int = 0
    intermediate: int = 0
    vocab: int = 0
    query_width: int = 0
    kv_heads: int = 0
    context: int = 0
    source: str = "given by numbers"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"{self.name} has no layers; give at least one")
        if self.expert_params and not 0 < self.experts_per_token <= self.experts:
            raise ConfigError(
                f"{self.name} uses {self.experts_per_token} of {self.experts} experts a token; give "
                "1 to all of them"
            )
        for index, layer in enumerate(self.layers):
            if layer.kind == "shared" and not (
                layer.source is not None and 0 <= layer.source < index
            ):
                raise ConfigError(
                    f"layer {index} of {self.name} shares the KV of layer {layer.source}; give the "
                    "index of an earlier layer"
                )

    @property
    def slug(self) -> str:
        """The name as an option: "llama-3.1-8b"."""
        return slug(self.name)

    # KV and state

    def count(self, *kinds: str) -> int:
        """Layers of these kinds."""
        return sum(layer.kind in kinds for layer in self.layers)

    @cached_property
    def unlike_layers(self) -> dict[LayerShape, int]:
        """Layers that keep different things -> how many there are of each."""
        counts: dict[LayerShape, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return counts

    @property
    def attention_layers(self) -> int:
        """Layers that keep KV of their own."""
        return self.count("full", "sliding", "latent", "compressed")

    @property
    def state_bytes(self) -> int:
        """Recurrent state of a sequence, all layers."""
        return sum(layer.state_bytes for layer in self.layers)

    def kv(self, tokens: float, dtype: str | KVDtype = "bf16") -> KVBytes:
        """KV and state of a sequence, by what grows and what does not."""
        return measure(self.layers, tokens, dtype)

    def token_bytes(self, dtype: str | KVDtype = "bf16") -> float:
        """Bytes that one more token adds to a sequence once all windows are full."""
        return self.kv(0, dtype).per_token

    def page_bytes(self, page_tokens: int, dtype: str | KVDtype = "bf16") -> float:
        """Bytes of a page in all layers that keep KV, sliding ones included: what a pool gives out
        for ``page_tokens`` tokens while no window is full."""
        fmt = kv_dtype(dtype)
        if page_tokens < 1:
            raise ConfigError(f"page_tokens is {page_tokens}; give 1 or more")
        return page_tokens * sum(
            layer.token_bytes(fmt) / max(1, layer.rate) for layer in self.layers
        )

    def sequence_bytes(self, tokens: float, dtype: str | KVDtype = "bf16") -> float:
        """KV and recurrent state of a sequence of ``tokens`` tokens, windows clipped."""
        return layers_bytes(self.layers, tokens, dtype)

    def layer_kv(self, tokens: float, dtype: str | KVDtype = "bf16") -> list[float]:
        """Bytes that each layer reads of a sequence in a decode step: its KV or the KV it shares,
        and its state."""
        fmt = kv_dtype(dtype)

        def read(layer: LayerShape) -> float:
            own = layer if layer.source is None else self.layers[layer.source]
            return own.kv_bytes(tokens, fmt) + layer.state_bytes

        return [read(layer) for layer in self.layers]

    def read_kv_bytes(self, tokens: float, dtype: str | KVDtype = "bf16") -> float:
        """Bytes of KV and state that a decode step reads of a sequence of ``tokens`` tokens. More
        than ``sequence_bytes`` where layers share KV: each reads it anew."""
        return sum(self.layer_kv(tokens, dtype))

    # weights

    @property
    def params(self) -> float:
        """All weights."""
        return self.shared_params + self.expert_params + self.gathered_params + self.idle_params

    @property
    def active_decode_params(self) -> float:
        """Weights an output token is multiplied with; embedding rows are looked up, not multiplied."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.shared_params + self.expert_params * share

    @property
    def active_params(self) -> float:
        return self.active_decode_params

    @property
    def active_prefill_params(self) -> float:
        """Weights an input token is multiplied with."""
        return self.prefill_params or self.active_decode_params

    @property
    def output_params(self) -> int:
        """Weights of the output head, part of the shared ones; 0 if the widths are unknown."""
        return self.vocab * self.hidden

    @property
    def native_bits(self) -> float:
        """Bits a weight takes as stored, its metadata included; Q4_K_M's where no file tells."""
        return self.stored.total * 8 / self.params if self.stored else Q4_K_M_BITS

    def expert_share(self, sequences: float = 1) -> float:
        """Share of the routed experts that ``sequences`` tokens touch in expectation:
        ``1 - (1 - k/E)^B``, each token picking its k at random."""
        if sequences < 0:
            raise ConfigError(f"sequences is {sequences}; give a number >= 0")
        if not self.experts:
            return 0.0
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** sequences

    def group_bytes(self, bits: float | None = None) -> StoredWeights:
        """Bytes of each group of weights: at ``bits`` each, or with None as stored."""
        if bits is None and self.stored is not None:
            return self.stored
        bits = Q4_K_M_BITS if bits is None else bits
        if not bits > 0:
            raise ConfigError(f"weight bits is {bits}; give a number > 0, e.g. 4.5")
        size = bits / 8
        return StoredWeights(
            self.shared_params * size,
            self.expert_params * size,
            self.gathered_params * size,
            self.idle_params * size,
            f"{self.params / 1e9:.2f}e9 parameters at {bits:g} bits",
        )

    def weight_bytes(self, bits: float | None = None) -> float:
        """All weights at ``bits`` each, or with None as stored (Q4_K_M if no file tells)."""
        return self.group_bytes(bits).total

    def read_bytes(self, bits: float | None = None, sequences: float = 1) -> float:
        """Weights that a decode step of ``sequences`` reads: all shared ones, the experts that the
        batch touches in expectation, no embedding rows."""
        groups = self.group_bytes(bits)
        return groups.shared + groups.experts * self.expert_share(sequences)

    # pages of a run

    def part_elements(self, dtype: str) -> tuple[int, int]:
        """Elements of K and of V that a token adds in one layer, as the layout counts them."""
        packed = KV_DTYPES[dtype][1]
        paged = [one for one in self.layers if one.kind in ("full", "sliding", "latent")]
        sizes = {(one.k, one.v) for one in paged if one.k}
        if len(sizes) != 1:
            raise ConfigError(
                f"{self.name} has {'unlike' if sizes else 'no'} layers of plain KV to lay out in pages; "
                "choose a model whose attention layers are the same"
            )
        k, v = sizes.pop()
        if k % packed or v % packed:
            raise ConfigError(
                f"{self.name} has {k} and {v} elements of K and V, not whole bytes in {dtype}"
            )
        return k // packed, v // packed

    def divisor(self, dtype: str, wanted: float) -> int:
        """The number nearest to ``wanted`` by which K and V of a token can be divided evenly."""
        common = math.gcd(*self.part_elements(dtype))
        fits = [n for n in range(1, common + 1) if common % n == 0]
        return min(fits, key=lambda n: abs(math.log(n / wanted)))

    def layout(
        self,
        dtype: str,
        page_tokens: int,
        divisor: int = 1,
        *,
        heads: int = 1,
        summaries: bool = False,
    ) -> PageLayout:
        """The pages of this model, with K and V of a token ``divisor`` times smaller, cut into
        ``heads``. They hold the elements alone, without the scales of a quantised format."""
        element = KV_DTYPES[dtype][0]
        k, v = (n // divisor for n in self.part_elements(dtype))

        def layout(layer: LayerShape) -> LayerLayout:
            state = layer.state_bytes // divisor
            if layer.kind == "state":
                return LayerLayout("state", state_bytes=state)
            if layer.kind not in ("full", "sliding", "latent"):
                return LayerLayout("none")
            kind, window = layer.kind, layer.window or None
            n = heads if kind != "latent" else 1
            return LayerLayout(kind, n, k // n, element, n, v // n, element, window, state)

        return PageLayout([layout(layer) for layer in self.layers], page_tokens, summaries)

    @cached_property
    def describe(self) -> str:
        """Layers in words: ``10 full, 52 sliding (window 1024)``."""
        windows = sorted({layer.window for layer in self.layers if layer.kind == "sliding"})
        names = {"sliding": f"sliding (window {', '.join(map(str, windows))})", "latent": "MLA"}
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        return ", ".join(f"{self.count(kind)} {names.get(kind, kind)}" for kind in kinds)


def slug(name: str) -> str:
    """``Llama 3.1 8B`` -> ``llama-3.1-8b``."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def spread(some: list[LayerShape], others: list[LayerShape]) -> tuple[LayerShape, ...]:
    """Two kinds of layers, ``some`` spread evenly among ``others``: which is which is not always
    known, and matters little."""
    total, taken = len(some) + len(others), 0
    mixed = []
    for n in range(total):
        more = (n + 1) * len(some) // total > n * len(some) // total
        mixed.append(some[taken] if more else others[n - taken])
        taken += more
    return tuple(mixed)
