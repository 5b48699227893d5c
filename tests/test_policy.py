"""Residency policies: the contract, equality with a naive model, and load_policy."""

from __future__ import annotations

import heapq
import math
import random
import sys
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_policy import NaivePolicy

from kvtier.errors import ConfigError, KvtierError
from kvtier.policies import ranked
from kvtier.policies.lru import LRU
from kvtier.policies.mass import Mass
from kvtier.policy import PageFacts, ResidencyPolicy, load_policy


def facts(key: str, parent: str | None = None, depth: int = 0) -> PageFacts:
    return PageFacts(key.encode(), None if parent is None else parent.encode(), depth, 4096)


def chain(policy: ResidencyPolicy, name: str, pages: int) -> list[bytes]:
    """Insert a sequence of pages, root first."""
    for depth in range(pages):
        policy.insert(facts(f"{name}{depth}", f"{name}{depth - 1}" if depth else None, depth))
    return [f"{name}{depth}".encode() for depth in range(pages)]


def drain(policy: ResidencyPolicy) -> list[bytes]:
    gone: list[bytes] = []
    while (key := policy.victim()) is not None:
        policy.remove(key)
        policy.check()
        gone.append(key)
    return gone


class PolicyMachine(RuleBasedStateMachine):
    """Any order of operations, also those the store does not do; victims are compared each time."""

    policy_class: ClassVar[type[Any]] = LRU

    @initialize(leaf_first=st.booleans(), half_life=st.sampled_from([0.5, 3.0, 64.0]))
    def start(self, leaf_first: bool, half_life: float) -> None:
        self.real: ResidencyPolicy
        if self.policy_class is Mass:
            self.real = Mass(leaf_first=leaf_first, half_life=half_life)
            self.naive = NaivePolicy(leaf_first, half_life)
        else:
            self.real = LRU(leaf_first=leaf_first)
            self.naive = NaivePolicy(leaf_first)
        self.parents: list[PageFacts] = []

    def pick(self, data: st.DataObject, pinned: bool | None = None) -> bytes | None:
        keys = [e.page.key for e in self.naive.pages if pinned is None or e.pinned == pinned]
        return data.draw(st.sampled_from(keys)) if keys else None

    @rule(data=st.data())
    def insert_new(self, data: st.DataObject) -> None:
        # The parent may be a page that has left, or one that is pinned.
        above = data.draw(st.sampled_from([None, *self.parents[-12:]]))
        key = f"p{len(self.parents)}"
        page = PageFacts(key.encode(), above and above.key, above.depth + 1 if above else 0, 4096)
        self.parents.append(page)
        self.both("insert", page)

    @precondition(lambda self: len(self.naive.pages) < len(self.parents))
    @rule(data=st.data())
    def insert_again(self, data: st.DataObject) -> None:
        here = {e.page.key for e in self.naive.pages}
        self.both(
            "insert", data.draw(st.sampled_from([p for p in self.parents if p.key not in here]))
        )

    @rule(data=st.data(), measured=st.booleans())
    def touch_sequence(self, data: st.DataObject, measured: bool) -> None:
        page = data.draw(st.sampled_from([None, *self.parents]))
        keys: list[bytes] = []
        known = {p.key: p for p in self.parents}
        while page is not None:
            keys.insert(0, page.key)
            page = known.get(page.parent) if page.parent else None
        mass = (
            [data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])) for _ in keys] if measured else None
        )
        self.both("touch", keys, mass)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if key := self.pick(data, pinned=False):
            self.both("pin", key)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if key := self.pick(data, pinned=True):
            self.both("unpin", key)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if key := self.pick(data):
            self.both("remove", key)

    @rule(moved=st.booleans())
    def evict(self, moved: bool) -> None:
        key = self.real.victim()
        if key is not None:
            self.both("pin", key)
            self.both("remove" if moved else "unpin", key)

    def both(self, name: str, *args: object) -> None:
        getattr(self.real, name)(*args)
        getattr(self.naive, name)(*args)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "real"):
            self.real.check()
            assert len(self.real) == len(self.naive.pages)
            assert self.real.victim() in self.naive.victims()


