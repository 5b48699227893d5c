"""Gather and scatter of page parts against plain slicing, for sizes and places of any alignment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtier.kernels.gather import gather_run, scatter_tokens  # noqa: E402


def random_bytes(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@settings(deadline=None, max_examples=150)
@given(
    pages=st.integers(1, 5),
    step=st.sampled_from([1, 2, 4, 8, 16]),
    units=st.integers(1, 6),
    before=st.integers(0, 6),
    behind=st.integers(0, 6),
    to=st.integers(0, 9),
    skip=st.integers(0, 2),
    sides=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_gather_run(
    pages: int,
    step: int,
    units: int,
    before: int,
    behind: int,
    to: int,
    skip: int,
    sides: int,
    seed: int,
) -> None:
    nbytes, start_side = units * step, units * step + behind * step
    page_bytes = before * step + sides * start_side
    slab = random_bytes((pages + skip) * page_bytes, seed)
    start = skip * page_bytes + before * step
    to_side = pages * nbytes + behind * step
    target = random_bytes(to * step + sides * to_side + 7, seed + 1)
    expected = target.clone()
    for side in range(sides):
        for page in range(pages):
            at = start + page * page_bytes + side * start_side
            place = to * step + side * to_side + page * nbytes
            expected[place : place + nbytes] = slab[at : at + nbytes]
    gather_run(
        target, to * step, slab, start,
        pages=pages, page_bytes=page_bytes, nbytes=nbytes,
        sides=sides, to_side=to_side, start_side=start_side,
    )  # fmt: skip
    assert torch.equal(target, expected)


@settings(deadline=None, max_examples=100)
@given(
    heads=st.integers(1, 3),
    tokens=st.integers(1, 5),
    dim=st.integers(1, 5),
    to=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    view=st.sampled_from(["plain", "transposed", "cut"]),
)
def test_scatter_tokens(
    heads: int, tokens: int, dim: int, to: int, dtype: torch.dtype, view: str
) -> None:
    base = random_bytes(heads * (tokens + 3) * dim * dtype.itemsize, tokens).view(dtype)
    if view == "transposed":  # as attention layers give it: tokens before heads in memory
        values = base.view(tokens + 3, heads, dim).transpose(0, 1)[:, :tokens]
    elif view == "cut":
        values = base.view(heads, tokens + 3, dim)[:, 2 : 2 + tokens]
    else:
        values = base[: heads * tokens * dim].view(heads, tokens, dim)
    size = heads * tokens * dim * dtype.itemsize
    target = random_bytes(size + 64, 5)
    expected = target.clone()
    at = to * dtype.itemsize
    raw = values.transpose(0, 1).contiguous().view(torch.uint8).flatten()
    expected[at : at + size] = raw
    scatter_tokens(target, at, values)
    assert torch.equal(target, expected)
