"""Time of decode steps: units, places, modes, constants and the lint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cost.batches import kv_pool, largest, largest_batch, matched_batch
from kvtier.cost.cliff import slowdown
from kvtier.cost.constants import DEFAULTS, Constant, Constants
from kvtier.cost.lint import load_plausibility, plausibility, prefill_plausibility
from kvtier.cost.models import find_model
from kvtier.cost.modes import decode_estimate
from kvtier.cost.prefill import prefill_time
from kvtier.cost.slow_links import slow_link
from kvtier.cost.split import offload_decode, prefer
from kvtier.cost.streaming import crossover_tokens, kv_step_ms, stream_ms
from kvtier.cost.workload import Selection, Workload, kept_bytes, kv_read
from kvtier.devices.cards import cards, find_card
from kvtier.errors import ConfigError

CARD = find_card("rtx-4060-ti-16gb")
H100 = find_card("h100-sxm5-80gb")
LLAMA = find_model("llama-3.1-8b")
QWEN = find_model("qwen3-30b-a3b")
FAST, READ, PART, SEEN = 42.5, 4.63, 0.2, 3.8


# units


@pytest.mark.parametrize(
    ("per_token", "tokens", "ms", "gb"),
    [
        (320_000, 128_000, 97.81, 327.68),  # everything in thousands
        (327_680, 128_000, 100.16, 335.54),  # KiB per token, thousands of tokens
        (327_680, 131_072, 102.57, 343.60),  # powers of two throughout
        (70_272, 128_000, 21.48, 71.96),  # MLA: 61 layers of 512 + 64 elements
        (61 * 512 * 2, 128_000, 19.09, 63.96),  # without the rope part, which is stored too
    ],
)
def test_gb_and_gib_are_never_mixed(per_token: int, tokens: int, ms: float, gb: float) -> None:
    got = stream_ms(per_token, tokens, 8, 3350)
    assert round(got.ms, 2) == ms
    assert round(got.gb, 2) == gb
    assert got.gib == pytest.approx(got.gb * 1e9 / 2**30)
    text = str(got)
    for part in (f"{ms:.2f} ms", f"{gb:.2f} GB", f"{got.gib:.2f} GiB", "1e9", "2**30"):
        assert part in text


def test_a_bandwidth_is_given_once_and_in_one_unit() -> None:
    assert stream_ms(1, 1e9, 1, gibs=1).ms == pytest.approx(1e9 / 2**30 * 1e3)
    for wrong in ({}, {"gbs": 1.0, "gibs": 1.0}):
        with pytest.raises(ConfigError, match="bandwidth"):
            stream_ms(1, 1, 1, **wrong)
    with pytest.raises(ConfigError, match="eta"):
        kv_step_ms(1, 1, 1, 0.0)
    with pytest.raises(ConfigError, match="tokens is -1"):
        stream_ms(1, -1, 1, 1)


def test_from_which_length_on_kv_is_most_of_a_step() -> None:
    one = crossover_tokens(1_192_003_840, 114_688)
    assert int(one) == 10_393
    assert crossover_tokens(1_192_003_840, 114_688, 8) == pytest.approx(one / 8)
    with pytest.raises(ConfigError, match="batch"):
        crossover_tokens(1, 1, 0)


# places


def test_the_reference_case_and_the_links_that_do_not_explain_it() -> None:
    """A fifth of an 8B model off an RTX 4060 Ti: 42.5 became 3.8."""

    def by(kind: str, constants: Constants = DEFAULTS) -> object:
        link = slow_link(kind, CARD, constants)
        return offload_decode(fast_tps=FAST, read_gb=READ, slow_fraction=PART, slow_gbs=link)

    for kind in ("pageable", "fallback"):
        got = by(kind)
        assert got.contains(SEEN)  # type: ignore[attr-defined]
        assert got.level == "severe"  # type: ignore[attr-defined]
        assert kind in got.basis.link  # type: ignore[attr-defined]
    for peak in (38.4e9, 51.2e9, 89.6e9):
        assert not by("cpu", DEFAULTS.with_value("dram_bw", peak)).contains(SEEN)  # type: ignore[attr-defined]
    assert not by("pinned").contains(SEEN)  # type: ignore[attr-defined]


def test_the_reference_case_from_the_model_alone() -> None:
    for kind in ("pinned", "pageable", "fallback", "cpu"):
        work = Workload(LLAMA, CARD, 512, weights_off=PART, weights_link=kind)
        got = decode_estimate(work)
        assert got.contains(SEEN) == (kind in ("pageable", "fallback"))
        assert (got.level == "severe") == (kind in ("pageable", "fallback"))
        assert got.baseline_tps == pytest.approx(FAST, rel=0.03)
        assert kind in got.basis.link
        assert got.bound == ("weights off the card")


rates = st.floats(0.5, 4000)


@settings(deadline=None, max_examples=50)
@given(st.floats(1, 500), st.floats(0.1, 100), st.floats(0, 1), rates)
def test_two_places_are_the_hyperbola(tps: float, read: float, part: float, slow: float) -> None:
    got = offload_decode(fast_tps=tps, read_gb=read, slow_fraction=part, slow_gbs=slow)
    assert got.slowdown == pytest.approx(slowdown(part, read * tps / slow))


@settings(deadline=None, max_examples=50)
@given(
    st.floats(1, 500), st.floats(0, 1), st.floats(0, 1), st.floats(0.001, 1), st.floats(0.001, 1)
)
def test_more_bytes_off_are_never_faster_and_more_bandwidth_never_slower(
    fast: float, a: float, b: float, one: float, other: float
) -> None:
    """``one`` and ``other``: links as shares of the rate of VRAM."""
    less, more = sorted((a, b))
    slow, quick = sorted((one, other))
    read = 10.0

    def at(part: float, link: float) -> float:
        rate = link * read * fast
        return offload_decode(
            fast_tps=fast, read_gb=read, slow_fraction=part, slow_gbs=rate
        ).tps  # fmt: skip

    assert at(more, slow) <= at(less, slow) * (1 + 1e-9)
    assert at(more, quick) >= at(more, slow) * (1 - 1e-9)


def test_layers_and_the_output_layer_are_counted_where_they_are() -> None:
    common = {
        "layers": 48,
        "layer_mb": 164.8,
        "output_mb": 638.7,
        "gpu_gbs": 369.2,
        "slow_gbs": 24.7,
    }
    on_cpu = offload_decode(gpu_layers=24, output_on="cpu", **common)  # type: ignore[arg-type]
    on_gpu = offload_decode(gpu_layers=24, output_on="gpu", **common)  # type: ignore[arg-type]
    assert 1 / on_cpu.tps - 1 / on_gpu.tps == pytest.approx(0.6387 / 24.7 - 0.6387 / 369.2)
    whole = offload_decode(gpu_layers=48, output_on="gpu", **common)  # type: ignore[arg-type]
    assert whole.slowdown == pytest.approx(1)
    assert on_cpu.before_tps == pytest.approx(whole.tps)


def test_three_tiers_add_up_and_kv_comes_on_top() -> None:
    got = offload_decode(
        gpu_gb=43, gpu_gbs=538, ram_gb=24.4, ram_gbs=6.16, disk_gb=14.8, disk_gbs=2
    )
    assert got.seconds_per_token == pytest.approx(43 / 538 + 24.4 / 6.16 + 7.4)
    assert sum(got.parts.values()) == pytest.approx(got.seconds_per_token * 1e3)
    kv = offload_decode(fast_tps=75.4, slow_kv_gb=8.59, slow_gbs=8.97)
    assert kv.tps == pytest.approx(1.03, rel=0.01)
    assert prefer({"kv_out": kv.tps, "weights_out": 13.6}) == "weights_out"


@pytest.mark.parametrize(
    ("given_", "part"),
    [
        ({}, "nothing is read"),
        ({"fast_tps": 10, "slow_fraction": 1.2, "read_gb": 1, "slow_gbs": 1}, "slow_fraction"),
        ({"fast_tps": 10, "slow_fraction": 0.2, "slow_gbs": 1}, "read_gb"),
        ({"fast_tps": 10, "slow_fraction": 0.2, "read_gb": 1}, "slow_gbs"),
        ({"fast_tps": 0.0}, "fast_tps"),
        ({"ram_gb": -1, "ram_gbs": 1}, "ram_gb"),
        ({"ram_gb": 1, "ram_gbs": [0, 1]}, "ram_gbs"),
        ({"layers": 2, "gpu_layers": 3, "layer_mb": 1}, "gpu_layers"),
    ],
)
def test_what_is_missing_or_out_of_range_is_named(given_: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        offload_decode(**given_)  # type: ignore[arg-type]


# modes


def tps(mode: str = "vram", **changes: object) -> float:
    work = Workload(LLAMA, find_card("rtx-4090"), 8192)
    return decode_estimate(replace(work, **changes), mode).tps  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["kv-stream", "kv-cpu", "select"]),
    st.sampled_from(["pinned", "pageable", "fallback", "disk"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 16),
)
def test_rates_fall_with_bytes_off_the_card(
    mode: str, link: str, a: float, b: float, batch: int
) -> None:
    less, more = sorted((a, b))
    slower = tps(mode, kv_off=more, kv_link=link, batch=batch)
    assert slower <= tps(mode, kv_off=less, kv_link=link, batch=batch) * (1 + 1e-9)
    worse = tps(weights_off=more, weights_link=link, batch=batch)
    assert worse <= tps(weights_off=less, weights_link=link, batch=batch) * (1 + 1e-9)


def test_exact_modes_are_ordered_by_their_links() -> None:
    pinned = tps("kv-stream", kv_off=0.5)
    assert tps() > pinned > tps("kv-stream", kv_off=0.5, kv_link="pageable")
    assert pinned > tps("kv-stream", kv_off=0.5, kv_link="disk")
    assert pinned > tps("kv-cpu", kv_off=0.5)
    assert tps("kv-cpu", kv_off=0.5, server=True) > tps("kv-cpu", kv_off=0.5)


@pytest.mark.parametrize("off", [0.0, 0.25, 1.0])
def test_what_the_processor_attends_to_is_not_read_by_the_card(off: float) -> None:
    work = Workload(LLAMA, CARD, 32_768, 2, kv_off=off)
    got = decode_estimate(work, "kv-cpu")
    kv = kv_read(work, "kv-cpu")
    assert kv == 2 * 32_768 * 131_072
    rate = CARD.memory_bandwidth * DEFAULTS["vram_efficiency"]
    assert got.parts["KV in VRAM"] == pytest.approx((1 - off) * kv / rate)
    if off:
        handed = 2 * 32 * DEFAULTS["handover_s"]  # a query for each sequence and layer
        cold = off * kv / DEFAULTS["cpu_attention_bw"]
        assert got.parts["KV on the processor"] == pytest.approx(cold + handed)


def test_quantised_kv_and_shorter_contexts_are_faster() -> None:
    assert tps(kv_dtype="int4") > tps(kv_dtype="int8") > tps(kv_dtype="bf16") > tps(context=65536)
    got = decode_estimate(Workload(LLAMA, H100, 8192, kv_dtype="fp8"))
    assert got.exact


def test_more_flops_at_equal_bandwidth_leave_decoding_alone_and_shorten_prefill() -> None:
    """Every pair of the table's cards with one bandwidth, so RTX 4070, 4070 SUPER and 4070 Ti."""
    known = [card for card in cards() if card.bf16_flops and not card.unified]
    pairs = [
        (one, other)
        for one in known
        for other in known
        if one.memory_bandwidth == other.memory_bandwidth
        and one.bf16_flops < other.bf16_flops  # type: ignore[operator]
        and (one.name[:4] == other.name[:4])
    ]
    assert len(pairs) >= 6
    for one, other in pairs:
        rates_ = [decode_estimate(Workload(LLAMA, card, 4096)).tps for card in (one, other)]
        assert rates_[0] == rates_[1]
        first = [prefill_time(LLAMA, card, 65536).value for card in (one, other)]
        # All of it but the fixed cost of a step is operations.
        fixed = DEFAULTS["step_s"]
        ratio = (first[0] - fixed) / (first[1] - fixed)
        assert ratio == pytest.approx(other.bf16_flops / one.bf16_flops)  # type: ignore[operator]


