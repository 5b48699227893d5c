"""Graphics cards and the links that join them to host memory, as priors to plan with and to
emulate.

The table ``gpus.csv`` names a source for every row. Link rates are what copies reach, not what the
bus promises; each says where it comes from. All of it is to be replaced by measurements where
there are any. Rates are bytes per second (1 GB/s = 1e9), memory sizes bytes (a "16 GB" card has 16
GiB).
"""

from __future__ import annotations

import csv
import difflib
import functools
import re
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal, get_args

from kvtier.errors import ConfigError

LinkKind = Literal["pinned", "pageable", "fallback"]
Direction = Literal["h2d", "d2h", "d2d"]

DEFAULT_CARD = "rtx-4060-ti-16gb"

#: Bytes per second and lane that the bus promises, by PCIe generation.
_LANE_RATE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

#: (generation, lanes) -> one-way rate of large pinned copies, and its source.
_PINNED_RATE: dict[tuple[int, int], tuple[float, str]] = {
    (3, 8): (6.4e9, "half of x16"),
    (3, 16): (12.3e9, "CUDA C++ Best Practices Guide: 12-13 GB/s"),
    (4, 8): (
        13e9,
        "half of x16: 12.4 (nvbandwidth, NVIDIA forum 352186) to 13.1 (nvbandwidth issue 50)",
    ),
    (4, 16): (25e9, "nvbandwidth: 24.8 (NVIDIA forum 352186), 26.3 (nvbandwidth issue 50)"),
    (5, 8): (26e9, "half of x16"),
    (5, 16): (50e9, "vLLM blog of 2026-01-08 on KV offloading: ~50 GB/s on H100"),
}
_PAGEABLE_SOURCE = (
    "pageable host-to-device copies, staged by the driver: reported 2.8-6.0 GB/s, nearly whatever "
    "the lanes (sglang PR 32032, fiddler 7; NVIDIA forum 238833), and at most half of pinned; the "
    "likely rate is their geometric mean"
)
_FALLBACK_SOURCE = (
    "paging of VRAM into system memory by the driver, the class of pageable copies: 2.8-6.0 GB/s. "
    "It is the class in which 42.5 -> 3.8 tokens/s lies, with a fifth of an 8B Q4_K_M model outside "
    "the VRAM of an RTX 4060 Ti 16GB; nothing is fitted on that"
)

#: Bytes/s of copies that the driver stages: low, likely (the geometric mean), high.
STAGED_RATE = (2.8e9, 4.1e9, 6.0e9)


#: Free memory left alone: Windows drivers page VRAM out instead of failing, so running full is a
#: cliff and not an error.
MARGIN_SHARE = 0.08
MARGIN_BYTES = 512 * 2**20

#: Share of the peak memory bandwidth that streaming reads of weights and KV reach: 0.82-0.85 on an
#: H100 (KV), 0.74-0.82 on GDDR cards (llama.cpp, Q4_K_M weights), 0.80 in inference-sim 415.
VRAM_EFFICIENCY = 0.8

#: Seconds from a kernel's turn to its first byte; assumed.
KERNEL_START_S = 4e-6


def vram_margin(free_bytes: int) -> int:
    """Bytes of free VRAM that are never handed out."""
    return round(max(MARGIN_SHARE * free_bytes, MARGIN_BYTES))


