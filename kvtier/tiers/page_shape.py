"""How a page is cut into planes for checking and into pieces for storing in the database.

Each plane has its own XXH3-64, seeded by the page's key and the plane's number, so a plane can be
read and verified alone and bytes that belong to another page or plane never verify. The few bytes
between planes (alignment) have one more sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvtier.errors import LayoutError
from kvtier.tiers.record import Bytes, RecordError

#: A payload in the database is stored in pieces of at least this many bytes, cut between planes.
#: The binding touches every 4 KiB of a value it returns, so a piece is what reading one plane
#: costs; the kernel reads ahead about this much anyway, and smaller pieces would waste most of
#: their last database page.
PIECE_BYTES = 64 << 10
_MASK = (1 << 64) - 1
#: Odd, so that the seeds of a page's planes are all different (the golden ratio times 2**64).
_STEP = 0x9E3779B97F4A7C15


class Piece(NamedTuple):
    """A run of whole planes that is stored as one value."""

    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


class PageShape:
    """How a page of ``page_bytes`` is cut into planes and pieces.

    Args:
        page_bytes: bytes of a page.
        plane_ranges: ``(offset, nbytes)`` of each plane, ascending, not overlapping.

    Raises:
        LayoutError: the planes are not ascending ranges inside the page.
    """

    def __init__(self, page_bytes: int, plane_ranges: Sequence[tuple[int, int]]) -> None:
        if page_bytes < 1 or not plane_ranges:
            raise LayoutError(
                f"a page has {page_bytes} bytes and {len(plane_ranges)} planes; both must be >= 1"
            )
        self.page_bytes = page_bytes
        self.planes = tuple((int(offset), int(nbytes)) for offset, nbytes in plane_ranges)
        self._slices = [slice(offset, offset + nbytes) for offset, nbytes in self.planes]
        self._steps = [(number + 1) * _STEP for number in range(len(self.planes))]
        self.gaps: list[tuple[int, int]] = []
        at = 0
        for index, (offset, nbytes) in enumerate((*self.planes, (page_bytes, 0))):
            if offset < at or nbytes < 0:
                raise LayoutError(
                    f"plane {index} at {offset} + {nbytes} bytes overlaps its neighbour"
                )
            if offset > at:
                self.gaps.append((at, offset))
            at = offset + nbytes
        self.pieces = self._cut()
        self._piece_of = tuple(
            next(
                i
                for i, piece in enumerate(self.pieces)
                if offset < piece.stop or piece.stop == page_bytes
            )
            for offset, _ in self.planes
        )

    @property
    def sums(self) -> int:
        """Checksums a page has."""
        return len(self.planes) + bool(self.gaps)

    def _cut(self) -> tuple[Piece, ...]:
        """Pieces that cover the page and begin where a plane begins, about ``PIECE_BYTES`` or one
        plane long.
        """
        starts = [0]
        for offset, _ in self.planes[1:]:
            room = self.page_bytes - offset
            if offset - starts[-1] >= PIECE_BYTES and room >= PIECE_BYTES // 2:
                starts.append(offset)
        stops = [*starts[1:], self.page_bytes]
        return tuple(Piece(start, stop - start) for start, stop in zip(starts, stops, strict=True))

    def piece_of(self, plane: int) -> tuple[int, int]:
        """Number of the piece that holds a plane, and the plane's offset in it."""
        index = self._piece_of[plane]
        return index, self.planes[plane][0] - self.pieces[index].offset

    def checksums(self, key: bytes, page: Bytes) -> tuple[int, ...]:
        """The checksums of a page, uint8 ``[page_bytes]``, stored under ``key``."""
        seeds, view = PlaneSeeds(key), page.data
        sums = [
            xxhash.xxh3_64_intdigest(view[at : at + n], seed=seeds[i])
            for i, (at, n) in enumerate(self.planes)
        ]
        if self.gaps:
            sums.append(self._gap_sum(seeds, page))
        return tuple(sums)

    def verify(self, key: bytes, sums: Sequence[int], page: Bytes) -> None:
        """Raise RecordError unless every byte of ``page`` is as it was when ``sums`` were taken."""
        self.verify_planes(key, sums, page)
        self.verify_gaps(key, sums, page)

    def verify_planes(self, key: bytes, sums: Sequence[int], page: Bytes) -> None:
        """As ``verify``, without the bytes between the planes."""
        digest, view = xxhash.xxh3_64_intdigest, page.data
        base = digest(key)
        for number, (part, step) in enumerate(zip(self._slices, self._steps, strict=True)):
            if digest(view[part], seed=base + step & _MASK) != sums[number]:
                raise RecordError(f"plane {number} does not match its checksum")

    def verify_plane(self, key: bytes, sums: Sequence[int], plane: int, data: Bytes) -> None:
        """Raise RecordError unless ``data`` is plane ``plane`` of the page that ``sums`` were taken
        of.
        """
        if plane_sum(key, plane, data) != sums[plane]:
            raise RecordError(f"plane {plane} does not match its checksum")

    def verify_gaps(self, key: bytes, sums: Sequence[int], page: Bytes) -> None:
        """Raise RecordError if the bytes between the planes are wrong."""
        if self.gaps and self._gap_sum(PlaneSeeds(key), page) != sums[-1]:
            raise RecordError("the bytes between the planes do not match their checksum")

    def _gap_sum(self, seeds: PlaneSeeds, page: Bytes) -> int:
        state = xxhash.xxh3_64(seed=seeds[len(self.planes)])
        for start, stop in self.gaps:
            state.update(page[start:stop].data)
        return state.intdigest()


