"""Residency policies: the contract, equality with naive models, state, and load_policy."""

from __future__ import annotations

import heapq
import importlib
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from naive_policy import (
    NaiveDecayed,
    NaiveFIFO,
    NaiveGDSF,
    NaivePolicy,
    NaivePriority,
    NaiveSLRU,
    NaiveTTL,
)

from kvtier.errors import ConfigError, KvtierError
from kvtier.policies import heap, queue
from kvtier.policies.decayed import _log2_sum
from kvtier.policies.lru import LRU
from kvtier.policies.mass import Mass
from kvtier.policy import (
    PageFacts,
    Request,
    ResidencyPolicy,
    chained,
    decode_key,
    encode_key,
    load_policy,
    policy_names,
)

#: Spec -> its naive model.
MODELS: dict[str, Callable[..., NaivePolicy]] = {
    "lru": NaivePolicy,
    "fifo": NaiveFIFO,
    "slru:protected=0.6": lambda **k: NaiveSLRU(protected=0.6, **k),
    "lfu:half_life=3": lambda **k: NaiveDecayed(half_life=3, counts=True, **k),
    "mass:half_life=0.5": lambda **k: NaiveDecayed(half_life=0.5, counts=False, **k),
    "mass:half_life=64": lambda **k: NaiveDecayed(half_life=64, counts=False, **k),
    "gdsf:depth_scale=4": lambda **k: NaiveGDSF(depth_scale=4, **k),
    "ttl:seconds=4": lambda **k: NaiveTTL(seconds=4, **k),
    "priority:levels=3,default=1": lambda **k: NaivePriority(levels=3, default=1, **k),
}
ALL = sorted({spec.partition(":")[0] for spec in MODELS})


def facts(key: str, parent: str | None = None, depth: int = 0) -> PageFacts:
    return PageFacts(key.encode(), None if parent is None else parent.encode(), depth, 4096)


def chain(policy: ResidencyPolicy, name: str, pages: int) -> list[bytes]:
    """Insert a sequence of pages, root first."""
    for depth in range(pages):
        policy.insert(facts(f"{name}{depth}", f"{name}{depth - 1}" if depth else None, depth))
    return [f"{name}{depth}".encode() for depth in range(pages)]


def drain(policy: ResidencyPolicy) -> list[Any]:
    gone: list[Any] = []
    while (key := policy.victim()) is not None:
        policy.remove(key, evicted=True)
        policy.check()
        gone.append(key)
    return gone