@dataclass(frozen=True)
class LinkClass:
    """One way to reach host memory: a likely rate in bytes/s, the band ``low..high``, and the
    source."""

    kind: LinkKind
    rate: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class LinkModel:
    """Time of a copy between VRAM and host memory::

        host:   submit_s + calls * per_call_s                       (serial with other submissions)
        device: start_s + pieces * per_piece_s + bytes / rate       (one copy engine a direction)

    A piece is a contiguous run of bytes on both sides, a call one driver call.

    Attributes:
        h2d, d2h: bytes/s of large pinned copies in one direction.
        submit_s: Python and torch overhead of a submission; assumed, not measured.
        per_call_s: one ``cudaMemcpyAsync``, 5-7 us (DualPath, arXiv 2602.21548).
        start_s: latency of a copy on the device; assumed, not measured.
        per_piece_s: device time of a descriptor, 1.94 ms for 12,288 (vLLM PR 48434).
        small_piece_bytes, small_piece_count, small_piece_rate: host-to-device batches of many small
            pieces run at 4-7 GB/s below 28 KiB a piece whatever the link (vLLM PR 42212).
        duplex: rate of each direction while both are busy; 83.4 of 2 x 50 GB/s (vLLM blog
            2026-01-08). pageable_factor, pageable_limit: what is left of the rate without pinning.
        engines: copy engines; with 1 the directions take turns.
    """

    h2d: float
    d2h: float
    submit_s: float = 10e-6
    per_call_s: float = 6e-6
    start_s: float = 8e-6
    per_piece_s: float = 0.15e-6
    small_piece_bytes: float = 28 * 1024
    small_piece_count: int = 16
    small_piece_rate: float = 6.5e9
    duplex: float = 0.83
    pageable_factor: float = 0.45
    pageable_limit: float = 8e9
    engines: int = 2

    def __post_init__(self) -> None:
        if not (self.h2d > 0 and self.d2h > 0 and self.pageable_limit > 0):
            raise ConfigError(
                f"a link of {self.h2d} and {self.d2h} bytes/s; rates must be positive"
            )
        if not 0.0 < self.duplex <= 1.0:
            raise ConfigError(f"duplex is {self.duplex}; it must lie in (0, 1]")
        if self.engines not in (1, 2):
            raise ConfigError(
                f"engines is {self.engines}; give 1 (both directions take turns) or 2 (one each)"
            )

    def scaled(self, factor: float) -> LinkModel:
        """The link for data that was made ``factor`` times as large: the same seconds for the same
        copies. Rates and sizes are multiplied, latencies and counts stay."""
        return replace(
            self,
            h2d=self.h2d * factor,
            d2h=self.d2h * factor,
            small_piece_bytes=self.small_piece_bytes * factor,
            small_piece_rate=self.small_piece_rate * factor,
            pageable_limit=self.pageable_limit * factor,
        )

    def rate(
        self, direction: Direction, nbytes: int, pieces: int = 1, pinned: bool = True
    ) -> float:
        """Bytes/s of a copy while nothing else uses the link. ``d2d`` does not use it:
        ConfigError."""
        if direction == "d2d":
            raise ConfigError("a d2d copy does not use the link; give h2d or d2h")
        rate = self.h2d if direction == "h2d" else self.d2h
        if (
            direction == "h2d"
            and pieces >= self.small_piece_count
            and nbytes < pieces * self.small_piece_bytes
        ):
            rate = min(rate, self.small_piece_rate)
        return rate if pinned else min(rate * self.pageable_factor, self.pageable_limit)

    def host_s(self, calls: int = 1) -> float:
        """Seconds that submitting a copy of ``calls`` driver calls takes the host thread."""
        return self.submit_s + calls * self.per_call_s

    def device_s(
        self, direction: Direction, nbytes: int, pieces: int = 1, pinned: bool = True
    ) -> float:
        """Seconds from the start of a copy on the link to its end, nothing else using the link."""
        rate = self.rate(direction, nbytes, pieces, pinned)
        return self.start_s + pieces * self.per_piece_s + nbytes / rate


