"""Page geometry."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.layout import PLANE_ALIGN, LayerLayout, PageLayout

GQA = LayerLayout.attention(8, 128, "float16")
SLIDING = LayerLayout.attention(8, 128, "float16", window=512)
MLA = LayerLayout.mla(512, 64, "bfloat16")
STATE = LayerLayout("state", state_bytes=1000)
NONE = LayerLayout("none")


def test_gqa_page_of_a_known_model() -> None:
    # Llama-3.1-8B: 32 layers, 8 KV heads of 128, 16 bit = 128 KiB a token.
    layout = PageLayout([GQA] * 32, 32)
    assert layout.token_bytes == 128 * 1024
    assert layout.page_bytes == 32 * 128 * 1024
    assert layout.plane_bytes(5) == 2 * 32 * 8 * 128 * 2
    assert layout.plane(1).offset == layout.plane_bytes(0)
    assert layout.plane(1).v.offset == layout.plane(1).k.stop
    assert layout.sequence_bytes(1000) == 1000 * 128 * 1024


def test_mha_stores_more_than_gqa() -> None:
    assert (
        PageLayout([LayerLayout.attention(32, 128, "float16")]).page_bytes
        == 4 * PageLayout([GQA]).page_bytes
    )


def test_mla_has_parts_of_different_width() -> None:
    # DeepSeek-V3: latent 512 + rope 64 in bf16 = 1152 bytes a token and layer.
    layout = PageLayout([MLA] * 2, 16)
    plane = layout.plane(1)
    assert (plane.k.heads, plane.k.dim, plane.v.heads, plane.v.dim) == (1, 512, 1, 64)
    assert layout.token_bytes == 2 * 1152
    assert plane.nbytes == 16 * 1152


def test_sliding_layers_stop_growing() -> None:
    layout = PageLayout([GQA, SLIDING], 32)
    token = 2 * 8 * 128 * 2
    assert layout.sequence_bytes(512) == 2 * 512 * token
    assert layout.sequence_bytes(2000) == (2000 + 512) * token


def test_layers_without_planes() -> None:
    layout = PageLayout([STATE, GQA, NONE], 32)
    assert layout.planes[0] is None
    assert layout.planes[2] is None
    assert layout.page_bytes == PageLayout([GQA], 32).page_bytes
    assert (layout.plane_bytes(0), layout.plane_bytes(2)) == (0, 0)
    assert layout.sequence_bytes(10) == PageLayout([GQA], 32).sequence_bytes(10) + 1000
    with pytest.raises(LayoutError, match="layer 0 is of kind 'state'"):
        layout.plane(0)


def test_k_and_v_may_have_different_dtypes() -> None:
    mixed = LayerLayout("full", 2, 64, "float16", 2, 64, "float8_e4m3fn")
    plane = PageLayout([mixed], 16).plane(0)
    assert (plane.k.nbytes, plane.v.nbytes) == (16 * 2 * 64 * 2, 16 * 2 * 64)
    assert PageLayout([LayerLayout.attention(1, 64, "int4")], 32).page_bytes == 32 * 64


layers = st.one_of(
    st.builds(
        LayerLayout,
        st.just("full"),
        st.integers(1, 5),
        st.integers(1, 20),
        st.sampled_from(["float32", "bfloat16", "int8"]),
        st.integers(0, 5),
        st.integers(0, 20),
        st.sampled_from(["float16", "uint8"]),
    ),
    st.just(STATE),
    st.just(NONE),
)


@given(st.lists(layers, min_size=1, max_size=6), st.integers(1, 40))
def test_planes_are_aligned_disjoint_and_fill_the_page(
    layers: list[LayerLayout], page_tokens: int
) -> None:
    if not any(layer.paged for layer in layers):
        with pytest.raises(LayoutError, match="nothing to page"):
            PageLayout(layers, page_tokens)
        return
    layout = PageLayout(layers, page_tokens)
    planes = [plane for plane in layout.planes if plane is not None]
    assert [plane.layer for plane in planes] == [i for i, layer in enumerate(layers) if layer.paged]
    for plane in planes:
        assert plane.offset % PLANE_ALIGN == 0
        assert plane.k.stop == plane.v.offset
    for before, after in itertools.pairwise(planes):
        assert 0 <= after.offset - before.stop < PLANE_ALIGN
    assert 0 <= layout.page_bytes - planes[-1].stop < PLANE_ALIGN
    assert layout.page_bytes % PLANE_ALIGN == 0
    assert sum(plane.nbytes for plane in planes) == layout.token_bytes * page_tokens


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_pages(tokens: int, pages: int) -> None:
    assert PageLayout([GQA], 32).pages(tokens) == pages


def test_the_digest_is_different_for_pages_that_are_not_interchangeable() -> None:
    base = PageLayout([GQA, GQA], 32)
    others = [
        PageLayout([GQA, GQA], 16),
        PageLayout([GQA], 32),
        PageLayout([GQA, SLIDING], 32),
        PageLayout([SLIDING, GQA], 32),
        PageLayout([GQA, dataclasses.replace(SLIDING, window=511)], 32),
        PageLayout([LayerLayout.attention(8, 128, "bfloat16")] * 2, 32),
        PageLayout([LayerLayout.attention(16, 64, "float16")] * 2, 32),
        PageLayout([GQA, GQA, NONE], 32),
        PageLayout([GQA, GQA, STATE], 32),
    ]
    digests = {layout.digest for layout in [base, *others]}
    assert len(digests) == 1 + len(others)
    assert PageLayout((GQA, GQA), 32).digest == base.digest


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "full"}, "needs k_heads and k_dim > 0"),
        ({"kind": "full", "k_heads": 1, "k_dim": 0}, "got 1 x 0"),
        ({"kind": "full", "k_heads": -1, "k_dim": 8}, "k_heads is -1"),
        ({"kind": "full", "k_heads": 1.0, "k_dim": 8}, "k_heads is 1.0"),
        (
            {"kind": "full", "k_heads": 1, "k_dim": 8, "k_dtype": "half"},
            "k_dtype 'half' is unknown; known are",
        ),
        ({"kind": "full", "k_heads": 1, "k_dim": 8, "v_dtype": "fp8"}, "v_dtype 'fp8'"),
        ({"kind": "full", "k_heads": 1, "k_dim": 8, "window": 4}, "only sliding layers have one"),
        (
            {"kind": "sliding", "k_heads": 1, "k_dim": 8},
            "only sliding layers have one, and they must",
        ),
        ({"kind": "sliding", "k_heads": 1, "k_dim": 8, "window": 0}, "window is 0"),
        ({"kind": "state", "k_heads": 1, "k_dim": 8}, "stores no KV per token"),
        ({"kind": "none", "v_heads": 1}, "stores no KV per token"),
        ({"kind": "linear"}, "kind 'linear' is unknown"),
    ],
)
def test_impossible_layers(fields: dict[str, object], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        LayerLayout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_tokens", [0, -1, 1.5, "32"])
def test_impossible_page_tokens(page_tokens: object) -> None:
    with pytest.raises(LayoutError, match="page_tokens is"):
        PageLayout([GQA], page_tokens)  # type: ignore[arg-type]


def test_parts_are_whole_bytes() -> None:
    odd = LayerLayout.attention(1, 3, "int4")
    with pytest.raises(LayoutError, match="K part of layer 0 has 12 bits"):
        PageLayout([odd], 1)
    assert PageLayout([odd], 2).plane(0).k.nbytes == 3