@settings(deadline=None, max_examples=50)
@given(st.floats(1.0, 8.0))
def test_more_bandwidth_at_equal_flops_is_never_slower(factor: float) -> None:
    faster = replace(H100, memory_bandwidth=H100.memory_bandwidth * factor)
    for mode in ("vram", "kv-stream", "select", "evict"):
        off = 0.5 if mode in ("kv-stream", "select") else 0.0
        one, other = (
            decode_estimate(Workload(QWEN, card, 32768, 4, kv_off=off), mode).tps  # type: ignore[arg-type]
            for card in (H100, faster)
        )
        assert other >= one
    assert prefill_time(QWEN, faster, 512).value <= prefill_time(QWEN, H100, 512).value


def test_experts_of_a_batch_are_read_in_expectation() -> None:
    one = decode_estimate(Workload(QWEN, H100, 1024, 1, weight_bits=8))
    many = decode_estimate(Workload(QWEN, H100, 1024, 64, weight_bits=8))
    share = 1 - (1 - 8 / 128) ** 64
    grown = many.parts["weights in VRAM"] / one.parts["weights in VRAM"]
    wanted = (QWEN.shared_params + QWEN.expert_params * share) / QWEN.active_decode_params
    assert grown == pytest.approx(wanted)
    alike = DEFAULTS.with_value("expert_spread", 8 / 128)
    same = decode_estimate(Workload(QWEN, H100, 1024, 64, weight_bits=8), constants=alike)
    assert same.parts["weights in VRAM"] == pytest.approx(one.parts["weights in VRAM"])


