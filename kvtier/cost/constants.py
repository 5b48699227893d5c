"""Every number that an estimate takes from elsewhere, with its unit and its source, in one table.

Rates of memory and of links that belong to a card are the card's (``kvtier.devices.cards``). All
other numbers are here. A constant is either from a table or measured on this machine
(``kvtier calibrate``); ``Constants.measured`` puts measurements in the place of table values, and
every estimate says which it used.

Constants marked "fitted" come from one published row each; ``bench/cliff_points.py`` leaves those
rows out when it counts errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvtier.cost.churn import CHURN
from kvtier.cost.decode import STEP_S
from kvtier.cost.links import DISK_RATE
from kvtier.devices.cards import STAGED_RATE, VRAM_EFFICIENCY
from kvtier.errors import ConfigError

#: Units in which more is faster; of the others (seconds, shares read) less is.
_RATES = ("bytes/s", "share of peak", "share of link")


@dataclass(frozen=True)
class Constant:
    """A number and where it is from.

    Attributes:
        unit: "bytes/s", "s", "share of peak", ...
        measured: on this machine; otherwise from the source named.
        low, high: the band in which it was seen.
    """

    name: str
    value: float
    unit: str
    source: str
    measured: bool = False
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.low or self.value, self.high or self.value
        if not 0 < low <= self.value <= high:
            raise ConfigError(
                f"constant {self.name} is {self.value:g} {self.unit} in a band of {low:g} to "
                f"{high:g}; give a positive value inside its band"
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    @property
    def basis(self) -> str:
        """``measured`` or ``table``."""
        return "measured" if self.measured else "table"

    @property
    def slow(self) -> float:
        """The end of the band at which things take longest."""
        return self.low if self.unit in _RATES else self.high

    @property
    def fast(self) -> float:
        """The other end."""
        return self.high if self.unit in _RATES else self.low

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "low": self.low,
            "high": self.high,
            "basis": self.basis,
            "source": self.source,
        }


class Constants(Mapping[str, float]):
    """Constants by name; ``constants["step_s"]`` is the value, ``constants.get_constant`` all of it.

    Raises:
        ConfigError: a name is given twice, or asked for and not there.
    """

    def __init__(self, items: Iterable[Constant]) -> None:
        table: dict[str, Constant] = {}
        for item in items:
            if item.name in table:
                raise ConfigError(f"constant {item.name} is given twice; give it once")
            table[item.name] = item
        self._table: Mapping[str, Constant] = MappingProxyType(table)

    def __getitem__(self, name: str) -> float:
        return self.get_constant(name).value

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def get_constant(self, name: str) -> Constant:
        """The constant of that name."""
        if name not in self._table:
            raise ConfigError(f"constant {name!r} is unknown; use one of {', '.join(self._table)}")
        return self._table[name]

    def measured(self, values: Mapping[str, Constant | float]) -> Constants:
        """These constants with some replaced by measurements of this machine.

        Args:
            values: name -> a Constant, or a value that takes the unit of the one it replaces.
        """
        table = dict(self._table)
        for name, value in values.items():
            old = self.get_constant(name)
            if isinstance(value, Constant):
                table[name] = replace(value, name=name, measured=True)
            else:
                table[name] = Constant(name, value, old.unit, "measured here", True)
        return Constants(table.values())

    def with_value(self, name: str, value: float, source: str = "given") -> Constants:
        """These constants with one given by the caller, without a band."""
        table = dict(self._table)
        table[name] = Constant(name, value, self.get_constant(name).unit, source)
        return Constants(table.values())

    @property
    def slow(self) -> Constants:
        """All constants at the slow end of their bands."""
        return Constants(replace(c, value=c.slow) for c in self._table.values())

    @property
    def fast(self) -> Constants:
        """All constants at the fast end of their bands."""
        return Constants(replace(c, value=c.fast) for c in self._table.values())

    def pick(self, *names: str) -> tuple[Constant, ...]:
        """The constants of these names, for a basis."""
        return tuple(self.get_constant(name) for name in names)


_SPARSE = "SparseEngine results of 2026-09-23, H100"
_VLLM = "vLLM blog of 2026-01-08 on KV offloading, figure 1, H100, Llama-3.1-8B"

DEFAULTS = Constants(
    (
        # the card
        Constant(
            "vram_efficiency", VRAM_EFFICIENCY, "share of peak",
            "llama.cpp Q4_K_M weights on GDDR cards 0.74-0.82, inference-sim 415: 0.80; 0.91 read "
            "ceiling of an RTX 3090 (ninfer-3090 50)", low=0.74, high=0.92,
        ),
        Constant(
            "hbm_efficiency", 0.84, "share of peak",
            f"KV read by decode steps: 0.82-0.85 ({_SPARSE}, two slopes); 0.82 in inference-sim 415",
            low=0.80, high=0.92,
        ),
        Constant(
            "step_s", STEP_S, "s",
            "vLLM on an H100 about 3 ms, llama.cpp 28196 3.2 ms; a CUDA-graph engine with a CPU "
            "bubble of 0.9 ms (nano-vLLM on H100)", low=0.9e-3, high=5e-3,
        ),
        Constant(
            "sequence_s", 2e-5, "s",
            "per sequence and step: 4-5 ms for 128 sequences against 3 ms for one (nano-vLLM)",
            low=0.8e-5, high=12e-5,
        ),
        Constant(
            "handover_s", 48e-6, "s",
            "per layer whose work waits for another device: K and V, each submitted (10 us), one "
            "driver call (6 us) and a start on the link (8 us); devices.cards.LinkModel",
            low=20e-6, high=150e-6,
        ),
        # the processor computes
        Constant(
            "dram_bw", 51.2e9, "bytes/s",
            "peak of two channels of DDR4-3200; DDR4-2400 38.4, DDR5-5600 89.6", low=38.4e9,
            high=89.6e9,
        ),
        Constant(
            "cpu_efficiency", 0.643, "share of peak",
            "two-channel desktop, llama.cpp: fitted on InventiveHQ ngl 0 (24.7 of 38.4 GB/s)",
            low=0.55, high=0.68,
        ),
        Constant(
            "server_cpu_efficiency", 0.420, "share of peak",
            "eight channels: fitted on llama.cpp PR 8035, ngl 72 (74.6 of 204.8 GB/s, Epyc 7742)",
            low=0.33, high=0.45,
        ),
        Constant(
            "cpu_attention_bw", 1.77e9, "bytes/s",
            "attention over KV in host RAM by a desktop processor: fitted on unsloth PR 9872, 70B "
            "at 16,202 tokens (i5-12400F)", low=1.0e9, high=2.7e9,
        ),
        Constant(
            "server_cpu_attention_bw", 8.98e9, "bytes/s",
            "the same by a server: fitted on unsloth PR 9675, 131,072 tokens", low=5e9, high=12e9,
        ),
        # links
        Constant(
            "pinned_bw", 25e9, "bytes/s",
            "large pinned copies over PCIe 4.0 x16 (nvbandwidth: 24.8-26.3); a card of the table "
            "has its own, which is used unless this one is measured", low=12e9, high=55e9,
        ),
        Constant(
            "pageable_bw", STAGED_RATE[1], "bytes/s",
            "reported 2.8-6.0 GB/s, nearly whatever the lanes (sglang PR 32032, fiddler 7); value: "
            "the geometric mean", low=STAGED_RATE[0], high=STAGED_RATE[2],
        ),
        Constant(
            "fallback_bw", STAGED_RATE[1], "bytes/s",
            "paging of VRAM by the driver, the class of pageable copies: 2.8-6.0 GB/s; value: the "
            "geometric mean", low=STAGED_RATE[0], high=STAGED_RATE[2],
        ),
        Constant(
            "desktop_pageable_bw", 6.24e9, "bytes/s",
            "pageable weights copied layer by layer on a desktop: fitted on HF Accelerate's table, "
            "OPT-30B fp16", low=5e9, high=9.6e9,
        ),
        Constant(
            "weight_stream_efficiency", 0.769, "share of link",
            "what is left of the pinned rate when a framework streams all weights layer by layer: "
            "fitted on FlexGen's table, DeepSpeed OPT-30B on a T4", low=0.7, high=1.0,
        ),
        Constant(
            "framework_disk_bw", 2.0e9, "bytes/s",
            "weights from disk to the card as Accelerate reads them: 1.83-2.22 GB/s (its table)",
            low=1.83e9, high=2.22e9,
        ),
        Constant(
            "disk_bw", DISK_RATE, "bytes/s",
            "sequential reads of an NVMe drive on PCIe 3.0 x4; assumed", low=1.0e9, high=7.0e9,
        ),
        Constant(
            "restore_efficiency", 0.899, "share of link",
            f"of the pinned rate while a serving engine loads: fitted on 100,000 tokens of {_VLLM}",
            low=0.8, high=1.0,
        ),
        # prefill
        Constant(
            "matrix_efficiency", 0.706, "share of peak",
            f"of the bf16 peak: fitted on 10,000 and 100,000 tokens of {_VLLM}", low=0.55, high=0.76,
        ),
        Constant(
            "attention_efficiency", 0.564, "share of peak",
            f"of the bf16 peak: fitted on the same two rows of {_VLLM}", low=0.39, high=0.70,
        ),
        Constant(
            "lowbit_matrix_efficiency", 1.175, "share of peak",
            "of the bf16 peak, for products of 4-bit weights on int8 or fp4 units of GeForce cards: "
            "fitted on ollama PR 16836, llama3.2:3b, 4,107 tokens", low=0.75, high=1.4,
        ),
        # selection, experts, more than one card
        Constant(
            "expert_spread", 1.0, "share of experts",
            "share of the experts among which tokens choose: 1 if all are alike, so that the most "
            "are read", low=0.12, high=1.0,
        ),
        Constant(
            "selection_churn", CHURN, "share of pages",
            "pages chosen that were not chosen a step before: about what Quest has on SmolLM2-135M-Instruct and real "
            "texts (bench/quality.py)", low=0.05, high=1.0,
        ),
        Constant(
            "selection_s", 1.19e-3, "s",
            f"scoring and top-k of a step: fitted on {_SPARSE}, Quest on Qwen3-30B, batch 1",
            low=0.3e-3, high=3e-3,
        ),
        Constant(
            "split_s", 2.15e-3, "s",
            f"a step on more than one card: fitted on {_SPARSE}, Quest on GLM-4.7-Flash, batch 1",
            low=1e-3, high=4e-3,
        ),
        Constant(
            "runtime_reserve", 3e9, "bytes",
            f"activations, graphs and workspace beside weights and KV: gives the limits of {_SPARSE}",
            low=1e9, high=5e9,
        ),
        Constant(
            "usable_share", 0.9, "share of memory",
            "gpu_memory_utilization of serving engines", low=0.85, high=0.95,
        ),
    )
)  # fmt: skip
