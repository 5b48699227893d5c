#!/usr/bin/env python3
"""The disk tier against plain reads and writes of the same bytes, measured in the same run.

    python bench/disk.py [--quick] [--json] [--dir FOLDER]

For pages of 32 KiB, 512 KiB, 2 MiB and 4 MiB, in rounds (the median counts), each against the raw limit of
its own round:

* put durable, put relaxed: an empty tier is filled, up to the last acknowledgement, against writing a
  preallocated file with O_DIRECT, synced every 16 MiB (relaxed: not synced);
* churn: the same in a full tier, each put with the eviction of the oldest page, against overwriting;
* get warm: pages whose bytes are in the page cache, in random order, ``one`` page a call or ``many``, against a warm
  pread into the same buffers by one thread. ``read warm, summed`` is that pread with an XXH3-64 of what it brought
  and nothing else: what one thread that verifies can reach here;
* get cold: after a restart with nothing in the page cache, in random order, against random O_DIRECT reads of
  a page; ``one`` page a call against one thread, ``many`` pages a call against four.

Checksums are taken and verified throughout. Then random cold gets with four times more data than memory
(page cache included), and what the index costs: lookups, and puts into a large tier against a small one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raw_disk import (
    Bytes,
    Cost,
    MemoryLimit,
    RawFile,
    buffers,
    cost,
    drop_cache,
    fill_cache,
    shuffled,
)

from kvtier.tiers.disk import DiskTier
from kvtier.units import format_size

KIB, MIB = 2**10, 2**20
PAGE_SIZES = (32 * KIB, 512 * KIB, 2 * MIB, 4 * MIB)
RING_BYTES = 32 * MIB
MANY_BYTES = 16 * MIB
#: The page cache gives all pages in some 20 ms: until then the kernel may not even have noticed that two
#: threads share a processor.
WARM_PASSES = 5
IDENTITY = b"bench-disk".ljust(32, b".")

#: What is measured, against which raw limit, and the goal of the ratio at 2 MiB pages.
ROWS = (
    ("put durable", "write O_DIRECT synced", 0.8),
    ("churn durable", "overwrite O_DIRECT synced", 0.8),
    ("put relaxed", "write O_DIRECT", None),
    ("churn relaxed", "overwrite O_DIRECT", None),
    ("get warm one", "read warm", 0.8),
    ("get warm many", "read warm", 0.8),
    ("read warm, summed", "read warm", None),
    ("get cold one", "read cold O_DIRECT 1", 0.8),
    ("get cold many", "read cold O_DIRECT 4", 0.8),
)
MEMORY_ROWS = (
    ("4x get one", "4x read O_DIRECT 1", 0.8),
    ("4x get many", "4x read O_DIRECT 4", 0.8),
)
LOOKUP_GOAL = 300_000
LARGE_GOAL = 1.2
#: Pages of a large tier; a fifth of it in a quick run.
LARGE = 100_000

Costs = dict[str, Cost]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less data, 2 rounds; under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--mib", type=int, help="MiB of pages in a tier (default: 256, quick: 32)")
    parser.add_argument("--rounds", type=int, help="rounds (default: 5, quick: 2)")
    parser.add_argument("--payload", choices=("slab", "inline"), help="only this one")
    parser.add_argument(
        "--page-kib", type=int, action="append", help="only pages of this size; may be repeated"
    )
    options = parser.parse_args()
    options.mib = options.mib or (32 if options.quick else 256)
    options.rounds = options.rounds or (2 if options.quick else 5)
    sizes = [kib * KIB for kib in options.page_kib or []] or PAGE_SIZES
    payloads = [options.payload] if options.payload else ["slab", "inline"]
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvtier-bench-") as name:
        folder = Path(name)
        result: dict[str, Any] = {"machine": machine(folder), "rows": []}
        for size in sizes:
            for payload in payloads:
                # In a quick run the placement that is not the default is measured once.
                if (
                    options.quick
                    and payload == "inline"
                    and size != 2 * MIB
                    and not options.payload
                ):
                    continue
                rounds = [
                    one_round(folder, size, payload, options.mib) for _ in range(options.rounds)
                ]
                result["rows"] += rows(size, payload, rounds, ROWS)
        for payload in payloads:
            note, rounds = beyond_memory(folder, payload, options)
            result["rows"] += rows(2 * MIB, payload, rounds, MEMORY_ROWS)
            result["memory"] = note
        result["index"] = {
            payload: index(folder, payload, options.rounds, options.quick)
            for payload in (payloads[-1:] if options.quick else payloads)
        }
    print(json.dumps(result, indent=2) if options.json else as_text(result, options))
    return 0


def machine(folder: Path) -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "cpu": model,
        "memory": format_size(memory),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


# ---------------------------------------------------------------- put and get


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def open_tier(folder: Path, page_bytes: int, capacity_bytes: int, **options: Any) -> DiskTier:
    planes = 8 if page_bytes >= 32 * KIB else 1
    size = page_bytes // planes
    return DiskTier(
        folder,
        layout_digest=b"bench",
        page_bytes=page_bytes,
        plane_ranges=[(i * size, size) for i in range(planes)],
        capacity_bytes=capacity_bytes,
        timeout_s=300.0,
        **options,
    )


def put_all(
    tier: DiskTier, numbers: Sequence[int], ring: Sequence[Bytes], gone: Sequence[int] = ()
) -> None:
    """Put pages, each after the eviction of one of ``gone``; returns when all are acknowledged."""
    futures = []
    for number, victim in itertools.zip_longest(numbers, gone):
        if victim is not None:
            tier.delete([key_of(victim)])
        futures.append(
            tier.put(
                key_of(number),
                parent=None,
                depth=0,
                identity=IDENTITY,
                data=ring[number % len(ring)],
            )
        )
    for future in futures:
        future.result(300)


def get_one(tier: DiskTier, order: Sequence[int], ring: Sequence[Bytes]) -> None:
    for at, number in enumerate(order):
        if not tier.read(key_of(number), ring[at % len(ring)]):
            raise SystemExit("a page is missing; the rates mean nothing")


def get_many(tier: DiskTier, order: Sequence[int], ring: Sequence[Bytes]) -> None:
    count = max(1, min(len(ring), MANY_BYTES // ring[0].nbytes))
    for start in range(0, len(order), count):
        numbers = order[start : start + count]
        if not all(tier.read_pages([key_of(n) for n in numbers], ring[: len(numbers)])):
            raise SystemExit("a page is missing; the rates mean nothing")


def one_round(base: Path, page_bytes: int, payload: str, mib: int) -> Costs:
    """Every row and its raw limit once."""
    source = buffers(max(2, RING_BYTES // page_bytes), page_bytes)
    target = buffers(max(2, RING_BYTES // page_bytes), page_bytes)
    costs: Costs = {}
    for durability in ("durable", "relaxed"):
        folder = base / "tier"
        options = {"payload": payload, "durability": durability}
        capacity = mib * MIB + 16 * MIB
        tier = open_tier(folder, page_bytes, capacity, **options)
        count = tier.live_capacity_bytes // tier.stored_bytes_of(page_bytes)  # then it is full
        nbytes = count * page_bytes
        raw = RawFile(_fresh(base / "raw") / "file", count, source, target)
        synced = durability == "durable"
        name = "O_DIRECT synced" if synced else "O_DIRECT"
        costs[f"write {name}"] = raw.write(direct=True, synced=synced)
        costs[f"put {durability}"] = cost(nbytes, put_all, tier, range(count), source)
        costs[f"overwrite {name}"] = raw.write(direct=True, synced=synced)
        costs[f"churn {durability}"] = cost(
            nbytes, put_all, tier, range(count, 2 * count), source, range(count)
        )
        if synced:
            costs["write buffered"] = raw.write(direct=False, synced=False)
            costs["write buffered synced"] = raw.write(direct=False, synced=True)
            order = shuffled(count)
            ours = [count + number for number in order]
            fill_cache(folder)
            fill_cache(base / "raw")
            get_one(tier, ours, target)
            long = WARM_PASSES * order
            ours_long, warm_bytes = WARM_PASSES * ours, WARM_PASSES * nbytes
            costs["read warm"] = raw.read(long, direct=False)
            costs["read warm, summed"] = raw.read(long, direct=False, summed=True)
            costs["get warm one"] = cost(warm_bytes, get_one, tier, ours_long, target)
            costs["get warm many"] = cost(warm_bytes, get_many, tier, ours_long, target)
            tier.close()
            drop_cache(base / "raw")
            costs["read cold buffered"] = raw.read(order, direct=False)
            for threads, how, get in ((1, "one", get_one), (4, "many", get_many)):
                drop_cache(folder)
                costs[f"read cold O_DIRECT {threads}"] = raw.read(
                    order, direct=True, threads=threads
                )
                tier = open_tier(folder, page_bytes, capacity, **options)
                costs[f"get cold {how}"] = cost(nbytes, get, tier, ours, target)
                tier.close()
            with open_tier(folder, page_bytes, capacity, **options) as tier:
                verify(tier, ours, source)
        tier.close()
        shutil.rmtree(folder)
        shutil.rmtree(base / "raw")
    return costs


def verify(tier: DiskTier, numbers: Sequence[int], source: Sequence[Bytes]) -> None:
    """That what was measured was right."""
    (out,) = buffers(1, source[0].nbytes)
    for number in numbers[:16]:
        if not tier.read(key_of(number), out) or (out != source[number % len(source)]).any():
            raise SystemExit("read other bytes than were put; the rates mean nothing")


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


# ---------------------------------------------------------------- more data than memory


def beyond_memory(base: Path, payload: str, options: argparse.Namespace) -> tuple[str, list[Costs]]:
    """Random cold gets of 2 MiB pages with four times more data than memory."""
    page_bytes = 2 * MIB
    limit = 96 * MIB if options.quick else 256 * MIB
    count = 4 * limit // page_bytes
    folder = base / "tier"
    capacity = count * page_bytes * 5 // 4 + 16 * MIB
    source = buffers(8, page_bytes)
    raw = RawFile(_fresh(base / "raw") / "file", count, source, buffers(8, page_bytes))
    raw.write(direct=True, synced=True)
    with open_tier(folder, page_bytes, capacity, payload=payload) as tier:
        put_all(tier, range(count), source)
    group = MemoryLimit(limit)

    def work() -> dict[str, Cost]:
        ring = buffers(8, page_bytes)
        order = shuffled(count)[: count // 4 if options.quick else count]
        found: Costs = {}
        for threads, how, get in ((1, "one", get_one), (4, "many", get_many)):
            drop_cache(folder)
            found[f"4x read O_DIRECT {threads}"] = raw.read(order, direct=True, threads=threads)
            with open_tier(folder, page_bytes, capacity, payload=payload) as tier:
                found[f"4x get {how}"] = cost(len(order) * page_bytes, get, tier, order, ring)
        return found

    try:
        rounds = [
            {name: Cost(*values) for name, values in group.run(work).items()}
            for _ in range(options.rounds)
        ]
    finally:
        group.close()
    shutil.rmtree(folder)
    shutil.rmtree(base / "raw")
    how = (
        f"in a memory cgroup of {format_size(limit)}"
        if group.folder is not None
        else "with the page cache dropped before (no cgroup permitted), so later gets may hit it"
    )
    return f"{count} pages of 2 MiB, random order, {how}", rounds


# ---------------------------------------------------------------- the index


def index(base: Path, payload: str, rounds: int, quick: bool) -> dict[str, float]:
    """Lookups a second, and seconds of a put into a tier of ``large`` pages against one of 1,000.

    Pages of 256 bytes inline, of 4 KiB in slabs: what is compared is the index, not the payload. Every put comes
    with the eviction of the oldest page; groups of 64, each until it is acknowledged.
    """
    page_bytes = 256 if payload == "inline" else 4 * KIB
    large = LARGE // (5 if quick else 1)
    (data,) = buffers(1, page_bytes)
    counts = (1000, large)
    tiers = []
    for count in counts:
        capacity = 64 * MIB + count * (2 * page_bytes + 2048)
        tier = open_tier(base / str(count), page_bytes, capacity, payload=payload)
        put_all(tier, range(count), [data])
        tiers.append(tier)
    keys = [key_of(number) for number in range(large)]
    taken: dict[str, list[float]] = {"lookup": [], "1": [], "0": []}
    at = [0, 0]
    for _ in range(max(3, rounds)):
        started = time.perf_counter()
        found = sum(key in tiers[1] for key in keys)
        taken["lookup"].append(found / (time.perf_counter() - started))
        for which in (0, 1):
            started = time.perf_counter()
            for _ in range(8):
                first = at[which]
                at[which] += 64
                numbers = range(counts[which] + first, counts[which] + first + 64)
                put_all(tiers[which], numbers, [data], range(first, first + 64))
            taken[str(which)].append(time.perf_counter() - started)
        # The pages that were looked up go one after the other.
        keys = keys[512:]
    for tier, count in zip(tiers, counts, strict=True):
        tier.close()
        shutil.rmtree(base / str(count))
    small_s, large_s = (statistics.median(taken[str(which)]) / 512 for which in (0, 1))
    return {
        "lookups_per_s": statistics.median(taken["lookup"]),
        "large_pages": large,
        "page_bytes": page_bytes,
        "put_1k_us": small_s * 1e6,
        "put_large_us": large_s * 1e6,
        "put_large_to_1k": statistics.median(
            b / a for a, b in zip(taken["0"], taken["1"], strict=True)
        ),
    }


# ---------------------------------------------------------------- results


def rows(
    page_bytes: int, payload: str, rounds: Sequence[Costs], wanted: Sequence[tuple[str, str, Any]]
) -> list[dict[str, Any]]:
    """Medians over the rounds; a ratio is the median of the rounds' ratios."""

    def median(value: Callable[[Costs], float]) -> float:
        return round(statistics.median(value(costs) for costs in rounds), 4)

    found = []
    limits = {limit for _, limit, _ in wanted}
    for name in rounds[0]:
        row: dict[str, Any] = {
            "page_kib": page_bytes // KIB,
            "payload": payload,
            "what": name,
            "gbs": median(lambda costs, name=name: costs[name].gbs),  # type: ignore[misc]
            "gb_per_cpu_s": median(lambda costs, name=name: costs[name].gb_per_cpu_s),  # type: ignore[misc]
        }
        for what, limit, goal in wanted:
            if what == name:
                row["limit"] = limit
                row["ratio"] = median(lambda c, n=name, m=limit: c[n].gbs / c[m].gbs)  # type: ignore[misc]
                row["cpu_ratio"] = median(
                    lambda c, n=name, m=limit: c[n].gb_per_cpu_s / c[m].gb_per_cpu_s  # type: ignore[misc]
                )
                row["goal"] = goal if page_bytes == 2 * MIB else None
        row["raw"] = name in limits or "limit" not in row
        found.append(row)
    return found


