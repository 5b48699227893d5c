"""The store against a dict: any interleaving of calls, every combination of tiers, with and without
faults."""

# An expected error is checked where it is met.
# ruff: noqa: PT017

from __future__ import annotations

import errno
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_model import (
    IDENTITY,
    PLACEMENTS,
    Config,
    FailingDisk,
    as_page,
    assert_empty,
    child,
    close_clean,
    configs,
    damage,
    device,
    folder,
    noise,
    open_store,
    quiet,
)

from kvtier.errors import ConfigError, DiskError, KvtierError, PageLostError, TierFullError
from kvtier.store.lease import Lease
from kvtier.tiers.folder_info import Payload

#: Steps from the root to a page. Independent of what is stored, which hangs on the disk's pace.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def keys_of(path: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    for number in path:
        keys.append(child(keys[-1] if keys else None, number))
    return keys


class StoreMachine(RuleBasedStateMachine):
    """The model: the bytes of a key follow from it, and ``known`` has every key ever put."""

    leases = Bundle("leases")
    faulty = False

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()
        self.open: list[Lease] = []
        self.folder = folder()
        self.removed = False
        self.failing: FailingDisk | None = None
        self.quiet = quiet()
        self.quiet.__enter__()

    @initialize(config=configs())
    def begin(self, config: Config) -> None:
        self.config = config
        self.device = device()
        self.reopen()

    def page(self, key: bytes) -> bytes:
        """The bytes of a key."""
        return noise(key)

    def good(self, key: bytes, got: bytes) -> bool:
        """Whether a page may have come back like this."""
        return got == self.page(key)

    def reopen(self) -> None:
        self.store = open_store(self.config, self.device, self.folder.name)
        if self.faulty and self.config.disk:
            self.failing = FailingDisk(self.store)

    @property
    def roomy(self) -> bool:
        """Whether nothing may ever be dropped."""
        return self.config.disk == 60 and not self.removed and not self.faulty

    # ------------------------------------------------------------------ rules

    @rule(path=PATHS)
    def put(self, path: list[int]) -> None:
        """Put the page at ``path``, and those before it that are not there."""
        keys = keys_of(path)
        for parent, key in zip([None, *keys], keys, strict=False):
            if not self.put_one(key, parent, len(path)):
                return

    def put_one(self, key: bytes, parent: bytes | None, length: int) -> bool:
        there = parent is None or self.store.contains(parent)
        try:
            self.store.put(key, as_page(self.page(key)), parent=parent, identity=IDENTITY.digest)
        except ConfigError:
            assert not there or self.faulty
            return False
        except TierFullError as error:
            # The pages before it cannot go: leased, or needed by the new one.
            floor = [pages for pages in self.config.pages.values() if pages][-1]
            assert self.open or length > floor or self.faulty, f"full, nothing is held: {error}"
            assert error.holders
            self.store.check()
            return False
        except KvtierError:
            assert self.faulty
            self.store.check()
            return False
        assert self.faulty or self.store.contains(key)
        self.known.add(key)
        return True

    @rule(target=leases, path=PATHS, promote=st.booleans())
    def match(self, path: list[int], promote: bool) -> Lease | None:
        keys = keys_of(path)
        there = [self.store.contains(key) for key in keys]
        try:
            lease = self.store.match(keys, promote=promote)
        except KvtierError:
            assert self.faulty
            self.store.check()
            return None
        assert lease.keys == keys[: len(lease)]
        if not self.faulty:
            assert len(lease) == [*there, False].index(False)
            assert not any(there[len(lease) :]), "a suffix is there without its prefix"
        if self.roomy:
            assert len(lease) == sum(key in self.known for key in keys), "a page was lost"
        self.open.append(lease)
        self.verify(lease)
        return lease

    @rule(lease=leases)
    def read(self, lease: Lease | None) -> None:
        if lease is not None and not lease.closed:
            self.verify(lease)

    @rule(lease=consumes(leases))
    def close(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.close()
            self.open = [other for other in self.open if other is not lease]

    @rule(path=PATHS)
    def demote(self, path: list[int]) -> None:
        key = keys_of(path)[-1]
        before = self.store.contains(key)
        try:
            self.store.demote(key)
        except KvtierError:
            assert self.faulty
            self.store.check()
        assert self.faulty or self.store.contains(key) == before, "demote lost a page"

    @rule(path=PATHS)
    def prefetch(self, path: list[int]) -> None:
        keys = keys_of(path)
        try:
            found = self.store.prefetch(keys)
            assert self.faulty or (found == len(keys)) == self.store.contains(keys[-1])
        except KvtierError:
            assert self.faulty
            self.store.check()

    @rule(path=PATHS)
    def remove(self, path: list[int]) -> None:
        key = keys_of(path)[-1]
        self.removed = True
        gone = self.store.remove([key])
        held = any(key in lease.keys for lease in self.open)
        if not self.faulty:
            assert not (gone and held), "a leased page was removed"
        if gone:
            assert not self.store.contains(key)

    @rule()
    def flush(self) -> None:
        missed = self.store.flush()
        if self.roomy:
            assert missed == 0

    @rule()
    def poll(self) -> None:
        self.store.poll()

    @rule(disk=st.sampled_from([None, None, 2, 8]))
    @precondition(lambda self: not self.open)
    def restart(self, disk: int | None) -> None:
        close_clean(self.store)
        if self.config.disk:
            self.config = replace(self.config, disk=disk or self.config.disk)
        else:
            self.known.clear()
        self.removed |= self.config.disk < 60
        self.reopen()
        limit = self.store.stats().tiers["disk"]
        assert limit.used_bytes <= limit.capacity_bytes

    # ------------------------------------------------------------------ checks

    def verify(self, lease: Lease) -> None:
        for index, key in enumerate(lease.keys):
            try:
                got = lease.read(index).numpy().tobytes()
            except (PageLostError, DiskError):
                assert self.faulty
                self.store.check()
                continue
            assert self.good(key, got), "wrong bytes"

    @invariant()
    def leases_stay(self) -> None:
        if hasattr(self, "store"):
            for lease in self.open:
                for page, copy in zip(lease.pages, lease.copies, strict=True):
                    if not self.faulty:
                        assert page.copies.get(copy.tier) is copy, "a leased copy is gone"
            for tier, base in self.store.stats().tiers.items():
                assert base.used_bytes <= base.capacity_bytes, tier
                assert base.peak_bytes <= base.capacity_bytes, tier
            assert self.store.stats().leases == len(self.open)

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                for lease in self.open:
                    self.verify(lease)
                    lease.close()
                for path in ([0] * 6, [1] * 6, [0, 1, 0, 1, 0, 1]):
                    with self.store.match(keys_of(path)) as lease:
                        self.verify(lease)
                assert_empty(self.store)
                close_clean(self.store)
        finally:
            self.quiet.__exit__(None, None, None)
            self.folder.cleanup()


class FaultyStoreMachine(StoreMachine):
    """The same, while copies and writes fail and records rot."""

    faulty = True

    @rule(direction=st.sampled_from(["h2d", "d2h"]), nth=st.integers(1, 3))
    def fail_copy(self, direction: str, nth: int) -> None:
        self.device.faults.fail_copy(direction, nth)

    @rule(at_call=st.booleans(), count=st.integers(1, 3))
    def fail_disk(self, at_call: bool, count: int) -> None:
        if self.failing is not None:
            error = DiskError(errno.ENOSPC, "no space left on device", "data.mdb")
            (self.failing.at_call if at_call else self.failing.later).extend([error] * count)

    @rule(path=PATHS)
    def rot(self, path: list[int]) -> None:
        damage(self.store, keys_of(path)[-1])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            if self.failing is not None:
                self.failing.at_call.clear()
                self.failing.later.clear()
            self.device.faults._failing.clear()
        super().teardown()


def run(machine: type[StoreMachine], examples: int, steps: int = 40) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_store_against_a_dict() -> None:
    run(StoreMachine, 60)


def test_store_with_faults_against_a_dict() -> None:
    run(FaultyStoreMachine, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [StoreMachine, FaultyStoreMachine])
def test_store_against_a_dict_for_long(machine: type[StoreMachine]) -> None:
    run(machine, 2000, 80)


@pytest.mark.parametrize("payload", PLACEMENTS)
@pytest.mark.parametrize("pages", [1, 2, 4])
def test_the_least_limit_works_after_a_larger_one(
    payload: Payload, pages: int, tmp_path: Path
) -> None:
    with closing(device()) as card:
        for disk in (pages, 8, pages, 60, pages):
            with open_store(Config(vram=2, disk=disk, payload=payload), card, tmp_path) as store:
                tier = store.stats().tiers["disk"]
                assert tier.used_bytes <= tier.capacity_bytes
