"""Planted bugs, and which rung of the ladder finds which.

    python tests/kernels/mutants.py    prints the table of every rung (a few minutes)

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
from bodies import SANITIZED_BODIES
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
        old, new: text of ``kvtier.cu`` and what takes its place, at its first occurrence.
        tamper: name of an entry of ``TAMPERS``, instead of an edit.
        by: rungs that must find it; none for kernels without a bug.
    """

    name: str
    body: str
    by: tuple[str, ...]
    old: str = ""
    new: str = ""
    tamper: str = ""

    def code(self, source: str) -> str:
        """The mutant's device code."""
        if self.old:
            assert self.old in source, f"{self.name}: kvtier.cu has no {self.old!r}"
            source = source.replace(self.old, self.new, 1)
        if self.old or self.tamper:
            source = only(source, INSTANCES.get(self.body, ""))
        return source

    @property
    def planted(self) -> bool:
        """Whether there is a bug at all."""
        return bool(self.old or self.tamper)


#: Names of the instances of templates that a small body launches.
INSTANCES = {
    "moves": "gather.*|scatter.*",
    "pieces": "none",
    "summaries": "summarise_16_f16|summarise_1_bf16",
    "scores": "quest_scores_f16|arkbox_scores_f16",
    "attentions": "attend_128_f16|attend_128_bf16",
    "quantisation": "f16",
    "casts": "f32|f16|bf16",
}


def only(source: str, names: str) -> str:
    """Device code without the other instances of its templates: it compiles in a fraction of the time."""
    instance = re.compile(r"(?:MOVE|SUMMARISE|SCORES|ATTEND|QUANTISE)\((\w+), ")
    lines = source.splitlines(keepends=True)
    found = [instance.match(line) for line in lines]
    return "".join(
        line
        for line, of in zip(lines, found, strict=True)
        if of is None or re.fullmatch(names, of[1])
    )


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

# fmt: off
MUTANTS = (
    Mutant("atomic add lost", "masses", (RACE,),
           "atomicAdd(mass + rows[page], total * weight)", "mass[rows[page]] += total * weight"),
    Mutant("atomic max lost", "quantisation", (RACE,),
           "atomicMax(worst_of + page, worst)", "worst_of[page] = max(worst_of[page], worst)"),
    Mutant("barrier before the sum missing", "masses", (VALUES, RACE),
           "= sum;\n    __syncthreads();", "= sum;"),
    Mutant("barrier after the tile missing", "attentions", (RACE,),
           "            __syncthreads();  // the tile before has been read\n", ""),
    Mutant("barrier before the tile missing", "attentions", (VALUES, RACE),
           "wide);\n            __syncthreads();\n            float score", "wide);\n            float score"),
    Mutant("blocks overlap in words", "moves", (RACE,),
           "step = (i64)gridDim.x * blockDim.x;", "step = (i64)blockDim.x;"),
    Mutant("blocks overlap in pages", "moves", (RACE,),
           "page += gridDim.y) {\n        u8* in_page", "page++) {\n        u8* in_page"),
    Mutant("tail one byte long", "moves", (VALUES,),
           "rest < nbytes)", "rest <= nbytes)"),
    Mutant("tail of a piece one byte short", "pieces", (VALUES,),
           "rest < nbytes)", "rest + 1 < nbytes)"),
    Mutant("tail of a piece by every block", "pieces", (RACE,),
           "blockIdx.x == 0 && rest", "rest"),
    Mutant("wide words by the source alone", "pieces", (ALIGNMENT,),
           "both % 16 == 0", "sources[piece] % 16 == 0"),
    Mutant("wide words by the destination alone", "pieces", (ALIGNMENT,),
           "both % 16 == 0", "destinations[piece] % 16 == 0"),
    Mutant("blocks overlap in pieces", "pieces", (RACE,),
           "piece += gridDim.y", "piece++"),
    Mutant("16-byte words of pieces lost", "pieces", (COMPILE,),
           "copy_bytes<uint4>(to", "copy_bytes<u32>(to"),
    Mutant("page bound missing", "scores", (BOUNDS,),
           "if (page >= n_pages) return;", ""),
    Mutant("summary at the start of its page", "scores", (VALUES,),
           "pages[page] + start) + (i64)head", "pages[page]) + (i64)head"),
    Mutant("page bound one too far", "masses", (BOUNDS,),
           "if (page < n_pages)\n", "if (page <= n_pages)\n"),
    Mutant("shared memory read one row too far", "masses", (BOUNDS,),
           "n < warps; n++) total", "n <= warps; n++) total"),
    Mutant("one token too many", "attentions", (VALUES,),
           "if (lane < rows) {", "if (lane <= rows) {"),
    Mutant("unused tokens are read", "attentions", (VALUES,),
           "min(tile, count - first)", "tile"),
    Mutant("shared memory off by one row", "masses", (LAUNCH,),
           "sums[warp * WARP + lane] = sum", "sums[(warp + 1) * WARP + lane] = sum"),
    Mutant("sum of a quarter warp", "scores", (VALUES,),
           "float warp_sum(float x) {\n    for (int step = WARP / 2;",
           "float warp_sum(float x) {\n    for (int step = WARP / 4;"),
    Mutant("shuffle in a branch", "quantisation", (LAUNCH,),
           "worst = warp_max(worst), squares",
           "if (threadIdx.x % WARP < 16) worst = warp_max(worst);\n    squares"),
    Mutant("barrier in a branch", "masses", (LAUNCH,),
           "    if (page < n_pages)\n        for (int head = warp",
           "    if (page >= n_pages) return;\n        for (int head = warp"),
    Mutant("bf16 truncated", "casts", (VALUES,),
           "u + 0x7fffu + ((u >> 16) & 1u)", "u"),
    Mutant("e4m3 ties away from even", "casts", (VALUES,),
           "a + 0x7ffffu + ((a >> 20) & 1u)", "a + 0x80000u"),
    Mutant("e4m3 subnormals truncated", "casts", (VALUES,),
           "__float2int_rn(__uint_as_float(a) * 512.0f)", "(__uint_as_float(a) * 512.0f)"),
    Mutant("int8 truncated", "quantisation", (VALUES,),
           "min(127, __float2int_rn(y))", "min(127, (int)y)"),
    Mutant("int4 halves swapped", "quantisation", (VALUES,),
           "code[0] | code[1] << 4", "code[1] | code[0] << 4"),
    Mutant("empty part is read", "merges", (VALUES,),
           "if (part != -INF) sum += expf(part - peak)", "sum += expf(part - peak)"),
    Mutant("running sum not faded", "attentions", (VALUES,),
           "total = total * fade", "total = total"),
    Mutant("16-byte words on odd rows", "moves", (ALIGNMENT,), tamper="16-byte words always"),
    Mutant("count passed as 64 bits", "moves", (LAUNCH,), tamper="count of 64 bits"),
    Mutant("scale passed as a double", "attentions", (LAUNCH,), tamper="scale as a double"),
    Mutant("half the blocks", "scores", (VALUES,), tamper="half the blocks"),
    Mutant("shared memory a float short", "masses", (LAUNCH,), tamper="shared memory a float short"),
    Mutant("block over its launch bounds", "summaries", (LAUNCH,), tamper="512 threads"),
    Mutant("16-byte loads lost", "moves", (COMPILE,),
           "MOVE(gather_pages_16, uint4, false)", "MOVE(gather_pages_16, u32, false)"),
    Mutant("registers spill", "attentions", (COMPILE,),
           "__launch_bounds__(threads)", "__launch_bounds__(threads, 8)"),
    Mutant("needs a header", "summaries", (COMPILE,),
           "(float)count", "static_cast<std::common_type_t<float>>(count)"),
    Mutant("decode contracted", "quantisation", (COMPILE,),
           "__fadd_rn(__fmul_rn(value, steps.scale), steps.zero)", "value * steps.scale + steps.zero"),
)
# fmt: on

