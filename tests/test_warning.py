"""What is said before it gets slow: one record, the same everywhere, never without a remedy."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.announce import announce, plain_record
from kvtier.cli.main import main
from kvtier.cost.cliff import level
from kvtier.cost.models import find_model
from kvtier.cost.outlook import Load
from kvtier.cost.tier_load import Expected, card_of, shape_of, tier_load
from kvtier.cost.warning import CostWarning, Remedy, worst
from kvtier.devices.cards import find_card
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError, OffloadWarning
from kvtier.identity import ModelIdentity
from kvtier.layout import LayerLayout, PageLayout
from kvtier.session.session import Session
from kvtier.store.store import TieredStore

MODEL, CARD = find_model("llama-3.1-8b"), find_card("rtx-4060-ti-16gb")
GIB = 2**30


def load(**changes: object) -> Load:
    values: dict[str, object] = {"context": 512, "weight_bits": 4.9}
    return Load(MODEL, CARD, **{**values, **changes})  # type: ignore[arg-type]


def cost_warning(**changes: object) -> CostWarning:
    values: dict[str, object] = {
        "kind": "slowdown",
        "level": "warning",
        "cause": "bytes come over a link",
        "link": "pinned",
        "before_tps": 40.0,
        "after_tps": 10.0,
        "after_low_tps": 8.0,
        "after_high_tps": 12.0,
        "remedies": (Remedy("more VRAM", "--vram 2GiB", 40.0),),
    }
    return CostWarning(**{**values, **changes})  # type: ignore[arg-type]


# The reference case


def test_a_fifth_behind_the_fallback_is_severe_and_names_its_class() -> None:
    """42.5 -> 3.8 tokens/s with a fifth of an 8B model outside a 16 GB RTX 4060 Ti."""
    slow = load(weights_off=0.2, link="fallback").warnings()[0]
    assert slow.kind == "slowdown"
    assert slow.level == "severe"
    assert 40 < slow.before_tps < 45
    assert slow.after_low_tps < 3.8 < slow.after_high_tps
    assert 3.5 < slow.after_tps < 4.5
    for words in ("fallback link of 4.1 GB/s", "class assumed: 2.8 to 6 GB/s", "20%", "0.92 GB"):
        assert words in slow.text


@pytest.mark.parametrize(("link", "low", "high"), [("pinned", 10, 13), ("cpu", 17, 24)])
def test_other_classes_exclude_the_reference(link: str, low: float, high: float) -> None:
    slow = load(weights_off=0.2, link=link).warnings()[0]
    assert slow.after_low_tps > 3.8
    assert low < slow.after_tps < high
    assert link in slow.text


def test_every_link_has_its_words() -> None:
    for link in ("pinned", "pageable", "fallback", "cpu", "disk"):
        for change in ({"weights_off": 0.5}, {"kv_off": 0.5, "context": 65536}):
            found = load(link=link, **change).warnings()
            assert found, (link, change)
            assert found[0].link == link
            assert f"{link} link" in found[0].cause


# What holds for all loads


@settings(max_examples=60, deadline=None)
@given(
    weights=st.floats(0, 1),
    kv=st.floats(0, 1),
    link=st.sampled_from(["pinned", "pageable", "fallback", "cpu", "disk"]),
    context=st.integers(1, 200_000),
    sequences=st.integers(1, 16),
    bits=st.sampled_from([4.9, 8.5, 16.0]),
)
def test_warnings_are_never_without_a_faster_remedy(
    weights: float, kv: float, link: str, context: int, sequences: int, bits: float
) -> None:
    asked = load(
        weights_off=weights, kv_off=kv, link=link, context=context, sequences=sequences,
        weight_bits=bits,
    )  # fmt: skip
    for one in asked.warnings():
        assert one.level in ("notice", "warning", "severe")
        if one.kind == "slowdown":
            assert level(one.before_tps / one.after_tps) == one.level
            assert one.after_low_tps <= one.after_tps <= one.after_high_tps
            assert all(remedy.predicted_tps > 1.1 * one.after_tps for remedy in one.remedies)
        assert one.remedies
        json.dumps(one.to_json())


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["pinned", "fallback", "cpu"]))
def test_more_off_the_card_is_never_faster(a: float, b: float, link: str) -> None:
    low, high = sorted((a, b))
    for what in ("weights_off", "kv_off"):
        some, more = (load(**{what: x}, link=link, context=8192) for x in (low, high))
        assert more.estimate.tps <= some.estimate.tps * (1 + 1e-9)


def test_no_alarm_without_anything_off_the_card() -> None:
    for context in (1, 512, 8192, 65536):
        assert load(context=context).warnings() == []
    assert load(weights_off=1e-4, asked=()).warnings() == []


def test_a_remedy_does_what_it_says() -> None:
    """Each remedy's rate is that of the load with its options."""
    slow = load(context=131072).placed()
    assert slow is not None
    by_how = {remedy.how: remedy.predicted_tps for remedy in slow.remedies()}
    assert by_how["--kv-dtype fp8"] == load(context=131072, kv_dtype="fp8").estimate.tps
    longest = slow.resident.budget.longest_context()
    assert by_how[f"--context {longest}"] == load(context=longest).estimate.tps
    assert by_how["--mode select"] > slow.estimate.tps


