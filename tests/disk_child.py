"""Pages with known content, and a process that writes them to a disk tier until it is killed.

    python disk_child.py write FOLDER FIRST DURABILITY   put pages from FIRST on, older ones deleted
    python disk_child.py open FOLDER                     open the folder, print the error if any

``write`` prints ``put N`` after page N was acknowledged and ``del N`` before page N is deleted.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import DiskError
from kvtier.tiers.disk import DiskTier

#: Three planes with gaps of 16 bytes between them and of 84 bytes at the end.
PLANES = [(0, 2000), (2016, 2000), (4032, 1900)]
PAGE_BYTES = 6016
CAPACITY = 2 << 20
CHAIN = 4
LIVE = 60


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"key %d" % number, digest_size=32).digest()


def page_of(number: int, nbytes: int = PAGE_BYTES) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


def parent_of(number: int) -> tuple[bytes | None, int]:
    """Pages come in sequences of ``CHAIN``."""
    depth = number % CHAIN
    return (key_of(number - 1) if depth else None), depth


def open_tier(folder: Path | str, **options: Any) -> DiskTier:
    options = {
        "layout_digest": b"layout",
        "page_bytes": PAGE_BYTES,
        "plane_ranges": PLANES,
        "capacity_bytes": CAPACITY,
        **options,
    }
    return DiskTier(folder, **options)


def put(tier: DiskTier, number: int, **options: Any) -> Any:
    parent, depth = parent_of(number)
    options = {"parent": parent, "depth": depth, "data": page_of(number), **options}
    return tier.put(key_of(number), identity=b"identity", **options)


def write(folder: str, first: int, durability: str) -> None:
    tier = open_tier(folder, durability=durability)
    for start in range(first, first + 100_000, CHAIN):
        old = start - LIVE
        if old >= 0:
            numbers = list(range(old, old + CHAIN))
            for number in numbers:
                print("del", number, flush=True)
            tier.delete([key_of(number) for number in reversed(numbers)])
        futures = [put(tier, number) for number in range(start, start + CHAIN)]
        for number, future in enumerate(futures, start):
            future.result(30)
            print("put", number, flush=True)


def main() -> None:
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    try:
        open_tier(sys.argv[2]).close()
    except DiskError as error:
        print(error)


if __name__ == "__main__":
    main()
