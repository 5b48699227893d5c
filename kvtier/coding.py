"""Where everything is in a page that is kept in fewer bits, and what it takes. No torch; ``kvtier.tiers.codec`` codes.

Keys have one scale a channel and page, values one a token and ``V_GROUP`` channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvtier.errors import ConfigError
from kvtier.layout import PLANE_ALIGN, SUMMARY_DTYPES, CodecName, PageLayout, Part, Plane

#: Channels of values that share a scale, where the geometry allows it.
V_GROUP = 32

SCALE_BYTES = 4

#: What a coded page says of its error: the largest absolute one, the sum of squared errors, the sum of squared values.
FACTS = 3
FACTS_BYTES = FACTS * 4


@dataclass(frozen=True)
class CodedPart:
    """Where one part of a plane lies in a coded page; offsets in the page.

    Attributes:
        part: the part as it is uncoded.
        group: channels that share a scale; 0: a scale a channel and page.
        codes, scale, zero: first bytes; ``zero`` is -1 where the format has none.
        stop: end of it.
    """

    part: Part
    group: int
    codes: int
    scale: int
    zero: int
    stop: int


@dataclass(frozen=True)
class CodedPlane:
    """One layer's range in a coded page."""

    layer: int
    offset: int
    nbytes: int
    k: CodedPart
    v: CodedPart


def coded_planes(layout: PageLayout, codec: str) -> tuple[CodedPlane | None, ...]:
    """One entry a layer, as ``PageLayout.planes``, in a page that starts with the first plane.

    Raises:
        ConfigError: the codec is unknown, or cannot code such pages.
    """
    names = [name for name in get_args(CodecName) if name != "none"]
    if codec not in names:
        raise ConfigError(f"codec {codec!r} is unknown; use none, {', '.join(names)}")
    at = 0
    planes: list[CodedPlane | None] = []
    for plane in layout.planes:
        if plane is None:
            planes.append(None)
            continue
        k = _part(layout, codec, plane, plane.k, at, 0)
        v = _part(layout, codec, plane, plane.v, k.stop, _group(plane.v))
        planes.append(CodedPlane(plane.layer, at, v.stop - at, k, v))
        at = v.stop
    return tuple(planes)


def coded_page_bytes(layout: PageLayout, codec: str) -> int:
    """Bytes of a page in a tier with that codec, scales, error and summaries included; with ``none`` those of a page.
    Raises as ``coded_planes``."""
    if codec == "none":
        return layout.page_bytes
    stop = max(plane.v.stop for plane in coded_planes(layout, codec) if plane is not None)
    return aligned(aligned(stop + FACTS_BYTES) + layout.summary_range[1])


def aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGN) * PLANE_ALIGN


def _part(
    layout: PageLayout, codec: str, plane: Plane, part: Part, at: int, group: int
) -> CodedPart:
    channels, tokens = part.heads * part.dim, layout.page_tokens
    if part.nbytes and (part.dtype not in SUMMARY_DTYPES or channels % 2):
        raise ConfigError(
            f"layer {plane.layer} has {channels} channels of {part.dtype}; codec {codec} needs an even "
            f"number of {', '.join(SUMMARY_DTYPES)}"
        )
    codes = tokens * (channels // 2 if codec == "int4" else channels)
    scales = (tokens * channels // group if group else channels) * SCALE_BYTES
    scale = aligned(at + codes)
    zero = aligned(scale + scales) if codec == "int4" else -1
    stop = aligned((zero if zero >= 0 else scale) + scales)
    return CodedPart(part, group, at, scale, zero, stop if part.nbytes else at)


def _group(part: Part) -> int:
    """The largest even divisor of the channels that is not above ``V_GROUP``."""
    channels = part.heads * part.dim
    return max((n for n in range(2, V_GROUP + 1, 2) if channels and channels % n == 0), default=2)
