"""The store from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from store_model import IDENTITY, Config, as_page, assert_empty, chain, device, noise, open_store

from kvtier.errors import ClosedError
from kvtier.store.aio import AsyncStore
from kvtier.store.store import TieredStore


@pytest.fixture
def store(tmp_path: Path) -> TieredStore:
    return open_store(Config(vram=3, host=20, disk=60), device(), tmp_path)


async def put(store: AsyncStore, keys: list[bytes]) -> None:
    for parent, key in zip([None, *keys], keys, strict=False):
        await store.put(key, as_page(noise(key)), parent=parent, identity=IDENTITY.digest)


async def test_many_requests_at_once(store: TieredStore) -> None:
    async with AsyncStore(store) as many:

        async def request(number: int) -> int:
            keys = chain(2, number)
            await put(many, keys)
            with await many.match(keys) as lease:
                for index, key in enumerate(lease.keys):
                    assert (await many.read(lease, index)).numpy().tobytes() == noise(key)
                return len(lease)

        assert await asyncio.gather(*(request(number) for number in range(8))) == [2] * 8
        assert await many.flush() == 0
        assert (await many.stats()).leases == 0
        assert await many.prefetch(chain(2, 3)) == 2
        assert await many.remove(chain(1, 3)) == 1
    assert store.closed


async def test_a_cancelled_lookup_leaves_no_lease(store: TieredStore) -> None:
    many = AsyncStore(store)
    await put(many, chain(2))
    entered, leave = threading.Event(), threading.Event()

    def hog() -> None:
        with store._locked(10.0):
            entered.set()
            leave.wait(10.0)

    thread = threading.Thread(target=hog)
    thread.start()
    assert await asyncio.to_thread(entered.wait, 10.0)
    waiting = [asyncio.create_task(many.match(chain(2))) for _ in range(9)]
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    leave.set()
    thread.join(10.0)
    # The calls that were running when they were cancelled end in their threads.
    end = time.monotonic() + 10.0
    while (await many.stats()).leases and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert_empty(store)
    await many.close()


async def test_a_lookup_cancelled_as_it_ends_leaves_no_lease(store: TieredStore) -> None:
    many = AsyncStore(store)
    await put(many, chain(2))
    for turns in range(12):
        task = asyncio.create_task(many.match(chain(2)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(result, BaseException):
            result.close()
    await many.close()


async def test_errors_arrive_and_closing_is_final(store: TieredStore) -> None:
    many = AsyncStore(store)
    with pytest.raises(ValueError, match="key is"):
        await many.put(b"", as_page(noise(1)))
    assert await many.close() == []
    assert await many.close() == []
    with pytest.raises(ClosedError):
        await many.match(chain(1))
