"""``kvtier stress``: the real store on emulated cards, predicted against emulated, and its options."""

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvtier.stress.forward as stress_forward
from kvtier.cli.main import main
from kvtier.cost.models import find_model
from kvtier.devices.spec import parse_card
from kvtier.errors import ConfigError, OffloadWarning
from kvtier.stress.load import run_context
from kvtier.stress.plan import LoadPlan, find_cliff
from kvtier.stress.report import ContextResult
from kvtier.stress.run import run_load, sweep_vram
from kvtier.stress.spec import Duration, FaultPlan, LoadSpec, parse_duration, parse_faults

GIB = 2**30


def load(card: str = "rtx-4060-ti-16gb", context: int = 8192, **other: object) -> LoadSpec:
    values: dict[str, object] = {"duration": Duration(6, None), "vram": round(5.25 * GIB)}
    return LoadSpec(parse_card(card), find_model("llama-3.1-8b"), (context,), **{**values, **other})  # type: ignore[arg-type]


def run(spec: LoadSpec) -> ContextResult:
    return run_context(LoadPlan(spec, spec.contexts[0]))


# Predicted and emulated


@pytest.mark.parametrize("kind", ["pinned", "pageable", "fallback"])
@pytest.mark.parametrize("vram", [4.9, 5.4, 8.0])
def test_emulated_times_agree_with_the_prediction(kind: str, vram: float) -> None:
    spec = load(f"rtx-4060-ti-16gb,link={kind}", vram=round(vram * GIB))
    plan = LoadPlan(spec, 8192)
    result = run(spec)
    assert result.ok, (result.error, result.books)
    assert result.cold_pages == pytest.approx(plan.cold_pages, abs=1)
    assert result.ratio == pytest.approx(1.0, abs=0.05)
    assert (plan.cold_pages > 0) == (vram < 6)


@pytest.mark.parametrize("kind", ["pinned", "pageable", "fallback"])
def test_weights_behind_a_link_agree_too(kind: str) -> None:
    result = run(load(f"rtx-4060-ti-16gb,link={kind}", weights_off=0.15, vram=round(4.9 * GIB)))
    assert result.ok
    assert result.ratio == pytest.approx(1.0, abs=0.05)


def test_a_fifth_of_a_model_behind_the_fallback_is_the_known_cliff() -> None:
    """42.5 -> 3.8 tokens/s on a 16 GB RTX 4060 Ti."""
    spec = load("rtx-4060-ti-16gb,link=fallback", 512, vram=None, weights_off=0.2)
    whole = run(replace(spec, weights_off=0.0))
    assert 39 < whole.emulated_tps < 44
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        report = run_load(spec)
    slow, needless = (str(one.message) for one in caught)
    assert re.search(r"severe.*10\.\dx slower.*20%.*fallback link.*Instead", slow)
    assert "everything fits in VRAM" in needless
    result = report.contexts[0]
    assert 3.4 < result.emulated_tps < 4.3
    assert result.level == "severe"
    assert not report.failed


def test_without_payload_full_size_takes_the_same_time() -> None:
    scaled, full = run(load()), run(load(payload=False))
    assert full.emulated_tps == pytest.approx(scaled.emulated_tps, rel=0.01)
    assert full.cold_pages == scaled.cold_pages > 0
    assert full.checked_bytes == 0 < scaled.checked_bytes
    assert full.moved["host->vram"] == pytest.approx(scaled.moved["host->vram"])


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8", "int4"])
def test_every_kv_dtype_is_a_load(dtype: str) -> None:
    result = run(load(kv_dtype=dtype, duration=Duration(2, None), check=True))
    assert result.ok
    assert result.checked_bytes > 0
    assert result.ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("model", "vram"), [("gemma-3-12b", 8.5), ("deepseek-v2-lite", 9.2), ("qwen3.5-9b", 5.6)]
)
def test_windows_latents_and_states_are_loads(model: str, vram: float) -> None:
    spec = replace(
        load(duration=Duration(3, None), vram=round(vram * GIB)), model=find_model(model)
    )
    result = run(spec)
    assert result.ok, (result.error, result.books)
    assert result.ratio == pytest.approx(1.0, abs=0.06)


