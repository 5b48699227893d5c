"""``kvtier stress --mode``: the modes of attention under load, their content, their times, and ``auto``."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import kvtier.stress.forward as stress_forward
from kvtier.cli.main import main
from kvtier.cost.budget import memory_budget
from kvtier.cost.constants import DEFAULTS
from kvtier.cost.models import find_model
from kvtier.devices.spec import parse_card
from kvtier.errors import ConfigError
from kvtier.stress.load import run_context
from kvtier.stress.plan import LoadPlan
from kvtier.stress.report import ContextResult
from kvtier.stress.spec import Duration, LoadSpec

CONTEXT, PAGE = 2048, 64
SELECT = "select:quest,budget=20%,dense=none"
MODES = ("exact-stream", "exact-split", SELECT, SELECT + ",scope=layer", "select:arkbox,budget=20%,dense=0",
         "select:window,budget=4pages,dense=none", "select:quest,budget=20%,prefetch=hidden")  # fmt: skip


def plan(
    mode: str,
    *,
    hot: float = 0.5,
    model: str = "llama-3.1-8b",
    link: str = "pinned",
    **other: object,
) -> LoadPlan:
    """A load of which a share of the pages is in VRAM."""
    values: dict[str, object] = {
        "duration": Duration(9, None),
        "page_tokens": PAGE,
        "policy": "mass",
        **other,
    }
    spec = LoadSpec(
        parse_card(f"rtx-4060-ti-16gb,link={link}"), find_model(model), (CONTEXT,), mode=mode, vram=1 << 44, **values  # type: ignore[arg-type]
    )  # fmt: skip
    roomy = LoadPlan(spec, CONTEXT)
    pages = round(roomy.pages * hot) + spec.sessions * 2
    return LoadPlan(
        replace(spec, vram=roomy.vram - roomy.tier + pages * roomy.layout.page_bytes), CONTEXT
    )


def run(mode: str, **other: object) -> ContextResult:
    result = run_context(plan(mode, **other))  # type: ignore[arg-type]
    assert result.ok, (result.error, result.books)
    return result


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reads_what_was_written(mode: str) -> None:
    result = run(mode)
    assert result.cold_pages > 0
    assert result.checked_bytes > 0
    assert result.mode == mode
    assert result.ratio == pytest.approx(1.0, abs=0.12)
    assert bool(result.selected) == bool(result.vram.get("summaries")) == mode.startswith("select")


@pytest.mark.parametrize("mode", ["exact-split", SELECT, SELECT + ",scope=layer"])
def test_wrong_bytes_are_found_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stress_forward.Compass.values

    def lying(self, part, layer, numbers, start, stop):  # type: ignore[no-untyped-def]
        made = honest(self, part, layer, numbers, start, stop)
        if stop == CONTEXT + 1 and start == 0:
            made[..., 3, 0] += 1
        return made

    monkeypatch.setattr(stress_forward.Compass, "values", lying)
    result = run_context(plan(mode, duration=Duration(3, None)))
    assert "wrong bytes" in result.error
    assert result.books == []


def test_nothing_crosses_the_link_where_the_processor_attends() -> None:
    stream, split, select = (
        run(mode, duration=Duration(9, None)) for mode in ("exact-stream", "exact-split", SELECT)
    )
    assert split.moved["host->vram"] == 0
    assert 0 < select.moved["host->vram"] < stream.moved["host->vram"] / 2


@pytest.mark.parametrize("link", ["pageable", "fallback"])
@pytest.mark.parametrize("mode", ["exact-split", SELECT])
def test_emulated_times_agree_on_other_links(mode: str, link: str) -> None:
    assert run(mode, link=link).ratio == pytest.approx(1.0, abs=0.12)


def test_several_sequences_and_windows() -> None:
    few = Duration(3, None)
    assert run("exact-split", sessions=2, duration=few).ratio == pytest.approx(1.0, abs=0.1)
    assert run(SELECT, sessions=2).ratio == pytest.approx(1.0, abs=0.15)
    assert run("exact-split", model="gemma-3-12b", duration=few).checked_bytes > 0


def test_the_processor_works_beside_the_card() -> None:
    """With a processor as fast as what the card reads meanwhile, half of the KV on it costs nothing."""
    fast = DEFAULTS.measured({"cpu_attention_bw": 1e12, "handover_s": 1e-6})
    few = Duration(4, None)
    half = run("exact-split", constants=fast, duration=few)
    whole = run("exact-split", hot=1.0, duration=few)
    assert half.emulated_tps == pytest.approx(whole.emulated_tps, rel=0.05)
    slow = run("exact-split", constants=DEFAULTS.measured({"cpu_attention_bw": 1e9}), duration=few)
    assert slow.emulated_tps < half.emulated_tps / 2
    assert slow.bound == "cpu"


def test_churn_and_traffic_are_those_of_the_locality() -> None:
    result = run(SELECT)
    found, planned = result.selected, result.predicted_selected
    assert found["budget"] == planned["budget"]
    assert found["planes"] == pytest.approx(planned["planes"], rel=0.15)
    assert found["churn"] == pytest.approx(planned["churn"], abs=0.06)
    assert 0 < found["late"] < found["cold"] < found["planes"]


def test_auto_picks_by_the_rates() -> None:
    fast_cpu = DEFAULTS.measured({"cpu_attention_bw": 40e9})
    for other, mode in (
        ({"link": "fallback", "constants": fast_cpu}, "exact-split"),
        ({"link": "pinned"}, "exact-stream"),
        ({"hot": 1.0, "constants": fast_cpu}, "exact-stream"),
        ({"kv_dtype": "fp8", "link": "fallback", "constants": fast_cpu}, "exact-stream"),
    ):
        found = plan("auto", **other)  # type: ignore[arg-type]
        assert found.mode.kind == mode, other
        assert found.choice is not None
        assert found.choice.text.startswith(mode)
    result = run("auto", link="fallback", constants=fast_cpu, duration=Duration(3, None))
    assert result.mode == "exact-split"
    assert result.choice is not None


def test_exact_split_without_payload_takes_the_same_time() -> None:
    full, scaled = (
        run("exact-split", payload=payload, duration=Duration(4, None)) for payload in (False, True)
    )
    assert full.emulated_tps == pytest.approx(scaled.emulated_tps, rel=0.02)
    assert full.checked_bytes == 0


@pytest.mark.parametrize(
    ("mode", "other", "part"),
    [
        (SELECT, {"kv_dtype": "fp8"}, "--kv-dtype is fp8"),
        ("exact-split", {"kv_dtype": "int4"}, "--kv-dtype is int4"),
        (SELECT, {"payload": False}, "--no-payload"),
        ("select:quest,budget=10%,dense=99", {}, "dense=99"),
        ("exact-split", {"model": "deepseek-v2-lite"}, "full attention"),
    ],
)
def test_what_a_mode_cannot_do_is_said(mode: str, other: dict[str, object], part: str) -> None:
    spec = LoadSpec(
        parse_card("rtx-4060-ti-16gb"), find_model(str(other.pop("model", "llama-3.1-8b"))), (CONTEXT,), mode=mode, **other  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(ConfigError, match=part):
        LoadPlan(spec, CONTEXT).check()


# The command

ARGS = ["stress", "--contexts", "1k", "--vram", "4.8GiB", "--duration", "3", "--page-tokens", "64"]


def test_the_command_says_the_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGS, "--mode", "auto", "--json"]) == 0
    load = json.loads(capsys.readouterr().out)["loads"][0]
    assert load["mode"] == "auto"
    assert load["contexts"][0]["mode"] == "exact-stream"
    assert load["contexts"][0]["choice"]["text"].startswith("exact-stream")
    assert main([*ARGS, "--mode", SELECT, "--policy", "mass", "--locality", "0.3"]) == 0
    text = capsys.readouterr().out
    for part in (f"mode {SELECT}", "a layer chose", "summaries take", "were new each step"):
        assert part in text
    assert main([*ARGS, "--mode", SELECT, "--json"]) == 0
    context = json.loads(capsys.readouterr().out)["loads"][0]["contexts"][0]
    assert set(context["selected"]) == set(context["predicted_selected"])
    assert context["vram"]["summaries"] > 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--mode fast", "--mode"),
        ("--mode select:quest", "budget"),
        ("--mode select:nobody,budget=10%", "nobody"),
        ("--mode select:quest,budget=10% --kv-dtype fp8", "--kv-dtype"),
        ("--mode exact-split --kv-dtype int8", "--kv-dtype"),
        ("--mode select:quest,budget=10% --no-payload", "--no-payload"),
        ("--locality fast", "--locality"),
        ("--locality churn=3", "--locality"),
    ],
)
def test_wrong_modes_are_one_line_and_exit_status_2(
    options: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGS, *options.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert part in error


# Summaries in the budget


def test_summaries_are_in_the_budget() -> None:
    """Four numbers a channel of K for each page and layer; on the card, in whole slots of the tier."""
    model = find_model("llama-3.1-8b")
    budget = memory_budget(model, 1 << 34, tokens=1000, sequences=2, summary_tokens=64)
    assert budget.part("summaries") == 2 * 16 * 32 * 4 * 1024 * 2
    assert memory_budget(model, 1 << 34, tokens=1000).part("summaries") == 0
    found = plan(SELECT)
    slot = found.layout.page_bytes
    slots = math.ceil(found.columns // 64 / (slot // (32 * 4 * 1024 * 2)))
    assert found.split["summaries"] == slots * slot
    assert sum(found.split.values()) == pytest.approx(found.vram, abs=1)


def test_the_plan_of_a_selection_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "rtx-4060-ti-16gb",
        "--context",
        "16k",
        "--json",
    ]
    for options, there in ((["--mode", "select", "--kv-off-card", "0.5"], True), ([], False)):
        assert main([*base, *options]) == 0
        parts = {one["name"] for one in json.loads(capsys.readouterr().out)["budget"]["parts"]}
        assert ("summaries" in parts) == there


def test_the_compass_points_where_it_says() -> None:
    from kvtier.cost.churn import Locality
    from kvtier.stress.compass import Compass, dense_attention

    found = plan(SELECT)
    part = found.run_layout.plane(3).k
    compass = Compass(PAGE, found.group, 0.2, Locality())
    first, again = (compass.keys(part, 3, [0], 0, 200) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(compass.keys(part, 3, [0], 100, 200), first[:, :, 100:])
    assert not torch.equal(compass.keys(part, 4, [0], 0, 200), first)
    assert not torch.equal(compass.keys(part, 3, [1], 0, 200), first)
    q = compass.queries(part, 3, [0], 5)[0]
    k, v = first[0], compass.values(part, 3, [0], 0, 200)[0]
    seen = torch.ones(k.shape[0], 200, dtype=torch.bool)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double()[:, None],
        k.double().repeat_interleave(found.group, 0),
        v.double().repeat_interleave(found.group, 0),
    )[:, 0]
    assert torch.allclose(dense_attention(q, k, v, seen), want)
