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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

#: Keeps the interpreter's lock: these calls take less time than letting go of it.
_LIBC = ctypes.PyDLL(None)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
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
        if offset + nbytes > self._bytes.nbytes:
            return False
        return in_memory(self._base + offset, nbytes)


def in_memory(address: int, nbytes: int) -> bool:
    """Whether a range of a mapped file is in memory now, by its ends and some pages between."""
    if nbytes < 1:
        return False
    state = ctypes.c_ubyte()
    place = ctypes.addressof(state)
    for look in range(_LOOKS):
        at = (address + (nbytes - 1) * look // (_LOOKS - 1)) // mmap.PAGESIZE * mmap.PAGESIZE
        # The lowest bit counts; the others are reserved.
        if _LIBC.mincore(at, 1, place) or not state.value & 1:
            return False
    return True


def expect_random(address: int, nbytes: int) -> None:
    """Tell the kernel not to read ahead in a mapped range. Best effort."""
    _LIBC.madvise(address, nbytes, mmap.MADV_RANDOM)


def free_memory_bytes() -> int:
    """Memory that the page cache may grow into: the machine's, or a control group's if less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                version = _GROUPS if controllers else _GROUPS_2
                free = min([free, *_free_in_groups(version, place)])
    return free


class _Groups(NamedTuple):
    """Where a version of the kernel's control groups has what."""

    root: Path
    limit: str
    used: str


_GROUPS = _Groups(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
_GROUPS_2 = _Groups(Path("/sys/fs/cgroup"), "memory.max", "memory.current")


def _free_in_groups(version: _Groups, place: str) -> Iterator[int]:
    """What a group and those around it leave; what they have in the page cache counts as free."""
    folder = version.root / place.strip().lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            text = (group / version.limit).read_text().strip()
            if text != "max":
                lines = (group / "memory.stat").read_text().splitlines()
                stat = {name: int(value) for name, value in (line.split() for line in lines)}
                cached = sum(
                    stat.get(f"total_{name}", stat.get(name, 0))
                    for name in ("active_file", "inactive_file")
                )
                yield int(text) - int((group / version.used).read_text()) + cached
        if group == version.root:
            return
