"""``mode="auto"``: the cost model picks the faster exact mode and says why; what a selector moves, by its churn."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kvtier.cost.choose import choose_mode
from kvtier.cost.churn import Locality, parse_locality, traffic
from kvtier.cost.constants import DEFAULTS
from kvtier.cost.models import find_model
from kvtier.cost.modes import decode_estimate, selection_traffic
from kvtier.cost.tier_load import tier_choice
from kvtier.cost.workload import Selection, Workload
from kvtier.devices.cards import find_card
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError

WORK = Workload(
    find_model("llama-3.1-8b"), find_card("rtx-4060-ti-16gb"), 16_384, kv_off=0.5, kv_link="pinned"
)
FAST_CPU = DEFAULTS.measured({"cpu_attention_bw": 30e9})
SLOW_LINK = FAST_CPU.measured({"fallback_bw": 3e9})


def test_a_slow_link_is_left_alone() -> None:
    choice = choose_mode(replace(WORK, kv_link="fallback"), constants=SLOW_LINK)
    assert choice.mode == "exact-split"
    assert choice.split_tps > choice.stream_tps  # type: ignore[operator]
    for part in ("exact-split: ", "50%", "3 GB/s (measured)", "30 GB/s (measured)", "16,384"):
        assert part in choice.text


def test_a_fast_link_beats_a_slow_processor() -> None:
    work = replace(WORK, card=find_card("h100-sxm5-80gb"))
    choice = choose_mode(work)
    assert choice.mode == "exact-stream"
    assert choice.stream_tps > choice.split_tps  # type: ignore[operator]
    assert "(assumed)" in choice.text


def test_all_in_vram_is_streamed_whatever_the_rates() -> None:
    for constants in (DEFAULTS, SLOW_LINK):
        choice = choose_mode(replace(WORK, kv_off=0.0), constants=constants)
        assert choice.mode == "exact-stream"
        assert "all KV of 16,384 tokens is in VRAM" in choice.text
        assert choice.to_json()["split_tps"] is None


def test_what_cannot_be_told_or_used_is_streamed() -> None:
    assert "not known" in choose_mode(None).text
    assert (
        choose_mode(WORK, constants=SLOW_LINK, split="no floats").text == "exact-stream: no floats"
    )


@pytest.mark.parametrize("cpu", [1e9, 3e9, 8e9, 20e9, 60e9])
@pytest.mark.parametrize("link", ["pinned", "pageable", "fallback"])
def test_the_choice_is_the_faster_estimate(cpu: float, link: str) -> None:
    constants = DEFAULTS.measured({"cpu_attention_bw": cpu})
    work = replace(WORK, kv_link=link)
    choice = choose_mode(work, constants=constants)
    stream = decode_estimate(replace(work, hot_passes=3.0), "kv-stream", constants=constants).tps
    split = decode_estimate(work, "kv-cpu", constants=constants).tps
    assert choice.mode == ("exact-split" if split > stream else "exact-stream")


def test_a_store_with_an_unknown_card_or_room_for_all() -> None:
    layout = WORK.model.layout("bf16", 64)
    page = layout.page_bytes
    device = EmulatedDevice("rtx-4060-ti-16gb")
    try:
        rooms = {"vram": 300 * page, "host": 0}
        whole = tier_choice(layout, device, rooms, tokens=16_384, weight_bytes=0)
        assert "is in VRAM" in whole.text
        rooms = {"vram": 128 * page, "host": 128 * page}
        half = tier_choice(layout, device, rooms, tokens=0, weight_bytes=0)
        assert "50% of the KV of 16,384 tokens" in half.text
    finally:
        device.close()
    other = tier_choice(layout, object(), {"vram": page, "host": page}, tokens=0, weight_bytes=0)
    assert "not known" in other.text


# What a selector moves


def test_traffic_has_the_right_ends() -> None:
    near = Locality()
    assert traffic(100, 100, 0.5, near).missing == 0  # all is read, nothing is chosen
    assert traffic(100, 10, 1.0, near).missing == 0  # all is in VRAM
    still = traffic(100, 10, 0.5, Locality(churn=0.0), vram_pages=50.0)
    moving = traffic(100, 10, 0.5, Locality(churn=1.0), vram_pages=50.0)
    assert still.late == still.moved == 0
    # 19.375 pages are chosen by any layer: half of them and the 3.125 that come up at a look are in VRAM, so of the
    # 80.625 others the rest of its 50 pages are.
    cold = 1 - (50 - 19.375 / 2 - 3.125) / 80.625
    assert moving.late == moving.missing == pytest.approx(moving.planes * cold)
    assert moving.ahead == moving.missing, "every guess is wrong, and crosses the link in vain"
    assert moving.missing > still.missing
    blind = traffic(100, 10, 0.5, near, guessed=False)
    assert blind.late == blind.missing == traffic(100, 10, 0.5, near).missing


def test_more_churn_or_less_vram_is_never_less_traffic() -> None:
    by_churn = [
        traffic(256, 26, 0.5, Locality(churn=c)).missing for c in (0, 0.05, 0.1, 0.2, 0.5, 1)
    ]
    by_share = [traffic(256, 26, hot, Locality()).missing for hot in (1, 0.75, 0.5, 0.25, 0)]
    assert by_churn == sorted(by_churn)
    assert by_share == sorted(by_share)


def test_churn_sets_the_rate_of_a_selection() -> None:
    rates = [
        decode_estimate(
            replace(WORK, selection=Selection(locality=Locality(churn=churn), dense=0.0)), "select"
        ).tps
        for churn in (0.0, 0.2, 1.0)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.1 * rates[-1]
    measured = DEFAULTS.measured({"selection_churn": 0.5})
    assert selection_traffic(WORK, measured).late > selection_traffic(WORK).late


@pytest.mark.parametrize("text", ["0.2", "20%", "churn=0.2", "churn=0.2,heads=0.5,layers=50%"])
def test_localities_as_text(text: str) -> None:
    assert parse_locality(text) == Locality(0.2, 0.5, 0.5)


@pytest.mark.parametrize(
    "text", ["", "fast", "churn=2", "churn=0.1,churn=0.2", "tails=0.1", "-0.1"]
)
def test_wrong_localities_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="share"):
        parse_locality(text)


def test_choosing_needs_no_torch() -> None:
    program = "import sys, kvtier.cost.choose; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
