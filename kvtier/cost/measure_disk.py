"""What the file system of a folder does, measured with plain files in pieces of a page.

Durable writes and reads past the page cache (O_DIRECT) are what a disk tier needs; buffered reads, from
the medium (cold) and from the page cache (warm), are what it gets where O_DIRECT is not to be had.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvtier.cost.profile import Measurement, middle
from kvtier.cost.trials import Tick, shares
from kvtier.errors import ConfigError
from kvtier.units import format_size

MiB = 2**20

#: Bytes of a read or write, and reads in flight.
PIECE = 4 * MiB
READERS = 4

#: Bytes between two syncs of durable writes.
SYNC_BYTES = 16 * MiB

FILE_BYTES = 1024 * MiB
QUICK_BYTES = 192 * MiB

#: Space that is left alone.
SPARE_BYTES = 512 * MiB


def measure_disk(
    folder: Path, seconds: float, quick: bool, tick: Tick
) -> tuple[list[Measurement], dict[str, str]]:
    """Bytes/s of ``folder``, and what was left out with the reason. Takes ``seconds``, about: a slow disk
    moves fewer bytes.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    size = QUICK_BYTES if quick else FILE_BYTES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < size + SPARE_BYTES:
            need = format_size(size + SPARE_BYTES)
            return [], {"disk": f"{format_size(free)} free in the folder, {need} needed"}
        handle, name = tempfile.mkstemp(prefix=".kvtier-calibrate-", dir=folder)
        os.close(handle)
    except OSError as error:
        raise ConfigError(
            f"folder {folder} cannot be written: {error.strerror}; give another with --store DIR"
        ) from error
    path = Path(name)
    try:
        return _measure(path, size, seconds / 5, tick)
    except OSError as error:
        raise ConfigError(
            f"folder {folder} failed while it was measured: {error.strerror}; give another with --store DIR"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def _measure(
    path: Path, size: int, seconds: float, tick: Tick
) -> tuple[list[Measurement], dict[str, str]]:
    ticks = shares(5, tick)
    pieces = _memory(READERS)
    found: list[Measurement] = []
    left_out: dict[str, str] = {}

    def add(name: str, rates: list[float], how: str) -> None:
        # All bytes over all the time: stalls count.
        rate = len(rates) / sum(1 / one for one in rates)
        band = middle(name, rates, "bytes/s", f"{how}, pieces of 4 MiB")
        low, high = min(band.low, rate), max(band.high, rate)
        found.append(replace(band, value=rate, low=low, high=high))

    # A buffered write fills the file first: all that is read later exists.
    with _opened(path, direct=False) as fd:
        rates = _write(fd, size, pieces[0], seconds, next(ticks))
        written = os.fstat(fd).st_size
    add("disk_write_buffered", rates, "buffered writes, fdatasync every 16 MiB")
    try:
        with _opened(path, direct=True) as fd:
            rates = _write(fd, written, pieces[0], seconds, next(ticks))
            add("disk_write", rates, "O_DIRECT writes, fdatasync every 16 MiB")
        with _opened(path, direct=True) as fd:
            rates = _read(fd, written, pieces, seconds, next(ticks))
            add("disk_read", rates, f"O_DIRECT reads, {READERS} at a time")
    except OSError:
        left_out["O_DIRECT"] = "the file system of the folder does not have it"
    with _opened(path, direct=False) as fd:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        rates = _read(fd, written, pieces, seconds, next(ticks, tick))
        add(
            "disk_read_cold",
            rates,
            f"buffered reads after the page cache was dropped, {READERS} at a time",
        )
        if "O_DIRECT" in left_out:
            add(
                "disk_read",
                rates,
                f"buffered reads after the page cache was dropped, {READERS} at a time",
            )
        _read(fd, written, pieces, seconds, lambda done: None)
        rates = _read(fd, written, pieces, seconds, next(ticks, tick))
        add("disk_read_warm", rates, f"buffered reads from the page cache, {READERS} at a time")
    tick(1.0)
    return found, left_out


def _memory(count: int) -> list[memoryview]:
    """Pieces that begin at memory pages, as O_DIRECT needs them; not zeros, which a file system may
    leave out."""
    memory = memoryview(mmap.mmap(-1, count * PIECE))
    memory[:] = os.urandom(PIECE) * count
    return [memory[n * PIECE : (n + 1) * PIECE] for n in range(count)]


@contextlib.contextmanager
def _opened(path: Path, *, direct: bool) -> Iterator[int]:
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    if direct and not flag:
        raise OSError("no O_DIRECT on this system")
    fd = os.open(path, os.O_RDWR | flag)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(fd: int, size: int, piece: memoryview, seconds: float, tick: Tick) -> list[float]:
    """Rates of groups of SYNC_BYTES, each durable; at least one."""

    def group(at: int) -> None:
        for start in range(at, min(at + SYNC_BYTES, size), PIECE):
            os.pwrite(fd, piece, start)
        os.fdatasync(fd)

    return _groups(group, size, seconds, tick)


def _read(fd: int, size: int, pieces: list[memoryview], seconds: float, tick: Tick) -> list[float]:
    with ThreadPoolExecutor(READERS) as pool:

        def group(at: int) -> None:
            starts = range(at, min(at + SYNC_BYTES, size), PIECE)
            for moved in pool.map(
                lambda pair: os.preadv(fd, [pair[0]], pair[1]), zip(pieces, starts, strict=False)
            ):
                if moved != PIECE:
                    raise OSError(f"a read gave {moved} bytes instead of {PIECE}")

        return _groups(group, size, seconds, tick)


def _groups(group: Callable[[int], None], size: int, seconds: float, tick: Tick) -> list[float]:
    """Bytes/s of each group of SYNC_BYTES, until the file or the time ends."""
    rates: list[float] = []
    began = time.perf_counter()
    for at in range(0, size, SYNC_BYTES):
        started = time.perf_counter()
        group(at)
        now = time.perf_counter()
        rates.append(min(SYNC_BYTES, size - at) / (now - started))
        tick(min(1.0, max((at + SYNC_BYTES) / size, (now - began) / seconds)))
        if now - began > seconds:
            break
    return rates
