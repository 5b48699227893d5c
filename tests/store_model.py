"""What the tests of the store and of sessions share: a small layout, every combination of tiers,
pages whose content follows from their key, and faults on demand."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.faults import Faults
from kvtier.errors import OffloadWarning
from kvtier.identity import ModelIdentity
from kvtier.layout import CodecName, LayerLayout, PageLayout
from kvtier.store.store import TieredStore
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.payload import Payload
from kvtier.tiers.record import piece_place
from kvtier.tiers.slab_room import plan_slab

LAYOUT = PageLayout([LayerLayout.attention(1, 4, "float32")] * 2, page_tokens=4)
PAGE = LAYOUT.page_bytes
IDENTITY = ModelIdentity(
    model="toy",
    revision="",
    weights_digest=b"w" * 16,
    weights_quantisation="",
    kv_dtype="float32",
    kv_quantisation="",
    rope="",
    attention="full",
    layout_digest=LAYOUT.digest,
    page_tokens=LAYOUT.page_tokens,
)


def disk_bytes_for(pages: int, payload: Payload = "inline") -> int:
    """The smallest capacity of a disk tier that holds ``pages`` pages of LAYOUT."""
    plan = plan_slab if payload == "slab" else Room.plan
    shape = PageShape(PAGE, [(p.offset, p.nbytes) for p in LAYOUT.planes if p is not None])

    def held(capacity: int) -> int:
        try:
            room = plan(
                capacity_bytes=capacity, batch_bytes=16 << 20, psize=mmap.PAGESIZE, shape=shape
            )
        except ValueError:
            return 0
        return room.live_capacity_bytes // room.page_stored_bytes

    low, high = 0, 64 << 20
    while high - low > 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) >= pages else (middle, high)
    return high


@dataclass(frozen=True)
class Config:
    """A store to test: pages a tier, and how it writes."""

    vram: int
    host: int = 0
    disk: int = 0
    host_write: Literal["write_back", "write_through"] = "write_back"
    disk_write: Literal["write_back", "write_through"] = "write_through"
    policy: str = "kvtier.policies.lru:LRU"
    payload: Payload = "inline"
    host_codec: CodecName = "none"
    disk_codec: CodecName = "none"

    @property
    def pages(self) -> dict[str, int]:
        return {"vram": self.vram, "host": self.host, "disk": self.disk}


PLACEMENTS: tuple[Payload, ...] = ("inline", "slab")
WRITES: Any = st.sampled_from(["write_back", "write_through"])
# By class: looking names up among the installed packages takes longer than most tests.
POLICIES = st.sampled_from(["kvtier.policies.lru:LRU", "kvtier.policies.mass:Mass:half_life=4"])


def configs(*, vram: int = 2, disks: Sequence[int] = (0, 3, 60)) -> st.SearchStrategy[Config]:
    """All combinations of tiers, small enough to be full most of the time."""
    return st.builds(
        Config,
        vram=st.integers(vram, vram + 3),
        host=st.sampled_from([0, 0, 2, 3, 5]),
        disk=st.sampled_from(list(disks)),
        host_write=WRITES,
        disk_write=WRITES,
        policy=POLICIES,
        payload=st.sampled_from(PLACEMENTS),
    )


_DISK_BYTES = {
    (pages, payload): disk_bytes_for(pages, payload)
    for pages in (1, 2, 3, 4, 8, 60)
    for payload in PLACEMENTS
}


def device(faults: Faults | None = None, **options: Any) -> EmulatedDevice:
    return EmulatedDevice(vram_bytes=64 * PAGE, faults=faults, **options)


def open_store(
    config: Config, on: EmulatedDevice, folder: Path | str | None = None, **options: Any
) -> TieredStore:
    disk = _DISK_BYTES[config.disk, config.payload] if config.disk else 0
    options.setdefault("durability", "relaxed")
    options.setdefault("check", True)
    return TieredStore(
        LAYOUT,
        device=on,
        vram=config.vram * PAGE,
        host=config.host * PAGE,
        disk=disk,
        path=folder if disk else None,
        policy=config.policy,
        disk_payload=config.payload,
        host_codec=config.host_codec,
        disk_codec=config.disk_codec,
        host_write=config.host_write,
        disk_write=config.disk_write,
        **options,
    )


def noise(*seed: object) -> bytes:
    """PAGE bytes that follow from ``seed``."""
    return hashlib.shake_128(repr(seed).encode()).digest(PAGE)


def as_page(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def child(parent: bytes | None, number: int) -> bytes:
    """A key below ``parent``."""
    return hashlib.blake2b((parent or b"") + bytes([number]), digest_size=32).digest()


def chain(length: int, number: int = 0, start: bytes | None = None) -> list[bytes]:
    """Keys of a sequence of pages."""
    keys: list[bytes] = []
    for _ in range(length):
        keys.append(child(keys[-1] if keys else start, number))
    return keys


def put_chain(store: TieredStore, keys: Sequence[bytes]) -> None:
    for parent, key in zip([None, *keys], keys, strict=False):
        store.put(key, as_page(noise(key)), parent=parent, identity=IDENTITY.digest)


def read_all(store: TieredStore, keys: Sequence[bytes]) -> int:
    """Match, read and compare; the number of pages found."""
    with store.match(keys) as lease:
        for index, key in enumerate(lease.keys):
            assert key == keys[index]
            assert lease.read(index).numpy().tobytes() == noise(key), "wrong bytes"
        return len(lease)


def assert_empty(store: TieredStore) -> None:
    """Nothing is held, and the tiers are within their limits."""
    stats = store.stats()
    assert (stats.leases, stats.owners) == (0, 0)
    for tier, base in stats.tiers.items():
        assert base.peak_bytes <= base.capacity_bytes, tier
    placement = store._placement
    placement.drain(placement_deadline(store))
    assert not placement.tails
    for page in store._directory.pages.values():
        assert not page.owners
        assert not page.ephemeral, "a private page outlived its session"
        for copy in page.copies.values():
            assert (copy.holds, copy.leaving, copy.arriving) == (0, False, False)


def placement_deadline(store: TieredStore) -> float:
    with store._locked(10.0) as deadline:
        return deadline


def close_clean(store: TieredStore, *, kept_bytes: int = 0) -> None:
    """Close; everything must be saved, and all memory given back but ``kept_bytes`` of VRAM."""
    assert_empty(store)
    store.check()
    on = store.device
    dropped = store.close()
    assert all("written to disk" in text for text in dropped), dropped
    assert (on.used_bytes, on.host_bytes) == (kept_bytes, 0)


def damage(store: TieredStore, key: bytes) -> bool:
    """Flip one byte of a stored page behind the store's back; False if it is not on disk."""
    disk = store._placement.disk
    if disk is None or key not in disk:
        return False
    entry = next((entry for entry in disk.entries() if entry.key == key), None)
    if entry is None:
        return False
    if entry.payload == "slab":
        with open(disk.path / f"pages-{entry.segment:05d}.slab", "r+b") as file:
            at = entry.slot * disk.info.slot_bytes + entry.nbytes // 2
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        return True
    with disk._commits.lock, disk._file.writing() as txn:
        at_piece = piece_place(disk._commits.records[key].sequence, 0)
        value = txn.get(at_piece, db=disk._file.pages)
        if value is None:
            return False
        raw = bytearray(value)
        raw[len(raw) // 2] ^= 1
        txn.put(at_piece, bytes(raw), db=disk._file.pages)
    return True


class FailingDisk:
    """Makes the next writes to a store's disk fail, at the call or later in the future."""

    def __init__(self, store: TieredStore) -> None:
        disk = store._placement.disk
        assert disk is not None
        self._put = disk.put
        self.at_call: list[BaseException] = []
        self.later: list[BaseException] = []
        disk.put = self.put  # type: ignore[method-assign]

    def put(self, key: bytes, **options: Any) -> Future[None]:
        if self.at_call:
            raise self.at_call.pop()
        if self.later:
            future: Future[None] = Future()
            future.set_exception(self.later.pop())
            return future
        return self._put(key, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """OffloadWarnings are what a test is about to provoke."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        yield


def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        prefix="kvtier-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )
