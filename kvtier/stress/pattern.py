"""K and V that can be recognised: every byte says which sequence, token and layer it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.layout import Part


def pattern(layer: int, numbers: Sequence[int], start: int, stop: int) -> np.ndarray:
    """A byte a token: uint8 ``[rows, stop - start]``. ``numbers`` are those of the sequences."""
    rows = np.array(numbers)[:, None] * 31 + np.arange(start, stop)[None] * 7 + layer * 13
    return (rows % 251).astype(np.uint8)


def values(
    part: Part, layer: int, numbers: Sequence[int], start: int, stop: int, *, payload: bool
) -> torch.Tensor:
    """K or V of new tokens, ``[rows, heads, stop - start, dim]`` of the part's dtype, all bytes of a
    token being its pattern; on the meta device without ``payload``."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    shape = (len(numbers), part.heads, stop - start, part.dim)
    if not payload:
        return torch.empty(shape, dtype=dtype, device="meta")
    width = part.dim * dtype.itemsize
    if not width:
        return torch.empty(shape, dtype=dtype)
    wide = np.empty((*shape[:3], width), dtype=np.uint8)
    wide[:] = pattern(layer, numbers, start, stop)[:, None, :, None]
    return torch.from_numpy(wide).view(dtype)


def compare(got: torch.Tensor, layer: int, numbers: Sequence[int], stop: int) -> int:
    """Check what attention reads of the tokens before ``stop``; the number of bytes.

    Args:
        got: ``[rows, heads, tokens, dim]``.

    Raises:
        AssertionError: a byte is not the one that was written.
    """
    if not got.numel():
        return 0
    wanted = pattern(layer, numbers, stop - got.shape[2], stop)[:, None, :, None]
    seen = got.view(torch.uint8).numpy()
    wrong = np.count_nonzero(seen != wanted)
    if wrong:
        raise AssertionError(f"{wrong} bytes of layer {layer} are not those that were written")
    return int(seen.size)


def same(got: torch.Tensor, made: torch.Tensor, layer: int) -> int:
    """Check bytes that were read against those that were written; their number.

    Raises:
        AssertionError: they differ.
    """
    seen, wanted = (x.contiguous().view(torch.uint8).flatten() for x in (got, made))
    wrong = int((seen != wanted).sum())
    if wrong:
        raise AssertionError(f"{wrong} bytes of layer {layer} are not those that were written")
    return seen.numel()