class MassMachine(PolicyMachine):
    policy_class = Mass


TestLRUMachine = PolicyMachine.TestCase
TestMassMachine = MassMachine.TestCase
TestLRUMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestMassMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)

both_policies = pytest.mark.parametrize("cls", [LRU, Mass])
both_modes = pytest.mark.parametrize("leaf_first", [True, False])


@both_policies
def test_leaf_first_gives_up_a_sequence_from_its_tail_whatever_was_touched(
    cls: type[ResidencyPolicy],
) -> None:
    policy = cls(leaf_first=True)
    keys = chain(policy, "a", 5)
    for key in reversed(keys):
        policy.touch([key], [0.5])
    assert drain(policy) == keys[::-1]


@both_modes
def test_lru_gives_up_the_older_sequence_first_each_from_its_tail(leaf_first: bool) -> None:
    policy = LRU(leaf_first=leaf_first)
    a, b = chain(policy, "a", 3), chain(policy, "b", 3)
    policy.touch(a)
    assert drain(policy) == b[::-1] + a[::-1]


@both_policies
def test_a_pinned_child_protects_its_parents_only_with_leaf_first(
    cls: type[ResidencyPolicy],
) -> None:
    strict, loose = cls(leaf_first=True), cls(leaf_first=False)
    for policy in (strict, loose):
        keys = chain(policy, "a", 3)
        policy.pin(keys[2])
    assert strict.victim() is None
    assert loose.victim() == keys[1]
    strict.unpin(keys[2])
    assert strict.victim() == keys[2]


@both_policies
def test_a_child_that_arrived_before_its_parent_protects_it(cls: type[ResidencyPolicy]) -> None:
    policy = cls(leaf_first=True)
    policy.insert(facts("child", "root", 1))
    policy.insert(facts("root"))
    policy.touch([b"child"], [1.0])
    assert drain(policy) == [b"child", b"root"]


@both_policies
@both_modes
def test_victim_changes_nothing(cls: type[ResidencyPolicy], leaf_first: bool) -> None:
    policy = cls(leaf_first=leaf_first)
    chain(policy, "a", 4)
    assert len({policy.victim() for _ in range(5)}) == 1
    assert len(policy) == 4


@both_policies
def test_pages_that_left_are_forgotten_even_if_nobody_asks_for_a_victim(
    cls: type[ResidencyPolicy],
) -> None:
    policy = cls(leaf_first=True)
    policy.insert(facts("stays"))
    for step in range(1000):
        policy.insert(facts(f"x{step}"))
        policy.remove(f"x{step}".encode())
    policy.check()
    assert len(policy) == 1


@both_policies
def test_misuse_is_named(cls: type[ResidencyPolicy]) -> None:
    policy = cls(leaf_first=True)
    policy.insert(facts("a"))
    with pytest.raises(KvtierError, match="in the tier already"):
        policy.insert(facts("a"))
    with pytest.raises(KvtierError, match="not pinned"):
        policy.unpin(b"a")
    policy.pin(b"a")
    with pytest.raises(KvtierError, match="pinned already"):
        policy.pin(b"a")
    with pytest.raises(KvtierError, match="not in the tier"):
        policy.remove(b"b")
    for mass in ([0.1, 0.2], [math.nan], [-1.0], [math.inf]):
        with pytest.raises(KvtierError, match="mass"):
            policy.touch([b"a"], mass)
    policy.check()


def test_mass_keeps_the_page_that_is_attended_to() -> None:
    policy = Mass(leaf_first=False)
    keys = chain(policy, "a", 4)
    for _ in range(200):
        policy.touch(keys, [0.6, 0.01, 0.3, 0.09])
    assert drain(policy) == [keys[1], keys[3], keys[2], keys[0]]


def test_mass_forgets_with_its_half_life_and_h2o_does_not() -> None:
    first = {}
    for half_life in (4.0, math.inf):
        policy = Mass(leaf_first=True, half_life=half_life)
        policy.insert(facts("old"))
        policy.insert(facts("new"))
        for _ in range(100):
            policy.touch([b"old"], [0.5])
        for _ in range(20):
            policy.touch([b"new"], [0.5])
        first[half_life] = policy.victim()
    assert first == {4.0: b"old", math.inf: b"new"}