# matched and largest batch


def test_selecting_cannot_raise_the_batch_and_dropping_can() -> None:
    """Qwen3-30B-A3B FP8 on an H100 at 131,072 + 2,048 tokens: vLLM ran 3 sequences, a selector that
    keeps all KV as many, and SnapKV with 8,192 tokens of the prompt 30."""
    work = Workload(QWEN, H100, 133_120, weight_bits=8, selection=Selection(8192 + 2048))
    pool = 0.9 * 79.1 * 2**30 - 31.2e9 - 3e9
    assert largest(work, "vram", pool) == 3
    assert largest(work, "select", pool) == 3
    assert 25 <= largest(work, "evict", pool) <= 35
    rows = {
        row.estimate.mode: row for row in largest_batch(work, ["select", "evict"], pool_bytes=pool)
    }
    assert rows["select"].estimate.batch == rows["select"].reference.batch == 3
    assert rows["select"].from_batch == 1
    assert rows["evict"].from_batch > 2
    for row in rows.values():
        assert row.from_reading * row.from_batch == pytest.approx(row.gain)


@settings(deadline=None, max_examples=50)
@given(st.integers(1024, 262_144), st.integers(256, 16_384), st.floats(0, 1), st.integers(1, 64))
def test_gains_are_attributed_to_what_makes_them(
    context: int, kept: int, dense: float, batch: int
) -> None:
    work = Workload(QWEN, H100, context, batch, selection=Selection(kept, dense=dense))
    pool = 8 * kept_bytes(work, "vram")
    assert largest(work, "select", pool) == largest(work, "vram", pool) == 8
    assert largest(work, "evict", pool) >= 8
    evict, select, whole = (kv_read(work, mode) for mode in ("evict", "select", "vram"))  # type: ignore[arg-type]
    assert evict <= select * (1 + 1e-9)
    assert select <= whole * (1 + 1e-9)
    for row in matched_batch(work, ["select", "evict", "vram"]):
        assert row.estimate.batch == row.reference.batch == batch
        assert row.from_batch == 1


