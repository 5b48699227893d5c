#!/usr/bin/env python3
"""What each policy hits, on every trace at every size, and how much of the gap from LRU to the optimum it closes.

    python bench/policies.py            # all traces, minutes for each of the large ones
    python bench/policies.py --quick    # the three small ones
    python bench/policies.py --traces mooncake_conversation_trace --policies lru,arc,auto --sizes 1%,10%

One tier, pages of equal size, prefix hits over references (``kvtier.replay.tier``), a request's pages touched
tail first. The gap closed is (policy - lru) / (opt - lru) in hits: 0 % is LRU, 100 % the optimum, below 0 worse
than LRU. Sizes are shares of a trace's unique blocks, or blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.errors import ConfigError
from kvtier.policy import load_policy, policy_names
from kvtier.replay.sweep import TierJob, run_jobs
from kvtier.trace.read import read_trace
from kvtier.trace.trace import Trace

ROOT = Path(__file__).parent.parent
LARGE = ROOT / "bench" / "data" / "traces"
SMALL = ROOT / "tests" / "data" / "traces"
#: They act on hints or measured attention, of which these traces have none.
BY_HINTS = {"mass", "priority", "ttl"}
#: A gap of fewer hits than this share of the references says nothing.
LEAST_GAP = 0.002


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", help="comma-separated (default: all that need no hints)")
    parser.add_argument("--traces", help="comma-separated names or files (default: all here)")
    parser.add_argument(
        "--sizes", default="1%,5%,10%,25%", help="comma-separated (1%%,5%%,10%%,25%%)"
    )
    parser.add_argument("--quick", action="store_true", help="only the small traces")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        files = trace_files(options.traces, options.quick)
        specs = options.policies.split(",") if options.policies else shown()
        for spec in specs:
            load_policy(spec, leaf_first=False)
        rows = [row for file in files for row in measure(file, specs, options)]
    except ConfigError as error:
        print(f"policies: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    console = Console()
    for file in files:
        show(console, [row for row in rows if row["trace"] == name_of(file)])
    return 0


def shown() -> list[str]:
    """All policies that these traces say something about, the bounds of the gap first and last."""
    return [
        "lru",
        *(name for name in policy_names() if name not in {"lru", "opt", *BY_HINTS}),
        "opt",
    ]


def name_of(file: Path) -> str:
    return file.name.partition(".jsonl")[0]


def trace_files(names: str | None, quick: bool) -> list[Path]:
    small, large = (sorted(folder.glob("*.jsonl.gz")) for folder in (SMALL, LARGE))
    known = {name_of(file): file for file in (*small, *large)}
    if names is None:
        return small if quick else [*small, *large]
    return [known.get(name) or Path(name) for name in names.split(",")]


def blocks_of(size: str, unique: int) -> int:
    try:
        blocks = float(size[:-1]) / 100 * unique if size.endswith("%") else int(size)
    except ValueError:
        blocks = 0
    if not 0 < blocks < float("inf"):
        raise ConfigError(f"size {size!r} is not a share above 0 % or a number of blocks")
    return max(1, round(blocks))


def measure(file: Path, specs: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    trace: Trace = read_trace(file)
    unique = len(set(trace.pages))
    sizes = {size: blocks_of(size, unique) for size in options.sizes.split(",")}
    wanted = list(dict.fromkeys(["lru", "opt", *specs]))
    keys = [(size, spec) for size in sizes for spec in wanted]
    jobs = [TierJob(spec, sizes[size]) for size, spec in keys]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name_of(file), total=1.0)
        cells = run_jobs(
            trace,
            jobs,
            workers=options.workers,
            progress=lambda done: bar.update(task, completed=done),
        )
    hits = {key: cell.prefix_hits for key, cell in zip(keys, cells, strict=True)}
    rows = []
    for (size, spec), cell in zip(keys, cells, strict=True):
        if spec not in specs:
            continue
        lru, opt = hits[size, "lru"], hits[size, "opt"]
        gap = opt - lru
        rows.append(
            {
                "trace": name_of(file),
                "size": size,
                "pages": cell.pages,
                "policy": spec,
                "prefix_hits": cell.prefix_hits,
                "raw_hits": cell.raw_hits,
                "block_refs": cell.block_refs,
                "prefix_ratio": cell.prefix_ratio,
                "gap_closed": (cell.prefix_hits - lru) / gap
                if gap >= LEAST_GAP * cell.block_refs
                else None,
            }
        )
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    table = Table(title=f"{rows[0]['trace']}: prefix hit ratio, share of the gap closed")
    table.add_column("policy")
    for size in sizes:
        pages = next(row["pages"] for row in rows if row["size"] == size)
        table.add_column(f"{size} ({pages:,})", justify="right")
    for spec in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for size in sizes:
            row = next(r for r in rows if (r["policy"], r["size"]) == (spec, size))
            gap = row["gap_closed"]
            closed = "" if gap is None or spec == "lru" else f" {gap:+5.0%}"
            cells.append(f"{row['prefix_ratio']:.4f}{closed:>7}")
        table.add_row(spec, *cells)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
