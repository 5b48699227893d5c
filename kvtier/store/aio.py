"""The store from asyncio: the same calls, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from kvtier.errors import ClosedError
from kvtier.store.lease import Lease
from kvtier.store.stats import StoreStats
from kvtier.store.store import TieredStore

T = TypeVar("T")


class AsyncStore:
    """Runs a store's calls in a few threads of its own, so that the event loop never waits for the store.

    A call that is cancelled goes on until its own deadline in its thread; what it would have returned is given
    back (a lease is closed), so that nothing leaks.

    Args:
        store: the store; closed by ``close``.
        threads: calls that may run at once.
    """

    def __init__(self, store: TieredStore, *, threads: int = 4) -> None:
        self.store = store
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-aio")

    async def put(self, key: bytes, data: torch.Tensor, **options: Any) -> bool:
        """See ``TieredStore.put``."""
        return await self._run(lambda: self.store.put(key, data, **options))

    async def match(self, keys: Sequence[bytes], **options: Any) -> Lease:
        """See ``TieredStore.match``."""
        return await self._run(lambda: self.store.match(keys, **options), undo=Lease.close)

    async def read(self, lease: Lease, index: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Lease.read``."""
        return await self._run(lambda: lease.read(index, out))

    async def prefetch(self, keys: Sequence[bytes], **options: Any) -> int:
        """See ``TieredStore.prefetch``."""
        return await self._run(lambda: self.store.prefetch(keys, **options))

    async def remove(self, keys: Sequence[bytes], **options: Any) -> int:
        """See ``TieredStore.remove``."""
        return await self._run(lambda: self.store.remove(keys, **options))

    async def flush(self, timeout_s: float | None = None) -> int:
        """See ``TieredStore.flush``."""
        return await self._run(lambda: self.store.flush(timeout_s))

    async def stats(self) -> StoreStats:
        """See ``TieredStore.stats``."""
        return await self._run(self.store.stats)

    async def close(self, timeout_s: float | None = None) -> list[str]:
        """See ``TieredStore.close``."""
        if self._closed:
            return []
        self._closed = True
        try:
            return await self._run(lambda: self.store.close(timeout_s))
        finally:
            self._pool.shutdown(wait=False)

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        try:
            future = self._pool.submit(call)
        except RuntimeError:
            raise ClosedError("the store is closed; open a new one") from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(
                    lambda f: undo(f.result()) if not f.cancelled() and not f.exception() else None
                )
            raise
