"""What is kept of a sealed page's keys, so that a selector can score the page without reading it.

Least and largest value a channel: Quest (Tang et al., arXiv 2406.10774). Mean distance from the middle of the
two: ArkVale's "cuboid-mean" (Chen et al., NeurIPS 2024). Mean: the landmark of ShadowKV (arXiv 2410.21465).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import LayoutError
from kvtier.kernels.checks import FLOATS, check_count, check_tensor
from kvtier.kernels.launch import MAX_GRID_YZ, SUFFIX, THREADS, Launcher, blocks_for, launcher_for
from kvtier.kernels.pages import gather_pages
from kvtier.kernels.table import PageTable

#: Rows of a summary.
LEAST, LARGEST, MEAN, DEVIATION = range(4)


@dataclass(frozen=True, slots=True)
class PageSummaries:
    """The summaries of one layer's keys where they lie, one a page.

    Args:
        table: of the summaries, or of pages that they are a part of.
        start: first byte of the summary in each.
        heads, dim, dtype: as ``summarise_pages`` was given.

    Raises:
        LayoutError: a summary is not inside its page or not aligned to ``dtype``.
    """

    table: PageTable
    start: int
    heads: int
    dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.table.check_range("start, heads, dim", self.start, self._nbytes)
        if self.start % self.dtype.itemsize:
            raise LayoutError(
                f"start is {self.start}; it must be a multiple of {self.dtype.itemsize}, an item of {self.dtype}"
            )

    def __len__(self) -> int:
        return len(self.table)

    def gather(self) -> torch.Tensor:
        """A copy, ``[pages, 4, heads, dim]``."""
        raw = gather_pages(self.table, start=self.start, nbytes=self._nbytes)
        return raw.view(self.dtype).view(-1, 4, self.heads, self.dim)

    @property
    def _nbytes(self) -> int:
        return 4 * self.heads * self.dim * self.dtype.itemsize


def summarise_pages(
    table: PageTable,
    *,
    start: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    launcher: Launcher | None = None,
) -> torch.Tensor:
    """Summarise the keys of one layer of each page, for each KV head and channel.

    Args:
        table: the pages; only the tokens they hold are read.
        start: first byte of the K part in a page (``layout.plane(layer).k.offset``).
        heads, dim: KV heads and channels of a head.
        dtype: of the keys and of the result: float32, float16 or bfloat16.
        out: where to put the result; a new tensor if missing.
        launcher: runs the kernel instead of what the device calls for.

    Returns:
        ``[pages, 4, heads, dim]`` of ``dtype``: least, largest, mean, and mean of ``|k - (least + largest) / 2|``.
        Least and largest are exact; sums are in float32 in the order of the tokens, then rounded to ``dtype``.
        A NaN key is left out of least and largest.

    Raises:
        LayoutError: the K part is not inside a page or not aligned to ``dtype``, or ``out`` does not fit.
        ConfigError: ``heads`` or ``dim`` is not positive.
    """
    check_count("heads", heads)
    check_count("dim", dim)
    if dtype not in FLOATS:
        raise LayoutError(f"dtype is {dtype}; it must be one of {', '.join(map(str, FLOATS))}")
    channels = heads * dim
    row_bytes = channels * dtype.itemsize
    table.check_range("start, heads, dim", start, row_bytes * table.page_tokens)
    if start % dtype.itemsize:
        raise LayoutError(
            f"start is {start}; it must be a multiple of {dtype.itemsize}, an item of {dtype}"
        )
    shape = (len(table), 4, heads, dim)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=table.device)
    check_tensor("out", out, shape, dtypes=dtype, device=table.device)
    launcher = launcher or launcher_for(table.device)
    if not len(table):
        return out
    if launcher is None:
        return out.copy_(summarise_reference(table, start, heads, dim, dtype))
    wide = not (start | row_bytes | out.data_ptr()) % 16
    vector = 16 // dtype.itemsize if wide else 1
    grid = (blocks_for(channels // vector, THREADS), min(len(table), MAX_GRID_YZ), 1)
    arguments = (
        table.addresses,
        table.tokens,
        np.int32(len(table)),
        np.int64(start),
        np.int32(channels),
        out,
    )
    name = f"summarise_{16 if wide else 1}_{SUFFIX[dtype]}"
    launcher.launch(name, grid, THREADS, arguments)
    return out


def summarise_reference(
    table: PageTable, start: int, heads: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """See ``summarise_pages``. A loop over tokens, for the order of the sums."""
    tokens = table.page_tokens
    raw = table.read(start, tokens * heads * dim * dtype.itemsize)
    keys = raw.view(dtype).view(len(table), tokens, heads, dim).float()
    held = torch.arange(tokens, device=table.device) < table.tokens[:, None]
    low = torch.full_like(keys[:, 0], torch.inf)
    high = torch.full_like(low, -torch.inf)
    total = torch.zeros_like(low)
    for t in range(tokens):
        here = held[:, t, None, None]
        low = torch.where(here, torch.fmin(low, keys[:, t]), low)
        high = torch.where(here, torch.fmax(high, keys[:, t]), high)
        total = torch.where(here, total + keys[:, t], total)
    middle = (low + high) * 0.5
    spread = torch.zeros_like(low)
    for t in range(tokens):
        spread = torch.where(held[:, t, None, None], spread + (keys[:, t] - middle).abs(), spread)
    count = table.tokens[:, None, None].float()
    return torch.stack([low, high, total / count, spread / count], dim=1).to(dtype)
