"""Memory through which planes of cold pages reach VRAM while a step runs: two halves, layers take turns.

As with ``Staging``: the copy stream waits for all compute work that was submitted before it fills a half, the compute
stream waits for the copies before it reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvtier.attention.coded import CodedPlanes, Wanted
from kvtier.attention.tables import LeasedPages
from kvtier.devices.base import Buffer, Event, Range, Stream
from kvtier.errors import CopyFailedError
from kvtier.layout import PLANE_ALIGN, Plane
from kvtier.store.store import TieredStore

#: Planes that a half has room for at first.
MIN_PLANES = 16


@dataclass(slots=True, eq=False)
class PlaneHalf:
    """One layer's planes on their way or there.

    Attributes:
        buffer: VRAM for ``room`` planes, one every ``stride`` bytes.
        layer: which layer's; ``None`` if nothing is in it.
        slots: (row, place in its sequence) -> number of the plane.
        ready: reached once all of them are there.
        cold: where those are that came by copy.
        bounce, bounced: host memory for planes from disk, and the copies out of it.
    """

    buffer: Buffer | None = None
    room: int = 0
    layer: int | None = None
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    ready: Event | None = None
    cold: list[Range] = field(default_factory=list)
    bounce: Buffer | None = None
    bounced: Event | None = None


class PlaneStage:
    """Both halves.

    Args:
        store: where the pages are.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.device = store.device
        self.stride = max(
            -(-plane.nbytes // PLANE_ALIGN) * PLANE_ALIGN
            for plane in store.layout.planes
            if plane is not None
        )
        self.halves = (PlaneHalf(), PlaneHalf())
        self._coded = CodedPlanes(store)
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """VRAM in use."""
        halves = sum(half.buffer.nbytes for half in self.halves if half.buffer is not None)
        return halves + self._coded.nbytes

    def begin(self) -> None:
        """A new step: nothing that a half holds is of use any more."""
        for half in self.halves:
            self._empty(half)

    def half(self, layer: int) -> PlaneHalf:
        """The half of a layer: where its planes were sent ahead, or else the one that is not the last layer's."""
        for half in self.halves:
            if half.layer == layer:
                return half
        self._turn ^= 1
        half = self.halves[self._turn]
        self._empty(half)
        half.layer = layer
        return half

    def held(self, plane: Plane, row: int, place: int) -> torch.Tensor | None:
        """uint8, the bytes of a layer's plane of a page if they are here now."""
        for half in self.halves:
            if half.layer == plane.layer and (row, place) in half.slots:
                assert half.buffer is not None
                at = half.slots[row, place] * self.stride
                return half.buffer.raw()[at : at + plane.nbytes]
        return None

    def place(self, half: PlaneHalf, number: int, nbytes: int) -> Range:
        assert half.buffer is not None
        return Range(half.buffer, number * self.stride, number * self.stride + nbytes)

    def fetch(
        self, half: PlaneHalf, plane: Plane, row: int, pages: LeasedPages, places: Sequence[int]
    ) -> int:
        """Start the copies of a layer's planes of pages that are not in VRAM; those on their way already are left
        out. The number of copies started.

        Raises:
            DeviceOOMError: no VRAM for them.
            PageLostError: a page on disk turned out to be damaged.
        """
        missing = [p for p in places if (row, p) not in half.slots and p not in pages.hot_row]
        if not missing:
            return 0
        first = len(half.slots)
        self._fit(half, first + len(missing))
        stream = self.device.stream("h2d")
        stream.wait(self.device.compute_stream().record())
        numbers = {p: first + n for n, p in enumerate(missing)}
        parts: list[tuple[Range, Range]] = []
        disk = [p for p in missing if p in pages.disk_page]
        if disk:
            bounce = self._bounce(half, len(disk))
            at = [
                Range(bounce, n * self.stride, n * self.stride + plane.nbytes)
                for n in range(len(disk))
            ]
            outs = [self.device.host(place, write=True).numpy() for place in at]
            self.store.read_disk_planes([pages.disk_page[p] for p in disk], plane.layer, outs)
            parts += [
                (self.place(half, numbers[p], plane.nbytes), source)
                for p, source in zip(disk, at, strict=True)
            ]
        coded: list[Wanted] = []
        for p in missing:
            if p in pages.host_row:
                slot = pages.host_slots[pages.host_row[p]]
                to = self.place(half, numbers[p], plane.nbytes)
                if slot.codec is None:
                    parts.append((to, slot.range(plane.offset, plane.nbytes)))
                else:
                    coded.append(Wanted(slot, [(to, 0)]))
        try:
            if parts:
                self.device.copy(stream, parts)
            self._coded.bring(stream, plane, coded)
        finally:
            half.ready = stream.record()
        self.store.count_streamed(sum(source.nbytes for _, source in parts), len(parts))
        if disk:
            half.bounced = half.ready
        half.slots.update({(row, p): n for p, n in numbers.items()})
        half.cold += [self.place(half, n, plane.nbytes) for n in numbers.values()]
        return len(missing)

    def extend(self, half: PlaneHalf, row: int, places: Sequence[int]) -> list[int]:
        """Numbers of fresh planes in a half for pages that the caller copies there itself."""
        first = len(half.slots)
        self._fit(half, first + len(places))
        numbers = list(range(first, first + len(places)))
        half.slots.update({(row, p): n for p, n in zip(places, numbers, strict=True)})
        return numbers

    def wait(self, half: PlaneHalf, compute: Stream) -> None:
        """Order compute work behind all copies into a half."""
        if half.ready is not None:
            compute.wait(half.ready)
            half.ready = None

    def end(self, compute: Stream) -> None:
        """The step is over: its last event on ``compute`` is to stand for all copies too."""
        for half in self.halves:
            self.wait(half, compute)

    def close(self) -> None:
        """Free everything, once the work on it is done."""
        with contextlib.suppress(CopyFailedError):
            self.device.synchronize(self.store.timeout_s)
        self._coded.close()
        for half in self.halves:
            for buffer in (half.buffer, half.bounce):
                if buffer is not None:
                    self.device.free(buffer)
            half.buffer = half.bounce = None
            half.room, half.ready = 0, None
            self._empty(half)

    # ------------------------------------------------------------------ inside

    @staticmethod
    def _empty(half: PlaneHalf) -> None:
        # ``ready`` stays: copies that nobody waited for may still be writing.
        half.layer = None
        half.slots, half.cold = {}, []

    def _fit(self, half: PlaneHalf, planes: int) -> None:
        """Room for ``planes``; what is in the half already moves along."""
        if planes <= half.room:
            return
        room = max(MIN_PLANES, planes + planes // 2)
        fresh = self.device.alloc(room * self.stride)
        old, used = half.buffer, len(half.slots) * self.stride
        if old is not None:
            # What is on its way to the old memory has to arrive first.
            self.device.synchronize(self.store.timeout_s)
            if used:
                compute = self.device.compute_stream()
                self.device.copy(compute, [(fresh.range(0, used), old.range(0, used))])
                compute.record().synchronize(self.store.timeout_s)
                half.cold = [Range(fresh, at.start, at.stop) for at in half.cold]
            self.device.free(old)
        half.buffer, half.room = fresh, room

    def _bounce(self, half: PlaneHalf, planes: int) -> Buffer:
        if half.bounced is not None:
            with contextlib.suppress(CopyFailedError):
                half.bounced.synchronize(self.store.timeout_s)
            half.bounced = None
        if half.bounce is None or half.bounce.nbytes < planes * self.stride:
            if half.bounce is not None:
                self.device.free(half.bounce)
            with torch.inference_mode(False):
                half.bounce = self.device.alloc_host(planes * self.stride * 2)
        return half.bounce
