"""A warning where reading payloads out of the database's map will be slow."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from kvtier.errors import OffloadWarning
from kvtier.tiers.page_cache import free_memory_bytes

#: Measured: with 8 MiB of read-ahead random reads of 2 MiB values take 6 times their bytes.
_MANY_KIB = 512


def read_ahead_kib(folder: Path) -> int | None:
    """The kernel's read-ahead on the device of a folder; ``None`` if it does not say."""
    device = os.stat(folder).st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (base / "queue", base.resolve().parent / "queue"):
        try:
            return int((queue / "read_ahead_kb").read_text())
        except (OSError, ValueError):
            continue
    return None


def warn_of_read_ahead(folder: Path, live_bytes: int) -> None:
    """Warn if pages in the map will be read with much more than was asked for, since they do not
    fit in memory and the kernel reads far ahead.
    """
    kib = read_ahead_kib(folder)
    if kib is None or kib <= _MANY_KIB or live_bytes <= free_memory_bytes():
        return
    warnings.warn(
        f"the disk tier at {folder} keeps payloads in the database, is larger than the free memory, "
        f"and its device reads {kib} KiB ahead at every page fault: reads will take several times "
        "their bytes; use payload='slab', or set the device's queue/read_ahead_kb to 128",
        OffloadWarning,
        stacklevel=3,
    )
