"""The ways by which bytes that are not in VRAM are reached, as classes with a band of rates.

The class decides the cliff far more than the card does: pageable copies and the driver's own paging
run at 2.8-6.0 GB/s on almost every machine, pinned copies at 80-90 % of the bus, and a processor
that computes where the weights are reads at a share of its DRAM's peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvtier.cost.constants import DEFAULTS, Constant, Constants
from kvtier.devices.cards import Card
from kvtier.errors import ConfigError

SlowKind = Literal["pinned", "pageable", "fallback", "cpu", "disk"]


@dataclass(frozen=True)
class SlowLink:
    """A link class: rates in bytes/s.

    Attributes:
        likely: what to plan with. low, high: the band of the class.
        measured: ``likely`` was measured on this machine.
        constants: those that the rates are made of.
    """

    kind: SlowKind
    likely: float
    low: float
    high: float
    source: str
    measured: bool = False
    constants: tuple[Constant, ...] = ()

    def __str__(self) -> str:
        if self.measured:
            return f"{self.kind}, {self.likely / 1e9:.3g} GB/s measured"
        return (
            f"{self.kind}, {self.likely / 1e9:.3g} GB/s "
            f"({self.low / 1e9:.3g}-{self.high / 1e9:.3g})"
        )

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "gbs": self.likely / 1e9,
            "low_gbs": self.low / 1e9,
            "high_gbs": self.high / 1e9,
            "source": self.source,
            "measured": self.measured,
        }


def slow_link(
    kind: str, card: Card | None = None, constants: Constants = DEFAULTS, *, server: bool = False
) -> SlowLink:
    """The link class ``kind`` of a card.

    ``pinned``: DMA from page-locked memory. ``pageable``: ordinary memory, staged by the driver.
    ``fallback``: the driver pages VRAM out ("sysmem fallback"). ``cpu``: the processor computes
    with the weights where they are, no copy. ``disk``: read for every step.

    Args:
        card: whose pinned rate counts; None takes a PCIe 4.0 x16 slot.
        server: of ``cpu``: eight channels or more, which reach a smaller share of their peak.

    Raises:
        ConfigError: no such class.
    """
    if kind == "cpu":
        dram = constants.get_constant("dram_bw")
        part = constants.get_constant("server_cpu_efficiency" if server else "cpu_efficiency")
        source = f"{part.value:.0%} of a DRAM peak of {dram.value / 1e9:.3g} GB/s; {part.source}"
        if dram.measured:
            source = dram.source
        return SlowLink(
            "cpu", dram.value * part.value, dram.value * part.low, dram.value * part.high,
            source, dram.measured, (dram, part),
        )  # fmt: skip
    if kind == "disk":
        return _from("disk", constants.get_constant("disk_bw"))
    if kind not in ("pinned", "pageable", "fallback"):
        raise ConfigError(f"link {kind!r} is unknown; use one of {', '.join(get_args(SlowKind))}")
    constant = constants.get_constant(f"{kind}_bw")
    if card is None or constant.measured:
        return _from(kind, constant)  # type: ignore[arg-type]
    named = card.link(kind)  # type: ignore[arg-type]
    rate = Constant(f"{kind}_bw", named.rate, "bytes/s", named.source, False, named.low, named.high)
    return _from(kind, rate)  # type: ignore[arg-type]


def _from(kind: SlowKind, constant: Constant) -> SlowLink:
    return SlowLink(
        kind, constant.value, constant.low, constant.high, constant.source, constant.measured,
        (constant,),
    )  # fmt: skip
