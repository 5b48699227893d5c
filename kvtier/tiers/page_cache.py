"""Whether the kernel has a part of a file in memory.

Asking by a read that must not wait (``RWF_NOWAIT``) makes newer kernels read the missing part in
the background, so that a direct read that follows takes the device twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


class PageCacheView:
    """The page cache of one open file, as far as it reached when this was made. Nothing is read
    through the map.

    Raises:
        OSError, ValueError: the file cannot be mapped; it is empty.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = self._bytes.ctypes.data

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether all of a range is in memory now. May be wrong a moment later."""
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        size = offset + nbytes - first
        if offset + nbytes > self._bytes.nbytes:
            return False
        pages = -(-size // mmap.PAGESIZE)
        states = ctypes.create_string_buffer(pages)
        if _LIBC.mincore(
            ctypes.c_void_p(self._base + first), ctypes.c_size_t(size), ctypes.byref(states)
        ):
            return False
        # The lowest bit counts; the others are reserved.
        raw = states.raw
        return raw == b"\1" * pages or all(state & 1 for state in raw)


def free_memory_bytes() -> int:
    """Memory that the page cache may grow into: the machine's, or the control group's if less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
        group = Path("/proc/self/cgroup").read_text().partition("::")[2].strip()
        base = Path("/sys/fs/cgroup") / group.lstrip("/")
        for folder in (base, *base.parents):
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                free = min(free, int(text) - int((folder / "memory.current").read_text()))
            if folder == Path("/sys/fs/cgroup"):
                break
    except (OSError, ValueError):
        pass
    return free