class PlaneSeeds:
    """The seed of each plane's checksum of the page stored under ``key``."""

    __slots__ = ("_base",)

    def __init__(self, key: bytes) -> None:
        self._base = xxhash.xxh3_64_intdigest(key)

    def __getitem__(self, plane: int) -> int:
        return (self._base + (plane + 1) * _STEP) & _MASK


class PageCheck:
    """Verifies a page front to back while its bytes arrive, so that they are summed while they are
    in the processor's cache.
    """

    def __init__(self, shape: PageShape, key: bytes, sums: Sequence[int], page: Bytes) -> None:
        self._shape, self._key, self._sums, self._page = shape, key, sums, page
        self._view = page.data
        self._seeds = PlaneSeeds(key)
        self._plane = 0
        self._at = 0
        self._state: xxhash.xxh3_64 | None = None

    def reach(self, stop: int) -> None:
        """The bytes of the page up to ``stop`` are in place. RecordError if a plane is wrong."""
        if self._at == 0 and stop == self._page.nbytes:
            self._shape.verify_planes(self._key, self._sums, self._page)
            self._plane, self._at = len(self._shape.planes), stop
            return
        planes, view, seeds = self._shape.planes, self._view, self._seeds
        while self._plane < len(planes):
            number = self._plane
            start, nbytes = planes[number]
            end = start + nbytes
            if end <= stop and self._state is None:
                found = xxhash.xxh3_64_intdigest(view[start:end], seed=seeds[number])
            else:
                first, last = max(start, self._at), min(end, stop)
                if last > first:
                    if self._state is None:
                        self._state = xxhash.xxh3_64(seed=seeds[number])
                    self._state.update(view[first:last])
                if end > stop or self._state is None:
                    break
                found = self._state.intdigest()
            if found != self._sums[number]:
                raise RecordError(f"plane {number} does not match its checksum")
            self._plane, self._state = number + 1, None
        self._at = max(self._at, stop)

    def finish(self) -> None:
        """Everything was reached. RecordError if the bytes between the planes are wrong."""
        assert self._plane == len(self._shape.planes)
        self._shape.verify_gaps(self._key, self._sums, self._page)


def plane_sum(key: bytes, plane: int, data: Bytes) -> int:
    """XXH3-64 of a plane's bytes, different for every key and plane number."""
    return xxhash.xxh3_64_intdigest(data.data, seed=PlaneSeeds(key)[plane])
