#!/usr/bin/env python3
"""The store against the plain operations it is made of, measured in the same run.

    python bench/store.py --page-kib 1440 --pages 128

* host tier: put and get of pages against memcpy of the same bytes;
* restore: one ``match`` of a sequence that is only on disk, nothing of it in the page cache, into a host tier that was
  never used and into one that was, against O_DIRECT reads of as many pages by four threads;
* metadata: lookups and puts of tiny pages per second of CPU time.

Each line is the median of the repetitions, interleaved with what it is compared with. The disk tier
has a program of its own, ``bench/disk.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from raw_disk import RawFile, buffers, drop_cache

from kvtier import LayerLayout, PageLayout, TieredStore
from kvtier.keys import child_key, root_key

IDENTITY = b"bench-store".ljust(32, b".")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-kib", type=int, default=1440, help="KiB of a page (default: 1440)")
    parser.add_argument("--pages", type=int, default=64, help="pages put and read (default: 64)")
    parser.add_argument("--entries", type=int, default=4096, help="pages of the metadata test")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {**host(options), **restore(options), **metadata(options)}
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{options.pages} pages of {options.page_kib} KiB, median of {options.repeat}, GB = 1e9 bytes"
    )
    for name in ("host_put", "host_get"):
        ours, theirs = result[f"{name}_gbs"], result["memcpy_gbs"]
        print(f"{name:13} {ours:7.2f} GB/s   memcpy   {theirs:7.2f} GB/s   {ours / theirs:6.1%}")
    for name in ("restore", "restore_again"):
        ours, theirs = result[f"{name}_gbs"], result["read_direct_gbs"]
        print(f"{name:13} {ours:7.2f} GB/s   O_DIRECT {theirs:7.2f} GB/s   {ours / theirs:6.1%}")
    for name in ("contains", "match_pages", "put"):
        print(f"{name:13} {result[f'{name}_per_cpu_s']:12,.0f} per CPU-second")
    return 0


def layout_of_size(nbytes: int) -> PageLayout:
    """A layout whose pages have ``nbytes``, a multiple of 32."""
    return PageLayout([LayerLayout.attention(1, nbytes // 32, "uint8")], page_tokens=16)


def chain(count: int, tag: int) -> list[bytes]:
    """Keys of the pages of one long sequence."""
    keys = [root_key(IDENTITY)]
    for index in range(count):
        keys.append(child_key(keys[-1], [tag, index]))
    return keys[1:]


def put_all(store: TieredStore, keys: list[bytes], data: torch.Tensor) -> None:
    parent = None
    for index, key in enumerate(keys):
        store.put(key, data[index], parent=parent, identity=IDENTITY)
        parent = key


def get_all(store: TieredStore, keys: list[bytes], out: torch.Tensor) -> None:
    with store.match(keys, promote=False) as lease:
        if len(lease) != len(keys):
            raise SystemExit(f"{len(lease)} of {len(keys)} pages found; the rates mean nothing")
        for index in range(len(keys)):
            lease.read(index, out[index])


def host(options: argparse.Namespace) -> dict[str, float]:
    """Host tier against memcpy."""
    layout = layout_of_size(options.page_kib * 1024)
    nbytes = options.pages * layout.page_bytes
    data = random_pages(options.pages, layout.page_bytes)
    out = torch.zeros_like(data)
    times = _Times()
    with TieredStore(
        layout, device="emulated", vram=4 * layout.page_bytes, host=nbytes + 8 * layout.page_bytes
    ) as store:
        put_all(store, chain(options.pages, 0), data)  # allocates and touches the slabs
        store.remove(chain(options.pages, 0))
        for repetition in range(1, options.repeat + 1):
            keys = chain(options.pages, repetition)
            times.take("host_put", lambda keys=keys: put_all(store, keys, data))
            times.take("memcpy", lambda: copy_all(data, out))
            times.take("host_get", lambda keys=keys: get_all(store, keys, out))
            if not torch.equal(data, out):
                raise SystemExit("read other bytes than were put; the rates mean nothing")
            store.remove(keys[::-1])
    return times.rates(nbytes)


def restore(options: argparse.Namespace) -> dict[str, float]:
    """A sequence that is only on disk comes up, against plain reads."""
    layout = layout_of_size(options.page_kib * 1024)
    page, count = layout.page_bytes, options.pages
    keys = chain(count, 0)
    data = random_pages(count, page)
    times = _Times()

    def match(store: TieredStore) -> None:
        with store.match(keys) as lease:
            if len(lease) != count or not torch.equal(lease.read(count - 1), data[-1]):
                raise SystemExit("not all came up as it was put; the rates mean nothing")

    with tempfile.TemporaryDirectory(dir=options.dir) as base:
        folder, plain = Path(base) / "tier", Path(base) / "raw"
        plain.mkdir()
        sizes = {
            "vram": 2 * page,
            "host": (count + 4) * page,
            "disk": 2 * count * page + (64 << 20),
        }
        with TieredStore(layout, device="emulated", path=folder, **sizes) as store:
            put_all(store, keys, data)
        ring = buffers(4, page)
        raw = RawFile(plain / "file", count, ring, ring)
        raw.write(direct=True, synced=True)
        for _ in range(options.repeat):
            drop_cache(folder)
            read = raw.read(range(count), direct=True, threads=4)
            times.add("read_direct", read.seconds)
            with TieredStore(layout, device="emulated", path=folder, **sizes) as store:
                times.take("restore", lambda store=store: match(store))
                for key in keys[::-1]:
                    while store.demote(key):
                        pass
                times.take("restore_again", lambda store=store: match(store))
    return times.rates(count * page)


def metadata(options: argparse.Namespace) -> dict[str, float]:
    """Directory, keys and policy alone: pages of 256 bytes."""
    layout = layout_of_size(256)
    count = options.entries
    keys = chain(count, 0)
    data = random_pages(1, layout.page_bytes).expand(count, -1).contiguous()
    runs: dict[str, list[float]] = {"put": [], "contains": [], "match_pages": []}
    for _ in range(options.repeat):
        size = (count + 8) * layout.page_bytes
        with TieredStore(layout, device="emulated", vram=8 * layout.page_bytes, host=size) as store:
            runs["put"].append(count / cpu(lambda store=store: put_all(store, keys, data)))
            lookups = cpu(lambda store=store: [store.contains(key) for key in keys])
            runs["contains"].append(count / lookups)
            runs["match_pages"].append(count / cpu(lambda store=store: store.match(keys).close()))
    return {f"{name}_per_cpu_s": statistics.median(values) for name, values in runs.items()}


class _Times:
    """Seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def take(self, name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self.add(name, time.perf_counter() - started)

    def rates(self, nbytes: int) -> dict[str, float]:
        """GB/s of the median times."""
        return {
            f"{name}_gbs": nbytes / statistics.median(seconds) / 1e9
            for name, seconds in self._seconds.items()
        }


def random_pages(count: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, nbytes), dtype=torch.uint8, generator=generator)


def copy_all(source: torch.Tensor, target: torch.Tensor) -> None:
    for index in range(len(source)):
        target[index].copy_(source[index])


def cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
