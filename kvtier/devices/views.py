"""A run of equal pieces as torch tensors, so that one ``copy_`` moves it."""

from __future__ import annotations

import torch

from kvtier.devices.parts import Run


def views(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Destination and source of a run: flat for one piece, ``[number, width]`` for several.

    Elements are int64 where everything is a multiple of 8, so that a strided copy moves 8 bytes a
    time.
    """
    first, number, dst_pitch, src_pitch = run
    dst, src = first.dst.raw(), first.src.raw()
    if number == 1:
        return (
            dst[first.dst_start : first.dst_start + first.nbytes],
            src[first.src_start : first.src_start + first.nbytes],
        )
    sizes = (first.dst_start, first.src_start, first.nbytes, dst_pitch, src_pitch)
    unit = 8 if all(size % 8 == 0 for size in sizes) else 1
    return (
        _strided(dst, unit, first.dst_start, number, first.nbytes, dst_pitch),
        _strided(src, unit, first.src_start, number, first.nbytes, src_pitch),
    )


def _strided(
    raw: torch.Tensor, unit: int, start: int, number: int, nbytes: int, pitch: int
) -> torch.Tensor:
    if unit == 8:
        raw = raw[: raw.numel() // 8 * 8].view(torch.int64)
    shape, stride = (number, nbytes // unit), (pitch // unit, 1)
    return raw.as_strided(shape, stride, raw.storage_offset() + start // unit)
