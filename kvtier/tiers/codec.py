"""Pages in fewer bits, for tiers that trade exactness for room. Always asked for by name.

Of each plane the keys are quantised with one scale a channel and page, the values with one a token and ``V_GROUP``
channels (see ``kvtier.kernels.quantise``). A coded page is its coded planes in layer order, each one contiguous range,
the error that was measured when it was coded, and behind that the summaries as they are. So each page tells its own
error, wherever it is. Bytes of no meaning are 0, on the way there and back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvtier.coding import (
    FACTS,
    FACTS_BYTES,
    SCALE_BYTES,
    V_GROUP,
    CodedPart,
    CodedPlane,
    aligned,
    coded_page_bytes,
    coded_planes,
)
from kvtier.errors import ConfigError
from kvtier.kernels.quantise import (
    Format,
    Quantised,
    dequantise,
    quantise_keys,
    quantise_values,
)
from kvtier.layout import PageLayout

CODEC_VERSION = 1


@dataclass
class CodecStats:
    """What coding has cost so far.

    Attributes:
        pages: pages coded.
        worst: largest absolute error of any value.
        squares, energy: sums of squared errors and of squared values.
        last_worst, last_error: of the last page: the largest absolute error, and the relative one (root of the
            mean squared error over that of the mean squared value).
    """

    pages: int = 0
    worst: float = 0.0
    squares: float = 0.0
    energy: float = 0.0
    last_worst: float = 0.0
    last_error: float = 0.0

    @property
    def error(self) -> float:
        """Relative error over all pages."""
        return _relative(self.squares, self.energy)


class PageCodec:
    """Codes pages of one layout.

    Args:
        layout: of the pages; K and V in float32, float16 or bfloat16.
        name: ``fp8``, ``int8`` or ``int4``.

    Raises:
        ConfigError: the name is unknown, or the layout cannot be coded.
    """

    def __init__(self, layout: PageLayout, name: str) -> None:
        self.layout = layout
        self.name = name
        self.stats = CodecStats()
        #: One entry a layer, as ``PageLayout.planes``.
        self.planes = coded_planes(layout, name)
        at = max(plane.v.stop for plane in self.planes if plane is not None)
        #: First byte of what a coded page says of its error.
        self.facts_offset = at
        at = aligned(at + FACTS_BYTES)
        self._summary_at = at
        #: Bytes of a coded page.
        self.page_bytes = coded_page_bytes(layout, name)
        self._gaps = _gaps(self._pieces(), self.page_bytes)
        self._layout_gaps = _gaps(layout.ranges, layout.page_bytes)

    @property
    def text(self) -> str:
        """Name and groups, for identities and people."""
        return f"{self.name} (K a channel and page, V a token and {V_GROUP} channels)"

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ for any two layouts or codecs whose coded pages are not interchangeable."""
        facts = repr((CODEC_VERSION, self.layout.digest, self.text, self.page_bytes, self.ranges))
        return hashlib.blake2b(facts.encode(), digest_size=16, person=b"kvtier.codec").digest()

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first byte, bytes) of what is read by itself, as ``PageLayout.ranges``."""
        planes = [(plane.offset, plane.nbytes) for plane in self.planes if plane is not None]
        size = self.layout.summary_range[1]
        return (*planes, (self._summary_at, size)) if size else tuple(planes)

    @property
    def summary_offset(self) -> int:
        """First byte of the summaries, which are not coded."""
        return self._summary_at

    def plane(self, layer: int) -> CodedPlane:
        plane = self.planes[layer]
        assert plane is not None
        return plane

    # ------------------------------------------------------------------ whole pages

    def encode(self, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Code pages.

        Args:
            pages: uint8 ``[n, layout.page_bytes]``.
            out: uint8 ``[n, page_bytes]``, rows of consecutive bytes.

        Returns:
            float32 ``[n, 3]`` on the pages' device: largest absolute error, sum of squared errors, sum of squared values;
            the coded pages have it too (see ``facts_of``). ``note`` adds it to the statistics.
        """
        facts = torch.zeros(len(pages), FACTS, dtype=torch.float32, device=pages.device)
        for coded in self.planes:
            if coded is None:
                continue
            for side in (coded.k, coded.v):
                if side.part.nbytes:
                    made = self._quantise(pages, side)
                    _put(out, side.codes, made.codes)
                    _put(out, side.scale, made.scale)
                    if side.zero >= 0:
                        _put(out, side.zero, made.zero)
                    facts[:, 0] = torch.maximum(facts[:, 0], made.worst)
                    facts[:, 1:] += made.sums
        _put(out, self.facts_offset, facts)
        for first, stop in self._gaps:
            out[:, first:stop] = 0
        at, size = self.layout.summary_range
        if size:
            out[:, self._summary_at : self._summary_at + size] = pages[:, at : at + size]
        return facts

    def facts_of(self, coded: torch.Tensor) -> torch.Tensor:
        """What ``encode`` measured of the pages ``coded``, uint8 ``[n, page_bytes]``: float32 ``[n, 3]``."""
        return _take(coded, self.facts_offset, (len(coded), FACTS), torch.float32)

    def note(self, facts: torch.Tensor) -> None:
        """Add what ``encode`` returned to the statistics; waits for it. A page with a NaN or an infinity, which no codec
        keeps, leaves an infinite error there."""
        for worst, squares, energy in facts.tolist():
            stats = self.stats
            stats.pages += 1
            stats.last_worst = worst if math.isfinite(worst) else math.inf
            stats.last_error = _relative(squares, energy)
            stats.worst = max(stats.worst, stats.last_worst)
            stats.squares += squares
            stats.energy += energy

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """The inverse, as near as it goes: uint8 ``[n, page_bytes]`` to uint8 ``[n, layout.page_bytes]``."""
        for plane in self.planes:
            if plane is not None:
                self._decode(plane, coded, 0, out, 0)
        for first, stop in self._layout_gaps:
            out[:, first:stop] = 0
        at, size = self.layout.summary_range
        if size:
            out[:, at : at + size] = coded[:, self._summary_at : self._summary_at + size]

    def decode_planes(self, layer: int, coded: torch.Tensor, out: torch.Tensor) -> None:
        """One layer's planes: uint8 ``[n, coded plane's nbytes]`` to uint8 ``[n, plane's nbytes]``, rows of consecutive
        bytes."""
        plane = self.plane(layer)
        self._decode(plane, coded, plane.offset, out, plane.k.part.offset)

    # ------------------------------------------------------------------ inside

    def _pieces(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of all that has a meaning in a coded page, ascending."""
        pieces = []
        tokens = self.layout.page_tokens
        for plane in self.planes:
            for side in (plane.k, plane.v) if plane is not None else ():
                if not side.part.nbytes:
                    continue
                channels = side.part.heads * side.part.dim
                scales = (tokens * channels // side.group if side.group else channels) * SCALE_BYTES
                pieces.append((side.codes, tokens * self._wide(channels)))
                pieces.append((side.scale, scales))
                if side.zero >= 0:
                    pieces.append((side.zero, scales))
        pieces.append((self.facts_offset, FACTS_BYTES))
        pieces.append((self._summary_at, self.layout.summary_range[1]))
        return pieces

    def _wide(self, channels: int) -> int:
        """Bytes of a token's codes."""
        return channels // 2 if self.name == "int4" else channels

    def _quantise(self, pages: torch.Tensor, side: CodedPart) -> Quantised:
        part = side.part
        raw = pages[:, part.offset : part.stop].contiguous()
        x = raw.view(getattr(torch, part.dtype)).view(len(pages), self.layout.page_tokens, -1)
        format: Format = self.name  # type: ignore[assignment]
        return (
            quantise_values(x, format, group=side.group) if side.group else quantise_keys(x, format)
        )

    def _decode(
        self, plane: CodedPlane, coded: torch.Tensor, shift: int, out: torch.Tensor, out_shift: int
    ) -> None:
        tokens, n = self.layout.page_tokens, len(coded)
        for side in (plane.k, plane.v):
            part = side.part
            if not part.nbytes:
                continue
            channels = part.heads * part.dim
            shape: Sequence[int] = (
                (n, tokens, channels // side.group) if side.group else (n, channels)
            )
            quantised = Quantised(
                codes=_take(
                    coded, side.codes - shift, (n, tokens, self._wide(channels)), torch.uint8
                ),
                scale=_take(coded, side.scale - shift, shape, torch.float32),
                zero=_take(coded, side.zero - shift, shape, torch.float32)
                if side.zero >= 0
                else coded.new_empty(0, dtype=torch.float32),
                format=self.name,  # type: ignore[arg-type]
                group=side.group,
                worst=coded.new_empty(0, dtype=torch.float32),
                sums=coded.new_empty(0, dtype=torch.float32),
            )
            values = dequantise(quantised, getattr(torch, part.dtype))
            at = part.offset - out_shift
            out[:, at : at + part.nbytes] = values.view(n, -1).view(torch.uint8)


def codec_of(layout: PageLayout, name: str, option: str) -> PageCodec | None:
    """The codec of that name; ``None`` for ``none``.

    Args:
        option: what asks for it, for messages.

    Raises:
        ConfigError: it is unknown, or cannot code such pages.
    """
    if name == "none":
        return None
    try:
        return PageCodec(layout, name)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def alike(one: PageCodec | None, other: PageCodec | None) -> bool:
    """Whether two codecs of the same layout (``None``: none) give the same bytes."""
    return (one and one.name) == (other and other.name)


def recode(
    data: torch.Tensor, of: PageCodec | None, out: torch.Tensor, to: PageCodec | None
) -> None:
    """Bytes of one page from one coding (``None``: none) to another, on the CPU; the error of what is coded is noted.

    Args:
        data, out: uint8 ``[bytes]`` of a page as ``of`` and ``to`` have it; different memory.
    """
    if alike(of, to):
        out.copy_(data)
        if to is not None:
            to.note(to.facts_of(out[None]))
        return
    raw = data
    if of is not None:
        raw = out if to is None else data.new_empty(of.layout.page_bytes)
        of.decode(data[None], raw[None])
    if to is not None:
        to.note(to.encode(raw[None], out[None]))


def _relative(squares: float, energy: float) -> float:
    """Root of mean squared error over mean squared value; infinite where there is no telling."""
    if not math.isfinite(squares) or not math.isfinite(energy):
        return math.inf
    return (squares / energy) ** 0.5 if squares else 0.0


def _gaps(pieces: Iterable[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """(first byte, stop) of what ``pieces``, (first byte, bytes) ascending, leave out of ``total`` bytes."""
    gaps, at = [], 0
    for first, nbytes in (*pieces, (total, 0)):
        if first > at:
            gaps.append((at, first))
        at = max(at, first + nbytes)
    return gaps


def _put(out: torch.Tensor, at: int, values: torch.Tensor) -> None:
    rows = values.reshape(len(values), -1).view(torch.uint8)
    out[:, at : at + rows.shape[1]] = rows


def _take(coded: torch.Tensor, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    nbytes = dtype.itemsize
    for size in shape[1:]:
        nbytes *= size
    return coded[:, at : at + nbytes].contiguous().view(dtype).view(tuple(shape))
