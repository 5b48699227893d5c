"""Gather page parts into contiguous staging memory, and scatter new tokens into pages: torch reference.

Pages lie in slabs, one page every ``page_bytes``; a part (the K or V of one layer) is a byte range inside
each. Both functions work on bytes: a copy changes no bit, whatever the dtype. Each is one strided copy; offsets go
in as numbers and not as slices, because making views costs more than copying a token.
"""

from __future__ import annotations

import torch


def gather_run(
    target: torch.Tensor,
    to: int,
    slab: torch.Tensor,
    start: int,
    *,
    pages: int,
    page_bytes: int,
    nbytes: int,
    sides: int = 1,
    to_side: int = 0,
    start_side: int = 0,
) -> None:
    """Copy ``nbytes`` bytes of each of ``pages`` consecutive pages behind each other.

    Args:
        target: uint8, contiguous; written from byte ``to`` on, ``pages * nbytes`` bytes.
        slab: uint8, contiguous; the part of the first page starts at byte ``start``, that of the next one
            ``page_bytes`` further on.
        sides: 2 to do the same for a second part (the V beside a K) at once, which starts ``start_side`` bytes after
            the first one and goes ``to_side`` bytes behind the first one's place.
    """
    word = _word(to, start, page_bytes, nbytes, to_side, start_side, target.nbytes, slab.nbytes)
    if word is not None:
        size, dtype = word
        target, slab = target.view(dtype), slab.view(dtype)
        to, start, page_bytes, nbytes, to_side, start_side = (
            x // size for x in (to, start, page_bytes, nbytes, to_side, start_side)
        )
    shape = (sides, pages, nbytes)
    source = slab.as_strided(shape, (start_side, page_bytes, 1), slab.storage_offset() + start)
    place = target.as_strided(shape, (to_side, nbytes, 1), target.storage_offset() + to)
    place.copy_(source)


def scatter_tokens(target: torch.Tensor, to: int, values: torch.Tensor) -> None:
    """Write tokens into a part.

    Args:
        target: uint8, contiguous; written from byte ``to`` on, which is a multiple of the values' item size, as
            consecutive tokens ``[tokens, heads, dim]``.
        values: ``[heads, tokens, dim]``, as attention layers produce K and V; any strides.
    """
    heads, tokens, dim = values.shape
    typed = target.view(values.dtype)
    at = typed.storage_offset() + to // values.itemsize
    typed.as_strided((heads, tokens, dim), (dim, heads * dim, 1), at).copy_(values)


def _word(*sizes: int) -> tuple[int, torch.dtype] | None:
    """The widest integer of which all sizes are multiples; wider words copy faster. The tensors themselves must
    start at multiples of 8 bytes, as whole buffers do."""
    whole = 0
    for size in sizes:
        whole |= size
    for width, dtype in ((8, torch.int64), (4, torch.int32)):
        if not whole % width:
            return width, dtype
    return None