def test_several_sequences_can_be_fewer() -> None:
    slow = load(context=32768, sequences=8).placed()
    assert slow is not None
    assert any(remedy.how.startswith("--sequences ") for remedy in slow.remedies())


def test_a_fallback_can_be_pinned_or_computed_by_the_processor() -> None:
    hows = [remedy.how for remedy in load(weights_off=0.2, link="fallback").remedies()]
    assert "--link pinned" in hows
    assert "--link cpu" in hows


# Not needed, and later though faster


def test_what_fits_and_is_off_the_card_is_warned_about() -> None:
    needless = [one for one in load(weights_off=0.2).warnings() if one.kind == "needless"]
    assert len(needless) == 1
    assert "everything fits in VRAM" in needless[0].text
    assert needless[0].remedies[0].how == "--weights-off-card 0 --kv-off-card 0"
    small = [one for one in load(kv_off=0.01).warnings() if one.kind == "needless"]
    assert [one.level for one in small] == ["notice"]


def test_what_must_be_off_the_card_is_not() -> None:
    big = load(weight_bits=16.0).placed()
    assert big is not None
    assert big.weights_off > 0
    assert "needless" not in [one.kind for one in big.warnings()]
    assert "needless" not in [one.kind for one in load(weights_off=0.2, asked=()).warnings()]


def test_a_disk_tier_can_make_the_first_token_later() -> None:
    """As in LMCache's figures: a fast card computes 10,000 tokens sooner than an SSD gives them."""
    fast = Load(MODEL, find_card("h100-sxm5-80gb"), 10_000, disk_prefix=True)
    late = [one for one in fast.warnings() if one.kind == "ttft"]
    assert len(late) == 1
    assert late[0].after_ttft_s > late[0].before_ttft_s  # type: ignore[operator]
    assert late[0].link == "disk"
    for words in ("first token", "throughput may rise", "+121 %"):
        assert words in late[0].text
    data = late[0].to_json()
    assert data["after_ttft_s"] > data["before_ttft_s"] > 0
    # a slow card is glad of the disk
    assert load(context=32768, disk_prefix=True).warnings() == []


# The record


def test_a_warning_needs_a_level_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match="remedy"):
        cost_warning(remedies=())
    with pytest.raises(ConfigError, match="level"):
        cost_warning(level="none")


def test_the_worst_of_each_kind_and_link_comes_first() -> None:
    mild = cost_warning(level="notice", after_tps=30.0)
    loud = cost_warning(level="severe", after_tps=4.0)
    other = cost_warning(kind="needless", level="warning")
    assert worst([mild, other, loud]) == [loud, other]


def test_json_has_the_same_fields_with_and_without_a_prediction() -> None:
    data = cost_warning().to_json()
    assert set(data) == set(plain_record("x"))
    assert {"level", "cause", "link", "before_tps", "after_tps", "remedies"} <= set(data)
    assert set(data["remedies"][0]) == {"what", "how", "predicted_tps"}


