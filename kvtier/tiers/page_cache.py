"""Whether the kernel has a part of a file in memory.

A few memory pages of the part are looked at, not all: looking at each page of 2 MiB takes a third
of the time of copying them. Where the kernel has dropped some in between, a buffered read brings
them back.

Asking by a read that must not wait (``RWF_NOWAIT``) makes newer kernels read the missing part in
the background, so that a direct read that follows takes the device twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
#: Memory pages that are looked at.
_LOOKS = 4


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
        """Whether a range is in memory now, by its ends and some pages between."""
        end = offset + nbytes
        if end > self._bytes.nbytes or nbytes < 1:
            return False
        state = ctypes.c_ubyte()
        place = ctypes.addressof(state)
        for look in range(_LOOKS):
            at = (offset + (nbytes - 1) * look // (_LOOKS - 1)) // mmap.PAGESIZE * mmap.PAGESIZE
            # The lowest bit counts; the others are reserved.
            if _LIBC.mincore(self._base + at, 1, place) or not state.value & 1:
                return False
        return True


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