#: The kernels as they are: nothing may be found.
UNCHANGED = tuple(Mutant(f"unchanged: {body}", body, ()) for body in SANITIZED_BODIES)

_FINDS: dict[cpumod.Build, set[str]] = {
    "values": {VALUES, LAUNCH},
    "tsan": {RACE, LAUNCH},
    "asan": {BOUNDS, ALIGNMENT, LAUNCH},
}


@dataclass
class Findings:
    """What the rungs said of a mutant. ``tried`` are the rungs that it was taken to."""

    mutant: Mutant
    by_rung: dict[str, str] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)


def climb(mutants: Sequence[Mutant], folder: Path, *, every_rung: bool) -> list[Findings]:
    """Take mutants up the ladder, all in one process a build.

    Args:
        folder: where libraries are kept.
        every_rung: whether a mutant that was found goes on to rungs that need not find it. (The rung that
            compiles for a GPU is for those alone that no other found.)
    """
    source = cpumod.SOURCE.read_text()
    all_findings = {mutant.name: Findings(mutant) for mutant in mutants}
    for kind, finds in _FINDS.items():
        jobs = []
        for found in all_findings.values():
            mutant = found.mutant
            wanted = every_rung or not found.by_rung or finds & set(mutant.by) - set(found.by_rung)
            if not wanted or (kind != "values" and mutant.body not in SANITIZED_BODIES):
                continue
            library = cpumod.build(mutant.code(source), kind, folder)
            jobs.append(Job(mutant.name, str(library), mutant.body, mutant.tamper))
            found.tried |= finds
        for outcome in run_jobs(kind, jobs, folder):
            all_findings[outcome.name].by_rung.update(outcome.found)
    for found in all_findings.values():
        if not found.by_rung and found.mutant.planted:
            found.tried.add(COMPILE)
            try:
                ptx.examine(found.mutant.code(source), ARCHITECTURE)
            except AssertionError as error:
                found.by_rung[COMPILE] = str(error).splitlines()[0]
    return list(all_findings.values())


def table(findings: Sequence[Findings]) -> str:
    """One line a mutant, one column a rung; empty where the mutant was not tried."""
    width = max(len(found.mutant.name) for found in findings)
    lines = [f"{'planted bug':{width}}  " + "  ".join(f"{rung:9}" for rung in RUNGS)]
    for found in findings:
        cells = [
            "found" if rung in found.by_rung else "-" if rung in found.tried else ""
            for rung in RUNGS
        ]
        line = f"{found.mutant.name:{width}}  " + "  ".join(f"{cell:9}" for cell in cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvtier-mutants-") as folder:
        findings = climb(MUTANTS, Path(folder), every_rung=True)
    print(table(findings))
    survivors = [found.mutant.name for found in findings if not found.by_rung]
    for name in survivors:
        print(f"SURVIVED: {name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
