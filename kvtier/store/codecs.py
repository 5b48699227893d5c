"""How the tiers of a store keep pages: as they are, or in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.errors import ConfigError
from kvtier.layout import PageLayout
from kvtier.tiers.codec import PageCodec, codec_of


class StoreCodecs:
    """The codecs of the tiers below VRAM.

    Args:
        layout: of the pages.
        names: name of the codec by tier, ``host`` and ``disk``; ``none`` for none.
        sizes: bytes of the tiers.

    Raises:
        ConfigError: a codec is unknown, cannot code such pages, or has no tier.
    """

    def __init__(
        self, layout: PageLayout, names: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        self._layout = layout
        self._codecs = {
            tier: codec_of(layout, name, f"{tier}_codec") for tier, name in names.items()
        }
        for tier, codec in self._codecs.items():
            if codec is not None and not sizes[tier]:
                raise ConfigError(
                    f"{tier}_codec is {codec.name}, but there is no {tier} tier; "
                    f"give {tier} a size or leave the codec out"
                )

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(self._codecs.values())

    def of(self, tier: str) -> PageCodec | None:
        """The codec of a tier."""
        return self._codecs.get(tier)

    def all(self) -> list[PageCodec]:
        """Those that there are."""
        return [codec for codec in self._codecs.values() if codec is not None]

    def page_bytes(self, tier: str) -> int:
        """Bytes of a page in a tier."""
        codec = self.of(tier)
        return self._layout.page_bytes if codec is None else codec.page_bytes

    @property
    def text(self) -> str:
        """For identities: empty if all tiers keep pages as they are, else how each one that does not codes them."""
        return ", ".join(f"{tier} {codec.text}" for tier, codec in self._codecs.items() if codec)

    def folder(self) -> dict[str, Any]:
        """What the disk tier is told of its pages. A folder of another codec has another digest, so it is refused."""
        codec, layout = self.of("disk"), self._layout
        if codec is None:
            return {
                "layout_digest": layout.digest,
                "page_bytes": layout.page_bytes,
                "plane_ranges": layout.ranges,
                "layout_info": layout.describe(),
            }
        return {
            "layout_digest": codec.digest,
            "page_bytes": codec.page_bytes,
            "plane_ranges": codec.ranges,
            "layout_info": layout.describe() | {"codec": codec.text},
        }

    def stats(self, tier: str) -> dict[str, Any]:
        """What ``TierStats`` says of a tier's codec."""
        codec = self.of(tier)
        if codec is None:
            return {}
        return {
            "codec": codec.name,
            "pages_coded": codec.stats.pages,
            "worst_error": codec.stats.worst,
            "relative_error": codec.stats.error,
        }