def as_text(result: dict[str, Any], options: argparse.Namespace) -> str:
    about = result["machine"]
    lines = [
        f"{about['cpus']} x {about['cpu']}, {about['memory']}, Linux {about['kernel']}, load {about['load']}, "
        f"{about['date']}; {options.mib} MiB a tier, medians of {options.rounds} rounds, GB = 1e9 bytes",
        "",
        f"{'page':>9} {'payload':8} {'what':26} {'GB/s':>7} {'GB/CPU-s':>9}  against its limit",
    ]
    last = None
    for row in result["rows"]:
        place = (row["page_kib"], row["payload"])
        if place != last:
            lines.append("")
        last = place
        text = (
            f"{row['page_kib']:>5} KiB {row['payload']:8} {row['what']:26} {row['gbs']:7.3f} "
            f"{row['gb_per_cpu_s']:9.2f}"
        )
        if "ratio" in row:
            text += f"  {row['ratio']:5.2f} of {row['limit']}, CPU {row['cpu_ratio']:.2f}"
            if row["goal"]:
                text += f"  (goal {row['goal']}: {_met(row['ratio'] >= row['goal'])})"
        lines.append(text)
    lines += ["", f"4x: {result['memory']}", ""]
    for payload, facts in result["index"].items():
        lookups, ratio = facts["lookups_per_s"], facts["put_large_to_1k"]
        lines += [
            f"index, {payload}, {facts['large_pages']:,} pages of {facts['page_bytes']} bytes: "
            f"{lookups:,.0f} lookups/s (goal {LOOKUP_GOAL:,}: {_met(lookups >= LOOKUP_GOAL)})",
            f"  put into it {facts['put_large_us']:.0f} us, into 1,000 pages {facts['put_1k_us']:.0f} us: "
            f"{ratio:.2f} (goal {LARGE_GOAL}: {_met(ratio <= LARGE_GOAL)})",
        ]
    return "\n".join(lines)


def _met(good: bool) -> str:
    return "met" if good else "missed"


if __name__ == "__main__":
    sys.exit(main())