def test_sessions_share_the_card() -> None:
    result = run(load(context=4096, sessions=3, vram=round(5.6 * GIB), check=True))
    assert result.ok, result.error
    assert result.pages == 3 * 16
    assert result.cold_pages > 0
    assert result.ratio == pytest.approx(1.0, abs=0.05)


def test_the_disk_below(tmp_path: Path) -> None:
    result = run(
        load(context=4096, vram=round(4.8 * GIB), host=100 * 10**6, disk=4 * 10**9, path=tmp_path)
    )
    assert result.ok, (result.error, result.books)
    assert result.evicted["host"] > 0
    assert result.moved["disk->host"] > 0
    assert result.ratio == pytest.approx(1.0, abs=0.15)


def test_the_cliff_is_where_the_runs_say() -> None:
    spec = load(duration=Duration(2, None), page_tokens=128)
    cliff = find_cliff(spec)
    assert run(replace(spec, contexts=(cliff.fits // 128 * 128 - 128,))).cold_pages == 0
    assert run(replace(spec, contexts=(cliff.fits + 512,))).cold_pages > 0
    notice = cliff.begins["notice"]
    assert notice is not None
    assert LoadPlan(spec, notice).predicted.factor >= 1.3
    assert LoadPlan(spec, notice - 128).predicted.factor < 1.3
    assert cliff.fits < notice <= (cliff.begins["warning"] or notice)


def test_a_faster_link_or_card_is_never_slower() -> None:
    """Ordering that any change of the model must keep."""
    plans = [
        LoadPlan(load(card, vram=round(4.9 * GIB)), 8192).predicted.step.seconds
        for card in (
            "rtx-4060-ti-16gb,link=fallback",
            "rtx-4060-ti-16gb,link=pinned",
            "rtx-4060-ti-16gb,link=pinned,rate=50GB/s",
            "rtx-4090,link=pinned,rate=50GB/s",
        )
    ]
    assert plans == sorted(plans, reverse=True)


# Faults


def test_failed_copies_are_tried_again_and_bytes_stay_right() -> None:
    result = run(load(faults=parse_faults("copy-fail=0.03,seed=2")))
    assert result.failures["CopyFailedError"] > 0
    assert result.ok, (result.error, result.books)
    assert result.steps == 6
    assert result.checked_bytes > 0


def test_a_slow_link_shows_in_the_rate() -> None:
    result = run(load(faults=parse_faults("slow-h2d=1")))
    assert result.ok
    assert result.ratio < 0.5


def test_memory_that_cannot_be_pinned_is_told() -> None:
    result = run(load(faults=parse_faults("no-pin=0")))
    assert result.ok
    assert any("could not be pinned" in one["text"] for one in result.warnings)


def test_a_context_that_cannot_go_on_is_given_up_and_the_books_add_up() -> None:
    result = run(load(faults=parse_faults("fail-alloc=4")))
    assert "DeviceOOMError" in result.error
    assert result.failures == {"DeviceOOMError": 1}
    assert result.books == []
    assert not result.ok
    never = run(load(faults=parse_faults("stall-h2d=40,stall-s=inf")))
    assert "DeadlockError" in never.error


@pytest.mark.parametrize(
    ("text", "name"),
    [("copy-fial=1", "copy-fial"), ("copy-fail=2", "copy-fail"), ("fail-h2d=0", "fail-h2d"),
     ("seed=x", "seed"), ("slow-factor=0", "slow-factor"), ("fail-h2d=1.5", "fail-h2d")],
)  # fmt: skip
def test_wrong_faults_are_named(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_faults(text)


def test_faults_and_durations_as_text() -> None:
    assert not FaultPlan()
    plan = parse_faults("copy-fail=0.5,seed=3")
    first, second = plan.make(), plan.make()
    assert [first.on_copy("h2d") for _ in range(20)] == [second.on_copy("h2d") for _ in range(20)]
    assert parse_duration("32") == Duration(32, None)
    assert parse_duration("250ms") == Duration(None, 0.25)
    assert parse_duration("2s").over(10**6, 1.9) is False
    for wrong in ("", "0", "1.5steps", "-1s", "soon"):
        with pytest.raises(ConfigError, match="duration"):
            parse_duration(wrong)


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stress_forward.values

    def lying(part, layer, numbers, start, stop, *, payload):  # type: ignore[no-untyped-def]
        made = honest(part, layer, numbers, start, stop, payload=payload)
        if start == 8192 + 3:
            made.view(torch.uint8)[..., 0] ^= 1
        return made

    monkeypatch.setattr(stress_forward, "values", lying)
    result = run(load())
    assert "wrong bytes" in result.error
    assert not result.ok
    assert result.books == []


# Sweep


def test_the_smallest_memory_that_meets_a_rate() -> None:
    spec = load(vram=None, duration=Duration(2, None), kv_dtype="fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        sweep = sweep_vram(spec, 30.0).sweep
    assert sweep is not None
    assert sweep.vram is not None
    assert sweep.emulated_tps >= 30 * 0.95
    assert sweep.below_tps is None or sweep.below_tps < 30
    assert sweep.cards
    assert sweep.cards == sorted(sweep.cards, key=lambda card: card[1])[: len(sweep.cards)]
    with pytest.raises(ConfigError, match="--target-tps"):
        sweep_vram(spec, 10_000.0)


# The command


ARGS = ["stress", "--contexts", "2k", "--vram", "4.8GiB", "--duration", "2"]


def test_the_command_tells_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main([*ARGS, "--trace-out", str(trace), "--contexts", "1k,2k"]) == 0
    text = capsys.readouterr().out
    for part in ("predicted", "emulated", "the cliff", "the books add up", "evicted", "simulated"):
        assert part in text
    for context in (1024, 2048):
        events = json.loads((tmp_path / f"trace-{context}.json").read_text())["traceEvents"]
        assert any(event["name"] == "layer 31" for event in events)


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    # Enough steps for the first, which evicts, to count for little.
    assert main([*ARGS, "--duration", "16", "--json", "--kv-dtype", "bf16,int4"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["kv_dtype"] for one in data["loads"]] == ["bf16", "int4"]
    assert data["failed"] is False
    assert data["loads"][0]["contexts"][0]["ratio"] == pytest.approx(1, abs=0.05)


def test_a_failed_context_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGS, "--faults", "fail-alloc=4"]) == 1
    assert "given up: DeviceOOMError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--card rtx-9999", "--card"),
        ("--card vram=8GB", "bandwidth"),
        ("--link usb", "--link is 'usb'"),
        ("--card rtx-4090,link=pinned --link fallback", "--link"),
        ("--model gpt-9", "--model"),
        ("--contexts 8x", "--contexts"),
        ("--contexts 16", "--page-tokens"),
        ("--sessions 0", "--sessions"),
        ("--policy best", "--policy"),
        ("--mode fast", "--mode"),
        ("--duration soon", "--duration"),
        ("--faults bad=1", "--faults"),
        ("--kv-dtype fp4", "--kv-dtype"),
        ("--weight-bits 0", "--weight-bits"),
        ("--vram much", "--vram"),
        ("--host -1", "--host"),
        ("--weights-off-card 1.5", "--weights-off-card"),
        ("--scale 2", "--scale"),
        ("--scale 1/0", "--scale"),
        ("--disk 1GB --no-payload", "--disk"),
        ("--sweep time", "--sweep"),
        ("--sweep vram", "--target-tps"),
        ("--target-tps 5", "--sweep"),
        ("--sweep vram --target-tps 5 --vram 8GB", "--vram"),
        ("--trace-out /nowhere/at/all.json", "--trace-out"),
        ("--model llama-3.1-70b", "--weights-off-card 0.6"),
        ("--contexts 8k --vram 5GiB --host 0", "--host"),
        ("--contxts 8k", "--contexts"),
    ],
)
def test_wrong_options_are_one_line_and_exit_status_2(
    options: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", *options.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert part in error


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_plots_stand_for_themselves(
    suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / f"plot.{suffix}"
    assert main([*ARGS, "--plot", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "bf16 KV, predicted" in text
    assert "tokens/s (simulated)" in text
    capsys.readouterr()


def test_a_plot_needs_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from importlib.util import find_spec

    path = tmp_path / "plot.png"
    status = main([*ARGS, "--plot", str(path)])
    if find_spec("matplotlib") is None:
        assert status == 2
        assert "kvtier[plot]" in capsys.readouterr().err
    else:
        assert status == 0
        assert path.stat().st_size > 1000


def test_help_starts_without_torch() -> None:
    program = (
        "import sys; from kvtier.cli.main import main; main(['stress', '--help']);"
        "print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith("False False"), done.stdout[-200:]