def test_it_is_a_python_warning_and_a_log_event(caplog: pytest.LogCaptureFixture) -> None:
    one = cost_warning()
    with caplog.at_level(logging.WARNING, logger="kvtier"), pytest.warns(OffloadWarning) as caught:
        one.announce()
    assert caught[0].message.record == one.to_json()  # type: ignore[union-attr]
    assert caught[0].filename == __file__
    (event,) = caplog.records
    assert event.name == "kvtier"
    assert event.offload == one.to_json()  # type: ignore[attr-defined]
    assert event.getMessage() == one.text


def test_a_warning_made_an_error_was_logged_first(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OffloadWarning, match="lost"):  # pytest.ini makes it an error
        announce("a link was lost")
    assert [event.getMessage() for event in caplog.records] == ["a link was lost"]


def test_memory_that_cannot_be_pinned_is_a_log_event_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = EmulatedDevice("rtx-4060-ti-16gb", pinned=False)
    with pytest.warns(OffloadWarning, match="could not be pinned"):
        buffer = device.alloc_host(4096)
    device.free(buffer)
    device.close()
    assert caplog.records[0].offload["kind"] == "event"  # type: ignore[attr-defined]


# Stores and sessions

LAYOUT = PageLayout([LayerLayout("full", 8, 128, "bfloat16", 8, 128, "bfloat16")] * 32, 16)
SMOL = {"vram": 4 * LAYOUT.page_bytes, "host": 64 * LAYOUT.page_bytes}


def told(action) -> list[dict]:  # type: ignore[no-untyped-def, type-arg]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [dict(w.message.record) for w in caught if isinstance(w.message, OffloadWarning)]


