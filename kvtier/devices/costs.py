"""Virtual seconds of what an emulated device does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.devices.cards import KERNEL_START_S, Card, Direction, LinkModel
from kvtier.devices.operations import Span

#: ``(reads, writes) -> bytes``; each a list of (buffer, start, stop), disjoint and in order.
Traffic = Callable[[Sequence[Span], Sequence[Span]], int]


class Costs:
    """Times of copies and kernels of one card.

    Args:
        card: at full size.
        link: scaled already.
        scale: of bytes and rates.
        efficiency: share of the memory bandwidth that kernels reach.
        traffic: see ``EmulatedDevice``.
    """

    def __init__(
        self,
        card: Card,
        link: LinkModel,
        *,
        scale: float,
        efficiency: float,
        traffic: Traffic | None,
    ) -> None:
        self._link = link
        self._bandwidth = card.memory_bandwidth * efficiency * scale
        self._flops = card.bf16_flops * scale if card.bf16_flops else None
        self._traffic = traffic

    def copy_s(
        self, direction: Direction, nbytes: int, pieces: int, pinned: bool, slowdown: float
    ) -> float:
        """A copy on its engine; its bytes flow ``slowdown`` times slower than they could."""
        if direction == "d2d":
            return self.vram_s(2 * nbytes * slowdown)
        seconds = self._link.device_s(direction, nbytes, pieces, pinned)
        if slowdown != 1.0:
            rate = self._link.rate(direction, nbytes, pieces, pinned)
            seconds += (slowdown - 1.0) * nbytes / rate
        return seconds

    def kernel_s(self, nbytes: int, reads: Sequence[Span], writes: Sequence[Span]) -> float:
        """A kernel that declares ``nbytes`` in all."""
        return self.vram_s(nbytes if self._traffic is None else self._traffic(reads, writes))

    def compute_s(self, nbytes: float, flops: float) -> float:
        """The longer of memory traffic and arithmetic at the card's peak."""
        seconds = self.vram_s(nbytes)
        if flops and self._flops:
            seconds = max(seconds, KERNEL_START_S + flops / self._flops)
        return seconds

    def vram_s(self, nbytes: float) -> float:
        return KERNEL_START_S + nbytes / self._bandwidth