def test_a_sequence_that_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match="fewer tokens"):
        largest_batch(Workload(LLAMA, CARD, 1_000_000), ["vram"])
    assert kv_pool(Workload(LLAMA, CARD, 1)) == pytest.approx(
        0.9 * 16 * 2**30 - LLAMA.weight_bytes() - 3e9
    )


@pytest.mark.parametrize(
    ("changes", "mode", "part"),
    [
        ({"kv_off": 1.5}, "vram", "kv_off"),
        ({"kv_off": 0.5}, "vram", "kv-stream"),
        ({"kv_off": 0.5}, "evict", "keeps KV in VRAM"),
        ({"batch": 0}, "vram", "batch"),
        ({"context": -1}, "vram", "context"),
        ({"weights_off": 0.1, "weights_link": "usb"}, "vram", "usb"),
        ({"kv_link": "cpu"}, "kv-stream", "kv-cpu"),
        ({}, "vrm", "vrm"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(
    changes: dict[str, object], mode: str, part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        tps(mode, **changes)


# constants and bases


def test_every_estimate_names_its_inputs_and_constants() -> None:
    work = Workload(LLAMA, CARD, 4096, weights_off=0.2, kv_off=0.5, weights_link="pageable")
    got = decode_estimate(work, "kv-stream").to_json()
    basis = got["basis"]
    assert isinstance(basis, dict)
    assert "GB = 1e9" in basis["units"]
    assert "pageable" in basis["link"]
    assert basis["command"]
    assert basis["inputs"]["weights_off"] == 0.2
    for constant in basis["constants"]:
        assert constant["source"]
        assert constant["basis"] == "table"
        assert constant["low"] <= constant["value"] <= constant["high"]
    assert got["low_tps"] < got["tps"] < got["high_tps"]


def test_measurements_take_the_place_of_table_values() -> None:
    here = DEFAULTS.measured({"pinned_bw": 6e9, "step_s": Constant("x", 1e-3, "s", "today")})
    assert here.get_constant("step_s").measured
    assert here.get_constant("step_s").name == "step_s"
    link = slow_link("pinned", CARD, here)
    assert (link.likely, link.low, link.high, link.measured) == (6e9, 6e9, 6e9, True)
    work = Workload(LLAMA, CARD, 512, weights_off=0.2)
    got = decode_estimate(work, constants=here)
    assert set(got.basis.measured) == {"pinned_bw", "step_s"}
    assert got.tps < decode_estimate(work).tps
    with pytest.raises(ConfigError, match="pined_bw"):
        DEFAULTS.measured({"pined_bw": 1.0})
    with pytest.raises(ConfigError, match="band"):
        Constant("x", 1.0, "s", "", low=2.0)
    with pytest.raises(ConfigError, match="twice"):
        Constants([Constant("x", 1.0, "s", ""), Constant("x", 1.0, "s", "")])


def test_every_constant_has_a_source_and_a_band() -> None:
    for name in DEFAULTS:
        constant = DEFAULTS.get_constant(name)
        assert len(constant.source) > 20
        assert constant.unit
        assert constant.low <= constant.slow <= constant.high
        assert not constant.measured
    assert DEFAULTS.slow["pageable_bw"] == 2.8e9
    assert DEFAULTS.slow["step_s"] == DEFAULTS.get_constant("step_s").high


# lint


def test_a_claim_above_the_roofline_is_called_out() -> None:
    got = plausibility(
        weights_gb=19.85, gpu_fraction=0.390625, gpu_gbs=256, cpu_gbs=76.8, claimed_tps=10.8
    )
    assert not got.plausible
    assert got.max_tps == pytest.approx(5.33, rel=0.01)
    assert got.exceeds == pytest.approx(10.8 / 5.325, rel=0.01)
    assert "2.03x" in got.text
    assert plausibility(weights_gb=4.63, gpu_gbs=288, claimed_tps=42.5).plausible
    # Q8_0 and FP16 cannot give 42.5 tokens/s on that card.
    for size in (7.98, 15.02):
        assert not plausibility(weights_gb=size, gpu_gbs=288, claimed_tps=42.5).plausible
    with pytest.raises(ConfigError, match="cpu_gbs"):
        plausibility(weights_gb=1, gpu_gbs=1, gpu_fraction=0.5, claimed_tps=1)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.1, 500), st.floats(0, 1), st.floats(10, 8000), st.floats(1, 500))
def test_no_prediction_is_called_implausible(
    size: float, part: float, fast: float, slow: float
) -> None:
    seconds = size * part / (0.8 * fast) + size * (1 - part) / (0.64 * slow)
    got = plausibility(
        weights_gb=size, gpu_fraction=part, gpu_gbs=fast, cpu_gbs=slow, claimed_tps=1 / seconds
    )
    assert got.plausible


def test_loads_and_prefills_have_limits_too() -> None:
    bus = find_card("rtx-4070").bus_rate
    assert bus == pytest.approx(31.5e9, rel=0.01)
    assert not load_plausibility(nbytes=3.84e9, claimed_s=0.0194, peak_bw=bus).plausible
    assert load_plausibility(nbytes=3.84e9, claimed_s=0.16, peak_bw=bus).plausible
    slow = prefill_plausibility(
        tokens=8000, claimed_s=3.2, peak_flops=989e12, vram_bytes=80 * 2**30
    )
    assert not slow.plausible
    assert "parameters" in slow.text
    assert prefill_plausibility(
        tokens=8000, claimed_s=0.2, peak_flops=989e12, vram_bytes=80 * 2**30
    ).plausible
    fast = prefill_plausibility(tokens=8000, claimed_s=0.01, peak_flops=989e12, flops=1.3e14)
    assert not fast.plausible
