"""A disk tier against a dict: put, get, delete, restarts with other limits, and a disk that fails at
any call. After every step the books equal the folder."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import lmdb
import numpy as np
from disk_child import PAGE_BYTES, PLANES, key_of, open_tier, page_of
from disk_faults import DiskFaults, lmdb_error
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import DiskError, TierFullError
from kvtier.tiers.payload import Payload

DEADLINE_S = 20
SIZES = (768 << 10, 1 << 20, 2 << 20)
ERRORS = (
    lmdb_error(lmdb.Error, "mdb_txn_commit: Input/output error", errno.EIO),
    lmdb_error(lmdb.MapFullError, "mdb_put: MDB_MAP_FULL", 0),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOSPC, "No space left on device"),
)


def folder_bytes(folder: Path) -> int:
    """What ``du`` counts, folder included."""
    return 512 * sum(os.lstat(path).st_blocks for path in [folder, *folder.rglob("*")])


class InlineMachine(RuleBasedStateMachine):
    """The model maps a key to its parent, depth and content, and to its last use."""

    placement: Payload = "inline"

    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None))
        self.model: dict[bytes, tuple[bytes | None, int, int]] = {}
        self.age: dict[bytes, int] = {}
        self.clock = 0
        self.serial = 0
        self.faults = DiskFaults()
        self.patches = ExitStack()
        self.patches.enter_context(self.faults.system_calls())

    def _open(self, size: int, durability: str) -> None:
        self.tier = open_tier(
            self.folder, capacity_bytes=size, payload=self.placement, durability=durability
        )
        self.faults.watch(self.tier)

    @initialize(size=st.sampled_from(SIZES), durability=st.sampled_from(["durable", "relaxed"]))
    def start(self, size: int, durability: str) -> None:
        self._open(size, durability)

    def teardown(self) -> None:
        self.faults.disarm()
        if hasattr(self, "tier"):
            self.tier.close()
        self.patches.close()
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------------ steps

    def _used(self, key: bytes) -> None:
        self.clock += 1
        self.age[key] = self.clock

    def _settle(self, future: Future[None], full: bool) -> bool:
        """Whether a change took effect. It fails only for a reason."""
        error = future.exception(DEADLINE_S)
        if error is None:
            assert not full
            return True
        assert full or self.faults.struck, error
        assert isinstance(error, DiskError | TierFullError), error
        return False

    def _put(self, key: bytes, parent: bytes | None, depth: int) -> None:
        self.serial += 1
        content = self.serial
        future = self.tier.put(
            key, parent=parent, depth=depth, identity=b"i", data=page_of(content)
        )
        stored = self.tier.stored_bytes_of(PAGE_BYTES)
        full = key not in self.model and (
            (len(self.model) + 1) * stored > self.tier.live_capacity_bytes
        )
        if self._settle(future, full):
            self.model[key] = (parent, depth, content)
            self._used(key)

    @rule(data=st.data(), count=st.sampled_from([1, 1, 20, 60]))
    def put_new(self, data: st.DataObject, count: int) -> None:
        parent = data.draw(st.none() | st.sampled_from(sorted(self.model) or [None]))
        depth = 0 if parent is None else self.model[parent][1] + 1
        for _ in range(count):
            self._put(key_of(self.serial + 1), parent, depth)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        parent, depth, _ = self.model[key]
        self._put(key, parent, depth)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=8))
        if self._settle(self.tier.delete(keys), full=False):
            for key in keys:
                self.model.pop(key, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), plane=st.sampled_from([None, 0, 1, 2]), many=st.booleans())
    def get(self, data: st.DataObject, plane: int | None, many: bool) -> None:
        keys = data.draw(
            st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=12 if many else 1)
        )
        at, size = (0, PAGE_BYTES) if plane is None else PLANES[plane]
        outs = [np.zeros(size, np.uint8) for _ in keys]
        try:
            hits = (
                self.tier.read_pages(keys, outs)
                if plane is None
                else self.tier.read_planes(keys, plane, outs)
            )
        except DiskError:
            assert self.faults.struck
            return
        assert all(hits)
        for key, out in zip(keys, outs, strict=True):
            assert np.array_equal(out, page_of(self.model[key][2])[at : at + size])
            self._used(key)

    @rule(error=st.sampled_from(ERRORS), after=st.integers(0, 30))
    def fail_soon(self, error: Exception, after: int) -> None:
        self.faults.arm(error, after)

    @rule(size=st.sampled_from(SIZES), durability=st.sampled_from(["durable", "relaxed"]))
    def reopen(self, size: int, durability: str) -> None:
        self.faults.disarm()
        assert self.tier.close().clean
        self._open(size, durability)
        stored = self.tier.stored_bytes_of(PAGE_BYTES)
        for key in sorted(self.model, key=lambda k: self.model[k][1]):
            if self.model[key][0] is not None and self.model[key][0] not in self.model:
                del self.model[key]
        while len(self.model) * stored > self.tier.live_capacity_bytes:
            parents = {parent for parent, _, _ in self.model.values()}
            leaves = [key for key in self.model if key not in parents]
            del self.model[min(leaves, key=self.age.__getitem__)]
        assert folder_bytes(self.folder) <= size

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "tier"):
            return
        with self.faults.paused():
            self.tier.check()
        assert {r.key for r in self.tier.records()} == set(self.model)
        assert all(key in self.tier for key in self.model)
        assert self.tier.live_bytes <= self.tier.live_capacity_bytes
        assert self.faults.struck or self.tier.stats().map_full == 0
        assert self.tier.stats().damaged == 0


class SlabMachine(InlineMachine):
    placement: Payload = "slab"


TestInlineMachine = InlineMachine.TestCase
TestSlabMachine = SlabMachine.TestCase
TestInlineMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSlabMachine.settings = TestInlineMachine.settings
