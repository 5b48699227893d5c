"""``kvtier advise``: the figures of each mix, the rules, the ranking, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.cli.main import main
from kvtier.cost.advice import Advice, Means, _residency, _wait, advise
from kvtier.cost.constants import DEFAULTS
from kvtier.cost.demand import Demand, Turn
from kvtier.cost.first_token import FirstToken
from kvtier.cost.mix import Goals, Mix, Option, mixes
from kvtier.cost.models import find_model
from kvtier.cost.prefill import prefill_seconds
from kvtier.devices.cards import find_card
from kvtier.errors import ConfigError

GiB = 2**30
LLAMA = find_model("llama-3.1-8b")
CARD = find_card("rtx-4090")
BASE = ("advise", "--model", "llama-3.1-8b", "--gpu", "rtx-4090")
LOAD = (
    "--ram", "64GiB", "--disk", "500GiB", "--prompt", "16k", "--shared", "4k", "--sessions", "200",
    "--requests", "20", "--turns", "10",
)  # fmt: skip
DEMAND = Demand(16384, 4096, sessions=200, requests=20, turns=10)


@pytest.fixture(autouse=True, scope="module")
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("none")))
        yield


def by_mix(advice: Advice) -> dict[tuple[tuple[str, ...], bool, bool], Option]:
    return {(o.mix.tiers, o.mix.reuse, o.mix.retrieval): o for o in advice.options}


# Demand and residency


def test_turns_begin_with_the_turn_before() -> None:
    turns = Demand(1000, 200, turns=4, output=50).sample(False)
    assert turns == [
        Turn(400, 200, 0), Turn(600, 200, 450), Turn(800, 200, 650), Turn(1000, 200, 850)
    ]  # fmt: skip
    assert Demand(1000, 200, turns=4, retrieved=100).sample(True) == [Turn(300, 200, 0)]
    many = Demand(1000, 200, turns=500).sample(False)
    assert len(many) == 8
    assert (many[0].before, many[-1].prompt) == (0, 1000)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"shared": 16384}, "shared"), ({"shared": -1}, "shared"), ({"sessions": 0}, "sessions"),
        ({"requests": 0}, "requests"), ({"turns": 0}, "turns"), ({"retrieved": 12289}, "retrieved"),
        ({"prompt": 0}, "prompt"), ({"output": 0}, "output"),
    ],
)  # fmt: skip
def test_wrong_demands_are_named(change: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(DEMAND, **change)


@given(st.lists(st.floats(0, 100), min_size=3, max_size=3), st.floats(0.1, 100), st.floats(0, 100))
def test_residency_is_that_of_inclusive_tiers(held: list[float], size: float, after: float) -> None:
    """Against counting a thousand equal parts, each in the first tier large enough to reach it."""
    names = ("vram", "host", "disk")
    got = _residency(dict(zip(names, held, strict=True)), size, after)
    counted = dict.fromkeys((*names, "nowhere"), 0)
    for part in range(1000):
        at = after + size * (part + 0.5) / 1000
        place = next((n for n, room in zip(names, held, strict=True) if at <= room), "nowhere")
        counted[place] += 1
    for place, share in got.items():
        assert share == pytest.approx(counted[place] / 1000, abs=2e-3)


def test_known_tokens_are_loaded_only_where_that_is_sooner() -> None:
    first = FirstToken(LLAMA, CARD, DEFAULTS)
    turn = Turn(8192, 4096, 8000)
    anew = prefill_seconds(LLAMA, CARD, 8192, DEFAULTS)
    assert first.way(turn, "nowhere", "vram").seconds == anew  # no page without those before it
    warm = first.way(turn, "vram", "vram")
    assert warm.found == (("vram", 4096), ("vram", 3904))
    assert warm.seconds == prefill_seconds(LLAMA, CARD, 192, DEFAULTS, before=8000)
    host, disk = first.way(turn, "vram", "host"), first.way(turn, "vram", "disk")
    assert warm.seconds < host.seconds < disk.seconds < anew
    assert (host.disk_s, warm.link_s) == (0, 0)
    slow = FirstToken(LLAMA, CARD, DEFAULTS.with_value("disk_bw", 1e8))
    assert slow.way(turn, "disk", "disk").seconds == anew
    assert slow.way(turn, "vram", "disk").found == (("vram", 4096),)


def test_waiting_is_that_of_a_queue() -> None:
    """M/D/1: at half load a request waits half a service time."""
    assert _wait(0.5, 1.0) == pytest.approx(0.5)
    assert _wait(1.0, 1.0) == math.inf


# The figures


def test_a_mix_is_added_up_right() -> None:
    """No queue to speak of, everything in VRAM, one turn: a prefill, and steps of one sequence."""
    demand = Demand(4096, sessions=1, requests=0.001, output=100)
    option = by_mix(advise(LLAMA, Means(CARD), demand))[((), False, False)]
    prefill = prefill_seconds(LLAMA, CARD, 4096, DEFAULTS)
    assert option.ttft_s == pytest.approx(prefill, rel=1e-3)
    assert option.alone_s == option.last_s == prefill
    assert option.rate == pytest.approx(60 / (prefill + 100 / option.tps), rel=1e-3)
    assert (option.hit_share, option.batch) == (0, 1)


def test_the_prefix_is_kept_once_or_for_each() -> None:
    found = by_mix(advise(LLAMA, Means(CARD, 64 * GiB, 500 * GiB), DEMAND))
    once, each = (
        found[(("vram", "host", "disk"), True, False)],
        found[(("vram", "host", "disk"), False, False)],
    )
    shared = LLAMA.sequence_bytes(4096, "bf16")
    assert each.tiers["disk"].needed - once.tiers["disk"].needed == pytest.approx(199 * shared)
    assert once.hit_share > each.hit_share
    prefix = found[((), True, False)]
    assert prefix.hit_share == pytest.approx(4096 * 8 / sum(t.prompt for t in DEMAND.sample(False)))
    for one in found.values():
        assert sum(one.found.values()) == pytest.approx(1)


def test_what_a_tier_must_hold_is_compared_with_what_there_is() -> None:
    found = by_mix(advise(LLAMA, Means(CARD, 64 * GiB), DEMAND))
    uses = found[(("vram", "host"), True, False)].tiers
    assert not uses["host"].met
    assert uses["host"].used == 64 * GiB
    assert uses["vram"].met
    assert uses["disk"].needed == 0
    roomy = by_mix(advise(LLAMA, Means(CARD, 640 * GiB), DEMAND))[(("vram", "host"), True, False)]
    assert roomy.tiers["host"].met
    assert roomy.found["nowhere"] < 0.15


def test_a_card_that_is_too_small_puts_part_in_ram_or_says_so() -> None:
    small = find_card("rtx-4060-ti-8gb")
    demand = Demand(60_000, output=100, requests=0.01)
    without = advise(LLAMA, Means(small), demand).options[-1]
    assert not without.possible
    assert "must be in host RAM" in without.unmet[0]
    within = by_mix(advise(LLAMA, Means(small, 32 * GiB), demand))[((), False, False)]
    assert within.possible
    assert "off the card" in within.notes[0]
    assert within.tiers["host"].used > 0


# Rules


def test_a_host_tier_no_larger_than_the_vram_tier_adds_only_copies() -> None:
    means = Means(find_card("h100-sxm5-80gb"), 2 * GiB)
    demand = Demand(8192, 1024, sessions=200, requests=5, turns=10)
    found = by_mix(advise(LLAMA, means, demand))
    vram, host = found[(("vram",), True, False)], found[(("vram", "host"), True, False)]
    assert any("adds only copies" in note for note in host.notes)
    assert host.alone_s == vram.alone_s
    assert not host.worth
    assert host.rank > vram.rank


def test_a_tier_must_gain_something() -> None:
    found = by_mix(advise(LLAMA, Means(CARD, 64 * GiB), replace(DEMAND, turns=1)))
    host = found[(("vram", "host"), True, False)]
    assert not host.worth
    assert any("one turn" in note for note in host.notes)
    assert any("gains less than 5%" in note for note in host.notes)


def test_a_slow_disk_is_warned_about_and_not_waited_for() -> None:
    slow = DEFAULTS.with_value("disk_bw", 0.5e9)
    card = find_card("h100-sxm5-80gb")
    advice = advise(LLAMA, Means(card, 8 * GiB, 900 * GiB), DEMAND, constants=slow)
    (warning,) = advice.warnings
    assert (warning.kind, warning.link) == ("ttft", "disk")
    found = by_mix(advice)
    with_disk, without = (
        found[(("vram", "host", "disk"), True, False)],
        found[(("vram", "host"), True, False)],
    )
    assert with_disk.alone_s <= without.alone_s
    assert advise(LLAMA, Means(card, 8 * GiB), DEMAND).warnings == []


def test_gains_of_batches_are_kept_apart() -> None:
    """Retrieval reads less at the same batch, and lets more in: two factors. Caching changes neither."""
    found = by_mix(advise(LLAMA, Means(CARD, 64 * GiB), DEMAND))
    assert found[(("vram", "host"), True, False)].gain == {"matched_batch": 1, "from_batch": 1}
    gain = found[((), True, True)].gain
    assert gain["matched_batch"] > 1.2
    assert gain["from_batch"] > 1.2


def test_missed_goals_are_named() -> None:
    advice = advise(LLAMA, Means(CARD), replace(DEMAND, requests=600), Goals(0.01, 500))
    for option in advice.options:
        assert not option.met
        words = "; ".join(option.unmet)
        for part in ("requests a minute", "(goal 0.01 s)", "(goal 500)"):
            assert part in words
    assert advice.options[0].ttft_s is None
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="ttft_s"):
            Goals(ttft_s=wrong)


def test_what_meets_the_goals_comes_first_and_exact_before_inexact() -> None:
    options = advise(LLAMA, Means(CARD, 64 * GiB, 500 * GiB), DEMAND, Goals(1.0, 20)).options
    missed = [len(o.unmet) for o in options]
    assert missed == sorted(missed)
    assert options[0].met
    for count in set(missed):
        worth = [o.worth for o in options if len(o.unmet) == count]
        assert worth == sorted(worth, reverse=True)
    assert not all(o.worth for o in options)
    met = [o.mix.retrieval for o in options if o.met and o.worth]
    assert met == sorted(met)


def test_each_mix_has_a_simpler_one() -> None:
    found = set(mixes(DEMAND, True, True))
    assert len(found) == 10
    assert {m.simpler() for m in found} - {None} <= found
    assert Mix((), False, False).simpler() is None
    assert len(set(mixes(replace(DEMAND, shared=0), False, True))) == 4


def test_a_card_without_flops_is_refused() -> None:
    with pytest.raises(ConfigError, match="no FLOPS"):
        advise(LLAMA, Means(replace(CARD, bf16_flops=None)), DEMAND)


# Monotonicity

MODELS = st.sampled_from(["llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "qwen3-30b-a3b"]).map(
    find_model
)
CARDS = st.sampled_from(["rtx-4090", "rtx-4060-ti-16gb", "h100-sxm5-80gb"]).map(find_card)
PROPERTY = settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    prompt = draw(st.integers(100, 40_000))
    return Demand(
        prompt,
        draw(st.integers(0, prompt - 50)),
        sessions=draw(st.integers(1, 500)),
        requests=draw(st.floats(0.1, 60)),
        turns=draw(st.integers(1, 30)),
        output=draw(st.integers(1, 500)),
    )


def figures(option: Option) -> tuple[float, float, float]:
    """Smaller is better."""
    return (
        math.inf if option.ttft_s is None else option.ttft_s,
        option.alone_s,
        -option.rate,
    )


def no_worse(better: Option, worse: Option) -> None:
    for name, one, other in zip(
        ("ttft", "alone", "rate"), figures(better), figures(worse), strict=True
    ):
        assert one <= other + 1e-6 * abs(other if other != math.inf else 1) + 1e-9, (
            name,
            better,
            worse,
        )


@PROPERTY
@given(MODELS, CARDS, demands(), st.integers(0, 200), st.integers(0, 200), st.integers(0, 500))
def test_more_ram_is_never_worse(
    model: object, card: object, demand: Demand, ram: int, more: int, disk: int
) -> None:
    """Of each mix under load, and of the best first token of all."""
    less = by_mix(advise(model, Means(card, ram * GiB, disk * GiB), demand))  # type: ignore[arg-type]
    rich = by_mix(advise(model, Means(card, (ram + more) * GiB, disk * GiB), demand))  # type: ignore[arg-type]
    for key, option in less.items():
        if key in rich:
            no_worse(rich[key], option)
    assert (
        min(figures(o)[0] for o in rich.values())
        <= min(figures(o)[0] for o in less.values()) + 1e-6
    )


@PROPERTY
@example(
    find_model("qwen3-8b"), find_card("rtx-4090"), Demand(9717, 1497, 16, 14.0, 1, 272), 196, 0
)  # the soonest under load is not at the same batch
@example(
    find_model("gemma-3-12b"), find_card("rtx-4090"), Demand(1593, 531, 87, 28.0, 9, 262), 60, 25
)  # most is sustained between two powers of two
@given(MODELS, CARDS, demands(), st.integers(1, 20_000), st.integers(0, 100))
def test_a_shorter_prompt_is_never_slower(
    model: object, card: object, demand: Demand, fewer: int, ram: int
) -> None:
    short = replace(demand, prompt=max(demand.shared + 2, demand.prompt - fewer))
    means = Means(card, ram * GiB)  # type: ignore[arg-type]
    long_, short_ = by_mix(advise(model, means, demand)), by_mix(advise(model, means, short))  # type: ignore[arg-type]
    for key, option in long_.items():
        if option.possible and key in short_:
            no_worse(short_[key], option)


@PROPERTY
@given(MODELS, CARDS, demands(), st.integers(0, 100))
def test_more_requests_are_never_sooner(
    model: object, card: object, demand: Demand, ram: int
) -> None:
    means = Means(card, ram * GiB)  # type: ignore[arg-type]
    calm, busy = (
        by_mix(advise(model, means, demand)),
        by_mix(advise(model, means, replace(demand, requests=2 * demand.requests))),
    )  # type: ignore[arg-type]
    for key, option in calm.items():
        assert figures(option)[0] <= figures(busy[key])[0] + 1e-9
        assert 0 <= option.hit_share <= 1
        assert option.rank[0] == (not option.possible)


# The command


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict:  # type: ignore[type-arg]
    assert main([*args, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)  # type: ignore[no-any-return]


def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, *BASE, *LOAD, "--ttft", "1", "--rate", "20")
    assert set(data) == {
        "model", "gpu", "budget", "workload", "goals", "met", "options", "hosted", "warnings", "basis",
        "profile", "units",
    }  # fmt: skip
    assert data["met"]
    assert data["goals"] == {"requests_per_minute": 20, "ttft_s": 1, "tps": 20}
    for one in data["options"]:
        assert set(one) == {
            "name", "tiers", "prefix_reuse", "retrieval", "exact", "possible", "met", "worth", "ttft_s",
            "ttft_alone_s", "ttft_last_turn_s", "tps", "requests_per_minute", "batch", "hit_share",
            "found", "bytes", "decode_gain", "unmet", "notes",
        }  # fmt: skip
        assert set(one["bytes"]) == {"vram", "host", "disk"}
    assert data["hosted"]["break_even_rereads"] == 1
    assert data["hosted"]["terms"]["minimum"] == 1024
    assert "November 2026" in data["hosted"]["terms"]["source"]
    assert {c["basis"] for c in data["basis"]["constants"]} == {"table"}


def test_people_get_a_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*BASE, *LOAD, "--requests", "40", "--ttft", "1", "--rate", "20"]) == 0
    out = capsys.readouterr().out
    for words in (
        "prefix, VRAM+RAM+disk", "grows", "best: prefix reuse + sessions in VRAM, RAM, disk",
        "misses: sustains", "not exact", "hosted API", "misses of location", "from a table", "largest batch",
    ):  # fmt: skip
        assert words in out
    assert "…" not in out
    assert main([*BASE, *LOAD, "--requests", "4000"]) == 0
    assert "nothing meets all goals" in capsys.readouterr().out


def test_terms_of_another_api(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ("--cache-minimum", "4096", "--cache-step", "1", "--cache-discount", "0.5", "--cache-surcharge", "1", "--machine-rate", "2")  # fmt: skip
    hosted = answer(capsys, *BASE, "--prompt", "8k", "--shared", "2k", "--turns", "2", *terms)[
        "hosted"
    ]
    assert hosted["break_even_rereads"] == 3
    assert hosted["best_cached_tokens"] == 2048 + 3072 + 256
    assert (
        answer(capsys, *BASE, "--prompt", "8k", "--cache-discount", "0")["hosted"][
            "break_even_rereads"
        ]
        is None
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", "0"), "--prompt"),
        ((), "--prompt is missing"),
        (("--prompt", "1k", "--shared", "1k"), "--shared"),
        (("--prompt", "1k", "--retrieved", "2k"), "--retrieved"),
        (("--prompt", "1k", "--ram", "-1GB"), "--ram"),
        (("--prompt", "1k", "--disk", "much"), "--disk"),
        (("--prompt", "1k", "--requests", "0"), "--requests"),
        (("--prompt", "1k", "--sessions", "1.5"), "--sessions"),
        (("--prompt", "1k", "--turns", "0"), "--turns"),
        (("--prompt", "1k", "--ttft", "-1"), "--ttft"),
        (("--prompt", "1k", "--rate", "nan"), "--rate"),
        (("--prompt", "1k", "--kv-dtype", "fp7"), "--kv-dtype"),
        (("--prompt", "1k", "--cache-discount", "1.5"), "--cache-discount"),
        (("--prompt", "1k", "--cache-step", "0"), "--cache-step"),
        (("--prompt", "1k", "--machine-rate", "0"), "--machine-rate"),
        (("--prompt", "1k", "--vram", "0"), "--vram"),
        (("--prompt", "1k", "--promt", "1k"), "did you mean --prompt?"),
        (("--prompt", "1k", "--profile", "/nowhere"), "--profile"),
    ],
)
def test_wrong_options(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    assert main([*BASE, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvtier advise: error: ")
    assert words in err


VALUES = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "2",
        "1k",
        "16k",
        "1e9",
        "0.5",
        "50%",
        "8GiB",
        "nan",
        "inf",
        "",
        " ",
        "x",
        "-2GB",
        "999999999999",
    ]
)
OPTIONS = (
    "--prompt", "--shared", "--sessions", "--requests", "--turns", "--output", "--retrieved", "--ttft", "--rate",
    "--ram", "--disk", "--vram", "--kv-dtype", "--bits", "--cache-minimum", "--cache-step", "--cache-discount",
    "--cache-surcharge", "--machine-rate", "--cache-idle",
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=4), st.booleans())
def test_no_options_give_a_traceback(
    capsys: pytest.CaptureFixture[str], chosen: dict[str, str], as_json: bool
) -> None:
    args = [f"{name}={value}" for name, value in chosen.items()]
    prompt = () if "--prompt" in chosen else ("--prompt", "2k")
    status = main([*BASE, *prompt, *args, *(("--json",) if as_json else ())])
    out, err = capsys.readouterr()
    assert status in (0, 2)
    if status == 2:
        assert (out, err.count("\n")) == ("", 1)
    elif as_json:
        json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
