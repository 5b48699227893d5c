"""The slab files of a folder: made, found, grown and cut.

Slot ``n`` is the ``n % per_segment``-th of segment ``n // per_segment``. There is nothing in a
segment but slots; what is in which is the index's business. A slot begins at a multiple of 4 KiB.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from kvtier.tiers.aligned import ALIGN, aligned_buffer
from kvtier.tiers.lmdb_file import disk_error
from kvtier.tiers.page_cache import PageCacheView
from kvtier.tiers.record import RecordError
from kvtier.units import format_size

_PATTERN = "pages-{:05d}.slab"


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / _PATTERN.format(number)


def segment_paths(folder: Path) -> list[Path]:
    """The segment files that a folder has."""
    return sorted(folder.glob("pages-[0-9][0-9][0-9][0-9][0-9].slab"))


class ShortReadError(RecordError):
    """A segment ends before the slot does, or is not there."""


class Segment:
    """One file, open for direct and for buffered I/O (the same descriptor without direct I/O)."""

    def __init__(self, path: Path, fd: int, direct_fd: int | None) -> None:
        self.path = path
        self.fd = fd
        self.direct_fd = direct_fd
        stat = os.fstat(fd)
        self.file_id = (stat.st_dev, stat.st_ino)
        self.dirty = False
        self._cache: PageCacheView | None = None

    def cached(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache has all of a range."""
        cache = self._cache
        if cache is None:
            try:
                cache = self._cache = PageCacheView(self.fd)
            except (OSError, ValueError):
                return False
        return cache.has(offset, nbytes)

    def resized(self) -> None:
        """The file has another length."""
        self._cache = None

    @property
    def in_place(self) -> bool:
        """Whether the file is still the one of its name."""
        try:
            self.require_same_file()
        except OSError:
            return False
        return True

    def require_same_file(self) -> None:
        """FileNotFoundError if another file, or none, is in its place."""
        # Writes to an unlinked file succeed and vanish at close.
        stat = os.stat(self.path)
        if (stat.st_dev, stat.st_ino) != self.file_id:
            raise FileNotFoundError(
                errno.ENOENT, "another file has taken its place", str(self.path)
            )

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)


