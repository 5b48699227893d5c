"""Who holds pages of a store: its leases, and the lock under which everything happens."""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from kvtier.errors import ClosedError, ConfigError, DeadlineExceededError, PageLostError
from kvtier.layout import PageLayout
from kvtier.mover import deadline_after
from kvtier.store.directory import Directory
from kvtier.store.lease import Lease
from kvtier.store.page import Copy, Page
from kvtier.store.placement import Placement


class LeasedPages(ABC):
    """The part of a store that pins pages.

    Args:
        timeout_s: deadline of calls that are given none, > 0 seconds.
        check: recount every book after each call.
    """

    layout: PageLayout
    _directory: Directory
    _placement: Placement
    #: layer -> number of its plane, in page order.
    plane_numbers: dict[int, int]

    def __init__(self, timeout_s: float, check: bool) -> None:
        self.timeout_s = timeout_s
        self._check = check
        self._lock = threading.RLock()
        self._depth = 0
        self._closed = False
        #: Leases that sessions keep between steps; held here, so that one whose session was
        #: forgotten can still be closed when room is needed.
        self._idle: set[Lease] = set()
        self._open_leases = 0

    @property
    def closed(self) -> bool:
        return self._closed

    @abstractmethod
    def _recount(self) -> None:
        """Recount every book; AssertionError if one is wrong."""

    @contextlib.contextmanager
    def _locked(self, timeout_s: float | None, *, even_closed: bool = False) -> Iterator[float]:
        timeout = self.timeout_s if timeout_s is None else timeout_s
        if not 0 <= timeout < math.inf:
            raise ConfigError(f"timeout_s is {timeout!r}; it must be >= 0 seconds and finite")
        deadline = deadline_after(timeout)
        if not self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise DeadlineExceededError(f"the store was busy for {timeout} s")
        try:
            self._depth += 1
            if self._closed and not even_closed:
                raise ClosedError("the store is closed; open a new one")
            if self._depth == 1 and not even_closed:
                self._placement.speak()
            yield deadline
            if self._check and self._depth == 1 and not self._closed:
                self._recount()
        finally:
            self._depth -= 1
            self._lock.release()

    def lease(self, pages: Sequence[Page], *, timeout_s: float | None = None) -> Lease:
        """Pin pages that the caller owns, each in its fastest tier.

        Raises:
            PageLostError: one of them has no readable copy any more.
        """
        with self._locked(timeout_s):
            for index, page in enumerate(pages):
                if page.readable() is None:
                    raise PageLostError(
                        f"page {index} of the sequence was lost (failed copy or damaged record); compute it again"
                    )
            return self._hold(pages)

    def read_leased(
        self, lease: Lease, index: int, out: np.ndarray, *, timeout_s: float | None = None
    ) -> bool:
        """The bytes of a leased page into ``out``; see ``Lease.read``."""
        with self._locked(timeout_s) as deadline:
            if lease.closed:
                raise ClosedError("the lease is closed; take a new one with store.match")
            return self._placement.read(lease.pages[index], lease.copies[index], out, deadline)

    def read_disk_planes(self, pages: list[Page], layer: int, outs: list[np.ndarray]) -> None:
        """One layer's plane of leased pages on disk, checked, into ``outs`` (uint8 ``[plane bytes]`` each).

        Raises:
            PageLostError: a record turned out to be damaged.
        """
        self._read_disk_part(pages, self.plane_numbers[layer], outs, layer)

    def read_disk_summaries(self, pages: list[Page], outs: list[np.ndarray]) -> None:
        """The summaries of leased pages on disk, checked, into ``outs`` (uint8, ``layout.summary_range`` bytes each).

        Raises:
            PageLostError: a record turned out to be damaged.
        """
        self._read_disk_part(pages, len(self.plane_numbers), outs)

    def _read_disk_part(
        self, pages: list[Page], number: int, outs: list[np.ndarray], layer: int | None = None
    ) -> None:
        with self._locked(None):
            good = self._placement.read_planes(pages, number, outs, layer)
            if not all(good):
                raise PageLostError(
                    f"{good.count(False)} page(s) on disk are damaged and were removed; compute the sequence again"
                )

    def count_streamed(self, nbytes: int, copies: int) -> None:
        """Account planes that an attention step has gathered from host memory over the link."""
        self._placement.mover.links["host->vram"].add(nbytes, copies)

    def keep_idle(self, lease: Lease) -> None:
        """The lease is kept between steps: the store may close it when it needs the room."""
        with self._locked(None):
            lease.idle = True
            self._idle.add(lease)

    def use_again(self, lease: Lease) -> bool:
        """Take an idle lease back into use; False if the store has closed it."""
        with self._locked(None):
            if lease.closed:
                return False
            lease.idle = False
            self._idle.discard(lease)
            return True

    def end_lease(self, lease: Lease) -> None:
        """See ``Lease.close``."""
        with self._locked(None, even_closed=True):
            if lease.closed:
                return
            lease.closed = True
            self._idle.discard(lease)
            self._open_leases -= 1
            if not self._closed:
                for page, copy in zip(reversed(lease.pages), reversed(lease.copies), strict=True):
                    if lease.last_read is not None and copy.slot is not None:
                        copy.was_read(lease.last_read[1])
                    self._placement.unhold(page, copy, used=True)

    # ------------------------------------------------------------------ inside

    def _hold(self, pages: Sequence[Page]) -> Lease:
        lease = Lease(self, pages)
        for page in pages:
            copy = cast(Copy, page.readable())
            self._directory.hold(page, copy)
            lease.copies.append(copy)
        self._open_leases += 1
        return lease

    def _park(self) -> bool:
        """Close the leases that idle sessions keep between steps; whether there were any."""
        idle = list(self._idle)
        for lease in idle:
            self.end_lease(lease)
        return bool(idle)