class PolicyMachine(RuleBasedStateMachine):
    """Any order of operations, also those the store does not do; victims are compared each time."""

    spec: ClassVar[str]

    @initialize(leaf_first=st.booleans(), order=st.sampled_from(["tail", "tail", "head"]))
    def start(self, leaf_first: bool, order: str) -> None:
        spec = self.spec
        self.naive = MODELS[spec](leaf_first=leaf_first, order=order)
        sep = "," if ":" in spec else ":"
        self.real = load_policy(
            f"{spec}{sep}order={order}", leaf_first=leaf_first, clock=lambda: self.naive.now
        )
        self.parents: list[PageFacts] = []

    def pick(self, data: st.DataObject, pinned: bool | None = None) -> Any:
        keys = [e.page.key for e in self.naive.pages if pinned is None or e.pinned == pinned]
        return data.draw(st.sampled_from(keys)) if keys else None

    def request(self, data: st.DataObject) -> Request:
        return Request(
            session=data.draw(st.sampled_from([None, 1, 2])),
            priority=data.draw(st.sampled_from([None, None, 0, 1, 2, 7])),
            ttl_s=data.draw(st.sampled_from([None, None, 1.0, 9.0, math.inf])),
            next_use_at=data.draw(st.sampled_from([None, None, self.naive.now + 3.0])),
            at=data.draw(st.sampled_from([None, None, self.naive.now - 2.0])),
        )

    def new_page(self, data: st.DataObject) -> PageFacts:
        # The parent may be a page that has left, or one that is pinned.
        above = data.draw(st.sampled_from([None, *self.parents[-12:]]))
        page = PageFacts(
            f"p{len(self.parents)}".encode(),
            above and above.key,
            above.depth + 1 if above else 0,
            data.draw(st.sampled_from([1, 2, 5])),
            *data.draw(st.sampled_from([(None, None), (3.0, None), (3.0, 1.0), (1.0, 2.0)])),
        )
        self.parents.append(page)
        return page

    def sequence(self, data: st.DataObject) -> list[PageFacts]:
        """A page and those before it, root first; maybe not all of the tier."""
        page = data.draw(st.sampled_from([None, *self.parents]))
        pages: list[PageFacts] = []
        known = {p.key: p for p in self.parents}
        while page is not None:
            pages.insert(0, page)
            page = known.get(page.parent) if page.parent else None
        return pages

    @rule(data=st.data())
    def insert_new(self, data: st.DataObject) -> None:
        self.both("insert", self.new_page(data), self.request(data))

    @precondition(lambda self: len(self.naive.pages) < len(self.parents))
    @rule(data=st.data())
    def insert_again(self, data: st.DataObject) -> None:
        here = {e.page.key for e in self.naive.pages}
        page = data.draw(st.sampled_from([p for p in self.parents if p.key not in here]))
        self.both("insert", page, self.request(data))

    @rule(data=st.data(), measured=st.booleans())
    def use_sequence(self, data: st.DataObject, measured: bool) -> None:
        keys = [page.key for page in self.sequence(data)]
        mass = (
            [data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])) for _ in keys] if measured else None
        )
        self.both("use", keys, mass, self.request(data))

    @rule(data=st.data(), capacity=st.sampled_from([1, 7, 20, 40]))
    def whole_request(self, data: st.DataObject, capacity: int) -> None:
        pages = self.sequence(data)
        for _ in range(data.draw(st.integers(0, 3))):
            last = pages[-1] if pages else None
            page = self.new_page(data)._replace(
                parent=last and last.key, depth=last.depth + 1 if last else 0
            )
            self.parents[-1] = page
            pages.append(page)
        request = self.request(data)
        real = self.real.access_bytes(pages, capacity, request=request)
        self.naive.resize(self.real.capacity)
        assert real == self.naive.access_bytes(pages, capacity, request=request)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if key := self.pick(data, pinned=False):
            self.both("pin", key)

    @rule(data=st.data(), used=st.booleans())
    def unpin(self, data: st.DataObject, used: bool) -> None:
        if key := self.pick(data, pinned=True):
            self.both("unpin", key, used=used)

    @rule(data=st.data(), evicted=st.booleans())
    def remove(self, data: st.DataObject, evicted: bool) -> None:
        if key := self.pick(data):
            self.both("remove", key, evicted=evicted)

    @rule(moved=st.booleans())
    def evict(self, moved: bool) -> None:
        key = self.real.victim()
        if key is not None:
            self.both("pin", key)
            if moved:
                self.both("remove", key, evicted=True)
            else:
                self.both("unpin", key, used=False)

    @rule(data=st.data(), session=st.sampled_from([None, 1, 2]))
    def end_session(self, data: st.DataObject, session: int | None) -> None:
        self.both("session_ended", [page.key for page in self.sequence(data)], session)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.naive.now += seconds

    def both(self, name: str, *args: object, **options: object) -> None:
        getattr(self.real, name)(*args, **options)
        getattr(self.naive, name)(*args, **options)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "real"):
            self.real.check()
            assert self.real.pages.keys() == {e.page.key for e in self.naive.pages}
            assert self.real.victim() in self.naive.victims()


@pytest.mark.parametrize("spec", sorted(MODELS))
def test_machine(spec: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"spec": spec})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


both_policies = pytest.mark.parametrize("cls", [LRU, Mass])
every_policy = pytest.mark.parametrize("name", ALL)
#: Also those that other tests compare with their models.
registered = pytest.mark.parametrize("name", sorted(set(policy_names()) - {"min", "opt"}))
both_modes = pytest.mark.parametrize("leaf_first", [True, False])


def sequences(lengths: list[int], tree: list[int]) -> list[list[int]]:
    """Sequences of page ids, each continuing some prefix of an earlier one: equal ids, equal prefixes."""
    made: list[list[int]] = []
    fresh = 0
    for length, choice in zip(lengths, tree, strict=True):
        start = made[choice % len(made)] if made else []
        keys = start[: choice % (len(start) + 1)]
        while len(keys) < length:
            fresh += 1
            keys = [*keys, fresh]
        made.append(keys)
    return made


requests = st.integers(1, 40).flatmap(
    lambda n: st.builds(
        sequences,
        st.lists(st.integers(1, 12), min_size=n, max_size=n),
        st.lists(st.integers(0, 200), min_size=n, max_size=n),
    )
)


