"""Page geometry: what one layer stores for one token, and where it lies inside a page.

A page holds the KV of ``page_tokens`` consecutive tokens of one sequence, for all layers. It is one
contiguous byte range: the planes of the layers in order, each plane its K part and then its V part.
Inside a part the order is token-major, ``[page_tokens, heads, dim]``: the bytes of consecutive tokens
are contiguous, so a page that is filled up to token ``n`` is a prefix of each part, consecutive pages
lie behind each other in a staging buffer without any transposition, and a part is one DMA.

With ``summaries`` the planes are followed by what a selector needs to know of the page: for each layer with full
attention ``[4, k_heads, k_dim]`` numbers about its keys (see ``kvtier.kernels.summary``). As a part of the page they
move, are stored and are checked with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from kvtier.errors import LayoutError

#: Bits of one element, by the name that torch uses (``torch.float16`` -> ``"float16"``).
DTYPE_BITS: dict[str, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
}

#: Planes start at multiples of this many bytes, for 16-byte vector loads.
PLANE_ALIGN = 16

#: Numbers a channel in a summary: least, largest, mean, mean deviation.
SUMMARY_ROWS = 4

#: Dtypes of keys that can be summarised.
SUMMARY_DTYPES = ("float32", "float16", "bfloat16")

LAYOUT_VERSION = 1

LayerKind = Literal["full", "sliding", "latent", "state", "none"]

#: How a tier below VRAM may keep pages (see ``kvtier.tiers.codec``).
CodecName = Literal["none", "fp8", "int8", "int4"]


@dataclass(frozen=True)
class LayerLayout:
    """What one layer stores for one token.

    Attributes:
        kind: ``full`` attention (MHA, GQA, MQA), ``sliding`` (window-limited), ``latent`` (MLA: K part is the
            compressed latent, V part the shared rope key), ``state`` (fixed-size recurrent state, not
            paged) or ``none`` (no KV of its own).
        k_heads, k_dim, k_dtype: geometry of the K part; ``0`` heads for ``state`` and ``none``.
        v_heads, v_dim, v_dtype: geometry of the V part.
        window: tokens that a ``sliding`` layer attends to, itself included.
        state_bytes: bytes of a ``state`` layer's recurrent state per sequence.
    """

    kind: LayerKind
    k_heads: int = 0
    k_dim: int = 0
    k_dtype: str = "float16"
    v_heads: int = 0
    v_dim: int = 0
    v_dtype: str = "float16"
    window: int | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("k_dtype", "v_dtype"):
            value = getattr(self, name)
            if value not in DTYPE_BITS:
                raise LayoutError(f"{name} {value!r} is unknown; known are {', '.join(DTYPE_BITS)}")
        for name in ("k_heads", "k_dim", "v_heads", "v_dim", "state_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise LayoutError(f"{name} is {value!r}; it must be an integer >= 0")
        paged = self.kind in ("full", "sliding", "latent")
        if self.kind not in ("full", "sliding", "latent", "state", "none"):
            raise LayoutError(
                f"layer kind {self.kind!r} is unknown; use full, sliding, latent, state or none"
            )
        if paged and self.k_heads * self.k_dim == 0:
            raise LayoutError(
                f"a {self.kind} layer needs k_heads and k_dim > 0, got {self.k_heads} x {self.k_dim}"
            )
        if not paged and (self.k_heads or self.v_heads):
            raise LayoutError(f"a {self.kind} layer stores no KV per token; set its heads to 0")
        if (self.kind == "sliding") != (self.window is not None):
            raise LayoutError(
                f"window is {self.window!r} for a {self.kind} layer; only sliding layers have one, and they must"
            )
        if self.window is not None and self.window < 1:
            raise LayoutError(f"window is {self.window}; it must be >= 1 token")

    @classmethod
    def attention(
        cls, kv_heads: int, head_dim: int, dtype: str, *, window: int | None = None
    ) -> LayerLayout:
        """A layer with equal K and V: MHA, GQA or MQA, with a sliding window if ``window`` is given."""
        return cls(
            "full" if window is None else "sliding",
            kv_heads,
            head_dim,
            dtype,
            kv_heads,
            head_dim,
            dtype,
            window,
        )

    @classmethod
    def mla(cls, latent_dim: int, rope_dim: int, dtype: str) -> LayerLayout:
        """Multi-head latent attention: the compressed latent (K part) and the shared rope key (V part)."""
        return cls("latent", 1, latent_dim, dtype, 1, rope_dim, dtype)

    @property
    def paged(self) -> bool:
        """Whether the layer has a plane in a page."""
        return self.kind in ("full", "sliding", "latent")

    @property
    def k_token_bits(self) -> int:
        return self.k_heads * self.k_dim * DTYPE_BITS[self.k_dtype]

    @property
    def v_token_bits(self) -> int:
        return self.v_heads * self.v_dim * DTYPE_BITS[self.v_dtype]


@dataclass(frozen=True)
class Part:
    """A byte range inside a page and how to read it: ``[page_tokens, heads, dim]`` of ``dtype``."""

    offset: int
    nbytes: int
    heads: int
    dim: int
    dtype: str

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Plane:
    """One layer's part of a page: ``k`` directly followed by ``v``."""

    layer: int
    k: Part
    v: Part

    @property
    def offset(self) -> int:
        return self.k.offset

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def stop(self) -> int:
        return self.v.stop


