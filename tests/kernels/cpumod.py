"""Builds kernels/kvtier.cu for the CPU and launches its kernels: stands where CuPy stands on a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "kernels" / "kvtier.cu"

Order = Literal["forward", "reverse", "random"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
Build = Literal["values", "tsan", "asan"]
BUILDS: tuple[Build, ...] = ("values", "tsan", "asan")

_COMMON = [
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-U_FORTIFY_SOURCE",
]
#: Of the device code. The alignment check is in the build of AddressSanitizer, its reports are told apart.
_KERNEL_FLAGS: dict[Build, list[str]] = {
    "values": ["-O1"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
    "asan": ["-O1", "-g1", "-fsanitize=address,alignment", "-fsanitize-recover=address,alignment"],
}
#: Of the runtime, which is never instrumented.
_RUNTIME_FLAGS: dict[Build, list[str]] = {
    "values": ["-O2"],
    "tsan": ["-O2", "-DKVT_TSAN"],
    "asan": ["-O2", "-DKVT_ASAN"],
}
_COMPILE_TIMEOUT_S = 240.0


class LaunchError(Exception):
    """The shim refused a launch, or stopped it."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


def build(code: str, kind: Build, folder: Path) -> Path:
    """The shared library of this device code, from ``folder`` if it is there already."""
    runtime = runtime_of(kind, folder)
    text = folder / f"{_digest(code.encode())}.cu"
    if not text.exists():
        _write(text, code.encode())
    flags = ["-shared", *_COMMON, *_KERNEL_FLAGS[kind], "-include", str(HERE / "shim.h")]
    return _compile(text, [*flags, "-x", "c++"], ["-x", "none", str(runtime)], folder)


def runtime_of(kind: Build, folder: Path) -> Path:
    """The shared library that schedules threads, one for all device code of a kind."""
    flags = ["-shared", *_COMMON, *_RUNTIME_FLAGS[kind], "-I", str(HERE)]
    return _compile(HERE / "shim.cpp", flags, [], folder)


def _compile(source: Path, flags: list[str], behind: list[str], folder: Path) -> Path:
    header = (HERE / "shim.h").read_bytes()
    digest = _digest(source.read_bytes(), header, " ".join([*flags, *behind]).encode())
    target = folder / f"{digest}.so"
    if not target.exists():
        _run([*flags, str(source), *behind], target)
    return target


def _run(arguments: list[str], target: Path) -> None:
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = ["g++", *arguments, "-o", str(unfinished)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
    os.replace(unfinished, target)


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


class _Argument(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_char),
        ("item_size", ctypes.c_uint),
        ("item_kind", ctypes.c_char),
    ]


def _kind(dtype: torch.dtype) -> bytes:
    return b"f" if dtype.is_floating_point else b"i"


class CpuLauncher:
    """Launches kernels of a built library on CPU tensors, as ``CudaLauncher`` does on a GPU.

    Args:
        library: see ``build``.
        order: in which threads and blocks take turns.
        seed: of the random order.
    """

    #: Few, so that splits and grid strides are exercised by small inputs.
    multiprocessors = 2

    def __init__(self, library: Path, order: Order = "forward", seed: int = 1) -> None:
        kernels = ctypes.CDLL(str(library))
        kernels.kvt_kernels.restype = ctypes.c_void_p
        self._kernels = ctypes.c_void_p(kernels.kvt_kernels())
        # The runtime that it was linked with; the linker finds what is loaded already.
        self._launch = kernels.kvt_launch
        self.order, self.seed = order, seed
        self.launched: list[str] = []

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        threads: int | Sequence[int],
        arguments: Sequence[torch.Tensor | np.generic],
        shared_bytes: int = 0,
    ) -> None:
        """Run one launch to its end.

        Raises:
            LaunchError: the shim found something wrong.
        """
        values = [_value(name, index, item) for index, item in enumerate(arguments)]
        kinds = [_described(item) for item in arguments]
        count = len(values)
        block = (threads, 1, 1) if isinstance(threads, int) else tuple(threads)
        message = ctypes.create_string_buffer(400)
        failed = self._launch(
            self._kernels,
            name.encode(),
            (ctypes.c_uint64 * 3)(*grid),
            (ctypes.c_uint64 * 3)(*block),
            ctypes.c_uint64(shared_bytes),
            (_Argument * count)(*kinds),
            (ctypes.c_void_p * count)(*(ctypes.addressof(value) for value in values)),
            count,
            ORDERS.index(self.order),
            ctypes.c_uint64(self.seed),
            message,
            len(message),
        )
        self.launched.append(name)
        if failed:
            raise LaunchError(message.value.decode())


def _value(
    name: str, index: int, item: torch.Tensor | np.generic
) -> ctypes.Array | ctypes.c_uint64:
    if isinstance(item, torch.Tensor):
        assert item.device.type == "cpu", f"{name}: argument {index} is on {item.device}"
        return ctypes.c_uint64(item.data_ptr())
    if isinstance(item, np.generic):
        return (ctypes.c_char * item.itemsize).from_buffer_copy(item.tobytes())
    raise LaunchError(f"{name}: argument {index} is {item!r}; pass a tensor or a numpy scalar")


def _described(item: torch.Tensor | np.generic) -> _Argument:
    if isinstance(item, torch.Tensor):
        return _Argument(8, b"p", item.element_size(), _kind(item.dtype))
    kind = b"f" if item.dtype.kind == "f" else b"i"
    return _Argument(item.itemsize, kind, item.itemsize, kind)