def stepwise(policy: ResidencyPolicy, keys: list[int], capacity: int) -> tuple[int, list[Any]]:
    """``access`` by its definition: one page after the other."""
    if capacity != policy.capacity:
        policy.resize(capacity)
    policy._begin(keys, None, Request())
    hits, evicted = 0, []
    for page in policy.walk(chained(keys)):
        if page.key in policy:
            hits += 1
            policy.on_use(page.key)
            continue
        while len(policy) >= capacity:
            gone = policy.victim(page.key)
            if gone is None or gone == page.key:
                break
            policy.remove(gone, evicted=True)
            evicted.append(gone)
        else:
            policy._enter(page)
            policy.on_insert(page.key, None)
    return hits, evicted


@registered
@pytest.mark.parametrize("order", ["tail", "head"])
@settings(max_examples=20, deadline=None)
@given(requests=requests, capacity=st.integers(1, 40), leaf_first=st.booleans(), data=st.data())
def test_a_whole_request_equals_its_steps(
    name: str,
    order: str,
    requests: list[list[int]],
    capacity: int,
    leaf_first: bool,
    data: st.DataObject,
) -> None:
    now = [0.0]
    spec = f"{name}:order={order}"
    whole = load_policy(spec, leaf_first=leaf_first, clock=lambda: now[0])
    steps = load_policy(spec, leaf_first=leaf_first, clock=lambda: now[0])
    for keys in requests:
        now[0] += 50.0
        if data.draw(st.integers(0, 5)) == 0 and len(whole):
            key = data.draw(st.sampled_from(sorted(whole.pages, key=str)))
            for policy in (whole, steps):
                (policy.unpin if key in policy.pinned else policy.pin)(key)
        hits, evicted = whole.access(keys, capacity)
        assert (hits, evicted) == stepwise(steps, keys, capacity)
        assert whole.pages.keys() == steps.pages.keys()
        assert whole.victim() == steps.victim()
        whole.check()


@both_policies
def test_leaf_first_gives_up_a_sequence_from_its_tail_whatever_was_touched(
    cls: type[ResidencyPolicy],
) -> None:
    policy = cls(leaf_first=True)
    keys = chain(policy, "a", 5)
    for key in reversed(keys):
        policy.use([key], [0.5])
    assert drain(policy) == keys[::-1]


@both_modes
def test_lru_gives_up_the_older_sequence_first_each_from_its_tail(leaf_first: bool) -> None:
    policy = LRU(leaf_first=leaf_first)
    a, b = chain(policy, "a", 3), chain(policy, "b", 3)
    policy.use(a)
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
    policy.use([b"child"], [1.0])
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
            policy.use([b"a"], mass)
    policy.check()


def test_mass_keeps_the_page_that_is_attended_to() -> None:
    policy = Mass(leaf_first=False)
    keys = chain(policy, "a", 4)
    for _ in range(200):
        policy.use(keys, [0.6, 0.01, 0.3, 0.09])
    assert drain(policy) == [keys[1], keys[3], keys[2], keys[0]]


def test_mass_forgets_with_its_half_life_and_h2o_does_not() -> None:
    first = {}
    for half_life in (4.0, math.inf):
        policy = Mass(leaf_first=True, half_life=half_life)
        policy.insert(facts("old"))
        policy.insert(facts("new"))
        for _ in range(100):
            policy.use([b"old"], [0.5])
        for _ in range(20):
            policy.use([b"new"], [0.5])
        first[half_life] = policy.victim()
    assert first == {4.0: b"old", math.inf: b"new"}


def test_a_new_page_is_not_the_next_victim_of_mass() -> None:
    policy = Mass(leaf_first=True)
    policy.insert(facts("old"))
    for _ in range(300):
        policy.use([b"other"])
    policy.insert(facts("new"))
    assert policy.victim() == b"old"


