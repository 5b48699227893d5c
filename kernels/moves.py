"""Copy many small pieces, each between addresses of its own, in one launch.

Origin of the shape: the copy engine reaches 4-7 GB/s under 28 KiB a piece (vLLM PR 42212), where a kernel that reads
or writes pinned host memory through its unified address reaches the rate of the link.
"""

from __future__ import annotations

import ctypes
import functools
import importlib

import numpy as np
import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.kernels.checks import check_count, check_tensor
from kvtier.kernels.launch import THREADS, Launcher, launcher_for
from kvtier.kernels.pages import WORDS, copy_grid

#: cudaDevAttrCanUseHostPointerForRegisteredMem.
_HOST_POINTERS = 91


def move_pieces(
    destinations: torch.Tensor,
    sources: torch.Tensor,
    sizes: torch.Tensor,
    *,
    largest: int | None = None,
    blocks: int | None = None,
    launcher: Launcher | None = None,
) -> None:
    """Copy ``sizes[i]`` bytes from address ``sources[i]`` to address ``destinations[i]``.

    Addresses are raw, since a piece may lie in any buffer: of VRAM or of pinned host memory where the three lists are
    on a GPU, of host memory where they are on the CPU. The caller answers for them, keeps their memory alive until the
    stream has passed the copy, and lets no destination meet another piece. A piece goes in words of 16, 4 or 1 bytes,
    the widest that both of its addresses are multiples of.

    Args:
        destinations, sources: int64 ``[pieces]``, addresses in bytes.
        sizes: int64 ``[pieces]``, bytes; 0 copies nothing.
        largest: bytes of the largest piece, for the launch shape alone; default: read from ``sizes``, for which the
            host waits if they are on a GPU.
        blocks: at most this many thread blocks, to leave multiprocessors to other work.
        launcher: runs the kernel instead of what the device calls for.

    Raises:
        LayoutError: the lists differ in length, dtype or device, or (checked on the CPU alone) a size is negative or
            an address of a piece is 0 or less.
        ConfigError: ``largest`` or ``blocks`` is out of range, or the lists are on a GPU for which there are no
            kernels: torch cannot follow raw addresses there.
    """
    device = destinations.device if isinstance(destinations, torch.Tensor) else torch.device("cpu")
    check_tensor("destinations", destinations, (None,), dtypes=torch.int64, device=device)
    count = len(destinations)
    check_tensor("sources", sources, (count,), dtypes=torch.int64, device=device)
    check_tensor("sizes", sizes, (count,), dtypes=torch.int64, device=device)
    if largest is not None:
        check_count("largest", largest, least=0)
    if blocks is not None:
        check_count("blocks", blocks)
    if not count:
        return
    if device.type == "cpu":
        _check_values(destinations, sources, sizes)
    launcher = launcher or launcher_for(device)
    if launcher is not None:
        largest = int(sizes.max()) if largest is None else largest
        grid = copy_grid(count, largest // WORDS[0], blocks)
        arguments = (destinations, sources, sizes, np.int32(count))
        launcher.launch("move_pieces", grid, THREADS, arguments)
    elif device.type == "cpu":
        lists = (destinations.tolist(), sources.tolist(), sizes.tolist())
        for destination, source, size in zip(*lists, strict=True):
            if size:
                _bytes_at(destination, size).copy_(_bytes_at(source, size))
    else:
        raise ConfigError(
            f"destinations are on {device}, for which there are no kernels; copy the pieces as tensors, or install "
            "kvtier[cuda13] or kvtier[cuda12]"
        )


@functools.cache
def reaches_host_memory(device: torch.device) -> bool:
    """Whether kernels on ``device`` reach registered host memory at its host address, as ``move_pieces`` does."""
    if device.type == "cpu":
        return True
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        return bool(runtime.deviceGetAttribute(_HOST_POINTERS, device.index))
    except Exception:  # CuPy raises what the loader or the driver gave it
        return False


def _check_values(destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor) -> None:
    wrong = (sizes < 0).nonzero().flatten().tolist()
    if wrong:
        raise LayoutError(f"sizes[{wrong[0]}] is {int(sizes[wrong[0]])}; it must be 0 or more")
    for name, addresses in (("destinations", destinations), ("sources", sources)):
        wrong = ((addresses <= 0) & (sizes > 0)).nonzero().flatten().tolist()
        if wrong:
            raise LayoutError(
                f"{name}[{wrong[0]}] is {int(addresses[wrong[0]])}; it must be the address of a piece"
            )


def _bytes_at(address: int, size: int) -> torch.Tensor:
    """Host memory as a tensor, without a copy."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
