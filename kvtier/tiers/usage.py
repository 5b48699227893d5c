"""When each page was last used, and how often it was read: kept in memory, stored in batches.

A page that was never used since it was stored has no entry; its place in the order is that of its
put. What was not stored yet when a process dies is forgotten, which costs a page its place in the
eviction order and nothing else.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import lmdb
import xxhash

from kvtier.tiers.record import DiskRecord

_BODY = struct.Struct("<QQQ")
_SUM_BYTES = 8
#: Bytes of a stored entry.
USE_BYTES = _BODY.size + _SUM_BYTES


class Use(NamedTuple):
    """The last use of a page.

    Attributes:
        order: grows with every use and every put of any page, over restarts.
        used_ns: when, nanoseconds since the epoch.
        hits: reads of the whole page so far.
    """

    order: int
    used_ns: int
    hits: int

    def encode(self, place: bytes) -> bytes:
        body = _BODY.pack(*self)
        return body + xxhash.xxh3_64_digest(body + place)

    @classmethod
    def decode(cls, place: bytes, raw: bytes) -> Use | None:
        """``None`` if it is not what was encoded for ``place``."""
        body = raw[: _BODY.size]
        if len(raw) != USE_BYTES or raw[_BODY.size :] != xxhash.xxh3_64_digest(body + place):
            return None
        return cls(*_BODY.unpack(body))


class UsageBook:
    """The uses of all pages. ``clock`` also numbers the puts, so uses and puts have one order."""

    def __init__(self, found: dict[bytes, Use]) -> None:
        self._uses = found
        self._dirty: set[bytes] = set()
        self._lock = threading.Lock()
        self.clock = itertools.count(1)
        self._dirty_since = 0.0

    def start_behind(self, sequence: int) -> None:
        """Number the next use or put behind all uses that were found, and behind ``sequence``."""
        last = max((use.order for use in self._uses.values()), default=0)
        self.clock = itertools.count(1 + max(last, sequence))

    def touch(self, keys: Iterable[bytes], *, hits: int) -> None:
        """The pages were used now, ``hits`` of these uses being reads."""
        now, at = time.time_ns(), time.monotonic()
        with self._lock:
            if not self._dirty:
                self._dirty_since = at
            for key in keys:
                old = self._uses.get(key)
                count = hits + (old.hits if old is not None else 0)
                self._uses[key] = Use(next(self.clock), now, count)
                self._dirty.add(key)

    def of(self, record: DiskRecord) -> Use:
        """The last use of a stored page, its put if there was none since."""
        use = self._uses.get(record.key)
        return use if use is not None else Use(record.sequence, record.created_ns, 0)

    def order(self, record: DiskRecord) -> int:
        """Sorts pages by their last use."""
        use = self._uses.get(record.key)
        return use.order if use is not None and use.order > record.sequence else record.sequence

    def forget(self, key: bytes) -> None:
        """The page is gone."""
        with self._lock:
            self._uses.pop(key, None)
            self._dirty.discard(key)

    @property
    def unsaved(self) -> int:
        """Pages whose last use is not stored yet."""
        return len(self._dirty)

    def unsaved_for(self) -> float:
        """Seconds that the oldest unsaved use has waited; 0 if there is none."""
        return time.monotonic() - self._dirty_since if self._dirty else 0.0

    def save(
        self, txn: lmdb.Transaction, db: Any, limit: int, records: Mapping[bytes, DiskRecord]
    ) -> list[tuple[bytes, Use]]:
        """Write up to ``limit`` unsaved uses; hand them to ``saved`` once the transaction holds.

        Args:
            records: what is stored; the use of anything else is forgotten.
        """
        with self._lock:
            keys = list(itertools.islice(self._dirty, limit))
            for key in keys:
                if key not in records:
                    self._uses.pop(key, None)
                    self._dirty.discard(key)
            part = [(key, self._uses[key]) for key in keys if key in records]
        for place, use in sorted((records[key].place, use) for key, use in part):
            txn.put(place, use.encode(place), db=db)
        return part

    def saved(self, part: list[tuple[bytes, Use]]) -> None:
        """These uses are stored."""
        with self._lock:
            self._dirty.difference_update(key for key, use in part if self._uses.get(key) == use)
            self._dirty_since = time.monotonic()
