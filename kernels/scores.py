"""Scores of pages against a query, from their summaries alone.

Both are in units of ``q . k``: multiply by the attention scale where heads are compared by softmax. They are
given for each query head; how the heads of a group are reduced is the selector's choice.
"""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import LayoutError
from kvtier.kernels.checks import FLOATS, MAX_DIM, check_count, check_tensor
from kvtier.kernels.launch import (
    SUFFIX,
    THREADS,
    WARP,
    Argument,
    Launcher,
    blocks_for,
    launcher_for,
)
from kvtier.kernels.summary import DEVIATION, LARGEST, LEAST, PageSummaries


def quest_scores(
    q: torch.Tensor, summary: torch.Tensor | PageSummaries, *, launcher: Launcher | None = None
) -> torch.Tensor:
    """Upper bound of ``q . k`` over the keys of each page: the sum over channels of ``max(q * least, q * largest)``.

    Source: Quest (Tang et al., arXiv 2406.10774), eq. of section 3.3.

    Args:
        q: ``[heads, dim]``, queries of one step after the rotary embedding; float32, float16 or bfloat16.
        summary: ``[pages, 4, kv_heads, dim]`` from ``summarise_pages``, or such summaries where they lie, of the
            queries' dtype. Query head ``h`` belongs to KV head ``h // (heads / kv_heads)``.
        launcher: runs the kernel instead of what the device calls for.

    Returns:
        float32 ``[heads, pages]``.

    Raises:
        LayoutError: shapes, dtypes or devices do not fit each other.
        ConfigError: ``dim`` is above 512.
    """
    return _scores("quest", q, summary, launcher)


def arkbox_scores(
    q: torch.Tensor, summary: torch.Tensor | PageSummaries, *, launcher: Launcher | None = None
) -> torch.Tensor:
    """Estimate of the largest ``q . k`` of each page: the sum over channels of ``q * middle + |q| * deviation``,
    ``middle = (least + largest) / 2``.

    Source: ArkVale (Chen et al., NeurIPS 2024), the "cuboid-mean" digest. It ranks pages better than Quest's
    bound, and is no bound itself.

    Arguments, result and errors: see ``quest_scores``.
    """
    return _scores("arkbox", q, summary, launcher)


def _scores(
    kind: str, q: torch.Tensor, summary: torch.Tensor | PageSummaries, launcher: Launcher | None
) -> torch.Tensor:
    if isinstance(summary, PageSummaries):
        pages, kv_heads, dim, dtype = len(summary), summary.heads, summary.dim, summary.dtype
        device = summary.table.device
    elif isinstance(summary, torch.Tensor):
        device, dtype = summary.device, summary.dtype
        check_tensor("summary", summary, (None, 4, None, None), dtypes=FLOATS, device=device)
        pages, _, kv_heads, dim = summary.shape
    else:
        raise LayoutError(f"summary is a {type(summary).__name__}; it must be a torch.Tensor")
    check_count("dim of summary", dim, most=MAX_DIM)
    check_tensor("q", q, (None, dim), dtypes=dtype, device=device)
    heads = q.shape[0]
    if not heads or heads % kv_heads:
        raise LayoutError(
            f"q has {heads} heads; they must be a multiple of the {kv_heads} KV heads of summary"
        )
    launcher = launcher or launcher_for(device)
    if launcher is None:
        whole = summary.gather() if isinstance(summary, PageSummaries) else summary
        return scores_reference(kind, q, whole)
    out = torch.empty(heads, pages, dtype=torch.float32, device=device)
    if pages:
        where, start = _places(summary)
        arguments: list[Argument] = [q, where, np.int64(start), out]
        arguments += [np.int32(n) for n in (pages, kv_heads, heads // kv_heads, dim)]
        grid = (blocks_for(pages, THREADS // WARP), kv_heads, 1)
        launcher.launch(f"{kind}_scores_{SUFFIX[dtype]}", grid, THREADS, arguments)
    return out


def _places(summary: torch.Tensor | PageSummaries) -> tuple[torch.Tensor, int]:
    """int64 ``[pages]``: addresses of pages, and where in each its summary begins."""
    if isinstance(summary, PageSummaries):
        return summary.table.addresses, summary.start
    pages = len(summary)
    number = torch.arange(pages, dtype=torch.int64, device=summary.device)
    return number * (summary.nbytes // pages) + summary.data_ptr(), 0


def scores_reference(kind: str, q: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """See ``quest_scores``, or ``arkbox_scores`` if ``kind`` is ``"arkbox"``. Two products of matrices each."""
    pages, _, kv_heads, dim = summary.shape
    query = q.float().view(kv_heads, -1, dim)
    low, high, spread = (
        summary[:, row].float().permute(1, 2, 0) for row in (LEAST, LARGEST, DEVIATION)
    )
    if kind == "quest":
        scores = query.clamp_min(0) @ high + query.clamp_max(0) @ low
    else:
        scores = query @ ((low + high) * 0.5) + query.abs() @ spread
    return scores.reshape(-1, pages)