def test_a_store_says_at_once_that_it_will_be_slow() -> None:
    expect = Expected(tokens=8192, weight_bytes=4_600_000_000)
    device = EmulatedDevice("rtx-4060-ti-16gb")

    def open_it(**sizes: int) -> None:
        TieredStore(LAYOUT, device=device, expect=expect, **sizes).close()

    (said,) = told(lambda: open_it(vram=GIB // 4, host=4 * GIB))
    assert said["kind"] == "slowdown"
    assert said["level"] in ("warning", "severe")
    assert said["before_tps"] > said["after_tps"]
    assert "8,192 tokens" in said["cause"]
    assert any(remedy["how"] == "vram 1024MiB" for remedy in said["remedies"])
    # no alarm where it all fits
    assert told(lambda: open_it(vram=2 * GIB, host=4 * GIB)) == []
    device.close()


def test_a_store_of_which_nothing_is_known_says_nothing() -> None:
    device = EmulatedDevice("rtx-4060-ti-16gb")
    assert told(lambda: TieredStore(LAYOUT, device=device, **SMOL).close()) == []
    device.close()


def test_an_error_from_the_warning_leaves_nothing_open() -> None:
    device = EmulatedDevice("rtx-4060-ti-16gb")
    with pytest.raises(OffloadWarning):
        TieredStore(LAYOUT, device=device, expect=Expected(8192, 4_600_000_000), **SMOL)
    assert device.used_bytes == device.host_bytes == 0
    device.close()


def test_a_store_says_it_once_and_again_only_when_it_gets_worse() -> None:
    device = EmulatedDevice("rtx-4060-ti-16gb")
    store = TieredStore(LAYOUT, device=device, vram=GIB // 2, host=8 * GIB)
    weights = 4_600_000_000
    levels = [
        [one["level"] for one in told(lambda t=tokens: store.foresee(Expected(t, weights)))]
        for tokens in (1024, 8192, 8192, 8200, 65536)
    ]
    assert levels == [[], ["notice"], [], [], ["severe"]]
    store.close()
    device.close()


def test_a_session_says_it_too() -> None:
    device = EmulatedDevice("rtx-4060-ti-16gb,link=pageable")
    store = TieredStore(LAYOUT, device=device, vram=GIB // 4, host=8 * GIB)
    identity = ModelIdentity(
        model="m", revision="", weights_digest=b"w" * 32, weights_quantisation="", kv_dtype="bf16",
        kv_quantisation="", rope="", attention="full", layout_digest=LAYOUT.digest,
        page_tokens=LAYOUT.page_tokens,
    )  # fmt: skip
    said = told(lambda: Session(store, identity, expect=Expected(8192, 4_600_000_000)).close())
    assert [one["kind"] for one in said] == ["slowdown"]
    assert said[0]["link"] == "pageable"
    assert told(lambda: Session(store, identity).close()) == []
    store.close()
    device.close()


def test_an_unknown_card_gets_no_prediction() -> None:
    class Unknown:
        name = "cuda:0 Some Card 9000"

    assert card_of(Unknown()) is None
    Unknown.name = "cuda:0 NVIDIA GeForce RTX 4090"
    found = card_of(Unknown())
    assert found is not None
    assert found[0].name == "RTX 4090"
    assert card_of(EmulatedDevice("rtx-4090", scale=0.01)) is None


def test_a_layout_and_its_shape_have_the_same_bytes() -> None:
    odd = PageLayout(
        [
            LayerLayout("full", 2, 64, "float32", 2, 64, "float32"),
            LayerLayout("sliding", 2, 64, "bfloat16", 2, 64, "bfloat16", 128),
            LayerLayout("latent", 1, 512, "bfloat16", 1, 64, "bfloat16"),
        ],
        16,
    )
    shape = shape_of(odd, 10**9)
    for tokens in (16, 128, 4096):
        assert shape.sequence_bytes(tokens) == odd.sequence_bytes(tokens)
    assert shape.read_bytes() == 10**9


def test_old_tokens_of_a_window_are_no_reason_to_warn() -> None:
    """Cold pages hold the oldest tokens, which a window does not read."""
    sliding = PageLayout(
        [LayerLayout("sliding", 8, 128, "bfloat16", 8, 128, "bfloat16", 1024)] * 32, 16
    )
    expected = Expected(65536, 4_600_000_000)
    windowed = tier_load(sliding, CARD, expected, vram=GIB, host=16 * GIB)
    assert windowed.kv_off == 0.0
    assert windowed.warnings() == []
    full = tier_load(LAYOUT, CARD, expected, vram=GIB, host=16 * GIB)
    assert full.kv_off > 0.8


def test_what_is_on_disk_costs_more_than_what_is_in_ram() -> None:
    expected = Expected(16384, 4_600_000_000)
    ram = tier_load(LAYOUT, CARD, expected, vram=GIB, host=16 * GIB)
    disk = tier_load(LAYOUT, CARD, expected, vram=GIB, host=0)
    assert disk.disk_share == 1.0
    assert disk.estimate.tps < 0.5 * ram.estimate.tps
    assert "disk link of 3 GB/s" in disk.cause
    assert any(remedy.how.startswith("host ") for remedy in disk.remedies())


@pytest.mark.parametrize("field", ["tokens", "sequences"])
def test_expected_is_checked(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(Expected(1, 1), **{field: 0})


# The same words from plan and stress


def test_plan_and_stress_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    placement = ["--weights-off-card", "0.2", "--link", "fallback", "--json"]
    assert main(["plan", "--model", "llama-3.1-8b", "--gpu", "rtx-4060-ti-16gb",
                 "--weights-dtype", "q4_k_m", *placement]) == 0  # fmt: skip
    planned = json.loads(capsys.readouterr().out)["warnings"]
    threads = torch.get_num_threads()
    try:
        assert main(["stress", "--card", "rtx-4060-ti-16gb", "--duration", "1", "--no-payload",
                     *placement]) == 0  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    stressed = json.loads(capsys.readouterr().out)
    assert stressed["warnings"] == planned
    assert stressed["loads"][0]["warnings"] == planned
    assert [one["level"] for one in planned] == ["severe", "severe"]
    assert 3.4 < stressed["loads"][0]["contexts"][0]["emulated_tps"] < 4.5
