"""What offloading costs, in bytes a token and in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cost.cliff import DecodeStep, Level
from kvtier.devices.cards import Card, LinkKind
from kvtier.devices.spec import CardSpec, parse_card
from kvtier.errors import ConfigError
from kvtier.units import format_size

#: Sequential reads of an ordinary NVMe drive on PCIe 3.0 x4; assumed, not measured.
DISK_BANDWIDTH = 3.0e9

#: Bytes of a copy that reaches the full rate of a link.
LARGE_COPY = 2**30


@dataclass(frozen=True)
class Estimate:
    """A decode step on a named card.

    Attributes:
        card: whose bandwidths were used.
        link: the kind of host memory the copies come from.
        step: the bytes and bandwidths.
    """

    card: Card
    link: LinkKind
    step: DecodeStep

    @property
    def slowdown(self) -> float:
        return self.step.slowdown

    @property
    def level(self) -> Level:
        return self.step.level

    def basis(self) -> str:
        """What the number rests on."""
        step = self.step
        disk = f", disk {_rate(step.disk_bw)} assumed" if step.disk_bytes else ""
        return (
            f"1 + f(r-1) with f = {step.link_fraction:.0%} of the bytes read per token, "
            f"{self.card.name}: VRAM {_rate(step.vram_bw)}, {self.link} copies "
            f"{_rate(step.link_bw)}{disk}; no overlap counted, within about a factor of 2"
        )

    def warning(self, kv_bytes: int) -> str | None:
        """One sentence before the work starts; None below a slowdown of 1.3."""
        if self.level == "none":
            return None
        cold = self.step.link_bytes / max(1.0, self.step.kv_bytes)
        return (
            f"{self.level}: decoding would be about {self.slowdown:.1f}x slower on "
            f"{self.card.name} than with all KV in VRAM, because {cold:.0%} of the KV crosses the "
            f"link for every token ({self.basis()}). Instead: --vram {-(-kv_bytes // 2**20)}MiB "
            "or more, a shorter prompt, or KV in 16 bits"
        )


def named_card(device: str, device_name: str) -> CardSpec | None:
    """The card and link of a device; None if it is none of the table.

    Args:
        device: as given to ``kvtier.devices.open_device``, e.g. "emulated:rtx-4090,link=pageable".
        device_name: ``Device.name`` of what that opened, e.g. "cuda:0 NVIDIA GeForce RTX 4090".
    """
    kind, _, rest = device.partition(":")
    if kind == "emulated" and rest:
        return parse_card(rest)
    try:
        return parse_card(device_name.partition(" ")[2])
    except ConfigError:
        return None


def estimate(
    spec: CardSpec, *, weight_bytes: float, kv_bytes: float, link_bytes: float, disk_bytes: float
) -> Estimate:
    """Bytes that one decode step reads, as ``DecodeStep`` names them, on the card of ``spec``."""
    step = DecodeStep(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        link_bytes=min(link_bytes, kv_bytes),
        disk_bytes=min(disk_bytes, kv_bytes),
        vram_bw=spec.card.memory_bandwidth,
        link_bw=spec.link.rate("h2d", LARGE_COPY, pinned=spec.kind != "pageable"),
        disk_bw=DISK_BANDWIDTH,
    )
    return Estimate(spec.card, spec.kind, step)


def moved_words(per_token: dict[str, float]) -> str:
    """``{"host->vram": 1e8}`` -> "each new token moved 95.4 MiB from host to vram"."""
    moved = [
        f"{format_size(nbytes)} from {link.replace('->', ' to ')}"
        for link, nbytes in per_token.items()
        if nbytes >= 1
    ]
    if not moved:
        return "no KV moved between the tiers while decoding"
    return "each new token moved " + " and ".join(moved)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"
