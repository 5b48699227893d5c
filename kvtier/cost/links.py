"""How long copies between VRAM and host memory take, and how much of that a decode step sees.

    host:   submit + calls * per_call                     the thread that hands the copy over
    device: t0 + pieces * c + bytes / BW                  the copy engine

with BW lower for host-to-device batches of small pieces, for memory that is not pinned, and while
both directions are busy. The constants and their sources are ``kvtier.devices.cards.LinkModel``'s,
which also times the emulated device: one home, so that an emulated run can only differ from a
prediction by what happens, not by what a byte costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.devices.cards import Card, Direction, LinkKind, LinkModel

#: Bytes/s of sequential reads of an ordinary NVMe drive on PCIe 3.0 x4; assumed, not measured.
DISK_RATE = 3.0e9


@dataclass(frozen=True)
class LinkPath:
    """A link of one kind.

    Attributes:
        kind: ``pinned`` and ``fallback`` copies run beside compute; a ``pageable`` copy blocks the
            thread that starts it until it is over.
        model: its constants.
    """

    kind: LinkKind
    model: LinkModel

    @property
    def blocks(self) -> bool:
        """Whether copies keep their caller waiting, so that nothing overlaps with them."""
        return self.kind == "pageable"

    def rate(self, nbytes: float, pieces: int = 1, direction: Direction = "h2d") -> float:
        """Bytes/s while the bytes flow."""
        return self.model.rate(direction, round(nbytes), pieces, not self.blocks)

    def seconds(self, nbytes: float, pieces: int = 1, direction: Direction = "h2d") -> float:
        """Seconds on the copy engine; 0 for no bytes."""
        if nbytes <= 0:
            return 0.0
        return self.model.device_s(direction, round(nbytes), max(1, pieces), not self.blocks)

    def host_seconds(self, calls: int) -> float:
        """Seconds that submitting takes the host; 0 for no calls."""
        return self.model.host_s(calls) if calls else 0.0

    def effective_rate(self, nbytes: float, pieces: int = 1, direction: Direction = "h2d") -> float:
        """Bytes/s including latency and pieces."""
        return nbytes / self.seconds(nbytes, pieces, direction)

    def half_rate_bytes(self, direction: Direction = "h2d") -> float:
        """Size of a single copy that reaches half of the link's rate."""
        model = self.model
        return (model.start_s + model.per_piece_s) * self.rate(1 << 40, 1, direction)


def link_path(card: Card, kind: LinkKind = "pinned", rate: float | None = None) -> LinkPath:
    """The link of a card. ``rate`` in bytes/s, if it is not to be the table's."""
    return LinkPath(kind, card.link_model(kind, rate))
