"""The run-time monitor: measured against predicted, once a cause, no alarm for noise."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cost.models import find_model
from kvtier.cost.monitor import RateMonitor
from kvtier.cost.warning import CostWarning, Remedy
from kvtier.devices.spec import parse_card
from kvtier.errors import ConfigError, OffloadWarning
from kvtier.stress.load import run_context
from kvtier.stress.plan import LoadPlan
from kvtier.stress.spec import Duration, LoadSpec, parse_faults


def feed(monitor: RateMonitor, tps: float, samples: int = 20) -> list[CostWarning]:
    return [one for _ in range(samples) for one in monitor.sample(1, 1 / tps)]


def test_as_predicted_is_silent() -> None:
    monitor = RateMonitor(predicted_tps=10.0, baseline_tps=40.0)
    assert feed(monitor, 10.0, 200) == []
    assert monitor.measured_tps == pytest.approx(10.0)


def test_slower_than_predicted_is_said_once() -> None:
    monitor = RateMonitor(predicted_tps=10.0, link="fallback")
    said = feed(monitor, 4.0, 100)
    assert [(one.kind, one.level, one.link) for one in said] == [
        ("measured", "warning", "fallback")
    ]
    assert "below the predicted 10 tokens/s" in said[0].cause
    assert said[0].after_tps == pytest.approx(4.0)
    assert said[0].remedies
    assert feed(monitor, 4.0, 100) == []


def test_worse_is_said_again_and_better_is_not() -> None:
    monitor = RateMonitor(predicted_tps=10.0)
    levels = [one.level for tps in (6.0, 3.0, 1.0, 6.0, 1.0) for one in feed(monitor, tps, 100)]
    assert levels == ["notice", "warning", "severe"]


def test_what_the_plan_has_said_is_not_said_again() -> None:
    """A predicted 4x is a warning before the start: the monitor speaks from 5x on."""
    monitor = RateMonitor(predicted_tps=10.0, baseline_tps=40.0)
    assert feed(monitor, 9.0, 100) == []
    said = feed(monitor, 7.9, 100)
    assert [one.level for one in said] == ["severe"]
    assert said[0].before_tps == 40.0


def test_two_causes_are_two_warnings() -> None:
    monitor = RateMonitor(
        predicted_tps=30.0, baseline_tps=40.0, cause="weights come over a link",
        remedies=[Remedy("pin it", "--link pinned", 35.0)],
    )  # fmt: skip
    said = feed(monitor, 5.0, 100)
    assert len({one.cause for one in said}) == 2
    assert any(one.cause == "weights come over a link" for one in said)
    assert all(Remedy("pin it", "--link pinned", 35.0) in one.remedies for one in said)


def test_inside_the_band_is_as_predicted() -> None:
    monitor = RateMonitor(predicted_tps=4.1, predicted_low_tps=2.8)
    assert feed(monitor, 2.9, 200) == []
    assert [one.level for one in feed(monitor, 1.9, 200)] == ["warning"]


def test_one_slow_step_is_no_reason() -> None:
    monitor = RateMonitor(predicted_tps=10.0)
    feed(monitor, 10.0, 50)
    for _ in range(5):
        assert monitor.sample(1, 1.5) == []
    assert feed(monitor, 10.0, 50) == []


def test_a_level_must_last() -> None:
    monitor = RateMonitor(predicted_tps=10.0, window=1, warm_up=0, patience=3)
    for _ in range(5):
        assert feed(monitor, 1.0, 2) == []
        assert feed(monitor, 10.0, 1) == []
    assert len(feed(monitor, 1.0, 3)) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.floats(1.0, 100.0))
def test_noise_is_no_reason(seed: int, tps: float) -> None:
    rng = random.Random(seed)
    monitor = RateMonitor(predicted_tps=tps, baseline_tps=tps)
    for _ in range(300):
        assert monitor.sample(1, rng.uniform(0.75, 1.25) / tps) == []


def test_the_first_samples_do_not_count() -> None:
    monitor = RateMonitor(predicted_tps=10.0, warm_up=3)
    for _ in range(3):
        assert monitor.sample(1, 100.0) == []
    assert monitor.measured_tps is None
    assert feed(monitor, 10.0) == []


def test_a_baseline_can_be_learned() -> None:
    monitor = RateMonitor(cause="the KV has outgrown the VRAM tier")
    for _ in range(30):
        assert monitor.sample(1, 0.025, resident=True) == []
    assert monitor.baseline_tps == pytest.approx(40.0)
    said = feed(monitor, 10.0, 100)
    assert [one.level for one in said] == ["warning"]
    assert said[-1].before_tps == pytest.approx(40.0)


def test_nothing_to_compare_with_is_silent() -> None:
    assert feed(RateMonitor(), 1.0) == []


def test_feed_announces() -> None:
    monitor = RateMonitor(predicted_tps=10.0, patience=1, warm_up=0, window=1)
    with pytest.warns(OffloadWarning, match="below the predicted"):
        monitor.feed(1, 1.0)
    assert len(monitor.warnings) == 1


def test_threads_may_share_it() -> None:
    monitor = RateMonitor(predicted_tps=10.0)
    threads = [threading.Thread(target=feed, args=(monitor, 4.0, 200)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(monitor.warnings) == 1


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_samples_are_checked(tokens: float, seconds: float) -> None:
    with pytest.raises(ConfigError, match="sample"):
        RateMonitor(predicted_tps=1.0).sample(tokens, seconds)


@pytest.mark.parametrize("change", [{"predicted_tps": 0.0}, {"patience": 0}, {"warm_up": -1}])
def test_arguments_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        RateMonitor(**{"baseline_tps": 1.0, **change})  # type: ignore[arg-type]


def test_stress_sees_a_link_that_got_slow() -> None:
    """The same load with and without a link at a tenth of its rate."""
    spec = LoadSpec(
        parse_card("rtx-4060-ti-16gb"), find_model("llama-3.1-8b"), (8192,),
        duration=Duration(12, None), vram=round(5.25 * 2**30),
    )  # fmt: skip
    assert run_context(LoadPlan(spec, 8192)).warnings == []
    broken = LoadSpec(
        spec.card, spec.model, spec.contexts, duration=spec.duration, vram=spec.vram,
        faults=parse_faults("slow-h2d=1,slow-factor=10"),
    )  # fmt: skip
    said = [
        one for one in run_context(LoadPlan(broken, 8192)).warnings if one["kind"] == "measured"
    ]
    assert said
    assert "below the predicted" in said[0]["cause"]
    assert said[0]["after_tps"] < said[0]["before_tps"] / 2