@dataclass(frozen=True)
class PageLayout:
    """The geometry of all pages of a model: its layers and the number of tokens in a page.

    Args:
        layers: what each layer stores.
        page_tokens: tokens in a page.
        summaries: keep a summary of the keys of each layer with full attention in the page, for
            selection. Pages with and without are not interchangeable.

    Raises:
        LayoutError: no layer is paged, ``page_tokens`` < 1, or a part is not a whole number of bytes.
    """

    layers: tuple[LayerLayout, ...]
    page_tokens: int = 32
    summaries: bool = False

    def __init__(
        self, layers: Sequence[LayerLayout], page_tokens: int = 32, summaries: bool = False
    ) -> None:
        object.__setattr__(self, "layers", tuple(layers))
        object.__setattr__(self, "page_tokens", page_tokens)
        object.__setattr__(self, "summaries", summaries)
        if not isinstance(page_tokens, int) or page_tokens < 1:
            raise LayoutError(f"page_tokens is {page_tokens!r}; it must be an integer >= 1")
        if not any(layer.paged for layer in self.layers):
            raise LayoutError(
                "no layer of the layout stores KV per token; there is nothing to page"
            )
        for index, layer in enumerate(self.layers):
            for name, bits in (("K", layer.k_token_bits), ("V", layer.v_token_bits)):
                if bits * page_tokens % 8:
                    raise LayoutError(
                        f"the {name} part of layer {index} has {bits * page_tokens} bits, not whole bytes; "
                        f"use an even page_tokens (is {page_tokens})"
                    )
            if summaries and layer.kind == "full" and layer.k_dtype not in SUMMARY_DTYPES:
                raise LayoutError(
                    f"layer {index} has keys of {layer.k_dtype}; summaries need "
                    f"{', '.join(SUMMARY_DTYPES)}"
                )

    @cached_property
    def planes(self) -> tuple[Plane | None, ...]:
        """One entry a layer; ``None`` for layers that are not paged."""
        planes: list[Plane | None] = []
        at = 0
        for index, layer in enumerate(self.layers):
            if not layer.paged:
                planes.append(None)
                continue
            at = _aligned(at)
            k_bytes = layer.k_token_bits * self.page_tokens // 8
            v_bytes = layer.v_token_bits * self.page_tokens // 8
            k = Part(at, k_bytes, layer.k_heads, layer.k_dim, layer.k_dtype)
            v = Part(at + k_bytes, v_bytes, layer.v_heads, layer.v_dim, layer.v_dtype)
            planes.append(Plane(index, k, v))
            at = v.stop
        return tuple(planes)

    @cached_property
    def summary_parts(self) -> tuple[Part | None, ...]:
        """One entry a layer: where the summary of its keys is, ``[4, heads, dim]``; ``None`` without one."""
        parts: list[Part | None] = []
        at = _aligned(max(plane.stop for plane in self.planes if plane is not None))
        for plane in self.planes:
            if plane is None or not self.summaries or self.layers[plane.layer].kind != "full":
                parts.append(None)
                continue
            k = plane.k
            nbytes = SUMMARY_ROWS * k.heads * k.dim * DTYPE_BITS[k.dtype] // 8
            parts.append(Part(at, nbytes, k.heads, k.dim, k.dtype))
            at = _aligned(at + nbytes)
        return tuple(parts)

    @cached_property
    def summary_range(self) -> tuple[int, int]:
        """(first byte, bytes) of all summaries of a page; no bytes without any."""
        parts = [part for part in self.summary_parts if part is not None]
        return (parts[0].offset, parts[-1].stop - parts[0].offset) if parts else (0, 0)

    def summary_slots(self, pages: int) -> int:
        """Slots of a page's size that hold the summaries of so many pages, and nothing else."""
        return -(-pages // self.summaries_a_slot)

    @cached_property
    def summaries_a_slot(self) -> int:
        """Pages whose summaries one slot of a page's size holds, each at a multiple of 16 bytes. At least one, for a
        page has its own in itself; 0 without summaries."""
        size = _aligned(self.summary_range[1])
        return self.page_bytes // size if size else 0

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first byte, bytes) of what is read by itself: each plane in layer order, then the summaries."""
        planes = [(plane.offset, plane.nbytes) for plane in self.planes if plane is not None]
        return (*planes, self.summary_range) if self.summary_range[1] else tuple(planes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, padded so that the next page is aligned too."""
        return _aligned(max(offset + nbytes for offset, nbytes in self.ranges))

    @cached_property
    def token_bytes(self) -> float:
        """Bytes that one token adds in layers that grow without bound (``full`` and ``latent``) or do so
        until their window is full (``sliding``)."""
        return sum(layer.k_token_bits + layer.v_token_bits for layer in self.layers) / 8

    def plane(self, layer: int) -> Plane:
        """The plane of ``layer``; raises LayoutError if that layer has none."""
        plane = self.planes[layer]
        if plane is None:
            raise LayoutError(
                f"layer {layer} is of kind {self.layers[layer].kind!r} and has no plane"
            )
        return plane

    def plane_bytes(self, layer: int) -> int:
        """Bytes of one layer's plane; 0 for a layer without one."""
        plane = self.planes[layer]
        return 0 if plane is None else plane.nbytes

    def pages(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens, the last one perhaps partly filled."""
        return -(-tokens // self.page_tokens)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of KV that attention over ``tokens`` tokens can read: full layers grow, sliding layers stop at
        their window, recurrent state is counted once. No page rounding."""
        bits = 0
        for layer in self.layers:
            n = tokens if layer.window is None else min(tokens, layer.window)
            bits += n * (layer.k_token_bits + layer.v_token_bits)
        return bits // 8 + sum(layer.state_bytes for layer in self.layers)

    def describe(self) -> dict[str, Any]:
        """The layout as plain data for JSON; ``from_description`` makes it again. Last the digest."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        out["layers"] = [asdict(layer) for layer in self.layers]
        out["digest"] = self.digest.hex()
        return out

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> PageLayout:
        """The layout that ``describe`` gave.

        Raises:
            LayoutError: it is not a description, was altered, or is of another version.
        """
        values = dict(description)
        try:
            digest = values.pop("digest")
            layers = [LayerLayout(**layer) for layer in values.pop("layers")]
            layout = cls(layers, **values)
        except (KeyError, TypeError) as error:
            raise LayoutError(
                f"the description of the page layout is incomplete or of another version ({error})"
            ) from error
        if layout.digest.hex() != digest:
            raise LayoutError(
                "the description of the page layout does not give the digest it names; "
                "it was altered, or made by another version of kvtier"
            )
        return layout

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ for any two layouts whose pages are not interchangeable."""
        facts: tuple[object, ...] = (LAYOUT_VERSION, PLANE_ALIGN, self.page_tokens, self.layers)
        text = repr((*facts, SUMMARY_ROWS) if self.summaries else facts)
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvtier.layout").digest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGN) * PLANE_ALIGN
