"""The outlook of a store: its tiers and its device are known, the model only by its pages.

``Expected`` says what else is needed for a prediction. Whoever opens a store or a session with it
learns at once whether the slow path will be needed, and what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvtier.cost.choose import Choice, choose_mode
from kvtier.cost.coded import Codecs
from kvtier.cost.constants import DEFAULTS
from kvtier.cost.geometry import LayerShape
from kvtier.cost.outlook import Load
from kvtier.cost.profile import own_profile
from kvtier.cost.shape import ModelShape, StoredWeights
from kvtier.devices.cards import Card, LinkKind, find_card
from kvtier.errors import ConfigError
from kvtier.layout import PageLayout


@dataclass(frozen=True)
class Expected:
    """What a store will be used for.

    Attributes:
        tokens: of the longest sequence, prompt and new tokens.
        weight_bytes: of weights that a decode step reads: all but the rows of an input embedding.
        sequences: decoded together.
    """

    tokens: int
    weight_bytes: int
    sequences: int = 1

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("weight_bytes", 0), ("sequences", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"expected {name} is {value}; give {least} or more")


@dataclass(frozen=True)
class TierLoad(Load):
    """A load whose KV lies in the tiers of a store.

    Attributes:
        kv_bytes: of all sequences, in whole pages.
    """

    kv_bytes: int = 0

    def proposals(self) -> Iterator[tuple[str, str, Load]]:
        """Larger tiers, or less to keep."""
        everything = -(-self.kv_bytes // 2**20)
        yield (
            f"a VRAM tier of {everything} MiB, which holds all KV",
            f"vram {everything}MiB",
            self.resident,
        )
        if self.disk_share:
            yield (
                "a host tier that holds what is not in VRAM",
                f"host {-(-round(self.kv_off * self.kv_bytes * self.codecs.host_share) // 2**20)}MiB",
                replace(self, disk_off=0.0, link=self.work.kv_link),
            )
        half = self.context // 2
        if half:
            held = (1 - self.kv_off) * self.kv_bytes
            off = max(0.0, 1 - held / (self.kv_bytes / 2))
            disk = max(0.0, self.kv_off * self.disk_share - 0.5) / 0.5
            yield (
                f"half the tokens ({half:,})",
                "a shorter prompt",
                replace(self, context=half, kv_off=off, disk_off=min(off, disk)),
            )
        if self.sequences > 1:
            off = max(0.0, 1 - (1 - self.kv_off) * self.sequences)
            yield (
                "one sequence at a time",
                "fewer rows",
                replace(self, sequences=1, kv_off=off, disk_off=min(off, self.disk_off or 0.0)),
            )


def tier_load(
    layout: PageLayout,
    card: Card,
    expected: Expected,
    *,
    vram: int,
    host: int,
    disk: bool = False,
    link: str = "pinned",
    codecs: Codecs | None = None,
) -> TierLoad:
    """The load that ``expected`` puts on tiers of ``vram`` and ``host`` bytes; what fits in neither
    is on disk.

    Args:
        disk: there is a disk tier, from which prompts are restored.
        link: of the card to host memory.
        codecs: of the tiers below VRAM, for these pages.
    """
    codecs = codecs or Codecs()
    kv_bytes = stored_bytes(layout, expected)
    cold = max(0, kv_bytes - vram)
    # The oldest pages are the cold ones, and of a window only the newest tokens are read.
    load = moved_load(
        layout,
        card,
        expected,
        link=link,
        link_bytes=_read_of(layout, expected, cold / kv_bytes),
        disk_bytes=_read_of(layout, expected, max(0, cold - host / codecs.host_share) / kv_bytes),
    )
    return replace(load, disk_prefix=disk, codecs=codecs)


def card_of(device: object) -> tuple[Card, LinkKind] | None:
    """The card of a device and its kind of link; None if it is none of the table."""
    card = getattr(device, "card", None)
    if isinstance(card, Card):
        # At a scale, bytes are not those of the load.
        kind: LinkKind = getattr(device, "link_kind", "pinned")
        return (card, kind) if getattr(device, "scale", 1.0) == 1.0 else None
    try:
        return find_card(getattr(device, "name", "").partition(" ")[2]), "pinned"
    except ConfigError:
        return None


def tier_choice(
    layout: PageLayout,
    device: object,
    sizes: Mapping[str, int],
    *,
    tokens: int,
    weight_bytes: int,
    split: str = "",
) -> Choice:
    """The exact mode in which a sequence decodes faster from tiers of these ``sizes``.

    Rates are those of this machine's profile, if there is one (``kvtier calibrate``).

    Args:
        tokens: of the sequence; 0 if they are not known: then as many as VRAM and host RAM hold.
        split: why ``exact-split`` cannot be used; empty if it can.
    """
    known = card_of(device)
    if known is None:
        return choose_mode(None, split=split)
    card, link = known
    held = (sizes["vram"] + sizes["host"]) // layout.page_bytes * layout.page_tokens
    expected = Expected(max(1, tokens or held), weight_bytes)
    load = tier_load(layout, card, expected, vram=sizes["vram"], host=sizes["host"], link=link)
    profile, _ = own_profile()
    constants = DEFAULTS if profile is None else profile.constants(card)
    return choose_mode(load.work, constants=constants, split=split)


def stored_bytes(layout: PageLayout, expected: Expected) -> int:
    """KV of all sequences in whole pages."""
    return layout.pages(expected.tokens) * layout.page_bytes * expected.sequences


def _read_of(layout: PageLayout, expected: Expected, share: float) -> float:
    """Bytes that a step reads of the first ``share`` of the tokens."""
    tokens, read = expected.tokens, 0.0
    for layer in layout.layers:
        seen = tokens if layer.window is None else min(tokens, layer.window)
        bits = layer.k_token_bits + layer.v_token_bits
        read += max(0.0, seen - (1 - share) * tokens) * bits / 8
    return read * expected.sequences


def moved_load(
    layout: PageLayout,
    card: Card,
    expected: Expected,
    *,
    link: str,
    link_bytes: float,
    disk_bytes: float,
) -> TierLoad:
    """The load in which a decode step moves ``link_bytes`` to VRAM, ``disk_bytes`` of them from
    disk."""
    read = layout.sequence_bytes(expected.tokens) * expected.sequences
    off = min(1.0, link_bytes / max(1, read))
    return TierLoad(
        shape_of(layout, expected.weight_bytes),
        card,
        expected.tokens,
        sequences=expected.sequences,
        kv_off=off,
        disk_off=min(off, disk_bytes / max(1, read)),
        link=link,
        asked=(),
        page_tokens=layout.page_tokens,
        kv_bytes=stored_bytes(layout, expected),
    )


def shape_of(layout: PageLayout, weight_bytes: int) -> ModelShape:
    """A model with the pages of ``layout``, in 16 bits: elements of another size count as more or
    fewer of them, since only their bytes matter."""

    def shape(index: int) -> LayerShape:
        layer, plane = layout.layers[index], planes.get(index)
        if plane is None:
            return (
                LayerShape("state", state_bytes=layer.state_bytes)
                if layer.state_bytes
                else LayerShape("none")
            )
        k, v = (part.nbytes // layout.page_tokens // 2 for part in (plane.k, plane.v))
        return LayerShape("sliding" if layer.window else "full", k, v, layer.window or 0)

    planes = {plane.layer: plane for plane in layout.planes if plane is not None}
    return ModelShape(
        "the loaded model",
        tuple(shape(index) for index in range(len(layout.layers))),
        shared_params=weight_bytes / 2,
        stored=StoredWeights(float(weight_bytes), source="read a step, as given"),
        source="the layout of the pages",
    )
