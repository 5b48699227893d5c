"""Plain file I/O in the units of the disk tier: the limits that ``bench/disk.py`` measures against."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

#: Bytes between two syncs of "synced" writes; the disk tier commits groups of at most as much.
SYNC_BYTES = 16 << 20


class Cost(NamedTuple):
    """What moving some bytes took: seconds on the clock, and CPU seconds of the whole process."""

    seconds: float
    cpu_s: float
    nbytes: int

    @property
    def gbs(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def gb_per_cpu_s(self) -> float:
        return self.nbytes / max(self.cpu_s, 1e-6) / 1e9


def cost(nbytes: int, work: Callable[..., object], *args: object) -> Cost:
    """Calls ``work``, which moves ``nbytes``."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    work(*args)
    seconds = time.perf_counter() - started
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime - usage.ru_utime + now.ru_stime - usage.ru_stime
    return Cost(seconds, cpu, nbytes)


def buffers(count: int, nbytes: int) -> list[Bytes]:
    """``count`` buffers that begin at memory pages, as O_DIRECT needs them; all touched."""
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, count * stride), np.uint8)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.size, np.uint8)
    return [memory[i * stride : i * stride + nbytes] for i in range(count)]


class RawFile:
    """A preallocated file of ``count`` pages that is written and read with plain system calls.

    Args:
        source, target: buffers of one page each, used in turn for writes and for reads.
    """

    def __init__(
        self, path: Path, count: int, source: Sequence[Bytes], target: Sequence[Bytes]
    ) -> None:
        self._path, self._count, self._source, self._target = path, count, source, target
        self._nbytes = source[0].nbytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(fd, 0, count * self._nbytes)
        os.fsync(fd)
        os.close(fd)

    @contextlib.contextmanager
    def _opened(self, direct: bool) -> Iterator[int]:
        fd = os.open(self._path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        try:
            yield fd
        finally:
            os.close(fd)

    def write(self, *, direct: bool, synced: bool) -> Cost:
        """All pages in order. ``synced``: durable in groups of SYNC_BYTES, like the tier's commits; without
        it what a buffered write leaves in the page cache is not waited for."""

        def work() -> None:
            since = 0
            for index in range(self._count):
                os.pwrite(fd, self._source[index % len(self._source)], index * self._nbytes)
                since += self._nbytes
                if synced and since >= SYNC_BYTES:
                    os.fdatasync(fd)
                    since = 0
            if synced:
                os.fdatasync(fd)

        with self._opened(direct) as fd:
            result = cost(self._count * self._nbytes, work)
            os.fdatasync(fd)
            return result

    def read(
        self, order: Sequence[int], *, direct: bool, threads: int = 1, summed: bool = False
    ) -> Cost:
        """The pages of ``order``. ``summed``: each with its XXH3-64."""

        def some(start: int) -> None:
            for at in range(start, len(order), threads):
                into = self._target[at % len(self._target)]
                if os.preadv(fd, [into], order[at] * self._nbytes) != self._nbytes:
                    raise OSError(f"short read of {self._path}")
                if summed:
                    xxhash.xxh3_64_intdigest(into)

        with self._opened(direct) as fd, ThreadPoolExecutor(threads) as pool:
            list(pool.map(some, [0] * threads))  # starts the threads, warms nothing that counts
            return cost(len(order) * self._nbytes, lambda: list(pool.map(some, range(threads))))


def drop_cache(folder: Path) -> None:
    """Take the files of a folder out of the page cache (they must not be mapped)."""
    for path in folder.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fill_cache(folder: Path) -> None:
    """Read the files of a folder into the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass


def shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.Random(count).shuffle(order)
    return order


class MemoryLimit:
    """Children under a limit of memory, page cache included (a cgroup; needs root), or ``None`` for its
    folder where that is not permitted."""

    def __init__(self, limit_bytes: int) -> None:
        v1 = Path("/sys/fs/cgroup/memory")
        base, name = (
            (v1, "memory.limit_in_bytes")
            if (v1 / "cgroup.procs").exists()
            else (Path("/sys/fs/cgroup"), "memory.max")
        )
        self.folder: Path | None = base / f"kvtier-bench-{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / name).write_text(str(limit_bytes))
        except OSError:
            self.close()
            self.folder = None

    def run(self, work: Callable[[], Any]) -> Any:
        """``work()`` in a forked child inside the group; its result goes through JSON."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read)
                if self.folder is not None:
                    (self.folder / "cgroup.procs").write_text(str(os.getpid()))
                with os.fdopen(write, "w") as pipe:
                    pipe.write(json.dumps(work()))
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"the child under the memory limit ended with {status}")
        return json.loads(text)

    def close(self) -> None:
        for _ in range(50):
            try:
                if self.folder is not None:
                    self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
