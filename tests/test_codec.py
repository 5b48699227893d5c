"""Coded pages: sizes, errors as measured, planes alone and in pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.layout import LayerLayout, PageLayout
from kvtier.tiers.codec import PageCodec, alike, recode

FORMATS = ("fp8", "int8", "int4")


def layout_of(dtype: str, *, summaries: bool = True, tokens: int = 8) -> PageLayout:
    return PageLayout(
        [
            LayerLayout.attention(2, 16, dtype),
            LayerLayout("state", state_bytes=64),
            LayerLayout.attention(2, 16, dtype, window=20),
            LayerLayout.mla(24, 6, dtype),
        ],
        tokens,
        summaries,
    )


def values_of(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """All K and V of pages as float32, ``[n, values]``."""
    parts = []
    for plane in layout.planes:
        if plane is not None:
            raw = page[:, plane.offset : plane.stop].contiguous()
            parts.append(raw.view(getattr(torch, plane.k.dtype)).float())
    return torch.cat(parts, 1)


def random_pages(layout: PageLayout, count: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    torch.manual_seed(seed)
    pages = torch.randint(0, 255, (count, layout.page_bytes), dtype=torch.uint8)
    for plane in layout.planes:
        if plane is not None:
            dtype = getattr(torch, plane.k.dtype)
            values = (torch.randn(count, plane.nbytes // dtype.itemsize) * spread).to(dtype)
            pages[:, plane.offset : plane.stop] = values.view(torch.uint8)
    return pages


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    summaries=st.booleans(),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    count=st.integers(1, 3),
)
def test_pages_come_back_within_the_measured_error(
    seed: int, format: str, dtype: str, summaries: bool, spread: float, count: int
) -> None:
    layout = layout_of(dtype, summaries=summaries)
    codec = PageCodec(layout, format)
    pages = random_pages(layout, count, seed, spread)
    coded = torch.full((count, codec.page_bytes), 7, dtype=torch.uint8)
    facts = codec.encode(pages, coded)
    back = torch.zeros_like(pages)
    codec.decode(coded, back)
    want, got = values_of(pages, layout), values_of(back, layout)
    error = (want - got).abs()
    assert torch.allclose(error.amax(1), facts[:, 0], rtol=1e-6, atol=1e-12)
    assert torch.allclose(error.square().sum(1), facts[:, 1], rtol=1e-3, atol=1e-9)
    bound = {"fp8": 0.04, "int8": 0.01, "int4": 0.2}[format]
    assert (error.square().sum(1) <= bound**2 * want.square().sum(1) + 1e-12).all()
    at, size = layout.summary_range
    assert torch.equal(back[:, at : at + size], pages[:, at : at + size])
    codec.note(facts)
    assert codec.stats.pages == count
    assert codec.stats.worst == pytest.approx(float(error.max()), rel=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_plane_alone_is_the_plane_in_the_page(format: str) -> None:
    layout = layout_of("bfloat16")
    codec = PageCodec(layout, format)
    pages = random_pages(layout, 3, 1)
    coded = torch.zeros(3, codec.page_bytes, dtype=torch.uint8)
    codec.encode(pages, coded)
    back = torch.zeros_like(pages)
    codec.decode(coded, back)
    for plane in layout.planes:
        if plane is not None:
            place = codec.plane(plane.layer)
            alone = torch.zeros(3, plane.nbytes, dtype=torch.uint8)
            codec.decode_planes(
                plane.layer, coded[:, place.offset : place.offset + place.nbytes], alone
            )
            assert torch.equal(alone, back[:, plane.offset : plane.stop])


def test_ranges_cover_the_page_without_overlap_and_save_room() -> None:
    layout = PageLayout([LayerLayout.attention(8, 128, "bfloat16")] * 4, 32, True)
    sizes = {}
    for format in FORMATS:
        codec = PageCodec(layout, format)
        stop = 0
        for at, nbytes in codec.ranges:
            assert at >= stop
            assert at % 16 == 0
            stop = at + nbytes
        assert stop <= codec.page_bytes
        assert len(codec.ranges) == len(layout.ranges)
        sizes[format] = (codec.page_bytes - layout.summary_range[1]) / sum(
            plane.nbytes for plane in layout.planes if plane is not None
        )
    assert sizes["fp8"] == sizes["int8"] < 0.6
    assert sizes["int4"] < 0.4


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_of_no_meaning_are_zero_both_ways(format: str) -> None:
    layout = PageLayout([LayerLayout.attention(1, 2, "float16")] * 2, 3, True)
    codec = PageCodec(layout, format)
    assert sum(n for _, n in layout.ranges) < layout.page_bytes
    pages = torch.full((1, layout.page_bytes), 60, dtype=torch.uint8)
    first, second = (torch.full((1, codec.page_bytes), x, dtype=torch.uint8) for x in (7, 9))
    codec.encode(pages, first)
    codec.encode(pages, second)
    assert torch.equal(first, second)
    back = torch.full_like(pages, 5)
    codec.decode(first, back)
    gap = torch.ones(layout.page_bytes, dtype=torch.bool)
    for at, nbytes in layout.ranges:
        gap[at : at + nbytes] = False
    assert not back[0, gap].any()


def test_a_page_tells_its_own_error() -> None:
    layout = layout_of("float16")
    codec = PageCodec(layout, "int4")
    pages = random_pages(layout, 3, 5)
    coded = torch.zeros(3, codec.page_bytes, dtype=torch.uint8)
    facts = codec.encode(pages, coded)
    assert torch.equal(codec.facts_of(coded), facts)
    assert torch.equal(codec.facts_of(coded[1:2]), facts[1:2])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    of=st.sampled_from([None, *FORMATS]),
    to=st.sampled_from([None, *FORMATS]),
)
def test_recoding_is_decoding_and_encoding(seed: int, of: str | None, to: str | None) -> None:
    layout = layout_of("bfloat16")
    source, target = (PageCodec(layout, name) if name else None for name in (of, to))
    page = random_pages(layout, 1, seed)
    data = page.clone()
    if source is not None:
        data = torch.zeros(1, source.page_bytes, dtype=torch.uint8)
        source.encode(page, data)
        source.decode(data, page)
    want = page.clone()
    if target is not None:
        want = torch.zeros(1, target.page_bytes, dtype=torch.uint8)
        target.encode(page, want)
    out = torch.full_like(want, 3)
    recode(data[0], source, out[0], target)
    if alike(source, target):
        assert torch.equal(out, data)
    else:
        assert torch.equal(out, want)
    if target is not None:
        assert target.stats.pages == 1


def test_what_cannot_be_coded_is_refused() -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown; use none, fp8, int8, int4"):
        PageCodec(layout_of("float16"), "zip")
    with pytest.raises(ConfigError, match=r"float8_e4m3fn.*needs"):
        PageCodec(PageLayout([LayerLayout.attention(2, 16, "float8_e4m3fn")], 8), "int8")
