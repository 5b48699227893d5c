"""Sessions against lists of tokens: any interleaving of their calls, on every combination of tiers.

A session's numbers are its own: each step writes with a ``variant``, as two runs of a model differ
in rounding. What a session has once had of its sequence must never change.
"""

# An expected error is checked where it is met.
# ruff: noqa: PT017

from __future__ import annotations

import errno

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from session_steps import TOKENS, Sequence, of_page
from store_model import (
    IDENTITY,
    PAGE,
    Config,
    FailingDisk,
    as_page,
    close_clean,
    configs,
    damage,
    device,
    folder,
    noise,
    open_store,
    quiet,
)

from kvtier.errors import DiskError, KvtierError, PageLostError, TierFullError
from kvtier.keys import page_keys

#: Few tokens, so that sequences share prefixes often.
#: Numbers that choose, modulo what there is: draws must not hang on the pace of the disk.
NUMBERS = st.integers(0, 11)
STRINGS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class SessionMachine(RuleBasedStateMachine):
    faulty = False

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Sequence] = []
        #: Key of a page -> all contents that a session has sealed under it.
        self.contents: dict[bytes, set[bytes]] = {}
        self.history: list[list[int]] = [[0, 0, 0, 0, 0]]
        self.folder = folder()
        self.failing: FailingDisk | None = None
        self.quiet = quiet()
        self.quiet.__enter__()

    @initialize(config=configs(vram=4, disks=(0, 4, 60)))
    def begin(self, config: Config) -> None:
        self.config = config
        self.device = device()
        self.scratch = self.device.alloc(PAGE)
        self.reopen()

    def reopen(self) -> None:
        self.store = open_store(self.config, self.device, self.folder.name)
        if self.faulty and self.config.disk:
            self.failing = FailingDisk(self.store)

    def pick(self, number: int) -> Sequence | None:
        return self.open[number % len(self.open)] if self.open else None

    def past(self, number: int) -> list[int]:
        return self.history[number % len(self.history)]

    def give_up(self, sequence: Sequence) -> None:
        """What a user does with a session after an error."""
        assert self.faulty
        sequence.session.close()
        self.open.remove(sequence)
        self.store.check()

    def learn(self, sequence: Sequence) -> None:
        """Remember what the sequence's pages may be found as."""
        self.history.append(list(sequence.tokens))
        if sequence.named:
            keys = page_keys(IDENTITY, sequence.tokens, TOKENS)
            for n, key in enumerate(keys):
                kv = b"".join(sequence.kv[n * TOKENS : (n + 1) * TOKENS])
                self.contents.setdefault(key, set()).add(kv)

    # ------------------------------------------------------------------ rules

    @rule(past=NUMBERS, more=STRINGS, restore=st.booleans())
    def start(self, past: int, more: list[int], restore: bool) -> None:
        if len(self.open) >= 4:
            return
        sequence = Sequence(self.store, scratch=self.scratch)
        self.open.append(sequence)
        tokens = self.past(past) + more
        try:
            if restore:
                sequence.restore(tokens)
                keys = page_keys(IDENTITY, sequence.tokens, TOKENS)
                for n, key in enumerate(keys):
                    kv = b"".join(sequence.kv[n * TOKENS : (n + 1) * TOKENS])
                    assert kv in self.contents[key], "restored bytes that nobody sealed"
        except KvtierError:
            self.give_up(sequence)

    @rule(which=NUMBERS, tokens=STRINGS, variant=st.integers(0, 1), named=st.integers(0, 9))
    def step(self, which: int, tokens: list[int], variant: int, named: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        before = sequence.session.length
        try:
            sequence.append(tokens, variant, named=named > 0)
        except TierFullError as error:
            assert error.holders or len(tokens) > TOKENS * self.config.vram
            assert sequence.session.length == before
            if self.faulty:
                self.give_up(sequence)
            return
        except KvtierError:
            self.give_up(sequence)
            return
        self.learn(sequence)

    @rule(which=NUMBERS)
    def seal(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        sequence.session.seal()
        assert len(sequence.session.pages) == len(sequence.tokens) // TOKENS

    @rule(which=NUMBERS)
    def fork(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        if len(self.open) >= 4:
            return
        try:
            self.open.append(sequence.fork())
        except TierFullError as error:
            assert error.holders
        except KvtierError:
            self.give_up(sequence)

    @rule(which=NUMBERS, length=NUMBERS)
    def crop(self, which: int, length: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        length %= len(sequence.tokens) + 1
        try:
            sequence.crop(length)
        except TierFullError as error:
            assert error.holders
        except KvtierError:
            self.give_up(sequence)

    @rule(which=NUMBERS)
    def close(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        sequence.session.close()
        self.open.remove(sequence)

    @rule(which=NUMBERS)
    def check(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        try:
            sequence.check()
        except (PageLostError, DiskError) as error:
            if not self.faulty:
                raise AssertionError("an owned page was lost") from error
            self.give_up(sequence)
        except KvtierError:
            self.give_up(sequence)

    @rule(number=st.integers(0, 20))
    def put(self, number: int) -> None:
        """Pages of somebody else, for pressure."""
        key = number.to_bytes(32, "little")
        try:
            self.store.put(key, as_page(noise(key)), identity=IDENTITY.digest)
        except TierFullError as error:
            assert error.holders
        except KvtierError:
            assert self.faulty

    @rule(past=NUMBERS)
    def lookup(self, past: int) -> None:
        tokens = self.past(past)
        try:
            with self.store.match(page_keys(IDENTITY, tokens, TOKENS)) as lease:
                for index, key in enumerate(lease.keys):
                    page = lease.read(index).numpy().tobytes()
                    kv = b"".join(of_page(page, token) for token in range(TOKENS))
                    assert kv in self.contents[key], "found bytes that nobody sealed"
        except KvtierError:
            assert self.faulty

    @rule(which=NUMBERS, page=NUMBERS)
    def demote(self, which: int, page: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        pages = sequence.session.pages
        if pages:
            try:
                self.store.demote(pages[page % len(pages)].key)
            except KvtierError:
                assert self.faulty

    @rule(past=NUMBERS)
    def remove(self, past: int) -> None:
        tokens = self.past(past)
        self.store.remove(page_keys(IDENTITY, tokens, TOKENS))

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    @precondition(lambda self: not self.open)
    def restart(self) -> None:
        close_clean(self.store, kept_bytes=PAGE)
        self.reopen()

    # ------------------------------------------------------------------ checks

    @invariant()
    def books(self) -> None:
        if hasattr(self, "store"):
            self.store.check()
            stats = self.store.stats()
            assert stats.owners <= len(self.open)
            assert stats.leases <= len(self.open)
            for tier, base in stats.tiers.items():
                assert base.peak_bytes <= base.capacity_bytes, tier

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.calm()
                for sequence in self.open:
                    if not self.faulty:
                        sequence.check()
                    sequence.session.close()
                    sequence.session.close()
                self.device.synchronize(10.0)
                self.device.free(self.scratch)
                close_clean(self.store)
        finally:
            self.quiet.__exit__(None, None, None)
            self.folder.cleanup()

    def calm(self) -> None:
        """No more faults."""


class FaultySessionMachine(SessionMachine):
    """The same, while copies and writes fail and records rot."""

    faulty = True

    @rule(direction=st.sampled_from(["h2d", "d2h", "d2d"]), nth=st.integers(1, 3))
    def fail_copy(self, direction: str, nth: int) -> None:
        self.device.faults.fail_copy(direction, nth)

    @rule(at_call=st.booleans(), count=st.integers(1, 3))
    def fail_disk(self, at_call: bool, count: int) -> None:
        if self.failing is not None:
            error = DiskError(errno.ENOSPC, "no space left on device", "data.mdb")
            (self.failing.at_call if at_call else self.failing.later).extend([error] * count)

    @rule(past=NUMBERS, page=NUMBERS)
    def rot(self, past: int, page: int) -> None:
        keys = page_keys(IDENTITY, self.past(past), TOKENS)
        if keys:
            damage(self.store, keys[page % len(keys)])

    def calm(self) -> None:
        if self.failing is not None:
            self.failing.at_call.clear()
            self.failing.later.clear()
        self.device.faults._failing.clear()


def run(machine: type[SessionMachine], examples: int, steps: int = 40) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_sessions_against_lists_of_tokens() -> None:
    run(SessionMachine, 60)


def test_sessions_with_faults_against_lists_of_tokens() -> None:
    run(FaultySessionMachine, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [SessionMachine, FaultySessionMachine])
def test_sessions_against_lists_of_tokens_for_long(machine: type[SessionMachine]) -> None:
    run(machine, 2000, 80)
