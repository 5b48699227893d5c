"""Where the memory of a GPU goes, what fits in it, and what would make it fit.

All sizes are bytes of one GPU. With several, weights, KV heads and recurrent state are split evenly
(tensor parallelism); a KV head is never split, and an MLA latent is on every GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvtier.cost.buffers import (
    DEFAULT_CHUNK,
    SOURCES,
    RuntimeBuffers,
    activation_bytes,
    logits_bytes,
)
from kvtier.cost.geometry import LayerShape
from kvtier.cost.kv_dtype import KVDtype, kv_dtype
from kvtier.cost.shape import ModelShape
from kvtier.devices.cards import Card
from kvtier.errors import ConfigError
from kvtier.layout import SUMMARY_ROWS
from kvtier.units import format_size

#: Beyond these, memory is not what limits.
MAX_TOKENS = 2**31
MAX_SEQUENCES = 2**20


@dataclass(frozen=True)
class BudgetPart:
    """A named use of memory: bytes, and where the number comes from."""

    name: str
    nbytes: float
    source: str


@dataclass(frozen=True)
class Budget:
    """The memory of one GPU under a load. Made by ``memory_budget``, whose arguments are its fields."""

    model: ModelShape
    vram: int | Card
    sequences: int = 1
    tokens: int | tuple[int, ...] = 8192
    mean: bool = False
    dtype: KVDtype = field(default_factory=lambda: kv_dtype("bf16"))
    weight_bits: float | None = None
    page_tokens: int = 16
    chunk: int = DEFAULT_CHUNK
    buffers: RuntimeBuffers = field(default_factory=RuntimeBuffers)
    gpus: int = 1
    weights_off: float = 0.0
    kv_off: float = 0.0
    utilization: float = 1.0
    state_slots: int | None = None
    summary_tokens: int = 0

    def __post_init__(self) -> None:
        lengths = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        for name, value, least in (
            ("sequences", self.sequences, 1),
            ("page_tokens", self.page_tokens, 1),
            ("chunk", self.chunk, 1),
            ("gpus", self.gpus, 1),
            ("tokens", min(lengths, default=0), 0),
            ("summary_tokens", self.summary_tokens, 0),
            ("state_slots", 1 if self.state_slots is None else self.state_slots, 0),
        ):
            if value < least or value != int(value):
                raise ConfigError(f"{name} is {value}; give a whole number of at least {least}")
        if isinstance(self.tokens, tuple) and len(self.tokens) != self.sequences:
            raise ConfigError(
                f"tokens has {len(self.tokens)} lengths for {self.sequences} sequences; give one each"
            )
        if self.mean and isinstance(self.tokens, tuple):
            raise ConfigError("mean is given with a list of lengths; give the mean as one number")
        for name in ("weights_off", "kv_off"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a fraction from 0 to 1")
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(f"utilization is {self.utilization}; give a share above 0, at most 1")
        if self.capacity <= 0:
            raise ConfigError(f"vram is {self.capacity}; give bytes > 0")

    def changed(self, **change: object) -> Budget:
        """The same load with other arguments of ``memory_budget``."""
        return memory_budget(**{**self._arguments, **change})  # type: ignore[arg-type]

    @property
    def _arguments(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    # what there is

    @property
    def capacity(self) -> int:
        """Memory of the GPU."""
        return self.vram.vram_bytes if isinstance(self.vram, Card) else self.vram

    @property
    def usable(self) -> float:
        """Memory that the process may fill: what the driver leaves of the card, times
        ``utilization``."""
        kept = self.buffers.driver if isinstance(self.vram, Card) else 0.0
        return self.capacity * (1 - kept) * self.utilization

    # what it is used for

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Tokens of a sequence -> sequences of that length."""
        if isinstance(self.tokens, int):
            return {self.tokens: self.sequences}
        return {n: self.tokens.count(n) for n in dict.fromkeys(self.tokens)}

    @cached_property
    def parts(self) -> tuple[BudgetPart, ...]:
        """All uses, weights first."""
        model, buffers = self.model, self.buffers
        groups = model.group_bytes(self.weight_bits)
        split = f", split over {self.gpus} GPUs" if self.gpus > 1 else ""
        weights = groups.total * (1 - self.weights_off) / self.gpus
        kv, paged, state = self._sequences()
        activations = activation_bytes(model, self.chunk, self.gpus)
        logits = logits_bytes(model, self.sequences)
        staging = self._staging(paged)
        values = [
            BudgetPart("weights", weights, f"{groups.source}{split}"),
            BudgetPart("kv", kv * (1 - self.kv_off), f"{model.source}; {self.dtype.describe()}"),
            BudgetPart("state", state, f"recurrent state, {model.source}"),
            BudgetPart("page rounding", (paged - kv) * (1 - self.kv_off), self._rounding_source),
            BudgetPart("summaries", self._summaries(), self._summaries_source),
            BudgetPart("staging", staging, "two layers of KV and one of weights on their way"),
            BudgetPart("activations", activations, SOURCES["activations"]),
            BudgetPart("logits", logits, SOURCES["logits"]),
            BudgetPart("allocator slack", buffers.slack * (activations + logits), SOURCES["slack"]),
            BudgetPart("cuda context", buffers.cuda_context, SOURCES["cuda_context"]),
            BudgetPart("cuda graphs", buffers.graphs, SOURCES["graphs"]),
            BudgetPart("workspace", buffers.workspace, SOURCES["workspace"]),
            BudgetPart("other", buffers.other, "given"),
        ]
        return tuple(part for part in values if part.nbytes or part.name in ("weights", "kv"))

    @property
    def used(self) -> float:
        return sum(part.nbytes for part in self.parts)

    @property
    def free(self) -> float:
        """What is left; negative if the load does not fit."""
        return self.usable - self.used

    @property
    def fits(self) -> bool:
        """Whether the memory holds it, and there is a state slot for each sequence."""
        slots = self.state_slots is None or self.sequences <= self.state_slots
        return self.free >= 0 and slots

    def part(self, name: str) -> float:
        """Bytes of a part; 0 if there is none of that name."""
        return sum(part.nbytes for part in self.parts if part.name == name)

    @property
    def _rounding_source(self) -> str:
        if self.mean:
            return f"half a page of {self.page_tokens} tokens a sequence: lengths are spread evenly"
        return f"last page of {self.page_tokens} tokens of each sequence, and of each window"

    def _split(self, layer: LayerShape) -> float:
        """Share of a layer's KV that one GPU holds."""
        if layer.kind in ("latent", "compressed"):
            return 1.0
        heads = self.model.kv_heads
        return -(-heads // self.gpus) / heads if heads else 1 / self.gpus

    def _sequences(self) -> tuple[float, float, float]:
        """Bytes of all sequences: exact KV, KV in whole pages, state."""
        exact = paged = state = 0.0
        page = self.page_tokens
        for layer, times in self.model.unlike_layers.items():
            whole = replace(layer, window=-(-layer.window // page) * page)
            share = self._split(layer) * times
            state += layer.state_bytes * self.sequences * times / self.gpus
            for length, count in self.lengths.items():
                exact += layer.kv_bytes(length, self.dtype) * share * count
                if self.mean:
                    spare = 0.5 * (page - 1) * layer.growth_bytes(self.dtype)
                    room = layer.kv_bytes(length, self.dtype) + spare
                else:
                    room = whole.kv_bytes(-(-length // page) * page, self.dtype)
                paged += room * share * count
        return exact, paged, state

    @property
    def _summaries_source(self) -> str:
        return (
            f"of all pages of {self.summary_tokens} tokens, wherever those are: {SUMMARY_ROWS} numbers a channel of K "
            "for each layer with full attention"
        )

    def _summaries(self) -> float:
        if not self.summary_tokens:
            return 0.0
        size = self.dtype.element_bits / 8
        page = sum(
            SUMMARY_ROWS * layer.k * size * self._split(layer) * times
            for layer, times in self.model.unlike_layers.items()
            if layer.kind == "full"
        )
        return page * sum(
            -(-length // self.summary_tokens) * count for length, count in self.lengths.items()
        )

    def _staging(self, kv: float) -> float:
        layers = max(1, self.model.attention_layers)
        over = 2 * kv / layers if self.kv_off else 0.0
        read = self.model.read_bytes(self.weight_bits, self.sequences) / self.gpus
        return over + self.weights_off * read / len(self.model.layers)

    # what would fit

    def longest_context(self, sequences: int | None = None) -> int | None:
        """Tokens that each of ``sequences`` (default: as many as there are) can have; 0 if not even
        one fits, None if memory does not limit it."""
        count = self.sequences if sequences is None else sequences
        return _largest(
            lambda n: self.changed(tokens=n, sequences=count, mean=False).fits, MAX_TOKENS
        )

    def max_sequences(self, tokens: int | None = None) -> int | None:
        """Sequences of ``tokens`` (default: the load's, or its longest) that fit; 0 if none, None if
        memory does not limit them. Hybrid models are limited by state slots too."""
        length = max(self.lengths) if tokens is None else tokens
        return _largest(lambda n: self.changed(tokens=length, sequences=n).fits, MAX_SEQUENCES)

    def remedies(self) -> list[Remedy]:
        """What would make it fit, each checked by this same budget; none if it fits."""
        from kvtier.cost.remedies import remedies

        return remedies(self)

    # for people and programs

    def to_json(self) -> dict[str, object]:
        """Plain values; sizes in bytes."""
        lengths = self.tokens
        return {
            "model": self.model.name,
            "vram_bytes": self.capacity,
            "usable_bytes": round(self.usable),
            "gpus": self.gpus,
            "sequences": self.sequences,
            "tokens": list(lengths) if isinstance(lengths, tuple) else lengths,
            "kv_dtype": self.dtype.name,
            "parts": [
                {"name": part.name, "bytes": round(part.nbytes), "source": part.source}
                for part in self.parts
            ],
            "used_bytes": round(self.used),
            "free_bytes": round(self.free),
            "fits": self.fits,
            "longest_context": self.longest_context(),
            "max_sequences": self.max_sequences(),
            "remedies": [one.to_json() for one in self.remedies()],
            "units": "bytes; GB = 1e9 bytes, GiB = 2^30 bytes",
        }

    def lines(self) -> list[str]:
        """A line a part, in GiB, and the verdict."""
        rows = [f"{part.name:<16}{part.nbytes / 2**30:>9.2f} GiB" for part in self.parts]
        verdict = "free" if self.fits else "too much"
        return [
            *rows,
            f"{verdict:<16}{abs(self.free) / 2**30:>9.2f} GiB of {format_size(self.usable)}",
        ]


@dataclass(frozen=True)
class Remedy:
    """Something that makes a load fit.

    Attributes:
        kind: ``context``, ``kv_dtype``, ``sequences``, ``weights``, ``card``, ``gpus``,
            ``weights_off`` or ``kv_off``.
        text: one sentence.
        change: arguments of ``memory_budget`` (``Budget.changed``) with which it fits.
    """

    kind: str
    text: str
    change: dict[str, object]

    def to_json(self) -> dict[str, object]:
        change = {
            name: value.slug if isinstance(value, Card) else value
            for name, value in self.change.items()
        }
        return {"kind": self.kind, "text": self.text, "change": change}


def memory_budget(
    model: ModelShape,
    vram: int | Card,
    *,
    sequences: int = 1,
    tokens: int | Sequence[int] = 8192,
    mean: bool = False,
    dtype: str | KVDtype = "bf16",
    weight_bits: float | None = None,
    page_tokens: int = 16,
    chunk: int = DEFAULT_CHUNK,
    buffers: RuntimeBuffers | None = None,
    gpus: int = 1,
    weights_off: float = 0.0,
    kv_off: float = 0.0,
    utilization: float = 1.0,
    state_slots: int | None = None,
    summary_tokens: int = 0,
) -> Budget:
    """Where the memory goes.

    Args:
        vram: bytes of a GPU, all of them usable, or a card, of which the driver keeps a part.
        tokens: of each sequence, or a list of lengths, one a sequence (then ``sequences`` may be left
            out). mean: ``tokens`` is a mean of unlike lengths, so half a page a sequence is lost.
        dtype: of the KV cache. weight_bits: of a weight; None: as stored.
        chunk: tokens of a prefill step.
        buffers: what else takes memory; None: the defaults.
        gpus: cards that share the load by tensor parallelism, each with ``vram``.
        weights_off, kv_off: fraction kept outside the GPU.
        utilization: share of the memory that the engine may fill (vLLM's
            ``gpu_memory_utilization``).
        state_slots: recurrent states that the engine has room for, if it sets a number.
        summary_tokens: tokens of a page whose keys are summarised for selection; 0: there are no summaries.

    Raises:
        ConfigError: an argument is out of its range.
    """
    lengths = tokens if isinstance(tokens, int) else tuple(tokens)
    if isinstance(lengths, tuple) and sequences == 1:
        sequences = len(lengths)
    return Budget(
        model,
        vram,
        sequences,
        lengths,
        mean,
        kv_dtype(dtype),
        weight_bits,
        page_tokens,
        chunk,
        buffers or RuntimeBuffers(),
        gpus,
        weights_off,
        kv_off,
        utilization,
        state_slots,
        summary_tokens,
    )


def _largest(fits: Callable[[int], bool], limit: int) -> int | None:
    """Largest n in 1..limit with ``fits(n)``, which holds up to some n; 0 if for none, None if for
    all."""
    high = 1
    while high < limit and fits(high):
        high = min(2 * high, limit)
    found = bisect.bisect_left(range(1, high + 1), True, key=lambda n: not fits(n))
    return None if found == limit else found
