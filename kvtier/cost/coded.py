"""What codecs of the tiers below VRAM make of the bytes that pages take there and on the link."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.coding import coded_page_bytes
from kvtier.cost.shape import KV_DTYPES, ModelShape
from kvtier.errors import ConfigError
from kvtier.layout import LayerLayout, PageLayout


@dataclass(frozen=True)
class Codecs:
    """The codecs of a store's tiers, and what a page then takes as a share of what it takes in VRAM, all of it:
    codes, scales and padding.

    Attributes:
        host, disk: names; ``none``: as it is.
        host_share, disk_share: bytes of a page there over those of a page in VRAM.
    """

    host: str = "none"
    disk: str = "none"
    host_share: float = 1.0
    disk_share: float = 1.0

    @classmethod
    def of(cls, layout: PageLayout, host: str = "none", disk: str = "none") -> Codecs:
        """For pages of a layout.

        Raises:
            ConfigError: a codec is unknown or cannot code such pages.
        """
        shares = (coded_page_bytes(layout, name) / layout.page_bytes for name in (host, disk))
        return cls(host, disk, *shares)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return (self.host, self.disk) != ("none", "none")

    def on_link(self, disk: float) -> float:
        """Bytes on the link of planes that are streamed, as a share of those in VRAM, where the part ``disk`` of them is
        only on disk: the processor decodes that before it is copied."""
        return 1.0 - (1 - disk) * (1 - self.host_share)

    def raised(self, disk: float) -> float:
        """The same of whole pages that come up to VRAM: those pass the link as they are below."""
        return self.on_link(disk) - disk * (1 - self.disk_share)

    def to_json(self) -> dict[str, object]:
        return {
            "host": {"codec": self.host, "share": self.host_share},
            "disk": {"codec": self.disk, "share": self.disk_share},
        }


def codecs_for(
    model: ModelShape, kv_dtype: str, page_tokens: int, *, host: str = "none", disk: str = "none"
) -> Codecs:
    """The codecs for pages of a model.

    Raises:
        ConfigError: a codec is unknown, or KV of such a dtype cannot be coded.
    """
    if (host, disk) == ("none", "none"):
        return Codecs()
    return Codecs.of(pages_of(model, kv_dtype, page_tokens), host, disk)


def pages_of(model: ModelShape, kv_dtype: str, page_tokens: int) -> PageLayout:
    """Pages of a model at full size, K and V of a token as one head each; layers may be unlike.

    Raises:
        ConfigError: a store has no pages of such KV.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"KV of {kv_dtype} is not kept in a store's pages; use {', '.join(KV_DTYPES)}"
        )
    element = KV_DTYPES[kv_dtype][0]
    layers = [
        LayerLayout(
            layer.kind,
            1,
            layer.k,
            element,
            1 if layer.v else 0,
            layer.v,
            element,
            layer.window or None,
        )
        if layer.kind in ("full", "sliding", "latent")
        else LayerLayout("none")
        for layer in model.layers
    ]
    if not any(layer.paged for layer in layers):
        raise ConfigError(f"{model.name} has no KV that is kept in a store's pages")
    return PageLayout(layers, page_tokens)
