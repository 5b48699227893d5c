"""Every error and warning kvtier raises.

One base class, so that ``except KvtierError`` catches all of them. A message names the value that was
wrong, the limit it met and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KvtierError(Exception):
    """Base class of all errors raised by kvtier."""


class ConfigError(KvtierError, ValueError):
    """An option, a size or a name is not usable. Nothing was changed."""


class LayoutError(ConfigError):
    """A page layout is inconsistent, or data does not have the layout it should have."""


class TraceError(ConfigError):
    """A trace file cannot be read: names the file, the line and the reason."""


class IdentityError(KvtierError, ValueError):
    """Something a page's numbers depend on cannot be determined, or has changed under a live cache."""


class UnsupportedModelError(KvtierError, NotImplementedError):
    """The model, or the way it is called, cannot be served exactly; it is refused, not approximated."""


class TierFullError(KvtierError):
    """A tier has no room and nothing in it may be evicted.

    Attributes:
        tier: name of the tier.
        needed_bytes: bytes that were asked for.
        holders: owner -> number of pages that the owner keeps from being evicted.
    """

    def __init__(
        self, message: str, *, tier: str, needed_bytes: int, holders: dict[str, int]
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.holders = holders


class DeadlineExceededError(KvtierError, TimeoutError):
    """A wait reached its deadline. What was waited for may still complete later."""


class ClosedError(KvtierError):
    """The object was used after it was closed."""


class PageLostError(KvtierError):
    """A page that somebody held has no readable copy any more (failed copy, damaged record)."""


class DeviceOOMError(KvtierError, MemoryError):
    """The device has no room for an allocation."""


class CopyFailedError(KvtierError):
    """A copy between tiers failed; its destination holds nothing usable."""


class RaceError(KvtierError):
    """Two operations touch the same bytes with nothing that orders them (found by the emulated device)."""


class DeadlockError(KvtierError):
    """The host waits for device work that nothing will ever finish (found by the emulated device)."""


class DiskError(KvtierError, OSError):
    """The disk tier cannot be opened, read or written."""


class OffloadWarning(UserWarning):
    """Offloading will cost throughput, or does already.

    Attributes:
        record: the same for programs (see ``kvtier.announce``); empty if it was raised without.
    """

    def __init__(self, message: str, record: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.record: Mapping[str, Any] = record or {}
