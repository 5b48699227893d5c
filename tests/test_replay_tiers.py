"""Several tiers, and several machines: the books add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay import traces

from kvtier.errors import ConfigError
from kvtier.replay.affinity import conversations
from kvtier.replay.cost import Predictor, Served
from kvtier.replay.machines import ROUTERS, Router, replay_machines
from kvtier.replay.tier import replay_tier
from kvtier.replay.tiers import LINKS, replay_tiers
from kvtier.trace.read import read_trace
from kvtier.trace.trace import Trace, TraceBuilder

HEAD = Path(__file__).parent / "data" / "traces" / "mooncake_synth_head800.jsonl.gz"
PAGE = 1000
POLICIES = st.sampled_from(["lru", "fifo", "arc", "mq", "s3fifo", "gdsf", "lru:order=head"])
WRITES = st.sampled_from(["write_back", "write_through"])


@settings(max_examples=120, deadline=None)
@given(
    trace=traces(),
    policy=POLICIES,
    pages=st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 8)).filter(any),
    host_write=WRITES,
    disk_write=WRITES,
)
def test_the_books_of_all_tiers(
    trace: Trace, policy: str, pages: tuple[int, int, int], host_write: str, disk_write: str
) -> None:
    sizes = {t: n * PAGE for t, n in zip(("vram", "host", "disk"), pages, strict=True)}
    cell = replay_tiers(
        trace, policy, sizes, PAGE, host_write=host_write, disk_write=disk_write, check=True
    )
    assert cell.block_refs == trace.block_refs
    assert cell.prefix_hits + cell.misses == cell.block_refs
    assert cell.raw_hits >= cell.prefix_hits == sum(tier.hits for tier in cell.tiers.values())
    assert set(cell.tiers) == {t for t, size in sizes.items() if size}
    came = {tier: result.inserted for tier, result in cell.tiers.items()}
    moved = {link: cell.link_bytes[link] // PAGE for link in LINKS}
    assert all(cell.link_bytes[link] % PAGE == 0 for link in LINKS)
    for result in cell.tiers.values():
        assert result.resident <= result.pages
        assert result.inserted - result.evicted - result.removed == result.resident
        assert result.hit_bytes == result.hits * PAGE
    # Every page that is in a tier below the first came over a link, and over no other way.
    first = next(iter(cell.tiers))
    if "disk" in came and first != "disk":
        assert came["disk"] == moved["host->disk"]
    if "host" in came and first != "host":
        assert came["host"] <= moved["vram->host"] + moved["disk->host"]
    assert sum(1 for _ in cell.served.hits) == trace.requests
    assert sum(cell.served.hits) == cell.prefix_hits
    assert 0 <= cell.hit_tokens <= cell.prompt_tokens


def naive_tiers(trace: Trace, vram: int, host: int) -> tuple[int, int]:
    """Hits in VRAM and host RAM for ``fifo`` in both, written back: what was evicted above moves down, what
    comes back up stays below as well. Requests of single pages only."""
    above: list[int] = []
    below: list[int] = []
    hits = [0, 0]
    for keys in trace.entries():
        for key in keys:
            if key in above:
                hits[0] += 1
                continue
            if key in below:
                hits[1] += 1
                if len(above) < vram:
                    above.append(key)
                continue
            if len(above) == vram:
                gone = above.pop(0)
                if gone not in below:
                    if len(below) == host:
                        below.pop(0)
                    below.append(gone)
            above.append(key)
    return hits[0], hits[1]


@settings(max_examples=60, deadline=None)
@given(
    pages=st.lists(st.integers(0, 8), min_size=1, max_size=60),
    vram=st.integers(1, 4),
    host=st.integers(1, 4),
)
def test_two_tiers_of_single_pages_equal_a_simulator_of_two_lists(
    pages: list[int], vram: int, host: int
) -> None:
    builder = TraceBuilder("t", "test")
    for time, page in enumerate(pages):
        builder.add(time, [page])
    trace = builder.finish(page_tokens=1)
    cell = replay_tiers(trace, "fifo", {"vram": vram * PAGE, "host": host * PAGE}, PAGE, check=True)
    assert (cell.tiers["vram"].hits, cell.tiers["host"].hits) == naive_tiers(trace, vram, host)


def test_one_tier_equals_the_plain_replay_while_requests_fit() -> None:
    trace = read_trace(HEAD)
    most = max(len(pages) for pages in trace.entries())
    for pages in (most, 500, 2000):
        if pages >= most:
            many = replay_tiers(trace, "lru", {"vram": pages * PAGE}, PAGE)
            assert many.prefix_hits == replay_tier(trace, "lru", pages).prefix_hits
            assert many.refused == 0


def test_a_request_larger_than_all_tiers_keeps_its_first_pages() -> None:
    builder = TraceBuilder("t", "test")
    for time in range(3):
        builder.add(time, list(range(10)))
    trace = builder.finish(page_tokens=1)
    cell = replay_tiers(trace, "lru", {"vram": 4 * PAGE}, PAGE, check=True)
    assert (cell.prefix_hits, cell.refused) == (8, 18)
    spilled = replay_tiers(trace, "lru", {"vram": 4 * PAGE, "disk": 5 * PAGE}, PAGE, check=True)
    assert spilled.refused > 0
    enough = replay_tiers(trace, "lru", {"vram": 4 * PAGE, "host": 10 * PAGE}, PAGE, check=True)
    assert (enough.prefix_hits, enough.refused) == (20, 0)


def test_sizes_and_policies_that_make_no_sense() -> None:
    trace = read_trace(HEAD)
    with pytest.raises(ConfigError, match="host is 999 bytes, but one page"):
        replay_tiers(trace, "lru", {"vram": 5000, "host": 999}, PAGE)
    with pytest.raises(ConfigError, match="no tier has a size"):
        replay_tiers(trace, "lru", {"vram": 0}, PAGE)
    with pytest.raises(ConfigError, match="an optimum for one tier"):
        replay_tiers(trace, "opt", {"vram": 5000}, PAGE)


# ---------------------------------------------------------------------- predicted times


def test_hits_shorten_the_first_token_and_cold_pages_lengthen_the_rest() -> None:
    predictor = Predictor("llama-3.1-8b", "rtx-4090")
    assert predictor.page_bytes(1) == 131072  # 32 layers, 8 heads of 128, K and V, two bytes

    def times(**served: int) -> object:
        one = Served()
        one.add(0, **served)
        return predictor.times(one, [4096], 512)

    nothing, host, vram = times(hits=0), times(hits=4, host=4), times(hits=4)
    assert nothing.ttft_mean_s == nothing.recompute_mean_s  # type: ignore[attr-defined]
    assert nothing.ttft_mean_s > host.ttft_mean_s > vram.ttft_mean_s  # type: ignore[attr-defined]
    assert times(hits=4, disk=4).ttft_mean_s > host.ttft_mean_s  # type: ignore[attr-defined]
    assert predictor.decode_s(8e9, 0, 0) < predictor.decode_s(0, 8e9, 120)
    # 2 FLOPs a weight and token, 4 a query element, key and layer, at 60 to 100 % of 165 Tflop/s
    flops = 2 * predictor.model.params * 4096 + 4 * 32 * 4096 * 4096 * 4097 / 2
    best = flops / (predictor.card.bf16_flops or 0)
    assert best < predictor.prefill_s(4096, 4096) < best / 0.6
    half = predictor.prefill_s(2048, 4096)
    assert predictor.prefill_s(2048, 2048) < half < predictor.prefill_s(4096, 4096)


def test_a_card_whose_peak_is_not_known_and_a_dtype_that_is_not() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        Predictor("llama-3.1-8b", "rtx-4090", kv_dtype="int77")
    with pytest.raises(ConfigError, match="weight_bits is 0"):
        Predictor("llama-3.1-8b", "rtx-4090", weight_bits=0)


# ---------------------------------------------------------------------- several machines


@settings(max_examples=40, deadline=None)
@given(trace=traces(), policy=POLICIES, pages=st.integers(1, 10), router=st.sampled_from(ROUTERS))
def test_one_machine_is_the_plain_replay(
    trace: Trace, policy: str, pages: int, router: str
) -> None:
    one = replay_machines(trace, policy, pages, machines=1, router=router)
    plain = replay_tier(trace, policy, pages)
    assert (one.prefix_hits, one.raw_hits) == (plain.prefix_hits, plain.raw_hits)
    assert (one.shared_hits, one.location_misses, one.overflowed) == (0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(
    trace=traces(),
    machines=st.integers(1, 4),
    router=st.sampled_from(ROUTERS),
    overflow=st.none() | st.floats(0.5, 5),
    shared=st.sampled_from([0, 3, 100]),
)
def test_every_reference_is_a_hit_or_a_miss_for_one_reason(
    trace: Trace, machines: int, router: str, overflow: float | None, shared: int
) -> None:
    cell = replay_machines(
        trace, "lru", 4, machines=machines, router=router, overflow_per_min=overflow,
        shared_pages=shared,
    )  # fmt: skip
    parts = cell.local_hits, cell.shared_hits, cell.location_misses, cell.content_misses
    assert min(parts) >= 0
    assert sum(parts) == cell.block_refs
    assert cell.prefix_hits == cell.local_hits + cell.shared_hits
    assert sum(cell.by_machine) == trace.requests
    assert shared or not cell.shared_hits
    if shared >= trace.unique_pages and not any(trace.kinds):
        assert cell.location_misses == 0, "what any machine had is in the shared tier"


def test_round_robin_misses_for_location_what_hashing_finds() -> None:
    builder = TraceBuilder("t", "test")
    for time in range(40):
        builder.add(time, [(time % 3, n) for n in range(4)], session=time % 3, tokens=4)
    trace = builder.finish(page_tokens=1)
    hashed = replay_machines(trace, "lru", 100, machines=4, router="hash")
    spread = replay_machines(trace, "lru", 100, machines=4, router="round-robin")
    assert (hashed.location_misses, hashed.content_misses) == (0, 12)
    assert spread.content_misses == 12
    assert (
        spread.location_misses == 3 * 3 * 4
    )  # each of three sessions is new to three machines more


def test_conversations_are_inferred_where_no_session_is_known() -> None:
    builder = TraceBuilder("t", "test")
    asked = [
        [0, 1, 2],  # one conversation; all begin with page 0
        [0, 5, 6],  # another
        [0, 1, 2, 3],  # the first goes on
        [0, 5, 7, 8],  # the second goes on: its last page was partial
        [0],  # knows only what all know
        [0, 9, 1],  # shares only what all share
    ]
    for time, pages in enumerate(asked):
        builder.add(time, pages)
    talks = list(conversations(builder.finish(page_tokens=1)))
    assert talks[2] == talks[0]
    assert talks[3] == talks[1]
    assert len({talks[0], talks[1], talks[4], talks[5]}) == 4


def test_hashing_spreads_requests_that_share_a_system_prompt() -> None:
    cell = replay_machines(read_trace(HEAD), "lru", 100, machines=4, router="hash")
    assert min(cell.by_machine) > 100


def test_routers() -> None:
    even = Router("round-robin", 3)
    assert [even.choose(0.0, 7, 1) for _ in range(4)] == [0, 1, 2, 0]
    least = Router("least-loaded", 2)
    assert [least.choose(t, 7, tokens) for t, tokens in ((0, 100), (1, 10), (2, 10), (61, 1))] == [
        0, 1, 1, 0,
    ]  # fmt: skip
    hashed = Router("hash", 4)
    homes = {hashed.choose(0.0, session, 1) for session in range(50)}
    assert homes == {0, 1, 2, 3}
    assert len({Router("hash", 4).choose(0.0, 9, 1) for _ in range(5)}) == 1
    tight = Router("hash", 2, overflow_per_min=2)
    home = tight.choose(0.0, 1, 5)
    assert [tight.choose(t, 1, 5) for t in (1.0, 2.0, 60.0)] == [home, 1 - home, home]
    assert tight.overflowed == 1


def test_numbers_of_machines_that_make_no_sense() -> None:
    trace = read_trace(HEAD)
    for options, reason in (
        ({"machines": 0}, "0 machines"),
        ({"machines": 2, "router": "dns"}, "router 'dns' is unknown"),
        ({"machines": 2, "overflow_per_min": 0.0}, "overflow is 0.0"),
        ({"machines": 2, "shared_pages": -1}, "at least 1 and 0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            replay_machines(trace, "lru", 5, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="knows the future"):
        replay_machines(trace, "opt", 5, machines=2)
