"""Reading and writing slots of slab files, past the page cache.

Writes and first reads are direct (``O_DIRECT``): the host tier is the cache above this one, and a
second one in the kernel would take its memory. A page that is read again, in a store that fits
the memory the machine has free, is read through the page cache, and from then on warm. Where the
file system has no direct I/O everything is buffered and dropped from the page cache once written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from kvtier.tiers.aligned import ALIGN, AlignedBuffers, is_aligned, round_up
from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.record import Bytes
from kvtier.tiers.slab_segments import Segment, SegmentFiles, ShortReadError

#: Neighbouring slots are written in one call of at most this many bytes.
WRITE_BYTES = 4 << 20
#: One direct read; the next is under way while this one is verified.
_READ_BYTES = 1 << 20


class SlabFiles(SegmentFiles):
    """Reads and writes slots. Reads may come from any thread, writes from the writer's; nothing here
    knows whether a slot may be written or what it should hold.

    Args:
        folder, slot_bytes, per_segment, writable: see ``SegmentFiles``.
        page_bytes: bytes of a page, at most those of a slot.
        reads, writes: threads that read and write beside the caller.
        cache_reads: whether a page that is read again may take page cache.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slot_bytes: int,
        page_bytes: int,
        per_segment: int,
        reads: IoPool,
        writes: IoPool | None,
        writable: bool,
        cache_reads: bool,
    ) -> None:
        super().__init__(folder, slot_bytes=slot_bytes, per_segment=per_segment, writable=writable)
        self.page_bytes = page_bytes
        self._reads = reads
        self._writes = writes
        self._buffers = AlignedBuffers(max(_READ_BYTES, WRITE_BYTES) + 2 * ALIGN, keep=4)
        self._cache_reads = cache_reads
        #: Slots read once since they were written.
        self._seen: set[int] = set()

    # ------------------------------------------------------------------ writing

    def write(self, slots: Sequence[int], pages: Sequence[Bytes]) -> list[Exception | None]:
        """Write pages into slots, neighbours in one call; one outcome a page. Not yet synced."""
        runs = self._runs(slots)
        beside = self._begin(runs[1:], slots, pages)
        # One run in this thread, the others beside it.
        own: Future[None] = Future()
        try:
            self._write_run(slots[runs[0].start], pages[runs[0].start : runs[0].stop])
            own.set_result(None)
        except OSError as error:
            own.set_exception(error)
        return _outcomes([(runs[0], own), *beside])

    def begin(
        self, slots: Sequence[int], pages: Sequence[Bytes]
    ) -> Callable[[], list[Exception | None]]:
        """As ``write``, beside the caller; what is returned waits for the end."""
        return partial(_outcomes, self._begin(self._runs(slots), slots, pages))

    def _begin(
        self, runs: Sequence[range], slots: Sequence[int], pages: Sequence[Bytes]
    ) -> list[tuple[range, Future[None]]]:
        assert self._writes is not None
        submit, write = self._writes.submit, self._write_run
        return [
            (run, submit(_call(write, slots[run.start], pages[run.start : run.stop])))
            for run in runs
        ]

    def _runs(self, slots: Sequence[int]) -> list[range]:
        """Indices of neighbours that one call writes."""
        runs: list[range] = []
        start = 0
        for at in range(1, len(slots) + 1):
            whole = at < len(slots) and slots[at] == slots[at - 1] + 1
            whole = whole and slots[at] // self.per_segment == slots[start] // self.per_segment
            if not whole or (at + 1 - start) * self.slot_bytes > WRITE_BYTES:
                runs.append(range(start, at))
                start = at
        return runs

    def _write_run(self, first: int, pages: Sequence[Bytes]) -> None:
        segment, offset = self.segment_of(first)
        segment.require_same_file()
        self._seen.difference_update(range(first, first + len(pages)))
        try:
            self._write_slots(segment, offset, pages)
        finally:
            segment.dirty = True

    def _write_slots(self, segment: Segment, offset: int, pages: Sequence[Bytes]) -> None:
        if self.memory_align is None:
            self._write_buffered(segment.fd, offset, pages)
            return
        assert segment.direct_fd is not None
        if self.page_bytes == self.slot_bytes and self._takes(pages):
            try:
                _pwrite(segment.direct_fd, offset, list(pages))
                return
            except OSError as error:
                self.distrust(error)
        for page in pages:
            self._write_through_buffer(segment.direct_fd, offset, page)
            offset += self.slot_bytes

    def _takes(self, pages: Sequence[Bytes]) -> bool:
        """Whether direct I/O may use this memory as it is."""
        align = self.memory_align
        return align is not None and all(is_aligned(page, align) for page in pages)

    def _write_buffered(self, fd: int, offset: int, pages: Sequence[Bytes]) -> None:
        if self.page_bytes == self.slot_bytes:
            _pwrite(fd, offset, list(pages))
            return
        for number, page in enumerate(pages):
            _pwrite(fd, offset + number * self.slot_bytes, [page])

    def _write_through_buffer(self, fd: int, offset: int, page: Bytes) -> None:
        with self._buffers.borrow() as buffer:
            for at in range(0, page.nbytes, WRITE_BYTES):
                part = page[at : at + WRITE_BYTES]
                np.copyto(buffer[: part.nbytes], part)
                size = round_up(part.nbytes)
                buffer[part.nbytes : size] = 0
                _pwrite(fd, offset + at, [buffer[:size]])

    # ------------------------------------------------------------------ reading

    def read_page(self, slot: int, out: Bytes) -> Generator[int, None, None]:
        """Read a page past the page cache; yields up to where its bytes are in place, front to
        back.
        """
        segment, offset = self.segment_of(slot)
        self._seen.add(slot)
        return self._read_uncached(segment, offset, out)

    def warm(self, slot: int) -> bool:
        """Whether a page is to be read through the page cache: it is there, or may come there."""
        segment, offset = self.segment_of(slot)
        if self._cache_reads and slot in self._seen:
            return True
        if self.direct and segment.cached(offset, self.page_bytes):
            self._seen.add(slot)
            return True
        return False

    def read_warm(self, slot: int, out: Bytes) -> None:
        """Read a page through the page cache."""
        segment, offset = self.segment_of(slot)
        _pread(segment.fd, offset, out.data)

    def read_range(self, slot: int, start: int, out: Bytes) -> None:
        """Read the bytes of a page from ``start`` on into ``out``."""
        segment, offset = self.segment_of(slot)
        if self.direct and segment.cached(offset + start, out.nbytes):
            _pread(segment.fd, offset + start, out.data)
            return
        for _ in self._read_uncached(segment, offset + start, out, alone=True):
            pass

    def cached(self, first: int, count: int) -> bool:
        """Whether the page cache has all of ``count`` neighbouring slots of one segment."""
        number, offset = self.place(first)
        segment = self.segments[number] if number < len(self.segments) else None
        return segment is not None and segment.cached(offset, count * self.slot_bytes)

    def read_run(self, first: int, outs: Sequence[Bytes]) -> None:
        """Read pages of neighbouring slots of one segment, in one call where the memory allows it; as single
        ones through the page cache if they are there, or may come there."""
        segment, offset = self.segment_of(first)
        slots = range(first, first + len(outs))
        through = self.cached(first, len(outs)) or (
            self._cache_reads and self._seen.issuperset(slots)
        )
        self._seen.update(slots)
        if self.page_bytes == self.slot_bytes and self.direct:
            size = len(outs) * self.slot_bytes
            views = [out.data for out in outs]
            if through:
                if os.preadv(segment.fd, views, offset) == size:
                    return
            else:
                assert segment.direct_fd is not None
                try:
                    if self._takes(outs) and os.preadv(segment.direct_fd, views, offset) == size:
                        return
                except OSError as error:
                    self.distrust(error)
        for at, out in zip(slots, outs, strict=True):
            if through:
                self.read_warm(at, out)
                continue
            start = offset + (at - first) * self.slot_bytes
            for _ in self._read_uncached(segment, start, out, alone=True):
                pass

    def one_run(self, slots: Sequence[int]) -> bool:
        """Whether slots are neighbours of one segment and fit one read."""
        first, last = slots[0], slots[-1]
        return (
            last - first == len(slots) - 1
            and (len(slots) < 2 or slots[-2] == last - 1)
            and first // self.per_segment == last // self.per_segment
            and len(slots) * self.slot_bytes <= WRITE_BYTES
        )

    def read_cold(self, slot: int, out: Bytes) -> None:
        """Read a page from the device itself, whatever the page cache says."""
        segment, offset = self.segment_of(slot)
        for _ in self._read_uncached(segment, offset, out):
            pass

    def _read_uncached(
        self, segment: Segment, offset: int, out: Bytes, alone: bool = False
    ) -> Generator[int, None, None]:
        fd = segment.direct_fd
        if self.memory_align is None or fd is None:
            yield from _pieces(segment.fd, offset, out, _READ_BYTES)
            return
        direct = offset % ALIGN == 0 and self._takes([out])
        read = self._read_direct if direct else self._read_through_buffer
        parts = [
            _call(read, fd, offset + at, out[at : at + _READ_BYTES])
            for at in range(0, out.nbytes, _READ_BYTES)
        ]
        yield from self._ahead(parts, out.nbytes, alone)

    def _ahead(
        self, parts: list[Callable[[], None]], nbytes: int, alone: bool
    ) -> Generator[int, None, None]:
        """Run reads in order, one in this thread and the next beside it. ``alone``: all in this
        thread, which is one of the pool's and must not wait for another."""
        if alone:
            for number, part in enumerate(parts):
                part()
                yield min(nbytes, (number + 1) * _READ_BYTES)
            return
        ahead: Future[None] | None = None
        try:
            for number, part in enumerate(parts):
                if ahead is None:
                    if number + 1 < len(parts):
                        ahead = self._reads.submit(parts[number + 1])
                    part()
                else:
                    done, ahead = ahead, None
                    done.result()
                    if number + 1 < len(parts):
                        ahead = self._reads.submit(parts[number + 1])
                yield min(nbytes, (number + 1) * _READ_BYTES)
        finally:
            # It writes into the caller's memory: it must end before this does.
            if ahead is not None and not ahead.cancel():
                ahead.exception()

    def _read_direct(self, fd: int, offset: int, out: Bytes) -> None:
        try:
            _pread(fd, offset, out.data)
        except ShortReadError:
            raise
        except OSError as error:
            self.distrust(error)
            self._read_through_buffer(fd, offset, out)

    def _read_through_buffer(self, fd: int, offset: int, out: Bytes) -> None:
        first = offset // ALIGN * ALIGN
        size = round_up(offset + out.nbytes - first)
        with self._buffers.borrow() as buffer:
            _pread(fd, first, buffer[:size].data)
            np.copyto(out, buffer[offset - first : offset - first + out.nbytes])


