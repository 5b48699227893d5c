"""Compile ``kvtier.cu`` with NVRTC through CuPy, and launch its kernels on torch's current stream.

CuPy compiles and launches; torch owns all memory. CuPy is imported when the first kernel is launched on
a GPU, never before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol

import numpy as np
import torch

from kvtier.announce import announce

#: Threads of a block, the most that the kernels are compiled for.
THREADS = 256
WARP = 32

#: Shared memory that a block gets on every card without opting in to more.
MAX_SHARED_BYTES = 48 * 1024

#: The most blocks in the second and third dimension of a grid.
MAX_GRID_YZ = 65535

#: A kernel's arguments: tensors, of which it gets the address, and numpy scalars of its exact widths. CuPy
#: would pass a Python int as 64 bits and a float as a double, whatever the kernel expects.
Argument = torch.Tensor | np.generic

#: Names of the kernels that are compiled once a dtype end in these.
SUFFIX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Launcher(Protocol):
    """Runs kernels of ``kvtier.cu``."""

    #: Multiprocessors to keep busy.
    multiprocessors: int

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Enqueue one launch of kernel ``name`` with blocks of ``threads`` threads."""


class CudaLauncher:
    """Launches on one CUDA device.

    Raises:
        Exception: CuPy, the compiler or the driver is missing or does not work; whatever CuPy raises.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy

        self.device = device
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cupy: Any = cupy
        with cupy.cuda.Device(device.index):
            self._module = cupy.RawModule(code=source(), options=("--std=c++17",))
            self._module.compile()
        self._functions: dict[str, Any] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        stream = torch.cuda.current_stream(self.device)
        # Addresses as numbers: the array interfaces know neither bfloat16 nor fp8.
        values = tuple(
            np.uint64(item.data_ptr()) if isinstance(item, torch.Tensor) else item
            for item in arguments
        )
        with self._cupy.cuda.Device(self.device.index), self._adopt(stream):
            function = self._functions.get(name)
            if function is None:
                function = self._functions[name] = self._module.get_function(name)
            function(grid, (threads, 1, 1), values, shared_mem=shared_bytes)

    def _adopt(self, stream: Any) -> Any:
        """torch's stream as CuPy's current one."""
        streams = self._cupy.cuda
        if hasattr(streams.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
            return streams.Stream.from_external(stream)
        return streams.ExternalStream(stream.cuda_stream, self.device.index)


def source() -> str:
    """The device code, CUDA C without includes."""
    return files("kvtier.kernels").joinpath("kvtier.cu").read_text(encoding="utf-8")


def launcher_for(device: torch.device) -> Launcher | None:
    """What launches on ``device``; ``None`` where the reference has to do: on a CPU, and on a GPU for which
    the kernels cannot be compiled (one OffloadWarning a device)."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_launcher(index)


@functools.cache
def _cuda_launcher(index: int) -> Launcher | None:
    device = torch.device("cuda", index)
    try:
        return CudaLauncher(device)
    except Exception as error:  # CuPy raises what NVRTC, the driver or the loader gave it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        announce(
            f"the kernels of kvtier cannot be used on {device} ({reason}); slower torch operations do "
            "their work. Install kvtier[cuda13] or kvtier[cuda12], whichever CUDA the driver has",
            stacklevel=3,
        )
        return None


def blocks_for(items: int, a_block: int, limit: int = 2**31 - 1) -> int:
    """Blocks that ``items`` need when each takes ``a_block``; at least 1, at most ``limit``."""
    return max(1, min(limit, -(-items // a_block)))
