"""Where bodies run, the pages they run on, and how they compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.kernels.launch import Launcher
from kvtier.kernels.table import PageTable
from kvtier.layout import LayerLayout, PageLayout

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """Where kernels run. ``launcher`` is ``None`` on a GPU: the device decides."""

    device: torch.device
    launcher: Launcher | None

    def put(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in tensors]


@dataclass
class Pages:
    """Random pages in two slabs, on the CPU and in a place; every slab ends where its last page does."""

    layout: PageLayout
    here: PageTable
    there: PageTable

    @classmethod
    def make(
        cls,
        place: Place,
        layout: PageLayout,
        *,
        count: int,
        dtype: torch.dtype | None = None,
        tokens: list[int] | None = None,
        seed: int = 0,
    ) -> Pages:
        generator = torch.Generator().manual_seed(seed)
        size = layout.page_bytes
        slabs = []
        for slots in (count, count + 1):
            if dtype is None:
                slab = torch.randint(
                    0, 256, (slots * size,), dtype=torch.uint8, generator=generator
                )
            else:
                items = slots * size // dtype.itemsize
                slab = torch.randn(items, generator=generator).to(dtype).view(torch.uint8)
            slabs.append(slab)
        pages = [(n % 2, n * size) for n in torch.randperm(count, generator=generator).tolist()]

        def table(of: list[torch.Tensor]) -> PageTable:
            return PageTable(
                of, pages, page_bytes=size, page_tokens=layout.page_tokens, tokens=tokens
            )

        return cls(layout, table(slabs), table([slab.clone().to(place.device) for slab in slabs]))


def attention_layout(
    heads: int, dim: int, dtype: torch.dtype, page_tokens: int, layers: int = 2
) -> PageLayout:
    name = str(dtype).removeprefix("torch.")
    return PageLayout([LayerLayout.attention(heads, dim, name)] * layers, page_tokens)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal bit for bit, but any NaN equals any NaN and -0 equals 0."""
    got = got.cpu()
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    equal = got == want
    if got.dtype.is_floating_point:
        equal |= got.isnan() & want.isnan()
    wrong = (~equal).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.numel()} differ, first at {wrong[0].tolist()}: "
        f"{got[tuple(wrong[0])]} for {want[tuple(wrong[0])]}"
    )


def near(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 2e-5) -> None:
    """Equal up to ``tolerance``, absolute and relative; infinities are equal, NaN is wrong."""
    got = got.cpu()
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    off = (got - want).abs()
    wrong = (~((off <= tolerance * (1 + want.abs())) | (got == want))).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.numel()} are off, first at {wrong[0].tolist()}: "
        f"{got[tuple(wrong[0])]} for {want[tuple(wrong[0])]}"
    )
