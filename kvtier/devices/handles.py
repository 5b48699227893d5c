"""Buffers, streams and events of the emulated device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtier.devices.base import Buffer, Event, MemoryKind, Stream
from kvtier.devices.clock import Point, Queue
from kvtier.devices.faults import Damage
from kvtier.devices.races import AccessLog, Clock
from kvtier.errors import RaceError

if TYPE_CHECKING:
    from kvtier.devices.emulated import EmulatedDevice

#: Contents of memory that holds nothing: NaN as float16, bfloat16 and float8_e4m3fn.
POISON = 0xFF
#: Memory begins at a multiple of this, as that of a driver does; direct I/O wants it.
_ALIGN = 4096


class EmulatedBuffer(Buffer):
    """Memory of an emulated device or its host.

    ``label`` names it in messages. ``array`` is the memory as numpy sees it, None if the buffer
    holds no bytes; ``raw`` is then a tensor on torch's meta device.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        nbytes: int,
        kind: MemoryKind,
        label: str,
        payload: bool = True,
    ) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.label = label
        self.device = device
        self.log = AccessLog(nbytes, label)
        self.damage = Damage()
        self.dead = ""
        self.array: np.ndarray | None = None
        self._memory: torch.Tensor | None
        if payload:
            whole = torch.full((nbytes + _ALIGN,), POISON, dtype=torch.uint8)
            self._memory = whole.narrow(0, -whole.data_ptr() % _ALIGN, nbytes)
            self.array = self._memory.numpy()
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def raw(self) -> torch.Tensor:
        """See ``Buffer.raw``. Raises RaceError after the buffer was freed."""
        memory = self._memory
        if memory is None:
            raise RaceError(f"{self.label} is used after it was freed ({self.dead})")
        return memory

    def poison(self, start: int, stop: int) -> None:
        """The bytes hold nothing from now on."""
        if self.array is not None:
            self.array[start:stop] = POISON

    def drop(self, why: str) -> None:
        """Let go of the memory. Views that somebody kept turn into poison."""
        self.poison(0, self.nbytes)
        self.array = self._memory = None
        self.dead = why


class EmulatedEvent(Event):
    """See ``Event``. ``time_s`` is the virtual time at which the point was reached, NaN before."""

    def __init__(self, stream: EmulatedStream) -> None:
        self._device = stream.device
        self.clock: tuple[int, ...] = tuple(stream.clock)
        self.errors: list[Exception] = []
        self.point = Point(partial(self._reached, stream))

    @property
    def device(self) -> EmulatedDevice:
        return self._device

    @property
    def time_s(self) -> float:
        return self.point.at_s

    def _reached(self, stream: EmulatedStream) -> None:
        self.errors, stream.errors = stream.errors, []

    def done(self) -> bool:
        return self._device._query(self)

    def synchronize(self, timeout_s: float) -> None:
        self._device._await(self, timeout_s)


class EmulatedStream(Stream):
    """See ``Stream``. Made by ``EmulatedDevice.stream``."""

    def __init__(self, device: EmulatedDevice, name: str, index: int, clock: Clock) -> None:
        self.device = device
        self.name = name
        self.index = index
        self.clock = clock
        self.queue = Queue(name)
        self.errors: list[Exception] = []

    def record(self) -> EmulatedEvent:
        return self.device._record(self)

    def wait(self, event: Event) -> None:
        self.device._hold(self, event)

    def synchronize(self, timeout_s: float) -> None:
        self.record().synchronize(timeout_s)
