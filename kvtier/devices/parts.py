"""A copy's parts as few transfers as possible: checked, neighbours merged, equal pitches found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.devices.base import Buffer, Range
from kvtier.devices.cards import Direction
from kvtier.errors import ConfigError

#: A strided transfer passes through a temporary in VRAM of its size; longer ones are split up.
MAX_RUN_BYTES = 32 * 2**20


class Piece(NamedTuple):
    """``nbytes`` contiguous bytes from ``src`` to ``dst``."""

    dst: Buffer
    dst_start: int
    src: Buffer
    src_start: int
    nbytes: int


class Run(NamedTuple):
    """``number`` pieces of equal size, equally far apart on each side; ``first`` is the lowest."""

    first: Piece
    number: int
    dst_pitch: int
    src_pitch: int


def check_range(at: Range) -> None:
    """Raise ConfigError unless ``at`` lies inside its buffer."""
    if not 0 <= at.start <= at.stop <= at.buffer.nbytes:
        raise ConfigError(
            f"bytes [{at.start}, {at.stop}) do not lie in a buffer of {at.buffer.nbytes} bytes"
        )


def direction_of(parts: Sequence[tuple[Range, Range]]) -> Direction:
    """The direction that all ``(destination, source)`` pairs have in common.

    Raises:
        ConfigError: lengths differ, a range is out of bounds, sides are mixed, or both are host
            memory.
    """
    sides = set()
    for dst, src in parts:
        to, first, last = dst
        of, begin, end = src
        if not (0 <= first <= last <= to.nbytes and 0 <= begin <= end <= of.nbytes):
            check_range(dst)
            check_range(src)
        if last - first != end - begin:
            raise ConfigError(f"a copy of {src.nbytes} bytes has a destination of {dst.nbytes}")
        sides.add((of.kind == "vram", to.kind == "vram"))
    if len(sides) != 1:
        raise ConfigError(
            "a copy needs parts, all from one side (VRAM or host) to one side; "
            f"got {len(sides)} combinations in {len(parts)} parts; submit one copy a direction"
        )
    from_vram, to_vram = sides.pop()
    if not from_vram and not to_vram:
        raise ConfigError("a device does not copy from host to host; write through Device.host")
    return "d2d" if from_vram and to_vram else "d2h" if from_vram else "h2d"


def spans(ranges: Sequence[tuple[Buffer, int, int]]) -> list[tuple[Buffer, int, int]]:
    """``(buffer, start, stop)`` in order within each buffer, neighbours and overlaps merged, empty
    ones left out."""
    by_buffer: dict[Buffer, list[tuple[int, int]]] = {}
    for buffer, start, stop in ranges:
        if start < stop:
            found = by_buffer.get(buffer)
            if found is None:
                by_buffer[buffer] = [(start, stop)]
            else:
                found.append((start, stop))
    merged: list[tuple[Buffer, int, int]] = []
    for buffer, pairs in by_buffer.items():
        if len(pairs) == 1:
            merged.append((buffer, *pairs[0]))
            continue
        pairs.sort()
        start, stop = pairs[0]
        for lo, hi in pairs:
            if lo > stop:
                merged.append((buffer, start, stop))
                start, stop = lo, hi
            elif hi > stop:
                stop = hi
        merged.append((buffer, start, stop))
    return merged


def overlap(pieces: Sequence[Piece]) -> int | None:
    """A byte at which a destination meets another destination or a source, None if none does."""
    touched = [(id(p.dst), p.dst_start, p.dst_start + p.nbytes, True) for p in pieces]
    touched += [(id(p.src), p.src_start, p.src_start + p.nbytes, False) for p in pieces]
    touched.sort()
    where = read_end = write_end = 0
    for buffer, start, stop, write in touched:
        if buffer != where:
            where, read_end, write_end = buffer, 0, 0
        if start < (max(read_end, write_end) if write else write_end):
            return start
        if write:
            write_end = max(write_end, stop)
        else:
            read_end = max(read_end, stop)
    return None


def merge(parts: Sequence[tuple[Range, Range]]) -> list[Piece]:
    """Pieces in order of destination; parts that are neighbours on both sides are one piece."""
    if len(parts) == 1:
        dst, src = parts[0]
        size = dst.stop - dst.start
        return [Piece(dst.buffer, dst.start, src.buffer, src.start, size)] if size else []
    # The number of a part keeps buffers, which have no order, out of the comparison.
    rows = sorted(
        [
            (id(dst[0]), id(src[0]), dst[1], number, dst[2] - dst[1], src[1])
            for number, (dst, src) in enumerate(parts)
            if dst[2] > dst[1]
        ]
    )
    merged: list[Piece] = []
    to_id = of_id = to_end = of_end = -1
    for dst_id, src_id, dst_start, number, size, src_start in rows:
        if dst_start == to_end and src_start == of_end and dst_id == to_id and src_id == of_id:
            last = merged[-1]
            merged[-1] = Piece(
                last.dst, last.dst_start, last.src, last.src_start, last.nbytes + size
            )
        else:
            dst, src = parts[number]
            merged.append(Piece(dst.buffer, dst_start, src.buffer, src_start, size))
            to_id, of_id = dst_id, src_id
        to_end, of_end = dst_start + size, src_start + size
    return merged


def runs(pieces: Sequence[Piece], direction: Direction) -> list[Run]:
    """Group merged pieces so that each run is one driver call.

    Between host and VRAM only the VRAM side may be strided: torch copies a strided host side
    through an unpinned temporary that is not ordered with the stream.
    """
    found: list[Run] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and (grown := _grow(last, piece, direction)) is not None:
            found[-1] = grown
        else:
            found.append(Run(piece, 1, piece.nbytes, piece.nbytes))
    return found


def _grow(run: Run, piece: Piece, direction: Direction) -> Run | None:
    first, count = run.first, run.number
    if (
        piece.dst is not first.dst
        or piece.src is not first.src
        or piece.nbytes != first.nbytes
        or piece.nbytes * (count + 1) > MAX_RUN_BYTES
    ):
        return None
    if count == 1:
        dst_pitch = piece.dst_start - first.dst_start
        src_pitch = piece.src_start - first.src_start
        if dst_pitch < piece.nbytes or src_pitch < piece.nbytes:
            return None
        host_pitch = {"h2d": src_pitch, "d2h": dst_pitch, "d2d": piece.nbytes}[direction]
        if host_pitch != piece.nbytes:
            return None
    else:
        dst_pitch, src_pitch = run.dst_pitch, run.src_pitch
        if (
            piece.dst_start != first.dst_start + count * dst_pitch
            or piece.src_start != first.src_start + count * src_pitch
        ):
            return None
    return Run(first, count + 1, dst_pitch, src_pitch)