def test_a_new_page_is_not_the_next_victim_of_mass() -> None:
    policy = Mass(leaf_first=True)
    policy.insert(facts("old"))
    for _ in range(300):
        policy.touch([b"other"])
    policy.insert(facts("new"))
    assert policy.victim() == b"old"


@both_policies
@both_modes
def test_operations_do_not_grow_with_the_number_of_pages(
    cls: type[ResidencyPolicy], leaf_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts calls into the policy and heap steps for the same work in tiers of 500 and 8000 pages,
    most of them above a pinned tail, where looking for a victim by walking would take longest."""

    def calls(pages: int) -> int:
        policy = cls(leaf_first=leaf_first)
        keys = chain(policy, "a", pages)
        policy.pin(keys[-1])
        rng = random.Random(3)
        count = 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        monkeypatch.setattr(ranked, "heapq", _CountingHeap(lambda: count_up()))

        def count_up() -> None:
            nonlocal count
            count += 1

        policy.victim()
        sys.setprofile(profile)
        try:
            for step in range(300):
                policy.insert(facts(f"x{step}"))
                policy.touch([rng.choice(keys)])
                key = policy.victim()
                assert key is not None
                policy.pin(key)
                policy.remove(key)
        finally:
            sys.setprofile(None)
        policy.check()
        return count

    small, large = calls(500), calls(8000)
    assert large < 2 * small, f"{small} calls with 500 pages, {large} with 8000"


class _CountingHeap:
    """heapq with a counter, since its comparisons run in C where a profiler sees nothing."""

    def __init__(self, count: object) -> None:
        self.count = count

    def __getattr__(self, name: str) -> object:
        self.count()  # type: ignore[operator]
        return getattr(heapq, name)


# load_policy


class Own(LRU):
    """A policy of somebody else's, with one parameter of each type."""

    def __init__(
        self,
        *,
        leaf_first: bool,
        size: int = 1,
        rate: float = 0.5,
        strict: bool = False,
        label: str = "x",
    ) -> None:
        super().__init__(leaf_first=leaf_first)
        self.values = (size, rate, strict, label)


class NotAPolicy:
    pass


def test_load_by_name_and_with_parameters() -> None:
    assert type(load_policy("lru", leaf_first=True)) is LRU
    policy = load_policy("mass:half_life=8", leaf_first=False)
    assert isinstance(policy, Mass)
    assert policy.half_life == 8.0
    assert policy.leaf_first is False


def test_load_own_class_with_every_type_of_parameter() -> None:
    assert isinstance(load_policy(f"{__name__}:Own", leaf_first=True), Own)
    policy = load_policy(
        f"{__name__}:Own: size=3 ,rate=1e-3,strict=true,label=a b", leaf_first=True
    )
    assert isinstance(policy, Own)
    assert policy.values == (3, 1e-3, True, "a b")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fifo", r"'fifo' is unknown; known are .*lru, mass"),
        ("", "is unknown"),
        ("lru:size=3", r"'lru' has no parameter 'size'; it has: none"),
        ("mass:halflife=3", r"no parameter 'halflife'; it has: half_life"),
        ("mass:half_life=long", r"half_life='long' is not of type float"),
        ("mass:half_life=0", r"half_life=0.0; give at least"),
        ("mass:half_life=-3", r"half_life=-3.0"),
        ("mass:half_life=nan", r"half_life=nan"),
        ("mass:half_life=3,", "not of the form key=value"),
        ("mass:leaf_first=true", "no parameter 'leaf_first'"),
        ("no_such_module:Thing", "cannot be imported"),
        (f"{__name__}:Missing", "cannot be imported"),
        (f"{__name__}:NotAPolicy", "not a subclass"),
        (f"{__name__}:Own:size=1.5", "'1.5' is not of type int"),
        (f"{__name__}:Own:strict=1", "strict='1' is not of type bool"),
    ],
)
def test_what_cannot_be_loaded_says_why(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_policy(spec, leaf_first=True)
