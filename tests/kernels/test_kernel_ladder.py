"""The checks of the kernels that need no GPU, one rung above the other; see README.md beside the kernels."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import cpumod
import mutants
import numpy as np
import ptx
import pytest
import torch

# ------------------------------------------------------------------------------ launch checks


@pytest.fixture
def launcher(library: Path) -> cpumod.CpuLauncher:
    return cpumod.CpuLauncher(library)


def merge_arguments() -> list[torch.Tensor | np.generic]:
    outs, lses, out, lse = (torch.zeros(n) for n in (8, 2, 4, 1))
    return [outs, lses, out, lse, np.int32(2), np.int32(1), np.int32(4)]


def changed(index: int, value: torch.Tensor | np.generic) -> list[torch.Tensor | np.generic]:
    arguments = merge_arguments()
    arguments[index] = value
    return arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (merge_arguments()[:-1], "takes 7 arguments, got 6"),
        (changed(4, np.int64(2)), "argument 4 is a 32-bit integer, got a 64-bit integer"),
        (changed(4, np.float32(2)), "argument 4 is a 32-bit integer, got a 32-bit float"),
        (changed(4, torch.zeros(1)), "argument 4 is a 32-bit integer, got a pointer to"),
        (changed(0, torch.zeros(8, dtype=torch.int32)), "argument 0 is a pointer to 32-bit float"),
        (changed(0, torch.zeros(8, dtype=torch.float64)), "got a pointer to 64-bit float"),
        (changed(0, torch.zeros(64, dtype=torch.uint8)), "got a pointer to 8-bit"),
        (changed(0, torch.zeros(64, dtype=torch.uint8)[2:]), "argument 0 is not aligned"),
        (changed(4, 2), "pass a tensor or a numpy scalar"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_launch(launcher: cpumod.CpuLauncher, arguments: list, message: str) -> None:
    with pytest.raises(cpumod.LaunchError, match=message):
        launcher.launch("merge_partials", (1, 1, 1), 32, arguments)


@pytest.mark.parametrize(
    ("grid", "threads", "shared", "message"),
    [
        ((0, 1, 1), 32, 0, "grid out of range"),
        ((1, 65536, 1), 32, 0, "grid out of range"),
        ((2**31, 1, 1), 32, 0, "grid out of range"),
        ((1, 1, 1), 0, 0, "block out of range"),
        ((1, 1, 1), 1056, 0, "block out of range"),
        ((1, 1, 1), 288, 0, "288 threads is over its launch bounds of 256"),
        ((1, 1, 1), 32, 49153, "49153 bytes of shared memory are over 49152"),
    ],
)
def test_shape_of_a_launch(
    launcher: cpumod.CpuLauncher, grid: tuple, threads: int, shared: int, message: str
) -> None:
    with pytest.raises(cpumod.LaunchError, match=message):
        launcher.launch("merge_partials", grid, threads, merge_arguments(), shared)


def test_a_good_launch_after_bad_ones(launcher: cpumod.CpuLauncher) -> None:
    with pytest.raises(cpumod.LaunchError, match="no such kernel"):
        launcher.launch("merge", (1, 1, 1), 32, [])
    launcher.launch("merge_partials", (1, 1, 1), 32, merge_arguments())


PROBES = r"""
KERNEL(64) past_shared(int* out) { KVT_SHARED(int, s); s[threadIdx.x] = 1; out[0] = s[0]; }
KVT_EXPORT(past_shared, 64)
KERNEL(64) unwritten_shared(float* out) { KVT_SHARED(float, s); out[threadIdx.x] = s[threadIdx.x]; }
KVT_EXPORT(unwritten_shared, 64)
KERNEL(64) half_at_barrier(int* out) { if (threadIdx.x < 32) __syncthreads(); out[0] = 1; }
KVT_EXPORT(half_at_barrier, 64)
KERNEL(64) two_barriers(int* out) {
    if (threadIdx.x < 32) { __syncthreads(); out[0] = 1; }
    else { __syncthreads(); out[1] = 1; }
}
KVT_EXPORT(two_barriers, 64)
KERNEL(64) outside_mask(int* out) { if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffu, (int)threadIdx.x, 16); }
KVT_EXPORT(outside_mask, 64)
KERNEL(64) not_in_mask(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, (int)threadIdx.x, 1); }
KVT_EXPORT(not_in_mask, 64)
KERNEL(64) waits_for_lane(int* out) { if (threadIdx.x != 5) out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, (int)threadIdx.x, 1); }
KVT_EXPORT(waits_for_lane, 64)
KERNEL(64) shuffles(int* out) {
    const int x = threadIdx.x, lane = x % 32;
    int sum = __shfl_sync(ALL_LANES, x, 3) + __shfl_up_sync(ALL_LANES, x, 1) * 100;
    sum += __shfl_down_sync(ALL_LANES, x, 2) * 10000;
    __syncwarp();
    if (lane < 8) sum += __shfl_xor_sync(0xffu, x, 4) * 1000000;
    out[x] = sum;
}
KVT_EXPORT(shuffles, 64)
"""


@pytest.fixture(scope="module")
def probes(builds: Path) -> Path:
    code = mutants.only(cpumod.SOURCE.read_text(), "nothing") + PROBES.replace("\\\n", "")
    return cpumod.build(code, "values", builds)


@pytest.mark.parametrize("order", cpumod.ORDERS)
@pytest.mark.parametrize(
    ("kernel", "shared", "message"),
    [
        ("past_shared", 252, "wrote past the end of its 252 bytes of shared memory"),
        ("half_at_barrier", 0, "32 threads have left, 32 threads wait at the barrier in line"),
        ("two_barriers", 0, "wait for each other at different places"),
        ("outside_mask", 0, "reads lane (16|17|2.|3.|18|19), which takes no part"),
        ("not_in_mask", 0, "by a lane outside its mask"),
        ("waits_for_lane", 0, "31 threads wait at the warp operation in line|1 threads have left"),
    ],
)
def test_misuse_is_found(
    probes: Path, order: cpumod.Order, kernel: str, shared: int, message: str
) -> None:
    launcher = cpumod.CpuLauncher(probes, order)
    with pytest.raises(cpumod.LaunchError, match=message):
        launcher.launch(kernel, (1, 1, 1), 64, [torch.zeros(64, dtype=torch.int32)], shared)


def test_shared_memory_starts_as_nan(probes: Path) -> None:
    out = torch.zeros(64)
    cpumod.CpuLauncher(probes).launch("unwritten_shared", (2, 1, 1), 64, [out], 256)
    assert out.isnan().all()


@pytest.mark.parametrize("order", cpumod.ORDERS)
def test_shuffles_mean_what_they_mean_on_a_card(probes: Path, order: cpumod.Order) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    cpumod.CpuLauncher(probes, order).launch("shuffles", (1, 1, 1), 64, [out])
    x = torch.arange(64)
    lane, base = x % 32, x // 32 * 32
    up = torch.where(lane >= 1, x - 1, x)
    down = torch.where(lane < 30, x + 2, x)
    own = torch.where(lane < 8, base + (lane ^ 4), 0)
    expected = base + 3 + up * 100 + down * 10_000 + own * 1_000_000
    assert out.tolist() == expected.tolist()


# ---------------------------------------------------------- sanitizers and planted bugs, one climb


@pytest.fixture(scope="module")
def findings(builds: Path) -> dict[str, mutants.Findings]:
    """The kernels as they are and the planted bugs; sanitizers run them in one process each."""
    climbed = mutants.climb((*mutants.UNCHANGED, *mutants.MUTANTS), builds, every_rung=False)
    print(mutants.table([found for found in climbed if found.mutant.planted]))
    return {found.mutant.name: found for found in climbed}


@pytest.mark.ladder
@pytest.mark.parametrize("mutant", mutants.UNCHANGED, ids=lambda mutant: mutant.body)
def test_no_rung_finds_anything(
    findings: dict[str, mutants.Findings], mutant: mutants.Mutant
) -> None:
    found = findings[mutant.name]
    assert found.tried >= {mutants.RACE, mutants.BOUNDS, mutants.ALIGNMENT}
    assert found.by_rung == {}


@pytest.mark.ladder
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(
    findings: dict[str, mutants.Findings], mutant: mutants.Mutant
) -> None:
    found = findings[mutant.name].by_rung
    assert found, "survived every rung"
    assert set(found) >= set(mutant.by), f"found by {found}"


# --------------------------------------------------------------------------- real architectures


@pytest.mark.ladder
@pytest.mark.parametrize("architecture", ptx.ARCHITECTURES)
def test_compiles_for_a_card(builds: Path, architecture: str) -> None:
    """No warning, no spilled register, 16-byte accesses where promised, exact arithmetic left exact."""
    code = cpumod.SOURCE.read_text()
    parts = (code, architecture, Path(ptx.__file__).read_text(), str(ptx.disassembler()))
    verdict = builds / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.registers"
    if not verdict.exists():
        verdict.write_text(json.dumps(ptx.examine(code, architecture)))
    registers = json.loads(verdict.read_text())
    assert set(ptx.WIDE) < set(registers)