@registered
@both_modes
def test_operations_do_not_grow_with_the_number_of_pages(
    name: str, leaf_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts lines of Python and heap steps for the same work in tiers of 500 and 8000 pages, most of
    them above a pinned tail, where looking for a victim by walking would take longest."""

    def steps(pages: int) -> int:
        policy = load_policy(name, leaf_first=leaf_first, clock=lambda: 0.0)
        policy.resize(pages + 1)
        keys = chain(policy, "a", pages)
        for key in keys[-1:] if leaf_first else keys:
            policy.pin(key)
        rng = random.Random(3)
        count = 0

        def trace(frame: object, event: str, arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        def count_up() -> None:
            nonlocal count
            count += 1

        monkeypatch.setattr(heap, "heapq", _CountingHeap(count_up))
        monkeypatch.setattr(queue, "heapq", _CountingHeap(count_up))
        policy.insert(facts("x"))
        for _ in range(3):  # what is due once for all pages, when the first victim is looked for
            policy.victim()
        sys.settrace(trace)
        try:
            for step in range(300):
                policy.insert(facts(f"x{step}"))
                policy.use([rng.choice(keys)])
                key = policy.victim()
                assert key is not None
                policy.pin(key)
                policy.remove(key, evicted=True)
        finally:
            sys.settrace(None)
        policy.check()
        return count

    small, large = steps(500), steps(8000)
    assert large < 2 * small, f"{small} steps with 500 pages, {large} with 8000"


class _CountingHeap:
    """heapq with a counter, since its comparisons run in C where a tracer sees nothing."""

    def __init__(self, count: Callable[[], None]) -> None:
        self.count = count

    def __getattr__(self, name: str) -> object:
        self.count()
        return getattr(heapq, name)


@registered
@both_modes
@settings(max_examples=10, deadline=None)
@given(requests=requests, capacity=st.integers(1, 30))
def test_what_was_learnt_survives_a_restart(
    name: str, leaf_first: bool, requests: list[list[int]], capacity: int
) -> None:
    """The pages that are still there are given up in the same order by the policy that takes over."""
    old = load_policy(name, leaf_first=leaf_first, clock=lambda: 100.0)
    for keys in requests:
        old.access(keys, capacity)
    text = json.dumps(old.state())
    new = load_policy(name, leaf_first=leaf_first, clock=lambda: 7.0)
    new.resize(capacity)
    parents = {page.key: page for keys in requests for page in chained(keys)}
    stranger = PageFacts("stranger", None, 0, 1)
    left = random.Random(1).sample(sorted(old.pages), len(old) * 2 // 3)
    for key in sorted(set(old.pages) - set(left)):
        old.remove(key)
    for page in (stranger, *(parents[key] for key in sorted(left))):
        new.insert(page)
    new.load_state(json.loads(text))
    new.check()
    new.remove("stranger")
    if name in ALL:
        assert drain(new) == drain(old)


@registered
def test_a_state_of_something_else_is_refused(name: str) -> None:
    policy = load_policy(name, leaf_first=True)
    chain(policy, "a", 3)
    good = policy.state()
    for bad in ({}, {**good, "version": 0}, {**good, "policy": "other"}, {**good, "own": {"x": 1}}):
        if bad.get("own") == {"x": 1} and not good["own"]:
            continue
        with pytest.raises(KvtierError, match="saved state"):
            policy.load_state(bad)
        policy.check()


@every_policy
def test_a_limited_state_leaves_out_the_coldest(name: str) -> None:
    policy = load_policy(name, leaf_first=False, clock=lambda: 0.0)
    for n in range(20):
        policy.access([n], 20)
    new = load_policy(name, leaf_first=False, clock=lambda: 0.0)
    new.access(list(range(20)), 20)
    new.load_state(policy.state(5))
    assert drain(new)[-5:] == list(range(15, 20))


@pytest.mark.parametrize("key", [b"", b"\x00\xff", 7, -1, "text", (1, b"a", ("x",))])
def test_keys_survive_json(key: Any) -> None:
    assert decode_key(json.loads(json.dumps(encode_key(key)))) == key


def test_victims_come_until_their_bytes_suffice() -> None:
    policy = LRU(leaf_first=True)
    keys = chain(policy, "a", 5)
    policy.pin(keys[4])
    assert list(policy.victims(1)) == []
    policy.unpin(keys[4], used=False)
    gone = []
    for key in policy.victims(2 * 4096 + 1):
        policy.remove(key, evicted=True)
        gone.append(key)
    assert gone == keys[:1:-1]


def test_fifo_takes_no_notice_of_any_use() -> None:
    policy = load_policy("fifo", leaf_first=False)
    for key in "abc":
        policy.access([key], 9)
    policy.access(["a"], 9)
    policy.pin("a")
    policy.unpin("a")
    assert drain(policy) == ["a", "b", "c"]


def test_slru_protects_as_many_pages_as_it_says() -> None:
    policy = load_policy("slru:protected=0.8", leaf_first=False)
    for key in "abcdabcde":
        policy.access([key], 5)
    assert drain(policy) == ["e", "a", "b", "c", "d"]


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (3.0, 1.5), (-2.0, 4.0), (100.0, 99.0)])
def test_decayed_sums_are_sums(a: float, b: float) -> None:
    assert _log2_sum(a, b) == pytest.approx(math.log2(2**a + 2**b), rel=1e-12)
    assert _log2_sum(a, -math.inf) == _log2_sum(-math.inf, a) == a


def test_hints_of_requests() -> None:
    now = [0.0]
    policy = load_policy("ttl:seconds=100", leaf_first=False, clock=lambda: now[0])
    policy.access(["system", "x"], 9, request=Request(session=1))
    policy.access(["system", "y"], 9, request=Request(session=2, ttl_s=10.0))
    policy.access(["z"], 9, request=Request(session=3, ttl_s=1.0, next_use_at=60.0))
    policy.session_ended(["system", "x"], 1)
    assert policy.victim() == "x"  # the system prompt is the other session's too
    policy.remove("x")
    now[0] = 10.0
    assert policy.victim() == "y"
    now[0] = 62.0
    assert drain(policy) == ["y", "system", "z"]

    ranked = load_policy("priority:default=2", leaf_first=False)
    for key, priority in (("a", 5), ("b", None), ("c", 1), ("d", 99)):
        ranked.access([key], 9, request=Request(priority=priority))
    ranked.use(["a"])
    assert ranked.victim() == "c"
    ranked.use(["d"], request=Request(priority=0))
    assert drain(ranked) == ["d", "c", "b", "a"]


def test_the_worked_example_runs_and_is_the_one_in_the_documentation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parent.parent
    monkeypatch.syspath_prepend(root / "examples")
    main = importlib.import_module("own_policy").main
    main()
    assert "second" in load_policy("own_policy:SecondChance", leaf_first=True).name
    assert "of 114 pages were there" in capsys.readouterr().out
    text = (root / "docs" / "policies.md").read_text()
    block = text[text.index("class SecondChance") :].split("```")[0]
    shown = [line.split("  #")[0] for line in block.splitlines() if line.strip()]
    source = (root / "examples" / "own_policy.py").read_text()
    assert all(line in source for line in shown)


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
        ("fift", r"'fift' is unknown; known are .*fifo, .*lru, .*mass"),
        ("", "is unknown"),
        ("lru:size=3", r"'lru' has no parameter 'size'; it has: order"),
        ("mass:halflife=3", r"no parameter 'halflife'; it has: half_life"),
        ("mass:half_life=long", r"half_life='long' is not of type float"),
        ("mass:half_life=0", r"half_life=0.0; give at least"),
        ("mass:half_life=-3", r"half_life=-3.0"),
        ("mass:half_life=nan", r"half_life=nan"),
        ("mass:half_life=3,", "not of the form key=value"),
        ("lru:order=sideways", r"order='sideways'; use tail or head"),
        ("mass:half_life=3,half_life=4", "half_life is given twice"),
        ("ttl:inner=(lru", "parentheses do not match"),
        ("ttl:inner=lru),seconds=3", "parentheses do not match"),
        ("ttl:inner=(mass:half_life=0)", r"half_life=0.0; give at least"),
        ("ttl:inner=nothing", "'nothing' is unknown"),
        ("ttl:seconds=0", r"seconds=0.0; give more"),
        ("priority:levels=0", "levels=0; give 1 to 100"),
        ("priority:levels=2,default=2", "default=2; give 0 to 1"),
        ("slru:protected=1", r"protected=1.0; give a share"),
        ("gdsf:depth_scale=0", r"depth_scale=0.0; give more"),
        ("lfu:half_life=0", r"'lfu': half_life=0.0"),
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


@every_policy
@both_modes
def test_nothing_goes_for_a_page_that_fits_no_more(name: str, leaf_first: bool) -> None:
    """It was here while the tier was larger, and made room for the end of its own request."""
    policy = load_policy(name, leaf_first=leaf_first)
    large, small = PageFacts(b"large", None, 0, 5), PageFacts(b"small", b"large", 1, 1)
    policy.access_bytes([large], 8)
    assert b"large" in policy
    done = policy.access_bytes([large, small], 2)
    assert b"small" not in done.evicted
    assert b"large" not in policy
    policy.check()
