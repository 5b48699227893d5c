"""One tier: the published reference values, and an independent simulator."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, KvtierError
from kvtier.replay.find_size import find_size
from kvtier.replay.headroom import headroom, infinite_prefix_hits
from kvtier.replay.sweep import FindJob, TierJob, run_jobs
from kvtier.replay.tier import Cell, replay_tier
from kvtier.trace.read import read_trace
from kvtier.trace.trace import ADD, REMOVE, REQUEST, Trace, TraceBuilder

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "tests" / "data" / "traces"
LARGE = ROOT / "bench" / "data" / "traces"
REFERENCE: dict[str, Any] = json.loads((SMALL / "reference.json").read_text())
#: Policy and order -> its name in the reference.
NAMES = {
    ("lru", "head"): "lru",
    ("lru", "tail"): "lru_tail",
    ("fifo", "head"): "fifo",
    ("fifo", "tail"): "fifo_tail",
    ("opt", "head"): "opt",
    ("opt", "tail"): "opt",
}


def assert_reference(folder: Path, name: str, shares: list[str] | None = None) -> None:
    expected = REFERENCE[name]
    trace = read_trace(folder / f"{name}.jsonl.gz")
    assert trace.requests == expected["requests"]
    assert trace.block_refs == expected["block_refs"]
    assert trace.unique_pages == expected["unique_blocks"]
    infinite = infinite_prefix_hits(trace) / trace.block_refs
    assert infinite == pytest.approx(expected["infinite_prefix_hit"], abs=1e-6)
    entries = list(trace.entries())
    for share, cell in expected["cells"].items():
        if shares is not None and share not in shares:
            continue
        pages = cell["capacity_blocks"]
        assert pages == max(1, round(float(share) * trace.unique_pages))
        for (policy, order), column in NAMES.items():
            found = replay_tier(trace, policy, pages, order=order, entries=entries)  # type: ignore[arg-type]
            got = {"prefix_hits": found.prefix_hits, "raw_hits": found.raw_hits}
            assert got == cell[column], f"{name} at {share}: {policy}, {order} first"


@pytest.mark.parametrize("name", ["mooncake_conv_head1000", "mooncake_synth_head800"])
def test_every_reference_value(name: str) -> None:
    assert_reference(SMALL, name)


def test_reference_values_where_requests_are_larger_than_the_tier() -> None:
    assert_reference(SMALL, "agent_miniswe_c64", ["0.01"])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_every_reference_value_of_every_trace(name: str) -> None:
    small = (SMALL / f"{name}.jsonl.gz").exists()
    assert_reference(SMALL if small else LARGE, name)


# ---------------------------------------------------------------------- an independent simulator


def naive(trace: Trace, policy: str, order: str, pages: int) -> tuple[int, int]:
    """Prefix and raw hits of ``lru`` or ``fifo``, from a plain list, coldest first."""
    tier: list[int] = []
    prefix = raw = 0
    for at in range(len(trace)):
        keys, kind = trace.entry(at), trace.kinds[at]
        if kind == REMOVE:
            gone = set(keys)
            for page in range(trace.unique_pages):
                if trace.parents[page] in gone:
                    gone.add(page)
            tier = [page for page in tier if page not in gone]
            continue
        here = [key in tier for key in keys]
        if kind == REQUEST:
            prefix += [*here, False].index(False)
        for key in keys if order == "head" else reversed(keys):
            if key in tier:
                raw += kind == REQUEST
                if policy == "lru":
                    tier.remove(key)
                    tier.append(key)
                continue
            if len(tier) == pages:
                tier.pop(0)
            tier.append(key)
    return prefix, raw


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Requests over a small tree of pages, with additions and removals in between."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    builder = TraceBuilder("t", "test")
    path: list[tuple[int, ...]] = []
    for step in range(draw(st.integers(1, 60))):
        path = path[: rng.randrange(len(path) + 1)] if rng.random() < 0.7 else []
        for _ in range(rng.randrange(4)):
            path = [*path, (*(path[-1] if path else ()), rng.randrange(2))]
        known = [key for key in path if builder.knows(key)]
        if rng.random() < 0.1 and known:
            builder.add(step, [rng.choice(known)], kind=REMOVE, chained=False)
        elif rng.random() < 0.2 and known and len(known) < len(path):
            builder.add(step, path[len(known) :], kind=ADD, after=known[-1])
        else:
            builder.add(step, path, tokens=4 * len(path))
    return builder.finish(page_tokens=4)


@settings(max_examples=120, deadline=None)
@given(
    trace=traces(),
    policy=st.sampled_from(["lru", "fifo"]),
    order=st.sampled_from(["head", "tail"]),
    pages=st.integers(1, 12),
)
def test_lru_and_fifo_equal_a_simulator_of_twenty_lines(
    trace: Trace, policy: str, order: Any, pages: int
) -> None:
    cell = replay_tier(trace, policy, pages, order=order)
    assert (cell.prefix_hits, cell.raw_hits) == naive(trace, policy, order, pages)
    assert (
        cell.block_refs
        == trace.block_refs
        == sum(len(trace.entry(at)) for at in range(len(trace)) if trace.kinds[at] == REQUEST)
    )
    assert cell.hit_tokens <= cell.prompt_tokens
    assert 0 <= cell.inserted - cell.evicted <= max(pages, cell.inserted)


@settings(max_examples=60, deadline=None)
@given(trace=traces(), pages=st.integers(1, 12))
def test_nothing_beats_the_optimum_nor_room_for_everything(trace: Trace, pages: int) -> None:
    if any(trace.kinds):
        return  # a removal cuts prefixes short, which the optimum does not foresee
    best = replay_tier(trace, "opt", pages).prefix_hits
    assert best <= infinite_prefix_hits(trace)
    for policy in ("lru", "fifo", "lru:order=head"):
        assert replay_tier(trace, policy, pages).prefix_hits <= best
    everything = replay_tier(trace, "lru", max(1, trace.unique_pages))
    assert everything.prefix_hits == infinite_prefix_hits(trace)


def test_bytes_count_where_sizes_differ() -> None:
    builder = TraceBuilder("t", "csv")
    for time, (key, size) in enumerate([("a", 60), ("b", 50), ("a", 60), ("b", 50), ("b", 50)]):
        builder.add(time, [key], size=size, chained=False, tokens=1)
    trace = builder.finish(page_tokens=1)
    cell = replay_tier(trace, "lru", 2, capacity_bytes=100)
    assert (cell.prefix_hits, cell.hit_bytes, cell.ref_bytes) == (1, 50, 270)
    assert replay_tier(trace, "lru", 2, capacity_bytes=110).prefix_hits == 3


def test_leaf_first_keeps_parents() -> None:
    builder = TraceBuilder("t", "test")
    for step, path in enumerate([[1, 2, 3], [4], [1, 2, 3]]):
        builder.add(step, path)
    trace = builder.finish(page_tokens=1)
    # With the head touched first the root is the coldest page, but two others hang on it.
    plain = replay_tier(trace, "lru", 3, order="head")
    leaf = replay_tier(trace, "lru", 3, order="head", leaf_first=True)
    assert (plain.prefix_hits, leaf.prefix_hits) == (0, 2)


def test_a_tier_without_pages_is_refused() -> None:
    builder = TraceBuilder("t", "test")
    builder.add(0, [1])
    with pytest.raises(ConfigError, match="a tier of 0 pages"):
        replay_tier(builder.finish(page_tokens=1), "lru", 0)


# ---------------------------------------------------------------------- many replays


@pytest.fixture(scope="module")
def head() -> Trace:
    return read_trace(SMALL / "mooncake_synth_head800.jsonl.gz")


def outcome(cells: list[Cell]) -> list[tuple[str, int, int, int]]:
    return [(c.policy, c.pages, c.prefix_hits, c.raw_hits) for c in cells]


def test_several_processes_give_what_one_gives(head: Trace) -> None:
    jobs = [TierJob(spec, pages) for spec in ("lru", "fifo") for pages in (100, 800)]
    shares: list[float] = []
    one = run_jobs(head, jobs, workers=1, progress=shares.append)
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert outcome(run_jobs(head, jobs, workers=2)) == outcome(one)


def test_an_error_in_a_process_is_the_callers(head: Trace) -> None:
    jobs = [TierJob("lru", 5), TierJob("no-such-policy", 5)]
    with pytest.raises(ConfigError, match="'no-such-policy' is unknown"):
        run_jobs(head, jobs, workers=2)
    with pytest.raises(KvtierError, match="exit code 3 before its job"):
        run_jobs(head, [TierJob("lru", 5), Dies()], workers=2)
    with pytest.raises(ConfigError, match="workers is 0"):
        run_jobs(head, jobs, workers=0)


class Dies:
    """A job that takes its process with it."""

    weight = 1.0

    def run(self, *_: object) -> None:
        import os

        os._exit(3)


def test_traces_survive_the_way_to_another_process(head: Trace) -> None:
    assert list(pickle.loads(pickle.dumps(head)).entries()) == list(head.entries())


def test_the_headroom_is_the_gap_to_the_optimum(head: Trace) -> None:
    cell = REFERENCE["mooncake_synth_head800"]["cells"]["0.05"]
    lru, opt, fifo = (replay_tier(head, p, cell["capacity_blocks"]) for p in ("lru", "opt", "fifo"))
    (row,) = headroom(head, [lru], [opt])
    gap = cell["opt"]["prefix_hits"] - cell["lru_tail"]["prefix_hits"]
    assert row.gain_points == pytest.approx(100 * gap / head.block_refs)
    assert row.closed_by(opt) == 1.0
    assert row.closed_by(lru) == 0.0
    got = cell["fifo_tail"]["prefix_hits"] - cell["lru_tail"]["prefix_hits"]
    assert row.closed_by(fifo) == pytest.approx(got / gap)
    (none,) = headroom(head, [opt], [opt])
    assert none.closed_by(lru) is None


@settings(max_examples=25, deadline=None)
@given(trace=traces(), target=st.floats(0.01, 1.0), policy=st.sampled_from(["lru", "fifo"]))
def test_the_size_found_reaches_the_ratio_and_one_page_less_does_not(
    trace: Trace, target: float, policy: str
) -> None:
    found = find_size(trace, policy, target)
    assert found.probes < 12
    if found.pages is None:
        assert replay_tier(trace, policy, max(1, trace.unique_pages)).prefix_ratio < target
        return
    assert replay_tier(trace, policy, found.pages).prefix_ratio >= target
    if found.pages > 1:
        assert replay_tier(trace, policy, found.pages - 1).prefix_ratio < target
    for pages in range(1, found.pages) if policy == "lru" else ():
        assert replay_tier(trace, policy, pages).prefix_ratio < target


def test_a_ratio_out_of_range(head: Trace) -> None:
    for target in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="target hit ratio"):
            run_jobs(head, [FindJob("lru", target)])
