"""Load a stored prefix, or compute it again?

A prefix of T tokens has ``sequence_bytes(T)`` bytes. Through a chain of tiers each hop takes

    t0 + pieces c + bytes / rate

and the hops run one after the other, or pipelined in pieces: then the slowest hop counts, and of the
others one piece each. The first token needs one decode step after the load, or the prefill that made
the KV. ``load`` is chosen where that is sooner; the break-even length is the shortest prefix from
which on it stays so. Small pieces go through ``LinkPath``, which has their cliff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvtier.cost.basis import Basis, Estimate
from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.links import LinkPath, link_path
from kvtier.cost.models import ModelShape
from kvtier.cost.prefill import prefill_seconds, prefill_time, vram_constant
from kvtier.cost.slow_links import slow_link
from kvtier.cost.streaming import not_negative
from kvtier.devices.cards import Card, LinkKind
from kvtier.errors import ConfigError

Source = Literal["vram", "host", "disk"]

#: Longest prefix that a break-even is searched in.
LONGEST = 1 << 24


@dataclass(frozen=True)
class Chain:
    """The way of a prefix to VRAM.

    Attributes:
        source: the tier that has it.
        link: kind of host memory it passes: pinned, pageable or fallback.
        pipelined: hops overlap in pieces of a page; otherwise one starts when the last has ended.
        page_tokens: tokens of a page. parts_a_page: contiguous pieces that a page consists of, e.g.
            two a layer where K and V of a layer lie apart; 1 where a page is one run of bytes.
        coded: bytes that move, as a share of those of the KV in VRAM; below 1 with a codec.
    """

    source: Source = "host"
    link: LinkKind = "pinned"
    pipelined: bool = True
    page_tokens: int = 64
    parts_a_page: int = 1
    coded: float = 1.0

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ConfigError(
                f"source {self.source!r} is unknown; use one of {', '.join(get_args(Source))}"
            )
        for name in ("page_tokens", "parts_a_page"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more")

    def __str__(self) -> str:
        way = {"vram": "in VRAM", "host": f"host ({self.link}) -> VRAM"}
        return way.get(self.source, f"disk -> host ({self.link}) -> VRAM") + (
            ", pipelined" if self.pipelined and self.source == "disk" else ""
        )


@dataclass(frozen=True)
class Restore:
    """The decision for one prefix.

    Attributes:
        tokens: its length.
        load, recompute: seconds to the first token by either way, with their bases.
        break_even: shortest prefix from which on loading is sooner; None if it never is.
        chain: the way it would be loaded.
    """

    tokens: int
    load: Estimate
    recompute: Estimate
    break_even: int | None
    chain: Chain = field(repr=False)

    @property
    def choice(self) -> Literal["load", "recompute"]:
        return "load" if self.load.value < self.recompute.value else "recompute"

    @property
    def gain(self) -> float:
        """How many times sooner the first token comes by the better way than by the other."""
        values = (self.load.value, self.recompute.value)
        return max(values) / min(values)

    @property
    def sure(self) -> bool:
        """Whether the bands of the two do not overlap."""
        return self.load.high < self.recompute.low or self.recompute.high < self.load.low

    def to_json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "choice": self.choice,
            "sure": self.sure,
            "load_s": self.load.to_json(),
            "recompute_s": self.recompute.to_json(),
            "break_even_tokens": self.break_even,
            "chain": str(self.chain),
        }


def copy_seconds(path: LinkPath, nbytes: float, pieces: int, constants: Constants) -> float:
    """Seconds of one hop to VRAM, from host RAM or through it: ``t0 + n c + bytes / BW``, with the
    rate of small pieces where they are small, at the share of the link that loading reaches."""
    if nbytes <= 0:
        return 0.0
    fixed = path.model.start_s + pieces * path.model.per_piece_s + path.host_seconds(1)
    return fixed + nbytes / (path.rate(nbytes, pieces) * constants["restore_efficiency"])


def move_seconds(
    model: ModelShape,
    card: Card,
    tokens: float,
    chain: Chain,
    constants: Constants,
    kv_dtype: str = "bf16",
    link_rate: float | None = None,
) -> float:
    """Seconds until a prefix is in VRAM; see ``load_seconds``."""
    not_negative(tokens=tokens)
    nbytes = model.sequence_bytes(tokens, kv_dtype) * chain.coded
    pages = max(1, -(-int(tokens) // chain.page_tokens))
    pieces = pages * chain.parts_a_page
    hops: list[float] = []
    if chain.source == "disk":
        hops.append(nbytes / constants["disk_bw"])
    if chain.source in ("host", "disk"):
        rate = link_rate or slow_link(chain.link, card, constants).likely
        path = link_path(card, chain.link, rate)
        hops.append(copy_seconds(path, nbytes, pieces, constants))
    if len(hops) > 1 and chain.pipelined:
        # A piece on every hop but the slowest is not hidden.
        piece = min(1.0, chain.page_tokens / max(1.0, tokens))
        return max(hops) + (sum(hops) - max(hops)) * piece
    return sum(hops)


def load_seconds(
    model: ModelShape,
    card: Card,
    tokens: float,
    chain: Chain,
    constants: Constants,
    *,
    kv_dtype: str = "bf16",
    weight_bits: float | None = None,
    link_rate: float | None = None,
) -> float:
    """Seconds until the first token of a prefix that is loaded: the hops, then one decode step.

    ``link_rate`` in bytes/s, if it is not to be the likely one of the chain's link.
    """
    moved = move_seconds(model, card, tokens, chain, constants, kv_dtype, link_rate)
    bandwidth = card.memory_bandwidth * constants[vram_constant(card)]
    read = model.read_bytes(weight_bits) + model.read_kv_bytes(tokens, kv_dtype)
    return moved + constants["step_s"] + read / bandwidth


def restore_or_recompute(
    model: ModelShape,
    card: Card,
    tokens: int,
    *,
    chain: Chain | None = None,
    kv_dtype: str = "bf16",
    weight_bits: float | None = None,
    constants: Constants = DEFAULTS,
) -> Restore:
    """Predict both ways to the first token, and choose.

    Args:
        tokens: length of the stored prefix. chain: where it lies; pinned host RAM if None.
        kv_dtype: of the stored KV. weight_bits: of the weights, None: as stored or Q4_K_M.

    Raises:
        ConfigError: a value is out of range, or the card's FLOPS are unknown.
    """
    chain = chain or Chain()

    def load(c: Constants, rate: float, length: float = tokens) -> float:
        return load_seconds(
            model, card, length, chain, c, kv_dtype=kv_dtype, weight_bits=weight_bits,
            link_rate=rate,
        )  # fmt: skip

    def compute(length: float) -> float:
        return prefill_seconds(
            model, card, length, constants, weight_bits=weight_bits, kv_dtype=kv_dtype
        )

    link = slow_link(chain.link, card, constants)
    names = ["restore_efficiency", "step_s", vram_constant(card)]
    basis = Basis(
        inputs={
            "model": model.name, "card": card.name, "tokens": tokens, "kv_dtype": kv_dtype,
            "bytes": model.sequence_bytes(tokens, kv_dtype) * chain.coded, "page_tokens": chain.page_tokens,
            "parts_a_page": chain.parts_a_page,
        },
        formula=f"{chain}; hops of t0 + n c + bytes / BW, then one decode step",
        constants=(*link.constants, *constants.pick(*names, *(["disk_bw"] * (chain.source == "disk")))),
        link=str(link),
        command="kvtier calibrate (disk and links); kvtier run twice with the same prompt and folder",
    )  # fmt: skip
    loaded = Estimate(
        load(constants, link.likely),
        load(constants.fast, link.high),
        load(constants.slow, link.low),
        "s",
        basis,
    )
    recomputed = prefill_time(
        model, card, tokens, weight_bits=weight_bits, kv_dtype=kv_dtype, constants=constants
    )
    first = _break_even(lambda n: load(constants, link.likely, n) < compute(n))
    return Restore(tokens, loaded, recomputed, first, chain)


def decisions(
    model: ModelShape,
    card: Card,
    lengths: Sequence[int],
    *,
    chain: Chain | None = None,
    kv_dtype: str = "bf16",
    weight_bits: float | None = None,
    constants: Constants = DEFAULTS,
) -> list[Restore]:
    """``restore_or_recompute`` for several prefix lengths."""
    return [
        restore_or_recompute(
            model, card, length, chain=chain, kv_dtype=kv_dtype, weight_bits=weight_bits,
            constants=constants,
        )
        for length in lengths
    ]  # fmt: skip


def _break_even(sooner: Callable[[int], bool]) -> int | None:
    """Shortest length from which on ``sooner(length)`` holds. Computing grows faster than loading
    does, so it holds from some length on or never."""
    if not sooner(LONGEST):
        return None
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sooner(middle) else (middle, high)
    return high