def _outcomes(runs: Sequence[tuple[range, Future[None]]]) -> list[Exception | None]:
    """One outcome a page, after all runs have ended."""
    outcomes: list[Exception | None] = []
    for run, future in runs:
        error = future.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        outcomes += [error] * len(run)
    return outcomes


def _call(function: Callable[..., None], *args: object) -> Callable[[], None]:
    return lambda: function(*args)


def _pwrite(fd: int, offset: int, parts: list[Bytes]) -> None:
    while parts:
        done = os.pwritev(fd, [part.data for part in parts], offset)
        offset += done
        while parts and done >= parts[0].nbytes:
            done -= parts[0].nbytes
            parts = parts[1:]
        if done:  # a signal or a quota cut it short
            parts = [parts[0][done:], *parts[1:]]


def _pieces(fd: int, offset: int, out: Bytes, step: int) -> Generator[int, None, None]:
    """Read in pieces; yields up to where the bytes are in place."""
    view, size = out.data, out.nbytes
    for at in range(0, size, step):
        stop = min(size, at + step)
        _pread(fd, offset + at, view[at:stop])
        yield stop


def _pread(fd: int, offset: int, out: memoryview) -> None:
    got = os.preadv(fd, [out], offset)
    while got < out.nbytes:
        more = os.preadv(fd, [out[got:]], offset + got)
        if more == 0:
            raise ShortReadError("the segment is cut off before the end of the slot")
        got += more
