"""The prompt caches of hosted APIs: their arithmetic, and what a stream of requests finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cost.demand import Demand
from kvtier.cost.hosted import hosted
from kvtier.cost.prompt_cache import PromptCache, cached_tokens
from kvtier.errors import ConfigError

COUNTS = st.integers(0, 1 << 20)


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [(0, 0), (1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (2006, 1920)],
)
def test_published_examples(prompt: int, cached: int) -> None:
    """OpenAI's guide: from 1,024 tokens on, in steps of 128."""
    assert cached_tokens(prompt) == cached


@given(COUNTS, st.integers(0, 5000), st.integers(1, 3000))
def test_it_is_the_largest_step_that_is_not_more(prompt: int, minimum: int, step: int) -> None:
    got = cached_tokens(prompt, minimum, step)
    steps = [n for n in (got, got + step) if minimum <= n <= prompt and (n - minimum) % step == 0]
    if prompt < minimum:
        assert got == 0
    else:
        assert steps == [got]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prompt_tokens", (-1, 1024, 128)),
        ("prompt_tokens", (1.5, 1024, 128)),
        ("prompt_tokens", (float("nan"), 1024, 128)),
        ("prompt_tokens", (float("inf"), 1024, 128)),
        ("prompt_tokens", (True, 1024, 128)),
        ("minimum", (1, -1, 128)),
        ("step", (1, 1024, 0)),
    ],
)
def test_wrong_numbers_are_named(name: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=name):
        cached_tokens(*arguments)


def test_cost_of_a_hit_share() -> None:
    assert PromptCache().cost_ratio(0.5) == pytest.approx(0.55)  # 1 - 0.9 h
    assert PromptCache(discount=0).cost_ratio(1) == 1


@given(st.integers(0, 400), st.integers(0, 100))
def test_break_even_is_the_first_reread_that_pays(surcharge: int, discount: int) -> None:
    cache = PromptCache(write_surcharge=surcharge / 100, discount=discount / 100)
    paying = [k for k in range(500) if 100 + surcharge + k * (100 - discount) < 100 * (1 + k)]
    assert cache.break_even_rereads == (paying[0] if paying else None)


def test_break_even_of_the_defaults() -> None:
    assert PromptCache().break_even_rereads == 1  # 1.25 + 0.1 k < 1 + k


@given(st.integers(1, 200), st.integers(1, 40))
def test_overflow_goes_to_more_machines(requests: int, capacity: int) -> None:
    got = PromptCache(machine_rate=capacity).machines(requests)
    assert (got - 1) * capacity < requests <= got * capacity


def simulated(cache: PromptCache, requests: int, seed: int) -> float:
    """Share of misses among the requests of one keeping period, sent to random machines."""
    chosen = random.Random(seed)
    seen: set[int] = set()
    misses = 0
    machines = -(-requests // round(cache.machine_rate * cache.keep_minutes))
    for _ in range(requests):
        at = chosen.randrange(max(1, machines))
        misses += at not in seen
        seen.add(at)
    return misses / requests


@pytest.mark.parametrize("rate", [2, 15, 16, 100])
def test_first_touch_on_each_machine_misses(rate: int) -> None:
    cache = PromptCache()
    got = cache.outlook(8192, 8192, rate).miss_share
    assert got == pytest.approx(simulated(cache, round(rate * cache.keep_minutes), rate))


def test_what_is_forgotten_is_written_each_time() -> None:
    cache = PromptCache(idle_minutes=5)
    often, seldom = cache.outlook(4096, 4096, 1), cache.outlook(4096, 4096, 0.1)
    assert (often.idle, seldom.idle) == (False, True)
    assert seldom.miss_share == 1
    assert seldom.cost_ratio == pytest.approx(1.25)  # worse than no cache
    assert often.cost_ratio < 0.2


@given(COUNTS, st.floats(0, 1), st.floats(0.01, 500), st.integers(1, 50))
def test_bounds(prompt: int, part: float, rate: float, prefixes: int) -> None:
    cache = PromptCache()
    got = cache.outlook(prompt, int(part * prompt), rate, prefixes)
    assert 0 <= got.hit_share <= 1
    assert 0.1 - 1e-9 <= got.cost_ratio <= 1.25 + 1e-9
    assert got.cached_tokens <= prompt


def test_a_conversation_is_found_again_unless_it_goes_elsewhere() -> None:
    """Sessions that begin alike go to the same machines; with three of them, a session's next turn
    finds it in one case of three."""
    calm = hosted(Demand(16384, 4096, sessions=10, requests=10, turns=10))
    busy = hosted(Demand(16384, 4096, sessions=40, requests=40, turns=10))
    slow = hosted(Demand(16384, 4096, sessions=200, requests=10, turns=10))
    assert (calm.machines, busy.machines) == (1, 3)
    assert busy.location_misses == pytest.approx(2 / 3)
    assert calm.hit_share > busy.hit_share > slow.hit_share
    assert slow.idle
    assert calm.cost_ratio < busy.cost_ratio
    assert 1 - 0.9 * calm.hit_share <= calm.cost_ratio <= 1.26 - 0.9 * calm.hit_share
