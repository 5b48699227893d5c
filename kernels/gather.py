"""Gather page parts into contiguous staging memory, and scatter new tokens into pages: torch reference.

Pages lie in slabs, one page every ``page_bytes``; a part (the K or V of one layer) is a byte range inside
each. Both functions work on bytes: a copy changes no bit, whatever the dtype.
"""

from __future__ import annotations

import torch


def gather_run(
    target: torch.Tensor,
    slab: torch.Tensor,
    *,
    start: int,
    pages: int,
    page_bytes: int,
    part_offset: int,
    part_bytes: int,
) -> None:
    """Copy one part of ``pages`` consecutive pages behind each other.

    Args:
        target: uint8 ``[pages * part_bytes]``, contiguous.
        slab: uint8 ``[n]``; the first page starts at byte ``start``.
        part_offset, part_bytes: the part inside each page.
    """
    source = slab[start : start + pages * page_bytes].view(pages, page_bytes)[
        :, part_offset : part_offset + part_bytes
    ]
    places = (target.storage_offset(), slab.storage_offset() + start)
    width = _word(page_bytes, part_offset, part_bytes, *places)
    if width is not None:
        target.view(width).view(pages, -1).copy_(source.view(width))
    else:
        target.view(pages, part_bytes).copy_(source)


def scatter_tokens(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write tokens into a part.

    Args:
        target: uint8 bytes of consecutive tokens of one part, contiguous, ``tokens * heads * dim * itemsize``.
        values: ``[heads, tokens, dim]``, as attention layers produce K and V; any strides.
    """
    heads, tokens, dim = values.shape
    target.view(values.dtype).view(tokens, heads, dim).copy_(values.transpose(0, 1))


def _word(*sizes: int) -> torch.dtype | None:
    """The widest integer that all sizes are multiples of; wider words copy faster."""
    for width, dtype in ((8, torch.int64), (4, torch.int32)):
        if all(size % width == 0 for size in sizes):
            return dtype
    return None
