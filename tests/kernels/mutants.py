"""Planted bugs, and which rung of the ladder finds which.

    python tests/kernels/mutants.py    prints the table (about a minute)

A mutant is an edit of the device code, or a launch with something changed on its way (a tamper). It is run with
the same bodies as the real kernels. One that passes every rung shows a hole in the ladder, and fails the test.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpumod
import numpy as np
import ptx
from sanitized import ALIGNMENT, BOUNDS, LAUNCH, RACE, VALUES, Job, run_jobs

COMPILE = "compile"

#: In the order of the table.
RUNGS = (VALUES, LAUNCH, RACE, BOUNDS, ALIGNMENT, COMPILE)

#: The rung that compiles for a GPU is slow; only mutants that the CPU cannot see are taken there.
ARCHITECTURE = "sm_89"

Launch = tuple[str, tuple[int, int, int], int, list[Any], int]


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        name: what is wrong.
        body: the body that runs it.
        kernels: pattern of the names of the kernels to compile; the rest is left out, for speed.
        old, new: text of ``kvtier.cu`` and what takes its place, at its first occurrence.
        tamper: name of an entry of ``TAMPERS``, instead of an edit.
        by: rungs that must find it.
    """

    name: str
    body: str
    kernels: str
    by: tuple[str, ...]
    old: str = ""
    new: str = ""
    tamper: str = ""

    def code(self, source: str) -> str:
        """The mutant's device code."""
        if self.old:
            assert self.old in source, f"{self.name}: kvtier.cu has no {self.old!r}"
            source = source.replace(self.old, self.new, 1)
        return only(source, self.kernels)


def only(source: str, kernels: str) -> str:
    """Device code with those instances of templates alone whose names begin with ``kernels``."""
    kept = re.compile(rf"\w+\((?:{kernels})")
    instance = re.compile(r"(?:MOVE|SUMMARISE|SCORES|ATTEND|QUANTISE)\(\w+, ")
    lines = source.splitlines(keepends=True)
    return "".join(line for line in lines if not instance.match(line) or kept.match(line))


# ---------------------------------------------------------------------------------- tampers


def _narrow_count(launch: Launch) -> Launch:
    name, grid, threads, arguments, shared = launch
    return name, grid, threads, [*arguments[:1], np.int64(arguments[1]), *arguments[2:]], shared


def _float_as_double(launch: Launch) -> Launch:
    name, grid, threads, arguments, shared = launch
    return name, grid, threads, [*arguments[:-1], np.float64(arguments[-1])], shared


