"""Attention mass: the share of a step's attention that each page received.

With the log-sum-exp of each page and of the whole, ``exp(page_lse - lse)`` is the exact softmax mass of the
page (the identity of flash-decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html); no matrix of
probabilities is needed.
"""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.kernels.checks import check_tensor
from kvtier.kernels.launch import THREADS, WARP, Launcher, blocks_for, launcher_for


def add_page_mass(
    page_lse: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    mass: torch.Tensor,
    *,
    weight: float | None = None,
    launcher: Launcher | None = None,
) -> torch.Tensor:
    """``mass[rows[j]] += weight * sum over heads of exp(page_lse[head, j] - lse[head])``, in place.

    Args:
        page_lse: float32 ``[heads, pages]`` from ``partial_attention``; ``-inf`` for a page that was not read.
        lse: float32 ``[heads]`` of all pages together, after all merges.
        rows: int32 ``[pages]``, where in ``mass`` each page's share goes. Pages may share a row, as when
            sequences of a batch share a page. Every entry must be in range: on a GPU this is not checked.
        mass: float32 ``[rows]``.
        weight: default ``1 / heads``, so that the shares of a step sum to 1.
        launcher: runs the kernel instead of what the device calls for.

    Returns:
        ``mass``. The order of the additions is not fixed, so the last bits may vary.

    Raises:
        LayoutError: shapes, dtypes or devices do not fit each other, or a row is out of range (CPU).
        ConfigError: ``weight`` is not a finite number.
    """
    if not isinstance(mass, torch.Tensor):
        raise LayoutError(f"mass is a {type(mass).__name__}; it must be a torch.Tensor")
    device = mass.device
    check_tensor("mass", mass, (None,), dtypes=torch.float32, device=device)
    check_tensor("page_lse", page_lse, (None, None), dtypes=torch.float32, device=device)
    heads, pages = page_lse.shape
    check_tensor("lse", lse, (heads,), dtypes=torch.float32, device=device)
    check_tensor("rows", rows, (pages,), dtypes=torch.int32, device=device)
    if weight is None:
        weight = 1.0 / max(1, heads)
    if not np.isfinite(weight):
        raise ConfigError(f"weight is {weight!r}; it must be a finite number")
    if device.type == "cpu" and pages:
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= len(mass):
            raise LayoutError(
                f"rows has entries from {low} to {high}; mass has rows 0 to {len(mass) - 1}"
            )
    launcher = launcher or launcher_for(device)
    if not pages or not heads:
        return mass
    if launcher is None:
        return mass.index_add_(0, rows, mass_reference(page_lse, lse) * weight)
    arguments = (page_lse, lse, rows, mass, np.int32(heads), np.int32(pages), np.float32(weight))
    launcher.launch(
        "add_page_mass", (blocks_for(pages, WARP), 1, 1), THREADS, arguments, THREADS * 4
    )
    return mass


def mass_reference(page_lse: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """float32 ``[pages]``: the sum over heads of ``exp(page_lse - lse)``."""
    shares = (page_lse - lse[:, None]).exp()
    return torch.where(page_lse == -torch.inf, 0.0, shares).sum(0)
