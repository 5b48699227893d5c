"""Coded planes of pages in host memory on their way to attention: over the link as they are, decoded in VRAM.

All of it is work of the copy stream: coded planes come into scratch memory, a kernel decodes them to where attention
reads them, and the next ones come into the same scratch memory, behind it in the stream's order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.devices.base import Buffer, Range, Stream
from kvtier.errors import CopyFailedError
from kvtier.kernels.pages import gather_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import PLANE_ALIGN, Plane
from kvtier.store.store import TieredStore
from kvtier.tiers.codec import PageCodec
from kvtier.tiers.memory import Slot

#: Scratch memory at most. It also bounds what decoding needs at once besides.
SCRATCH_BYTES = 4 << 20


@dataclass(slots=True)
class Wanted:
    """A plane of the page in ``slot``, and where parts of it go: (destination, first byte in the uncoded plane)."""

    slot: Slot
    parts: list[tuple[Range, int]]


@dataclass(slots=True)
class _Run:
    """Equal parts of ``count`` planes from number ``first`` on, that lie behind each other at their destination."""

    first: int
    count: int
    at: int
    to: Range


class CodedPlanes:
    """Brings coded planes into VRAM.

    Args:
        store: where the pages are.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.device = store.device
        self._scratch: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """VRAM in use."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def bring(self, stream: Stream, plane: Plane, wanted: Sequence[Wanted]) -> None:
        """Start the copies of a layer's planes, and their decoding, on ``stream``.

        Args:
            wanted: of pages in slots that are all coded alike.

        Raises:
            DeviceOOMError: no VRAM for the scratch memory.
            CopyFailedError: what was copied is known to be unusable.
        """
        if not wanted:
            return
        codec = wanted[0].slot.codec
        assert codec is not None
        coded = codec.plane(plane.layer)
        stride = -(-coded.nbytes // PLANE_ALIGN) * PLANE_ALIGN
        scratch = self._room(codec)
        at_once = scratch.nbytes // stride
        for start in range(0, len(wanted), at_once):
            some = wanted[start : start + at_once]
            places = [
                scratch.range(n * stride, n * stride + coded.nbytes) for n in range(len(some))
            ]
            sources = [each.slot.range(coded.offset, coded.nbytes) for each in some]
            self.device.copy(stream, list(zip(places, sources, strict=True)))
            self._decode(stream, codec, plane, scratch.range(0, len(some) * stride), stride, some)
        self.store.count_streamed(len(wanted) * coded.nbytes, len(wanted))

    def close(self) -> None:
        """Free the scratch memory, once the work on it is done."""
        if self._scratch is not None:
            with contextlib.suppress(CopyFailedError):
                self.device.synchronize(self.store.timeout_s)
            self.device.free(self._scratch)
            self._scratch = None

    # ------------------------------------------------------------------ inside

    def _room(self, codec: PageCodec) -> Buffer:
        """The scratch memory, for one plane of any layer at least."""
        if self._scratch is None:
            largest = max(plane.nbytes for plane in codec.planes if plane is not None)
            largest = -(-largest // PLANE_ALIGN) * PLANE_ALIGN
            pages = self.store.sizes["host"] // codec.page_bytes
            self._scratch = self.device.alloc(
                largest * max(1, min(pages, SCRATCH_BYTES // largest))
            )
        return self._scratch

    def _decode(
        self,
        stream: Stream,
        codec: PageCodec,
        plane: Plane,
        coded: Range,
        stride: int,
        wanted: Sequence[Wanted],
    ) -> None:
        runs = _runs(wanted)

        def kernel() -> None:
            rows = coded.raw().view(len(wanted), stride)
            raw = rows.new_empty(len(wanted), plane.nbytes)
            codec.decode_planes(plane.layer, rows[:, : codec.plane(plane.layer).nbytes], raw)
            for run in runs:
                size = run.to.nbytes // run.count
                part = raw[run.first : run.first + run.count, run.at : run.at + size]
                run.to.raw().view(run.count, size).copy_(part)

        self.device.launch(
            stream, f"decode layer {plane.layer}", kernel,
            reads=[coded], writes=[run.to for run in runs],
        )  # fmt: skip


def decoded_table(table: PageTable, codec: PageCodec, plane: Plane) -> PageTable:
    """A layer's plane of pages that are coded in host memory, decoded by the CPU into memory of its own: a table whose
    pages are that plane."""
    coded = codec.plane(plane.layer)
    found = gather_pages(table, start=coded.offset, nbytes=coded.nbytes)
    stride = -(-plane.nbytes // PLANE_ALIGN) * PLANE_ALIGN
    rows = torch.empty(len(table), stride, dtype=torch.uint8)
    codec.decode_planes(plane.layer, found, rows[:, : plane.nbytes])
    return PageTable(
        [rows.view(-1)],
        [(0, n * stride) for n in range(len(table))],
        page_bytes=plane.nbytes,
        page_tokens=table.page_tokens,
    )


def _runs(wanted: Sequence[Wanted]) -> list[_Run]:
    """The parts of planes in order, neighbours that can be moved together as one."""
    done: list[_Run] = []
    open_: dict[int, _Run] = {}
    for number, each in enumerate(wanted):
        for to, at in each.parts:
            run = open_.get(at)
            if (
                run is not None
                and run.first + run.count == number
                and run.to.buffer is to.buffer
                and run.to.stop == to.start
                and run.to.nbytes == run.count * to.nbytes
            ):
                run.to = Range(to.buffer, run.to.start, to.stop)
                run.count += 1
            else:
                open_[at] = run = _Run(number, 1, at, to)
                done.append(run)
    return done