class SegmentFiles:
    """The segments of one folder.

    Args:
        folder: where the segments are.
        slot_bytes: bytes of a slot, a multiple of 4 KiB.
        per_segment: slots of a full segment.
        writable: whether segments may be made, resized and written.
    """

    def __init__(self, folder: Path, *, slot_bytes: int, per_segment: int, writable: bool) -> None:
        self.folder = folder
        self.slot_bytes = slot_bytes
        self.per_segment = per_segment
        self._writable = writable
        self.segments: list[Segment | None] = []
        self._dropped: list[Segment] = []
        self._resizing = threading.Lock()
        #: Alignment of addresses that direct I/O wants here; ``None`` without direct I/O.
        self.memory_align: int | None = None
        self._probed = False
        self.slots = 0

    @property
    def direct(self) -> bool:
        """Whether the file system does direct I/O."""
        return self.memory_align is not None

    def distrust(self, error: OSError) -> None:
        """Direct I/O has failed: if for the memory's alignment, ask for whole pages from now on."""
        if error.errno != errno.EINVAL:
            raise error
        self.memory_align = ALIGN

    def place(self, slot: int) -> tuple[int, int]:
        """Number of the segment that holds a slot, and the slot's offset in it."""
        number, inner = divmod(slot, self.per_segment)
        return number, inner * self.slot_bytes

    def segment_of(self, slot: int) -> tuple[Segment, int]:
        """The segment that holds a slot, and the slot's offset in it. ShortReadError if it is not
        there.
        """
        number, offset = self.place(slot)
        segment = self.segments[number] if 0 <= number < len(self.segments) else None
        if segment is None:
            raise ShortReadError(f"segment {number} is not there")
        return segment, offset

    def sizes(self, slots: int) -> list[int]:
        """Bytes of each segment of a store of ``slots`` slots."""
        full, rest = divmod(slots, self.per_segment)
        parts = [self.per_segment] * full + ([rest] if rest else [])
        return [n * self.slot_bytes for n in parts]

    def present(self, slot: int) -> bool:
        """Whether the files reach to the end of a slot."""
        number, offset = self.place(slot)
        segment = self.segments[number] if number < len(self.segments) else None
        return segment is not None and os.fstat(segment.fd).st_size >= offset + self.slot_bytes

    def open_found(self) -> None:
        """Open the segments that are there."""
        paths = segment_paths(self.folder)
        last = int(paths[-1].name[6:11]) + 1 if paths else 0
        while len(self.segments) < last:
            self.segments.append(None)
        for path in paths:
            number = int(path.name[6:11])
            if self.segments[number] is None:
                self.segments[number] = self._open(path, create=False)
        self.slots = len(self.segments) * self.per_segment
        self._probe()

    def follow(self) -> bool:
        """Open what another process has made, and drop what it has removed or replaced; whether
        anything was new. The files that are dropped stay open until ``close``, as somebody may
        still read them.
        """
        new = False
        with self._resizing:
            for number, segment in enumerate(self.segments):
                if segment is not None and not segment.in_place:
                    self._dropped.append(segment)
                    self.segments[number] = None
                    new = True
            before = sum(segment is not None for segment in self.segments)
            self.open_found()
            return new or sum(segment is not None for segment in self.segments) > before

    def cut(self, slots: int) -> None:
        """Remove the slots from number ``slots`` on."""
        wanted = self.sizes(slots)
        with self._resizing:
            for number, segment in enumerate(self.segments):
                if segment is None:
                    continue
                if number >= len(wanted):
                    segment.close()
                    segment.path.unlink(missing_ok=True)
                elif os.fstat(segment.fd).st_size > wanted[number]:
                    os.ftruncate(segment.fd, wanted[number])
                    segment.resized()
            del self.segments[len(wanted) :]
        self.slots = min(slots, self.slots)

    def resize(self, slots: int) -> None:
        """Make, grow and cut segments until there is room for ``slots``, all of it
        allocated, so that "no space" comes now and never at a write.

        Raises:
            DiskError: the file system has not got the room. The segments keep their sizes.
        """
        self.cut(slots)
        wanted = self.sizes(slots)
        with self._resizing:
            while len(self.segments) < len(wanted):
                self.segments.append(None)
            grown: list[tuple[Segment, int]] = []
            try:
                for number, size in enumerate(wanted):
                    segment = self.segments[number]
                    if segment is None:
                        segment = self._open(segment_path(self.folder, number), create=True)
                        self.segments[number] = segment
                    have = os.fstat(segment.fd).st_size
                    grown.append((segment, have))
                    _allocate(segment.fd, size)
                    segment.resized()
            except OSError as error:
                for segment, have in grown:
                    os.ftruncate(segment.fd, have)
                raise disk_error(
                    error, f"reserving {format_size(sum(wanted))}", self.folder
                ) from error
            for segment, _ in grown:
                os.fsync(segment.fd)
        self.slots = slots
        self._probe()

    def _open(self, path: Path, *, create: bool) -> Segment:
        flags = (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        fd = os.open(path, flags, 0o600)
        direct_fd: int | None = None
        try:
            # Read-ahead would bring in neighbours that are being written past the page cache.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            direct_fd = os.open(path, (flags & ~os.O_CREAT) | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(fd)
                raise
        return Segment(path, fd, direct_fd)

    def _probe(self) -> None:
        """Find out what memory direct I/O takes here, by reading."""
        segment = next((s for s in self.segments if s is not None), None)
        if self._probed or segment is None or segment.direct_fd is None:
            return
        self._probed = True
        buffer = aligned_buffer(2 * ALIGN)
        # Finer alignments pass a small read and fail where the kernel splits a large one.
        for align in (512, ALIGN):
            try:
                if os.preadv(segment.direct_fd, [buffer[align : align + ALIGN].data], 0) >= 0:
                    self.memory_align = align
                    return
            except OSError:
                continue

    def sync(self) -> None:
        """Make everything that was written durable."""
        dirty = [s for s in self.segments if s is not None and s.dirty]
        for segment in dirty:
            # Cleared before: what is written meanwhile may miss this sync and needs the next one.
            segment.dirty = False
            try:
                os.fdatasync(segment.fd)
            except OSError:
                segment.dirty = True
                raise
            if not self.direct:
                os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def disk_bytes(self) -> int:
        """Bytes of the segment files."""
        return sum(os.fstat(s.fd).st_size for s in self.segments if s is not None)

    def close(self) -> None:
        """Close the files. Nothing may be reading or writing. Idempotent."""
        for segment in (*self.segments, *self._dropped):
            if segment is not None:
                segment.close()
        self.segments, self._dropped = [], []


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)
