"""What is decoded, where it lies, and the bytes that a step reads of it.

=============  ==================================================================================
mode           what a step reads
=============  ==================================================================================
``vram``       all KV, in VRAM
``kv-stream``  the same KV; the cold part crosses the link while other layers compute (exact)
``kv-cpu``     the same KV; the processor attends to the cold part where it lies (exact)
``select``     page summaries, dense layers, and a budget of tokens; keeps all KV (not exact)
``evict``      the tokens that were kept; the others are gone (not exact)
=============  ==================================================================================

Weights off the card and a KV dtype go with every mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvtier.cost.churn import Locality
from kvtier.cost.constants import Constants
from kvtier.cost.models import ModelShape
from kvtier.cost.streaming import not_negative, share
from kvtier.devices.cards import Card
from kvtier.errors import ConfigError

Mode = Literal["vram", "kv-stream", "kv-cpu", "select", "evict"]

#: Tokens of a page whose K or V of a layer is one piece of a copy.
PAGE_TOKENS = 64

#: Layers that a selecting step attends to in full, as a share: the first two of Quest's 48.
DENSE_LAYERS = 2 / 48


@dataclass(frozen=True)
class Selection:
    """What a step of mode ``select`` reads, or what mode ``evict`` keeps.

    Attributes:
        tokens: of each sequence, sinks and recent ones included.
        page_tokens: of a summarised page.
        summaries: vectors as wide as a key that summarise a page: 2 for minimum and maximum
            (Quest), 0 if scores come from elsewhere.
        dense: share of the layers that read all KV; what of it is off the card is read by the processor.
        locality: how alike choices are, where KV is off the card (``kvtier.cost.churn``); None: the churn is a
            constant. always: share of the budget that is read whatever the query.
        heads: lists of pages a layer has. guessed: copies are sent ahead.
        gathered: what is in VRAM is copied together before it is read, as where each head has a list of its own.
    """

    tokens: int = 2048
    page_tokens: int = 16
    summaries: float = 2.0
    dense: float = DENSE_LAYERS
    locality: Locality | None = None
    always: float = 0.125
    heads: int = 1
    guessed: bool = True
    gathered: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.page_tokens < 1:
            raise ConfigError(
                f"a selection of {self.tokens} tokens in pages of {self.page_tokens}; give 1 or more"
            )
        share(dense=self.dense, always=self.always)
        not_negative(summaries=self.summaries)


@dataclass(frozen=True)
class Workload:
    """What is decoded, and where it lies.

    Attributes:
        context: tokens of each sequence. batch: sequences.
        weight_bits: None: as stored, or Q4_K_M's where no file tells.
        weights_off, kv_off: shares that are not in VRAM.
        weights_link: how weights off the card are reached: pinned, pageable, fallback, cpu, disk.
        kv_link: the same for KV in the modes ``kv-stream`` and ``select``; what lies on disk is
            read to pinned memory and copied from there.
        server: the host has eight memory channels or more.
        gpus: cards that split each layer; KV of MLA is on each of them in full.
        selection: of the modes ``select`` and ``evict``.
        hot_passes: times that mode ``kv-stream`` moves KV that is in VRAM: 3 where it is gathered first, as
            ``exact-stream`` does. page_tokens: of a page whose K or V of a layer is one piece of a copy.
        on_link, raised: bytes of cold KV on the link, as a share of what it is in VRAM: where planes are streamed, and
            where whole pages come up. Below 1 with a codec (``kvtier.cost.coded``).
    """

    model: ModelShape
    card: Card
    context: int
    batch: int = 1
    weight_bits: float | None = None
    kv_dtype: str = "bf16"
    weights_off: float = 0.0
    kv_off: float = 0.0
    weights_link: str = "pinned"
    kv_link: str = "pinned"
    server: bool = False
    gpus: int = 1
    selection: Selection = Selection()
    hot_passes: float = 1.0
    page_tokens: int = PAGE_TOKENS
    on_link: float = 1.0
    raised: float = 1.0

    def __post_init__(self) -> None:
        share(weights_off=self.weights_off, kv_off=self.kv_off)
        not_negative(context=self.context)
        for name in ("batch", "gpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.kv_link == "cpu":
            raise ConfigError(
                "kv_link is 'cpu'; give pinned, pageable, fallback or disk, or use mode kv-cpu"
            )


def read_weights(work: Workload, constants: Constants) -> float:
    """Weights a step reads on each card. Tokens that choose among a share of the experts only
    touch as many as fewer tokens that choose among all do."""
    model, batch = work.model, float(work.batch)
    spread = constants["expert_spread"]
    if model.experts and spread < 1 and batch > 1:
        pool = max(model.experts_per_token, spread * model.experts)
        touched = pool * (1 - (1 - model.experts_per_token / pool) ** batch) / model.experts
        batch = math.log(1 - touched) / math.log(1 - model.experts_per_token / model.experts)
    return model.read_bytes(work.weight_bits, batch) / work.gpus


def kv_read(work: Workload, mode: Mode) -> float:
    """Bytes of KV, state and page summaries that a step reads, all sequences."""
    model, chosen = work.model, work.selection
    whole = model.read_kv_bytes(work.context, work.kv_dtype)
    if mode in ("vram", "kv-stream", "kv-cpu"):
        return work.batch * whole / kv_split(work)
    kept = model.read_kv_bytes(min(work.context, chosen.tokens), work.kv_dtype)
    if mode == "evict":
        return work.batch * kept / kv_split(work)
    # A summary is as wide as a key; of MLA that is all that is stored of a token.
    key = 1.0 if model.count("latent") else 0.5
    summary = (whole - kept) * key * chosen.summaries / chosen.page_tokens
    read = chosen.dense * whole + (1 - chosen.dense) * (min(whole, kept + max(0.0, summary)))
    return work.batch * read / kv_split(work)


def kept_bytes(work: Workload, mode: Mode) -> float:
    """KV that one sequence keeps on each card: all of it, unless tokens are dropped."""
    tokens = work.context
    if mode == "evict":
        tokens = min(tokens, work.selection.tokens)
    return work.model.sequence_bytes(tokens, work.kv_dtype) / kv_split(work)


def kv_split(work: Workload) -> int:
    """Cards that KV heads are spread over."""
    return min(work.gpus, max(1, work.model.kv_heads))
