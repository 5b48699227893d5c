"""The memory of an emulated device and its host: a hard limit, pinning, and who owns which buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.announce import announce
from kvtier.devices.base import Buffer, MemoryKind
from kvtier.devices.cards import LinkModel
from kvtier.devices.faults import Faults
from kvtier.devices.handles import EmulatedBuffer
from kvtier.errors import ConfigError, DeviceOOMError, RaceError
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.devices.emulated import EmulatedDevice


class Heap:
    """Buffers of one device. The caller holds the device's lock.

    Args:
        device: whose memory it is.
        capacity: limit of VRAM in bytes.
        link, scale: for the warning about memory that cannot be pinned; at full size.
        pin: False emulates a host where nothing can be pinned.
        payload: whether buffers hold bytes; without, they only count.
        faults: allocations that fail, pinning that is refused.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        *,
        capacity: int,
        link: LinkModel,
        scale: float,
        pin: bool,
        payload: bool,
        faults: Faults,
    ) -> None:
        self.capacity = capacity
        self.used = self.host = self.peak = 0
        self._device = device
        self._link = link
        self._scale = scale
        self._pin = pin
        self._payload = payload
        self._faults = faults
        self._buffers: set[EmulatedBuffer] = set()
        self._pinned = self._made = 0
        self._warned = False

    def vram(self, nbytes: int, *, payload: bool = True) -> EmulatedBuffer:
        """VRAM. Raises DeviceOOMError past the limit."""
        _positive(nbytes)
        free = self.capacity - self.used
        injected = self._faults.on_alloc()
        if nbytes > free or injected:
            raise DeviceOOMError(
                f"{self._device.name} cannot give {format_size(nbytes)}: {format_size(free)} of "
                f"{format_size(self.capacity)} are free{' (injected fault)' * injected}; "
                "lower the VRAM budget of the cache, or free buffers first"
            )
        buffer = self._make(nbytes, "vram", payload)
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return buffer

    def on_host(self, nbytes: int, *, payload: bool = True) -> EmulatedBuffer:
        """Host memory, pinned where that is allowed."""
        _positive(nbytes)
        pinned = self._pin and self._faults.may_pin(self._pinned + nbytes)
        if not pinned:
            self._warn_pageable(nbytes)
        buffer = self._make(nbytes, "pinned" if pinned else "pageable", payload)
        self.host += nbytes
        self._pinned += nbytes if pinned else 0
        return buffer

    def mine(self, buffer: Buffer) -> EmulatedBuffer:
        """The buffer, if it is one of this device and was not freed."""
        if not isinstance(buffer, EmulatedBuffer) or buffer.device is not self._device:
            raise ConfigError(f"{buffer!r} is not a buffer of this {self._device.name}")
        if buffer.dead:
            raise RaceError(f"{buffer.label} is used after it was freed ({buffer.dead})")
        return buffer

    def free(self, buffer: EmulatedBuffer, why: str) -> None:
        buffer.drop(why)
        self._buffers.remove(buffer)
        if buffer.kind == "vram":
            self.used -= buffer.nbytes
        else:
            self.host -= buffer.nbytes
            self._pinned -= buffer.nbytes if buffer.kind == "pinned" else 0

    def close(self) -> None:
        for buffer in list(self._buffers):
            self.free(buffer, "its device was closed")

    def _make(self, nbytes: int, kind: MemoryKind, payload: bool) -> EmulatedBuffer:
        self._made += 1
        label = f"{kind} buffer {self._made} ({format_size(nbytes)})"
        buffer = EmulatedBuffer(self._device, nbytes, kind, label, payload and self._payload)
        self._buffers.add(buffer)
        return buffer

    def _warn_pageable(self, nbytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        nbytes = round(nbytes / self._scale)
        pinned = self._link.rate("h2d", nbytes)
        pageable = self._link.rate("h2d", nbytes, pinned=False)
        announce(
            f"{self._device.name}: {format_size(nbytes)} of host memory could not be pinned; "
            f"copies run at about {pageable / 1e9:.1f} GB/s instead of {pinned / 1e9:.1f} "
            f"({pinned / pageable:.1f} times slower) and block the caller; make the host tier "
            "smaller, or raise the limit on locked memory",
            stacklevel=4,
        )


def _positive(nbytes: int) -> None:
    if nbytes < 1:
        raise ConfigError(f"an allocation of {nbytes} bytes; give at least 1")