def _half_the_blocks(launch: Launch) -> Launch:
    name, grid, threads, arguments, shared = launch
    return name, (max(1, grid[0] // 2), *grid[1:]), threads, arguments, shared


def _one_float_less(launch: Launch) -> Launch:
    name, grid, threads, arguments, shared = launch
    return name, grid, threads, arguments, shared - 4


def _always_wide(launch: Launch) -> Launch:
    name, *rest = launch
    return (re.sub(r"_\d+$", "_16", name), *rest)  # type: ignore[return-value]


def _huge_block(launch: Launch) -> Launch:
    name, grid, _, arguments, shared = launch
    return name, grid, 512, arguments, shared


TAMPERS: dict[str, Callable[[Launch], Launch]] = {
    "count of 64 bits": _narrow_count,
    "scale as a double": _float_as_double,
    "half the blocks": _half_the_blocks,
    "shared memory a float short": _one_float_less,
    "16-byte words always": _always_wide,
    "512 threads": _huge_block,
}


class TamperedLauncher:
    """A launcher whose launches are changed on their way."""

    def __init__(self, inner: Any, tamper: Callable[[Launch], Launch]) -> None:
        self.inner, self.tamper = inner, tamper
        self.multiprocessors = inner.multiprocessors

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        if name == "merge_partials":  # of partial attention; the tampers mean the launch before
            self.inner.launch(name, grid, threads, arguments, shared_bytes)
        else:
            self.inner.launch(*self.tamper((name, grid, threads, list(arguments), shared_bytes)))


# ---------------------------------------------------------------------------------- mutants

MUTANTS = (
    Mutant("atomic add lost", "masses", "none", (RACE,),
           "atomicAdd(mass + rows[page], total * weight)", "mass[rows[page]] += total * weight"),
    Mutant("atomic max lost", "quantisation", "f16", (RACE,),
           "atomicMax(worst_of + page, worst)", "worst_of[page] = max(worst_of[page], worst)"),
    Mutant("barrier before the sum missing", "masses", "none", (VALUES, RACE),
           "= sum;\n    __syncthreads();", "= sum;"),
    Mutant("barrier after the tile missing", "attentions", "attend_128", (RACE,),
           "            __syncthreads();  // the tile before has been read\n", ""),
    Mutant("barrier before the tile missing", "attentions", "attend_128", (VALUES, RACE),
           "wide);\n            __syncthreads();\n            float score", "wide);\n            float score"),
    Mutant("blocks overlap in words", "moves", "scatter", (RACE,),
           "step = (i64)gridDim.x * blockDim.x;", "step = (i64)blockDim.x;"),
    Mutant("blocks overlap in pages", "moves", "gather", (RACE,),
           "page += gridDim.y) {\n        u8* in_page", "page++) {\n        u8* in_page"),
    Mutant("tail one byte long", "moves", "gather|scatter", (VALUES, RACE),
           "rest < nbytes)", "rest <= nbytes)"),
    Mutant("page bound missing", "scores", "quest|arkbox", (BOUNDS,),
           "if (page >= n_pages) return;", ""),
    Mutant("page bound one too far", "masses", "none", (BOUNDS,),
           "warp == 0 && page < n_pages", "warp == 0 && page <= n_pages"),
    Mutant("one token too many", "attentions", "attend_128", (VALUES,),
           "if (lane < rows) {", "if (lane <= rows) {"),
    Mutant("unused tokens are read", "attentions", "attend_128", (VALUES,),
           "min(tile, count - first)", "tile"),
    Mutant("shared memory off by one row", "masses", "none", (LAUNCH,),
           "sums[warp * WARP + lane] = sum", "sums[(warp + 1) * WARP + lane] = sum"),
    Mutant("sum of a quarter warp", "scores", "quest|arkbox", (VALUES,),
           "float warp_sum(float x) {\n    for (int step = WARP / 2;", "float warp_sum(float x) {\n    for (int step = WARP / 4;"),
    Mutant("shuffle in a branch", "quantisation", "f16", (LAUNCH,),
           "worst = warp_max(worst), squares", "if (threadIdx.x % WARP < 16) worst = warp_max(worst);\n    squares"),
    Mutant("barrier in a branch", "masses", "none", (LAUNCH,),
           "    if (page < n_pages)\n        for (int head = warp", "    if (page >= n_pages) return;\n        for (int head = warp"),
    Mutant("bf16 truncated", "casts", "f32|bf16|f16", (VALUES,),
           "u + 0x7fffu + ((u >> 16) & 1u)", "u"),
    Mutant("e4m3 ties away from even", "casts", "f32|bf16|f16", (VALUES,),
           "a + 0x7ffffu + ((a >> 20) & 1u)", "a + 0x80000u"),
    Mutant("e4m3 subnormals truncated", "casts", "f32|bf16|f16", (VALUES,),
           "__float2int_rn(__uint_as_float(a) * 512.0f)", "(__uint_as_float(a) * 512.0f)"),
    Mutant("int8 truncated", "quantisation", "f16", (VALUES,),
           "min(127, __float2int_rn(y))", "min(127, (int)y)"),
    Mutant("int4 halves swapped", "quantisation", "f16", (VALUES,),
           "code[0] | code[1] << 4", "code[1] | code[0] << 4"),
    Mutant("empty part is read", "merges", "none", (VALUES,),
           "if (part != -INF) sum += expf(part - peak)", "sum += expf(part - peak)"),
    Mutant("running sum not faded", "attentions", "attend_128", (VALUES,),
           "total = total * fade", "total = total"),
    Mutant("16-byte words on odd rows", "moves", "gather|scatter", (ALIGNMENT,),
           tamper="16-byte words always"),
    Mutant("count passed as 64 bits", "moves", "gather|scatter", (LAUNCH,), tamper="count of 64 bits"),
    Mutant("scale passed as a double", "attentions", "attend_128", (LAUNCH,), tamper="scale as a double"),
    Mutant("half the blocks", "scores", "quest|arkbox", (VALUES,), tamper="half the blocks"),
    Mutant("shared memory a float short", "masses", "none", (LAUNCH,), tamper="shared memory a float short"),
    Mutant("block over its launch bounds", "summaries", "summarise", (LAUNCH,), tamper="512 threads"),
    Mutant("16-byte loads lost", "moves", "gather", (COMPILE,),
           "MOVE(gather_pages_16, uint4, false)", "MOVE(gather_pages_16, u32, false)"),
    Mutant("registers spill", "attentions", "attend_512", (COMPILE,),
           "__launch_bounds__(threads)", "__launch_bounds__(threads, 8)"),
    Mutant("needs a header", "quantisation", "f16", (COMPILE,),
           "(float)count", "static_cast<std::common_type_t<float>>(count)"),
    Mutant("decode contracted", "quantisation", "f16", (COMPILE,),
           "__fadd_rn(__fmul_rn(value, steps.scale), steps.zero)", "value * steps.scale + steps.zero"),
)  # fmt: skip


@dataclass
class Findings:
    """What each rung said of a mutant; a rung that found nothing is missing."""

    mutant: Mutant
    by_rung: dict[str, str] = field(default_factory=dict)


def climb(mutants: Sequence[Mutant], folder: Path) -> list[Findings]:
    """Take the mutants up the ladder, all in one process a sanitizer."""
    source = cpumod.SOURCE.read_text()
    findings = {mutant.name: Findings(mutant) for mutant in mutants}
    for kind in cpumod.BUILDS:
        jobs = [
            Job(m.name, str(cpumod.build(m.code(source), kind, folder)), m.body, m.tamper)
            for m in mutants
        ]
        for outcome in run_jobs(kind, jobs, folder):
            findings[outcome.name].by_rung.update(outcome.found)
    for found in findings.values():
        if not found.by_rung:
            try:
                ptx.examine(found.mutant.code(source), ARCHITECTURE)
            except AssertionError as error:
                found.by_rung[COMPILE] = str(error).splitlines()[0]
    return list(findings.values())


def table(findings: Sequence[Findings]) -> str:
    """One line a mutant, one column a rung."""
    width = max(len(found.mutant.name) for found in findings)
    lines = [f"{'planted bug':{width}}  " + "  ".join(f"{rung:9}" for rung in RUNGS)]
    for found in findings:
        cells = [("found" if rung in found.by_rung else "-") for rung in RUNGS]
        if any(rung in found.by_rung for rung in RUNGS[:-1]):
            cells[-1] = ""
        line = f"{found.mutant.name:{width}}  " + "  ".join(f"{cell:9}" for cell in cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvtier-mutants-") as folder:
        findings = climb(MUTANTS, Path(folder))
    print(table(findings))
    print(f"\nThe last rung is tried where the others found nothing, for {ARCHITECTURE}.")
    survivors = [found.mutant.name for found in findings if not found.by_rung]
    for name in survivors:
        print(f"SURVIVED: {name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
