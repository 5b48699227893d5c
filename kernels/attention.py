"""Attention of one decode step over a list of pages, as a part that can be merged with others exactly.

Source: flash-decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Attention over disjoint sets of
tokens is merged by their log-sum-exp: ``lse = log(sum of exp(lse_i))``, ``out = sum of exp(lse_i - lse) * out_i``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.kernels.checks import FLOATS, MAX_DIM, check_count, check_tensor
from kvtier.kernels.launch import (
    MAX_GRID_YZ,
    MAX_SHARED_BYTES,
    SUFFIX,
    THREADS,
    WARP,
    Argument,
    Launcher,
    launcher_for,
)
from kvtier.kernels.table import PageTable

#: Blocks a multiprocessor should have in flight, so that loads of one hide behind sums of another.
_BLOCKS_A_MULTIPROCESSOR = 4


class Partial(NamedTuple):
    """Attention over some of a sequence's tokens.

    Attributes:
        out: float32 ``[heads, dim]``, normalised over these tokens; 0 if there are none.
        lse: float32 ``[heads]``, natural log of the sum of ``exp(scale * q . k)``; ``-inf`` if there are none.
    """

    out: torch.Tensor
    lse: torch.Tensor


def partial_attention(
    q: torch.Tensor,
    table: PageTable,
    *,
    k_start: int,
    v_start: int,
    kv_heads: int,
    v_dim: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
    launcher: Launcher | None = None,
) -> tuple[Partial, torch.Tensor]:
    """Attention of one query a head over the tokens of the listed pages. There is no causal mask: a decode step
    sees every token before it.

    Args:
        q: ``[heads, dim]``, after the rotary embedding; float32, float16 or bfloat16, as are the pages' K and V.
            Query head ``h`` reads KV head ``h // (heads / kv_heads)``.
        table: the pages and how many tokens each holds; what lies behind those is not read.
        k_start, v_start: first byte of the layer's K and V part in a page (``layout.plane(layer).k.offset``).
        kv_heads: heads of the K and V part.
        v_dim: channels of a value; default: those of ``q``.
        scale: default ``1 / sqrt(dim)``.
        splits: parts that the pages are divided into, to run at the same time; default: enough to fill the device.
        launcher: runs the kernel instead of what the device calls for.

    Returns:
        The attention, and float32 ``[heads, pages]``: the log-sum-exp of each page, for ``add_page_mass``.

    Raises:
        LayoutError: shapes, dtypes or devices do not fit each other, or a part is not inside a page.
        ConfigError: ``dim`` or ``v_dim`` is above 512, or an option is out of range.
    """
    check_tensor("q", q, (None, None), dtypes=FLOATS, device=table.device)
    heads, dim = q.shape
    v_dim = dim if v_dim is None else v_dim
    check_count("kv_heads", kv_heads)
    check_count("dim of q", dim, most=MAX_DIM)
    check_count("v_dim", v_dim, most=MAX_DIM)
    if not heads or heads % kv_heads:
        raise LayoutError(f"q has {heads} heads; they must be a multiple of kv_heads={kv_heads}")
    size = q.dtype.itemsize
    for name, start, width in (("k_start", k_start, dim), ("v_start", v_start, v_dim)):
        table.check_range(name, start, table.page_tokens * kv_heads * width * size)
        if start % size:
            raise LayoutError(
                f"{name} is {start}; it must be a multiple of {size}, an item of {q.dtype}"
            )
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if not math.isfinite(scale):
        raise ConfigError(f"scale is {scale!r}; it must be a finite number")
    if splits is not None:
        check_count("splits", splits)
    if not len(table):
        return _nothing(heads, v_dim, table.device)
    launcher = launcher or launcher_for(table.device)
    if launcher is None:
        return attention_reference(q, table, k_start, v_start, kv_heads, v_dim, scale)
    return _launch(launcher, q, table, k_start, v_start, kv_heads, v_dim, scale, splits)


def merge_partials(
    outs: torch.Tensor, lses: torch.Tensor, *, launcher: Launcher | None = None
) -> Partial:
    """Merge attention over disjoint sets of tokens.

    Args:
        outs: float32 ``[parts, heads, dim]``.
        lses: float32 ``[parts, heads]``. Where one is ``-inf``, that part has no tokens and is not read.
        launcher: runs the kernel instead of what the device calls for.

    Raises:
        LayoutError: shapes, dtypes or devices do not fit each other, or there is no part.
    """
    if not isinstance(outs, torch.Tensor):
        raise LayoutError(f"outs is a {type(outs).__name__}; it must be a torch.Tensor")
    check_tensor("outs", outs, (None, None, None), dtypes=torch.float32, device=outs.device)
    parts, heads, dim = outs.shape
    check_tensor("lses", lses, (parts, heads), dtypes=torch.float32, device=outs.device)
    if not parts or not heads or not dim:
        raise LayoutError(
            f"outs has shape {list(outs.shape)}; it must hold at least one part, head and channel"
        )
    launcher = launcher or launcher_for(outs.device)
    if launcher is None:
        return merge_reference(outs, lses)
    out = torch.empty(heads, dim, dtype=torch.float32, device=outs.device)
    lse = torch.empty(heads, dtype=torch.float32, device=outs.device)
    sizes = (np.int32(parts), np.int32(heads), np.int32(dim))
    threads = min(THREADS, -(-dim // WARP) * WARP)
    launcher.launch("merge_partials", (heads, 1, 1), threads, (outs, lses, out, lse, *sizes))
    return Partial(out, lse)


def merge_reference(outs: torch.Tensor, lses: torch.Tensor) -> Partial:
    """See ``merge_partials``."""
    peak = lses.amax(0)
    # By the peak and not by the sum's logarithm, whose last bits would depend on the parts' order.
    weights = torch.where(lses == -torch.inf, 0.0, (lses - peak).exp())
    total = weights.sum(0)
    parts = torch.where(lses[..., None] == -torch.inf, 0.0, outs)
    out = (weights[..., None] * parts).sum(0) / total.clamp_min(1.0)[:, None]
    return Partial(out, torch.where(total > 0.0, peak + total.log(), -torch.inf))


def attention_reference(
    q: torch.Tensor,
    table: PageTable,
    k_start: int,
    v_start: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
) -> tuple[Partial, torch.Tensor]:
    """See ``partial_attention``: one softmax over all tokens, in float32."""
    heads, dim = q.shape
    tokens, pages = table.page_tokens, len(table)

    def part(start: int, width: int) -> torch.Tensor:
        raw = table.read(start, tokens * kv_heads * width * q.element_size()).view(q.dtype)
        return raw.view(pages * tokens, kv_heads, width).float().transpose(0, 1)

    query = q.float().view(kv_heads, heads // kv_heads, dim) * scale
    scores = query @ part(k_start, dim).transpose(1, 2)
    values = part(v_start, v_dim)
    if not table.full:
        held = (torch.arange(tokens, device=table.device) < table.tokens[:, None]).view(-1)
        scores = scores.masked_fill(~held, -torch.inf)
        # Behind the last token there may be anything, NaN included.
        values = values.masked_fill(~held[:, None], 0.0)
    page_lse = scores.view(heads, pages, tokens).logsumexp(-1)
    lse = page_lse.logsumexp(-1)
    out = (scores - lse.view(kv_heads, -1, 1)).exp() @ values
    return Partial(out.reshape(heads, v_dim), lse), page_lse


def _nothing(heads: int, v_dim: int, device: torch.device) -> tuple[Partial, torch.Tensor]:
    out = torch.zeros(heads, v_dim, dtype=torch.float32, device=device)
    lse = torch.full((heads,), -torch.inf, dtype=torch.float32, device=device)
    return Partial(out, lse), torch.empty(heads, 0, dtype=torch.float32, device=device)


def _launch(
    launcher: Launcher,
    q: torch.Tensor,
    table: PageTable,
    k_start: int,
    v_start: int,
    kv_heads: int,
    v_dim: int,
    scale: float,
    splits: int | None,
) -> tuple[Partial, torch.Tensor]:
    (heads, dim), pages, size = q.shape, len(table), q.element_size()
    group = heads // kv_heads
    warps = min(group, THREADS // WARP)
    depth = -(-group // warps)
    wide = not any(n % 16 for n in (k_start, v_start, dim * size, v_dim * size))
    k_padded, v_padded = (_padded(width, size) for width in (dim, v_dim))
    queries_bytes = warps * dim * 4
    row_bytes = (k_padded + v_padded) * size
    tile = min(WARP, table.page_tokens, (MAX_SHARED_BYTES - queries_bytes) // row_bytes)
    if splits is None:
        wanted = launcher.multiprocessors * _BLOCKS_A_MULTIPROCESSOR
        splits = -(-wanted // (kv_heads * depth))
    a_split = -(-pages // min(splits, pages, MAX_GRID_YZ))
    splits = -(-pages // a_split)

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=table.device)

    outs, lses, page_lse = new(splits, heads, v_dim), new(splits, heads), new(heads, pages)
    arguments: list[Argument] = [q, table.addresses, table.tokens, outs, lses, page_lse]
    arguments += [np.int32(pages), np.int32(a_split), np.int64(k_start), np.int64(v_start)]
    shape = (kv_heads, group, dim, v_dim, tile, k_padded, v_padded, wide)
    arguments += [*(np.int32(n) for n in shape), np.float32(scale)]
    name = f"attend_{128 if v_dim <= 128 else MAX_DIM}_{SUFFIX[q.dtype]}"
    shared_bytes = queries_bytes + tile * row_bytes
    launcher.launch(name, (kv_heads, splits, depth), warps * WARP, arguments, shared_bytes)
    if splits == 1:
        return Partial(outs[0], lses[0]), page_lse
    return merge_partials(outs, lses, launcher=launcher), page_lse


def _padded(width: int, size: int) -> int:
    """Values in a row of a tile: whole 16-byte words and one more, so that rows begin in different banks."""
    return (-(-width * size // 16) * 16 + 16) // size


def merge(parts: Sequence[Partial], *, launcher: Launcher | None = None) -> Partial:
    """``merge_partials`` of parts that lie in separate tensors.

    Raises:
        LayoutError: ``parts`` is empty, or the parts do not fit each other.
    """
    if not parts:
        raise LayoutError("parts is empty; there is nothing to merge")
    outs, lses = zip(*parts, strict=True)
    if len({out.shape for out in outs}) > 1 or len({out.device for out in outs}) > 1:
        found = ", ".join(f"{list(out.shape)} on {out.device}" for out in outs)
        raise LayoutError(f"parts differ: {found}; they must have one shape and device")
    return merge_partials(torch.stack(outs), torch.stack(lses), launcher=launcher)