@dataclass(frozen=True)
class Card:
    """A card: sizes in bytes, rates in bytes/s and FLOP/s.

    Attributes:
        name: as people write it, "RTX 4060 Ti 16GB".
        vram_bytes: its memory.
        memory_bandwidth: peak rate of its memory; 80-92 % of it is reached by streaming reads.
        bf16_flops: dense bf16 (or fp16) tensor peak; None if unknown.
        pcie_gen, pcie_lanes: the host link; None for ``unified`` cards, whose memory is the host's.
        pinned_rate: bytes/s of large pinned copies where they were measured; else from the table.
        source: where memory size, bandwidth and link come from.
        flops_source: where ``bf16_flops`` comes from.
        note: what to know about the numbers.
    """

    name: str
    vram_bytes: int
    memory_bandwidth: float
    bf16_flops: float | None = None
    pcie_gen: int | None = None
    pcie_lanes: int | None = None
    unified: bool = False
    source: str = ""
    flops_source: str = ""
    note: str = ""
    pinned_rate: float | None = None

    def __post_init__(self) -> None:
        if self.vram_bytes <= 0 or self.memory_bandwidth <= 0:
            raise ConfigError(
                f"card {self.name!r} has {self.vram_bytes} bytes of memory at "
                f"{self.memory_bandwidth} bytes/s; both must be positive"
            )
        if self.pinned_rate is not None:
            if not self.pinned_rate > 0:
                raise ConfigError(
                    f"card {self.name!r} has a link of {self.pinned_rate} bytes/s; it must be > 0"
                )
            return
        if not self.unified and (self.pcie_gen not in _LANE_RATE or not self.pcie_lanes):
            raise ConfigError(
                f"card {self.name!r} has PCIe generation {self.pcie_gen!r} and {self.pcie_lanes!r} "
                f"lanes; give a generation of {', '.join(map(str, _LANE_RATE))} and the lanes, "
                "or unified=True"
            )

    @property
    def slug(self) -> str:
        """The name as an option: "rtx-4060-ti-16gb"."""
        return _slug(self.name)

    def link(self, kind: LinkKind) -> LinkClass:
        """What a copy between this card and host memory of ``kind`` reaches, one way.

        ``pinned``: page-locked memory, DMA. ``pageable``: ordinary memory, staged by the driver.
        ``fallback``: the driver itself pages VRAM out ("sysmem fallback"). The memory of a
        ``unified`` card is the host's: a copy reads and writes it, so half its bandwidth, for
        every kind.
        """
        if kind not in get_args(LinkKind):
            raise ConfigError(f"link kind {kind!r} is unknown; use {', '.join(get_args(LinkKind))}")
        if self.unified and self.pinned_rate is None:
            half = self.memory_bandwidth / 2
            source = "half the memory bandwidth: a copy inside one memory reads and writes"
            return LinkClass(kind, half, 0.7 * half, half, source)
        pinned, source = self._pinned_rate()
        if kind == "pinned":
            return LinkClass(kind, pinned, 0.9 * pinned, 1.1 * pinned, source)
        low, likely, high = (min(rate, 0.5 * pinned) for rate in STAGED_RATE)
        source = _PAGEABLE_SOURCE if kind == "pageable" else _FALLBACK_SOURCE
        return LinkClass(kind, likely, low, high, source)

    def link_model(self, kind: LinkKind = "pinned", rate: float | None = None) -> LinkModel:
        """The copy-time model of this card's link, equal in both directions.

        ``pageable`` is the pinned link used from memory that is not pinned (the emulated device
        gives such memory); ``fallback`` is a link at the driver's paging rate for every copy.

        Args:
            rate: bytes/s that large copies of that kind reach, if it is not to be the table's.
        """
        likely = self.link(kind).rate if rate is None else rate
        if kind != "pageable":
            return LinkModel(h2d=likely, d2h=likely)
        pinned = max(likely, self.link("pinned").rate)
        return LinkModel(h2d=pinned, d2h=pinned, pageable_factor=1.0, pageable_limit=likely)

    @property
    def bus_rate(self) -> float:
        """Bytes/s that the host link promises one way: what no copy can exceed. Of a ``unified``
        card, that of its memory."""
        if self.pcie_gen in _LANE_RATE and self.pcie_lanes:
            return _LANE_RATE[self.pcie_gen] * self.pcie_lanes
        return self.pinned_rate or self.memory_bandwidth

    @property
    def usable_bytes(self) -> int:
        """Memory that may be handed out: all of it less ``vram_margin``."""
        return self.vram_bytes - vram_margin(self.vram_bytes)

    def _pinned_rate(self) -> tuple[float, str]:
        if self.pinned_rate is not None:
            return self.pinned_rate, "given with the card"
        assert self.pcie_gen is not None
        assert self.pcie_lanes is not None
        known = _PINNED_RATE.get((self.pcie_gen, self.pcie_lanes))
        if known is not None:
            return known
        rate = 0.8 * _LANE_RATE[self.pcie_gen] * self.pcie_lanes
        return rate, "0.8 of the bus rate, as PCIe 4.0 x16 reaches (NVIDIA forum 352186)"


@functools.cache
def cards() -> tuple[Card, ...]:
    """All cards of ``gpus.csv``, in its order."""
    text = files("kvtier.devices").joinpath("gpus.csv").read_text(encoding="utf-8")
    return tuple(_card(row) for row in csv.DictReader(text.splitlines()))


def find_card(name: str) -> Card:
    """The card of that name: "rtx-4060-ti-16gb", "RTX 4060 Ti 16GB" or "NVIDIA GeForce RTX 4090".

    Raises:
        ConfigError: no such card; the message gives the nearest names.
    """
    by_slug = {card.slug: card for card in cards()}
    wanted = _slug(re.sub(r"(?i)\b(nvidia|geforce|amd|radeon)\b", " ", name))
    if wanted in by_slug:
        return by_slug[wanted]
    near = [slug for slug in by_slug if wanted and slug.startswith(wanted)]
    near += difflib.get_close_matches(wanted, by_slug, n=4, cutoff=0.5)
    hint = ", ".join(dict.fromkeys(near[:5])) or "e.g. " + DEFAULT_CARD
    raise ConfigError(f"card {name!r} is unknown; nearest of {len(by_slug)} known cards: {hint}")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _card(row: dict[str, str]) -> Card:
    tflops = row["bf16_dense_tflops"]
    return Card(
        name=row["name"],
        vram_bytes=round(float(row["vram_gb"]) * 2**30),
        memory_bandwidth=float(row["mem_bw_gbs"]) * 1e9,
        bf16_flops=float(tflops) * 1e12 if tflops else None,
        pcie_gen=int(row["pcie_gen"]) if row["pcie_gen"] else None,
        pcie_lanes=int(row["pcie_lanes"]) if row["pcie_lanes"] else None,
        unified=row["unified_memory"] == "1",
        source=row["source_vram_bw_pcie"],
        flops_source=row["source_tflops"],
        note=row["note"],
    )
