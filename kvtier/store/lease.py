"""A lease: the promise that the bytes of some pages stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtier.devices.base import Event
from kvtier.errors import ClosedError, LayoutError, PageLostError
from kvtier.store.page import Copy, Page

if TYPE_CHECKING:
    from kvtier.store.leases import LeasedPages


class Lease:
    """Pages from the root of a sequence on, each pinned in the fastest tier that has it.

    A context manager. Until ``close`` no copy of the lease moves or is overwritten. A lease that is ``idle``
    (kept by a session between two steps) may be closed by the store when somebody else needs the room.

    Attributes:
        pages: the pages, root first.
        copies: the pinned copy of each page.
    """

    def __init__(self, store: LeasedPages, pages: Sequence[Page], *, idle: bool = False) -> None:
        self._store = store
        self.pages = list(pages)
        self.copies: list[Copy] = []
        self.idle = idle
        self.closed = False
        #: Newest read of the pages on a stream, as (stream name, event); whoever reuses their room waits for it.
        self.last_read: tuple[str, Event] | None = None

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def keys(self) -> list[bytes]:
        return [page.key for page in self.pages]

    def tiers(self) -> list[str]:
        """The tier that each page is pinned in."""
        return [copy.tier for copy in self.copies]

    def read(self, index: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of page ``index``, checked: uint8 ``[page_bytes]`` on the CPU, written to ``out`` if given.

        Raises:
            PageLostError: the record on disk turned out to be damaged, or the copy out of VRAM failed.
            LayoutError: ``out`` has another size or type.
            ClosedError: the lease is closed.
        """
        if self.closed:
            raise ClosedError("the lease is closed; take a new one with store.match")
        size = self._store.layout.page_bytes
        if out is None:
            out = torch.empty(size, dtype=torch.uint8)
        if (
            out.dtype != torch.uint8
            or out.shape != (size,)
            or not out.is_contiguous()
            or out.device.type != "cpu"
        ):
            raise LayoutError(
                f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be contiguous uint8 [{size}] on the CPU"
            )
        array: np.ndarray = out.numpy()
        if not self._store.read_leased(self, index, array):
            raise PageLostError(
                f"page {index} ({self.pages[index].key.hex()[:16]}) cannot be read (its record on disk is damaged "
                "and was removed, or the copy out of VRAM failed); compute it again"
            )
        return out

    def close(self) -> None:
        """End the lease. Idempotent."""
        if not self.closed:
            self._store.end_lease(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
