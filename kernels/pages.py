"""Gather pages, planes or parts of them into contiguous memory, and scatter them back.

Both copy bytes and change no bit, whatever the dtype. Origin of the shape: one address a page and 16-byte
vectors, as in the swap kernels of vLLM and SGLang; here a plane or a part is one run of bytes, so there is no
loop over layers.
"""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import LayoutError
from kvtier.kernels.checks import check_count, check_device
from kvtier.kernels.launch import MAX_GRID_YZ, THREADS, Launcher, blocks_for, launcher_for
from kvtier.kernels.table import PageTable

#: Words that a copy may be made of, in bytes; the widest that fits all addresses is taken.
WORDS = (16, 4, 1)

#: Words that a thread has in flight.
_AT_ONCE = 4


def gather_pages(
    table: PageTable,
    out: torch.Tensor | None = None,
    *,
    start: int = 0,
    nbytes: int | None = None,
    blocks: int | None = None,
    launcher: Launcher | None = None,
) -> torch.Tensor:
    """Copy bytes ``start`` to ``start + nbytes`` of each page behind each other.

    Args:
        table: the pages, in the order wanted.
        out: uint8 ``[pages, nbytes]`` on the pages' device, rows of consecutive bytes; a new tensor if missing.
            Rows that begin at multiples of 16 bytes are copied fastest.
        start: first byte, for instance ``layout.plane(layer).offset``.
        nbytes: how many; default: to the end of the page.
        blocks: at most this many thread blocks, to leave multiprocessors to other work.
        launcher: runs the kernel instead of what the device calls for.

    Returns:
        ``out``.

    Raises:
        LayoutError: the bytes are not inside a page, or ``out`` does not fit them.
        ConfigError: ``blocks`` is not positive.
    """
    nbytes = table.page_bytes - start if nbytes is None else nbytes
    table.check_range("start, nbytes", start, nbytes)
    if out is None:
        out = torch.empty(len(table), nbytes, dtype=torch.uint8, device=table.device)
    _check_rows("out", out, table, nbytes)
    launcher = launcher or launcher_for(table.device)
    if launcher is None:
        out.copy_(table.read(start, nbytes))
    else:
        _launch("gather", launcher, table, out, start, nbytes, blocks)
    return out


def scatter_pages(
    table: PageTable,
    packed: torch.Tensor,
    *,
    start: int = 0,
    blocks: int | None = None,
    launcher: Launcher | None = None,
) -> None:
    """Write row ``i`` of ``packed`` over the bytes from ``start`` on of page ``i``: the inverse of gather.

    Args:
        table: the pages, each named once.
        packed: uint8 ``[pages, nbytes]`` on the pages' device, rows of consecutive bytes.
        start, blocks, launcher: see ``gather_pages``.

    Raises:
        LayoutError: the bytes are not inside a page, ``packed`` does not fit the table, or the table names a page
            twice.
        ConfigError: ``blocks`` is not positive.
    """
    if not table.distinct:
        raise LayoutError("table names a page twice; which row it gets would depend on timing")
    nbytes = packed.shape[1] if isinstance(packed, torch.Tensor) and packed.dim() == 2 else 0
    _check_rows("packed", packed, table, nbytes)
    table.check_range("start, packed", start, nbytes)
    launcher = launcher or launcher_for(table.device)
    if launcher is None:
        table.write(start, packed)
    else:
        _launch("scatter", launcher, table, packed, start, nbytes, blocks)


def _check_rows(name: str, rows: torch.Tensor, table: PageTable, nbytes: int) -> None:
    wanted = [len(table), nbytes]
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.uint8:
        given = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise LayoutError(f"{name} is of {given}; it must be a tensor of torch.uint8")
    if list(rows.shape) != wanted:
        raise LayoutError(f"{name} has shape {list(rows.shape)}; it must be {wanted}")
    check_device(name, rows, table.device)
    if len(table) and (rows.stride(1) != 1 or rows.stride(0) < nbytes):
        raise LayoutError(
            f"{name} has strides {list(rows.stride())}; its rows must be of consecutive bytes and not overlap"
        )


def _launch(
    verb: str,
    launcher: Launcher,
    table: PageTable,
    packed: torch.Tensor,
    start: int,
    nbytes: int,
    blocks: int | None,
) -> None:
    if blocks is not None:
        check_count("blocks", blocks)
    if not len(table):
        return
    stride = packed.stride(0)
    word = next(w for w in WORDS if not (start | stride | packed.data_ptr()) % w)
    grid = copy_grid(len(table), nbytes // word, blocks)
    arguments = (
        table.addresses,
        np.int32(len(table)),
        np.int64(start),
        np.int64(nbytes),
        packed,
        np.int64(stride),
    )
    launcher.launch(f"{verb}_pages_{word}", grid, THREADS, arguments)


def copy_grid(rows: int, words: int, blocks: int | None) -> tuple[int, int, int]:
    """Launch shape of a copy of ``rows`` times ``words`` words in at most ``blocks`` thread blocks."""
    down = min(rows, MAX_GRID_YZ if blocks is None else blocks)
    across = blocks_for(words, THREADS * _AT_ONCE)
    if blocks is not None:
        across = max(1, min(across, blocks // down))
    return across, down, 1
