"""Quantise pages for a tier that trades exactness for room, and measure what it costs.

Keys with one scale a channel and page, values with one scale a token and group of channels: the outliers of
keys sit in fixed channels, those of values in single tokens (KIVI, Liu et al., arXiv 2402.02750). Formats:

* ``fp8``: e4m3, largest absolute value at 448;
* ``int8``: -127 to 127, symmetric;
* ``int4``: 0 to 15 from the least to the largest value, two neighbouring channels in a byte, the first in the low half.

A code stands for ``zero + scale * code``, in float32. Quantising and dequantising on a GPU, in the reference and
in the tests gives the same bits. A NaN or an infinity does not survive; ``error`` then says NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.kernels.checks import FLOATS, check_count, check_tensor
from kvtier.kernels.launch import (
    MAX_GRID_YZ,
    SUFFIX,
    THREADS,
    WARP,
    Argument,
    Launcher,
    blocks_for,
    launcher_for,
)

Format = Literal["fp8", "int8", "int4"]

#: In the order of the device code's numbers.
FORMATS: tuple[Format, ...] = get_args(Format)

#: Steps between zero (or, for int4, the least value) and the largest value.
_TOP: dict[Format, float] = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}


@dataclass(frozen=True)
class Quantised:
    """Quantised pages.

    Attributes:
        codes: uint8 ``[pages, tokens, channels]``, for int4 ``[pages, tokens, channels / 2]``.
        scale: float32 ``[pages, channels]``, or ``[pages, tokens, channels / group]``.
        zero: float32, like ``scale``; empty unless the format is int4.
        format: see above.
        group: channels that share a scale; 0: one scale a channel and page.
        worst: float32 ``[pages]``, the largest absolute error of any value that ``dequantise`` will give.
        sums: float32 ``[pages, 2]``, of squared errors and of squared values.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    format: Format
    group: int
    worst: torch.Tensor
    sums: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        """float32 ``[pages]``: root of the mean squared error over that of the mean squared value; 0 for a page
        of zeros."""
        squares, energy = self.sums.unbind(1)
        return torch.where(squares == 0, squares, squares / energy).sqrt()

    @property
    def nbytes(self) -> int:
        """Bytes to store: codes, scales and zeros."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.zero))


def quantise_keys(
    x: torch.Tensor, format: Format, *, launcher: Launcher | None = None
) -> Quantised:
    """Quantise with one scale a channel and page.

    Args:
        x: ``[pages, tokens, channels]`` as ``gather_pages`` gives a K part, channels = heads * dim, an even
            number; float32, float16 or bfloat16.
        format: ``"fp8"``, ``"int8"`` or ``"int4"``.
        launcher: runs the kernel instead of what the device calls for.

    Raises:
        LayoutError: the shape or dtype of ``x`` is not as above.
        ConfigError: ``format`` is unknown.
    """
    return _quantise(x, format, 0, launcher)


def quantise_values(
    x: torch.Tensor, format: Format, *, group: int = 32, launcher: Launcher | None = None
) -> Quantised:
    """Quantise with one scale a token and ``group`` neighbouring channels.

    Args:
        x: see ``quantise_keys``.
        format: ``"fp8"``, ``"int8"`` or ``"int4"``.
        group: an even divisor of the channels.
        launcher: runs the kernel instead of what the device calls for.

    Raises:
        LayoutError: the shape or dtype of ``x`` is not as above.
        ConfigError: ``format`` is unknown, or ``group`` does not divide the channels.
    """
    check_count("group", group, least=2)
    return _quantise(x, format, group, launcher)


def dequantise(
    quantised: Quantised, dtype: torch.dtype, *, launcher: Launcher | None = None
) -> torch.Tensor:
    """``zero + scale * code`` in float32, rounded to ``dtype``.

    Returns:
        ``[pages, tokens, channels]`` of ``dtype``: float32, float16 or bfloat16.

    Raises:
        LayoutError: ``dtype`` is another one, or the tensors of ``quantised`` do not fit each other.
    """
    if dtype not in FLOATS:
        raise LayoutError(f"dtype is {dtype}; it must be one of {', '.join(map(str, FLOATS))}")
    q, device = quantised, quantised.codes.device
    _check_format(q.format)
    check_tensor("codes", q.codes, (None, None, None), dtypes=torch.uint8, device=device)
    pages, tokens, wide = q.codes.shape
    channels = wide * 2 if q.format == "int4" else wide
    shape = _scale_shape(pages, tokens, channels, q.group)
    check_tensor("scale", q.scale, shape, dtypes=torch.float32, device=device)
    zeros = shape if q.format == "int4" else (0,)
    check_tensor("zero", q.zero, zeros, dtypes=torch.float32, device=device)
    launcher = launcher or launcher_for(device)
    if launcher is None:
        return dequantise_reference(q, dtype)
    out = torch.empty(pages, tokens, channels, dtype=dtype, device=device)
    if out.numel():
        grid = (blocks_for(channels // 2, THREADS), min(pages * tokens, MAX_GRID_YZ), 1)
        sizes = (pages, tokens, channels, q.group, FORMATS.index(q.format))
        arguments: list[Argument] = [q.codes, q.scale, q.zero, out]
        arguments += [np.int32(n) for n in sizes]
        launcher.launch(f"dequantise_{SUFFIX[dtype]}", grid, THREADS, arguments)
    return out


def _quantise(x: torch.Tensor, format: Format, group: int, launcher: Launcher | None) -> Quantised:
    _check_format(format)
    if not isinstance(x, torch.Tensor):
        raise LayoutError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    check_tensor("x", x, (None, None, None), dtypes=FLOATS, device=x.device)
    pages, tokens, channels = x.shape
    if not tokens or not channels or channels % 2:
        raise LayoutError(
            f"x has shape {list(x.shape)}; it needs tokens and an even number of channels"
        )
    if x.data_ptr() % (2 * x.element_size()):
        raise LayoutError(
            f"x begins at an odd item; it must be aligned to {2 * x.element_size()} bytes"
        )
    if group and (group % 2 or channels % group):
        raise ConfigError(
            f"group is {group}; it must be even and divide the {channels} channels of x"
        )
    launcher = launcher or launcher_for(x.device)
    if launcher is None:
        return quantise_reference(x, format, group)
    device, shape = x.device, _scale_shape(pages, tokens, channels, group)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    result = Quantised(
        codes=torch.empty(
            pages, tokens, _code_bytes(channels, format), dtype=torch.uint8, device=device
        ),
        scale=torch.empty(shape, **floats),
        zero=torch.empty(shape if format == "int4" else (0,), **floats),
        format=format,
        group=group,
        worst=torch.zeros(pages, **floats),
        sums=torch.zeros(pages, 2, **floats),
    )
    if not pages:
        return result
    # The device code keeps the largest error as an unsigned integer of the same bits.
    buffers = (result.codes, result.scale, result.zero, result.worst.view(torch.int32), result.sums)
    sizes = [pages, tokens, channels, *([group] if group else []), FORMATS.index(format)]
    arguments: list[Argument] = [x, *buffers]
    arguments += [np.int32(n) for n in sizes]
    if group:
        kernel, grid = "quantise_groups", (blocks_for(pages * tokens, THREADS // WARP), 1, 1)
    else:
        across = blocks_for(channels // 2, THREADS)
        kernel, grid = "quantise_channels", (across, min(pages, MAX_GRID_YZ), 1)
    launcher.launch(f"{kernel}_{SUFFIX[x.dtype]}", grid, THREADS, arguments)
    return result


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ConfigError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")


def _code_bytes(channels: int, format: Format) -> int:
    return channels // 2 if format == "int4" else channels


def _scale_shape(pages: int, tokens: int, channels: int, group: int) -> tuple[int, ...]:
    return (pages, tokens, channels // group) if group else (pages, channels)


def quantise_reference(x: torch.Tensor, format: Format, group: int) -> Quantised:
    """See ``quantise_keys`` (``group`` 0) and ``quantise_values``."""
    pages, tokens, channels = x.shape
    # One scale for all but the last axis: [pages, channels, tokens], or [pages, tokens, groups, group].
    rows = x.float().view(pages, tokens, -1, group) if group else x.float().transpose(1, 2)
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    width = high - low if format == "int4" else torch.maximum(high, -low)
    scale = width / _TOP[format]
    scale = torch.where(scale > 0, scale, 1.0)
    zero = low if format == "int4" else torch.zeros_like(low)
    codes = _encode((rows - zero) / scale, format)
    codes = codes.reshape(x.shape) if group else codes.transpose(1, 2).contiguous()
    if format == "int4":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    shape = _scale_shape(pages, tokens, channels, group)
    zeros = zero.reshape(shape) if format == "int4" else zero.new_empty(0)
    stored = (codes, scale.reshape(shape), zeros, format, group)
    nothing = x.new_zeros(0, dtype=torch.float32)
    back = dequantise_reference(Quantised(*stored, worst=nothing, sums=nothing), x.dtype)
    error = (x.float() - back.float()).abs().reshape(pages, -1)
    sums = torch.stack([error.square().sum(1), x.float().square().reshape(pages, -1).sum(1)], dim=1)
    return Quantised(*stored, worst=error.amax(1), sums=sums)


def dequantise_reference(quantised: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """See ``dequantise``."""
    codes, group = quantised.codes, quantised.group
    if quantised.format == "int4":
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        values = codes.float()
    elif quantised.format == "int8":
        values = codes.view(torch.int8).float()
    else:
        values = codes.view(torch.float8_e4m3fn).float()

    def spread(of_scale: torch.Tensor) -> torch.Tensor:
        return of_scale.repeat_interleave(group, dim=-1) if group else of_scale[:, None]

    values = values * spread(quantised.scale)
    if quantised.format == "int4":
        values = values + spread(quantised.zero)
    return values.to(dtype)


def _encode(y: torch.Tensor, format: Format) -> torch.Tensor:
    if format == "fp8":
        return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    low = 0 if format == "int4" else -127
    rounded = y.nan_to_num(0.0).round().clamp(low, _TOP[format])
    return rounded.to(torch.int8).view(torch.uint8)
