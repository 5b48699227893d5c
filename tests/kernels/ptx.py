"""Compiles kernels/kvtier.cu for real GPUs with NVRTC, which needs no driver, and reads what came out."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

#: Turing, A100, Ampere, Ada, Hopper, Blackwell for servers and for desktops.
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

#: Registers of a thread at which two blocks of 256 still fit into a multiprocessor's 65,536.
MAX_REGISTERS = 128

#: 16-byte accesses that each kernel must have at least: (loads, stores) of global memory.
WIDE = {
    "gather_pages_16": (4, 4),
    "scatter_pages_16": (4, 4),
    "move_pieces": (4, 4),
    "summarise_16_f32": (2, 4),
    "summarise_16_f16": (2, 4),
    "summarise_16_bf16": (2, 4),
    "attend_128_f32": (2, 0),
    "attend_128_f16": (2, 0),
    "attend_128_bf16": (2, 0),
    "attend_512_f32": (2, 0),
    "attend_512_f16": (2, 0),
    "attend_512_bf16": (2, 0),
}

#: Kernels in which a contracted product and sum would change bits.
NOT_CONTRACTED = ("dequantise_f32", "dequantise_f16", "dequantise_bf16")


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of the source."""

    log: str
    ptx: str
    cubin: bytes


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    try:
        entries = files("nvidia-cuda-nvrtc") or []
    except PackageNotFoundError:
        raise AssertionError("nvidia-cuda-nvrtc is missing; pip install -e '.[dev]'") from None
    found = {entry.name: Path(str(entry.locate())) for entry in entries if ".so" in entry.name}
    builtins = next(path for name, path in found.items() if "builtins" in name)
    library = next(path for name, path in found.items() if re.fullmatch(r"libnvrtc\.so\.\d+", name))
    # NVRTC asks for its builtins by name; what is loaded already is found.
    ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def compile_for(code: str, architecture: str) -> Compiled:
    """Compile device code as CuPy would, to a cubin of one architecture.

    Raises:
        AssertionError: it does not compile; the message is the compiler's.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), code.encode(), b"kvtier.cu", 0, None, None
    )
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
    encoded = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(
        program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
    )
    log = _read(program, "ProgramLog").decode().rstrip("\0")
    try:
        assert not status, f"{architecture}: {_first_error(log)}"
        text = _read(program, "PTX").decode().rstrip("\0")
        return Compiled(log, text, _read(program, "CUBIN"))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert not getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    assert not getattr(_nvrtc(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _first_error(log: str) -> str:
    return next((line for line in log.splitlines() if "error" in line), log[:300])


def examine(code: str, architecture: str) -> dict[str, int]:
    """Compile, and check all that can be read without a GPU; registers of each kernel.

    Raises:
        AssertionError: a warning, spilled registers, too many of them, a promised 16-byte access that is not there,
            or a contraction where bits must be exact.
    """
    compiled = compile_for(code, architecture)
    warning = [line for line in compiled.log.splitlines() if "warning" in line]
    assert not warning, f"{architecture}: {warning[0]}"
    registers = {}
    resources = re.compile(
        r"Function properties for (\w+)\n"
        r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers"
    )
    for name, stack, stores, loads, used in resources.findall(compiled.log):
        spilled = [int(stack), int(stores), int(loads)]
        assert not any(spilled), (
            f"{architecture}: {name} spills (stack, stores, loads: {spilled} bytes)"
        )
        registers[name] = int(used)
        assert int(used) <= MAX_REGISTERS, f"{architecture}: {name} uses {used} registers"
    bodies = ptx_bodies(compiled.ptx)
    assert bodies.keys() == registers.keys(), (
        f"{architecture}: the log and the PTX name other kernels"
    )
    check_accesses(bodies, architecture)
    machine_code = disassemble(compiled.cubin)
    if machine_code is not None:
        check_machine_code(machine_code, architecture)
    return registers


def ptx_bodies(ptx: str) -> dict[str, str]:
    """PTX of each kernel, by name."""
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check_accesses(bodies: dict[str, str], architecture: str) -> None:
    """Wide accesses and exact arithmetic, as the PTX has them."""
    for name, body in bodies.items():
        loads = len(re.findall(r"\bld\.global\.\S*v4\.(?:\w32)\b", body))
        stores = len(re.findall(r"\bst\.global\.\S*v4\.(?:\w32)\b", body))
        least = WIDE.get(name, (0, 0))
        assert loads >= least[0], (
            f"{architecture}: {name} has {loads} 16-byte loads, not {least[0]}"
        )
        assert stores >= least[1], (
            f"{architecture}: {name} has {stores} 16-byte stores, not {least[1]}"
        )
        contracted = len(re.findall(r"\bfma\.rn\.f32\b", body)) if name in NOT_CONTRACTED else 0
        assert not contracted, f"{architecture}: {name} contracts a product and a sum"


@functools.cache
def disassembler() -> str | None:
    """nvdisasm of this environment or of a toolkit, if there is one."""
    try:
        for entry in files("nvidia-cuda-nvdisasm") or []:
            if entry.name == "nvdisasm":
                return str(entry.locate())
    except PackageNotFoundError:
        pass
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> dict[str, str] | None:
    """Machine code of each kernel, by name; ``None`` without a disassembler."""
    program = disassembler()
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, text=True, timeout=120, check=True
        )
    parts = re.split(r"\.section\s+\.text\.(\w+),", done.stdout)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check_machine_code(kernels: dict[str, str], architecture: str) -> None:
    """What ptxas made of it."""
    for name, text in kernels.items():
        loads = len(re.findall(r"\bLDG\.\S*128", text))
        stores = len(re.findall(r"\bSTG\.\S*128", text))
        least = WIDE.get(name, (0, 0))
        assert loads >= least[0], f"{architecture}: {name} has {loads} LDG.128, not {least[0]}"
        assert stores >= least[1], f"{architecture}: {name} has {stores} STG.128, not {least[1]}"
        local = len(re.findall(r"\b(?:LDL|STL)\b", text))
        assert not local, f"{architecture}: {name} has {local} accesses of local memory"
        if name in NOT_CONTRACTED:
            assert not re.search(r"\bFFMA\b", text), f"{architecture}: {name} has an FFMA"
