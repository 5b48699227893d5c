#!/usr/bin/env python3
"""How fast the policies are: block accesses per second in a replay, and memory a page.

    python bench/policy_speed.py

Each policy replays the two Mooncake traces (``bench/data/traces``) in a tier of a tenth of their unique
blocks, with the whole loop of ``kvtier replay``: prefix lookup, walk, counting. If ``libcachesim`` can be
imported (an external tool under the GPL, which is no dependency: ``pip install libcachesim``), its LRU runs in the same
process: its trace mode, all in C from a binary file; and its plug-in mode, where a policy in Python is called
from C, which is what writing one's own policy means there. Both count single blocks and know no prefixes.

Rates are per second of CPU time of this process, the best of the repetitions, which take turns. Memory is what
tracemalloc counts for the policy after the replay, over the pages in the tier; the pages' keys, integers here,
belong to the trace.
"""

from __future__ import annotations

import argparse
import gc
import json
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtier.policy import load_policy, policy_names
from kvtier.replay.tier import replay_tier
from kvtier.trace.read import read_trace
from kvtier.trace.trace import Trace

TRACES = Path(__file__).parent / "data" / "traces"
NAMES = ("mooncake_conversation_trace", "mooncake_synthetic_trace")

Runs = dict[str, Callable[[], float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", help="comma-separated (default: all that are installed)")
    parser.add_argument("--share", type=float, default=0.1, help="tier over unique blocks (0.1)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (default: 3)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    specs = options.policies.split(",") if options.policies else policy_names()
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        rows += measure(name, specs, options.share, options.repeat)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for name in NAMES:
        print(f"\n{name}, tier of {options.share:.0%} of the unique blocks")
        print(f"{'policy':24} {'accesses/s':>12} {'bytes/page':>11}")
        for row in (r for r in rows if r["trace"] == name):
            memory = "-" if row["bytes_per_page"] is None else f"{row['bytes_per_page']:.0f}"
            print(f"{row['policy']:24} {row['accesses_per_s']:12,.0f} {memory:>11}")
    return 0


def measure(name: str, specs: Sequence[str], share: float, repeat: int) -> Iterator[dict[str, Any]]:
    """One row a policy, and one a mode of libcachesim."""
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    entries = list(trace.entries())
    accesses = sum(map(len, entries))
    pages = max(1, round(share * len({key for keys in entries for key in keys})))
    with tempfile.TemporaryDirectory() as folder:
        runs: Runs = {}
        for spec in specs:
            runs[spec] = lambda spec=spec: cpu_seconds(  # type: ignore[misc]
                lambda: replay_tier(trace, spec, pages, entries=entries)
            )
        runs |= libcachesim_runs(entries, pages, Path(folder))
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(repeat):
            for label, run in runs.items():
                best[label] = min(best[label], run())
    for label, seconds in best.items():
        yield {
            "trace": name,
            "policy": label,
            "pages": pages,
            "accesses_per_s": accesses / seconds,
            "bytes_per_page": memory(label, trace, entries, pages) if label in specs else None,
        }


def cpu_seconds(run: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    run()
    return time.process_time() - began


def memory(spec: str, trace: Trace, entries: Sequence[Sequence[int]], pages: int) -> float | None:
    """Bytes a page that the policy takes after the trace; None for one that must know the future."""
    policy = load_policy(spec, leaf_first=False, clock=lambda: 0.0)
    if hasattr(policy, "foresee"):
        return None
    gc.collect()
    tracemalloc.start()
    try:
        for keys in entries:
            policy.access(keys, pages)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / len(policy)
    finally:
        tracemalloc.stop()


# libcachesim


def libcachesim_runs(entries: Sequence[Sequence[int]], pages: int, folder: Path) -> Runs:
    """Its two modes, with LRU; none if it is not installed."""
    try:
        import libcachesim as lcs
    except ImportError:
        print("libcachesim is not installed: its rates are left out", file=sys.stderr)
        return {}
    path = folder / "trace.oracleGeneral"
    walk = [key for keys in entries for key in keys]
    with path.open("wb") as file:
        for at, key in enumerate(walk):
            # time, id, size, next access; -1 for never, which LRU does not look at
            file.write(struct.pack("<IQIq", at, key + 1, 1, -1))

    def reader() -> Any:
        return lcs.TraceReader(trace=str(path), trace_type=lcs.TraceType.ORACLE_GENERAL_TRACE)

    def in_c() -> float:
        # A power of two of buckets; the default of 24 spends its time on clearing them.
        cache, source = lcs.LRU(cache_size=pages, hashpower=18), reader()
        return cpu_seconds(lambda: cache.process_trace(source))

    def plug_in() -> float:
        cache, source = plugin_lru(lcs, pages), reader()
        return cpu_seconds(lambda: cache.process_trace(source))

    return {"libcachesim lru (C)": in_c, "libcachesim lru (plug-in)": plug_in}


def plugin_lru(lcs: Any, pages: int) -> Any:
    """LRU as a Python plug-in of libcachesim."""

    def hit(order: OrderedDict[int, None], request: Any) -> None:
        order.move_to_end(request.obj_id)

    def miss(order: OrderedDict[int, None], request: Any) -> None:
        order[request.obj_id] = None

    def evict(order: OrderedDict[int, None], request: Any) -> int:
        return order.popitem(last=False)[0]

    def remove(order: OrderedDict[int, None], key: int) -> None:
        order.pop(key, None)

    return lcs.PluginCache(
        cache_size=pages,
        cache_init_hook=lambda params: OrderedDict(),
        cache_hit_hook=hit,
        cache_miss_hook=miss,
        cache_eviction_hook=evict,
        cache_remove_hook=remove,
        cache_free_hook=lambda order: order.clear(),
        cache_name="plug-in LRU",
        hashpower=18,
    )


if __name__ == "__main__":
    raise SystemExit(main())
