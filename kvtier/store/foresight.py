"""What a store says before it gets slow, once."""

from __future__ import annotations

from kvtier.cost.coded import Codecs
from kvtier.cost.tier_load import Expected, TierLoad, card_of, tier_load
from kvtier.devices.base import Device
from kvtier.layout import PageLayout


class Foresight:
    """Predicts what tiers of given sizes cost a load, and warns.

    Nothing is said where nothing is known: without ``Expected``, or on a card that the table does
    not have. What was said is said again only when it gets a level worse.

    Args:
        sizes: bytes of the tiers ``vram``, ``host`` and ``disk``.
        codecs: names of the codecs of ``host`` and ``disk``.
    """

    def __init__(
        self, layout: PageLayout, device: Device, sizes: dict[str, int], codecs: dict[str, str]
    ) -> None:
        self._layout = layout
        self._card = card_of(device)
        self._sizes = sizes
        self._codecs = Codecs.of(layout, **codecs)
        self._said: dict[str, int] = {}

    def tell(self, expected: Expected, *, stacklevel: int = 1) -> TierLoad | None:
        """Warn of what will be slow. The load as it was predicted; None if the card is not known."""
        if self._card is None:
            return None
        card, kind = self._card
        load = tier_load(
            self._layout,
            card,
            expected,
            vram=self._sizes["vram"],
            host=self._sizes["host"],
            disk=bool(self._sizes["disk"]),
            link=kind,
            codecs=self._codecs,
        )
        for one in load.warnings():
            if one.loudness > self._said.get(one.kind, 0):
                self._said[one.kind] = one.loudness
                one.announce(stacklevel + 1)
        return load
