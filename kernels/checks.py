"""Checks of arguments, with errors that name the argument, the value and what it has to be."""

from __future__ import annotations

from collections.abc import Collection

import torch

from kvtier.errors import ConfigError, LayoutError

#: Dtypes that keys, values and queries may have.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

#: Channels of a head, the most that the kernels hold in registers.
MAX_DIM = 512


def check_tensor(
    name: str,
    value: torch.Tensor,
    shape: tuple[int | None, ...],
    *,
    dtypes: torch.dtype | Collection[torch.dtype],
    device: torch.device,
) -> None:
    """``value`` is a contiguous tensor of the shape (``None``: any size), of one of ``dtypes``, on ``device``.

    Raises:
        LayoutError: it is not.
    """
    if not isinstance(value, torch.Tensor):
        raise LayoutError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if value.dtype not in allowed:
        raise LayoutError(
            f"{name} is of {value.dtype}; it must be of {' or '.join(map(str, allowed))}"
        )
    fits = len(value.shape) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LayoutError(f"{name} has shape {list(value.shape)}; it must be [{wanted}]")
    check_device(name, value, device)
    if not value.is_contiguous():
        raise LayoutError(
            f"{name} has strides {list(value.stride())}; it must be contiguous, call .contiguous()"
        )


def check_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    """Raises LayoutError if ``value`` is not on ``device``."""
    if value.device != device:
        raise LayoutError(f"{name} is on {value.device}; it must be on {device}, like the pages")


def check_count(name: str, value: int, *, least: int = 1, most: int | None = None) -> None:
    """Raises ConfigError if ``value`` is not an integer from ``least`` to ``most``."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < least
        or (most is not None and value > most)
    ):
        limit = f">= {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is {value!r}; it must be an integer {limit}")
