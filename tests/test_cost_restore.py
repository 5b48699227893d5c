"""Prefill time, load time, and which of the two is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cost.constants import DEFAULTS
from kvtier.cost.links import link_path
from kvtier.cost.models import find_model
from kvtier.cost.prefill import prefill_flops, prefill_time
from kvtier.cost.restore import Chain, decisions, load_seconds, restore_or_recompute
from kvtier.devices.cards import find_card
from kvtier.errors import ConfigError

H100 = find_card("h100-sxm5-80gb")
LLAMA = find_model("llama-3.1-8b")


def test_operations_are_matrices_and_causal_attention() -> None:
    """2 P T + 2 L d T^2, as the vLLM figure was checked with."""
    work = prefill_flops(LLAMA, 10_000)
    assert work.matrix == 2 * LLAMA.active_prefill_params * 10_000
    assert work.attention == pytest.approx(2 * 32 * 4096 * 1e8)
    assert not work.assumed


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200_000), st.integers(1, 200_000))
def test_operations_of_parts_add_up(first: int, second: int) -> None:
    for name in ("llama-3.1-8b", "gemma-3-27b"):
        model = find_model(name)
        whole = prefill_flops(model, first + second).total
        parts = prefill_flops(model, first).total + prefill_flops(model, second, first).total
        assert whole == pytest.approx(parts)


def test_windows_bound_attention_and_states_have_none() -> None:
    gemma = find_model("gemma-3-27b")
    growth = [prefill_flops(gemma, n).attention / prefill_flops(gemma, n // 2).attention
              for n in (1024, 262_144)]  # fmt: skip
    assert growth[0] == pytest.approx(4, rel=0.01)
    assert 2 < growth[1] < 4
    by_numbers = find_model("layers=2,kv_heads=2,head_dim=64,params=1B")
    assert "4 query heads" in prefill_flops(by_numbers, 10).assumed


def test_input_and_output_parameters_are_separate() -> None:
    model = find_model("deepseek-v4.1-flash")
    work = prefill_flops(model, 1000)
    assert work.matrix == 2 * 8e9 * 1000
    assert model.active_decode_params == pytest.approx(16e9, rel=0.1)


def test_chunks_read_the_weights_again() -> None:
    whole = prefill_time(LLAMA, H100, 16_384, weight_bits=16).value
    large = prefill_time(LLAMA, H100, 16_384, chunk=4096, weight_bits=16).value
    small = prefill_time(LLAMA, H100, 16_384, chunk=16, weight_bits=16).value
    assert whole < large < 1.1 * whole
    reads = 1024 * LLAMA.read_bytes(16) / (H100.memory_bandwidth * DEFAULTS["hbm_efficiency"])
    assert small > reads > large
    with pytest.raises(ConfigError, match="chunk"):
        prefill_time(LLAMA, H100, 10, chunk=0)


def test_a_cached_prefix_costs_its_attention_only() -> None:
    after = prefill_time(LLAMA, H100, 1000, before=50_000).value
    assert prefill_time(LLAMA, H100, 1000).value < after
    assert after < prefill_time(LLAMA, H100, 51_000).value / 10


def test_a_card_without_flops_says_so() -> None:
    with pytest.raises(ConfigError, match="no FLOPS"):
        prefill_time(LLAMA, find_card("apple-m1"), 100)


def test_reload_against_recompute_on_an_h100() -> None:
    """vLLM's figure: at 100,000 tokens 6,855 ms from nothing and 305 ms from host RAM; at 10,000
    265 and 40."""
    for tokens, cold, warm in ((10_000, 0.265, 0.040), (50_000, 2.290, 0.160)):
        got = restore_or_recompute(LLAMA, H100, tokens, weight_bits=16)
        assert got.recompute.value == pytest.approx(cold, rel=0.05)
        assert got.load.value == pytest.approx(warm, rel=0.07)
        assert got.choice == "load"
        assert got.sure
        assert got.recompute.contains(cold)
        assert got.load.contains(warm)


def test_a_disk_can_be_slower_than_computing() -> None:
    small = find_model("smollm2-135m")
    got = restore_or_recompute(small, H100, 20_000, chain=Chain("disk"), weight_bits=16)
    assert got.choice == "recompute"
    assert got.break_even is not None
    assert got.break_even > 20_000
    later = restore_or_recompute(
        small, H100, 4 * got.break_even, chain=Chain("disk"), weight_bits=16
    )
    assert later.choice == "load"


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["host", "disk"]),
    st.sampled_from(["pinned", "pageable", "fallback"]),
    st.booleans(),
    st.sampled_from(["smollm2-135m", "llama-3.1-8b", "gemma-3-12b"]),
)
def test_the_break_even_length_divides_the_decisions(
    source: str, link: str, pipelined: bool, name: str
) -> None:
    chain = Chain(source, link, pipelined)  # type: ignore[arg-type]
    model = find_model(name)
    first = restore_or_recompute(model, H100, 1000, chain=chain).break_even
    if first is None:
        assert restore_or_recompute(model, H100, 1 << 22, chain=chain).choice == "recompute"
        return
    shorter, longer = decisions(model, H100, [max(1, first - 1), first], chain=chain)
    assert longer.choice == "load"
    assert first == 1 or shorter.choice == "recompute"


def test_hops_add_up_or_overlap() -> None:
    def load(source: str, pipelined: bool = True, **more: int) -> float:
        chain = Chain(source, "pinned", pipelined, **more)  # type: ignore[arg-type]
        return load_seconds(LLAMA, H100, 65_536, chain, DEFAULTS)

    disk_s = LLAMA.sequence_bytes(65_536) / DEFAULTS["disk_bw"]
    step = load("vram")
    host = load("host")
    assert load("disk", False) == pytest.approx(host + disk_s)
    assert load("disk") == pytest.approx(step + disk_s, rel=0.01)
    assert step < host < load("disk") < load("disk", False)


def test_small_pieces_fall_off_the_cliff() -> None:
    """A page of 16 tokens in 64 parts of 32 KiB is above vLLM's 28 KiB, in 128 parts below it."""

    def load(parts: int) -> float:
        chain = Chain("host", page_tokens=16, parts_a_page=parts)
        return load_seconds(LLAMA, H100, 65_536, chain, DEFAULTS)

    assert load(128) / load(1) > 4
    assert load(64) / load(1) < 1.5
    path = link_path(H100)
    assert path.rate(2**30, 2**30 // (16 * 1024)) == pytest.approx(6.5e9)


def test_wrong_chains_are_refused() -> None:
    with pytest.raises(ConfigError, match="tape"):
        Chain("tape")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="page_tokens"):
        Chain(page_tokens=0)
    with pytest.raises(ConfigError, match="tokens"):
        restore_or_recompute(LLAMA, H100, -1)


def test_a_decision_as_json_has_both_bases() -> None:
    got = restore_or_recompute(LLAMA, H100, 10_000, chain=Chain("disk")).to_json()
    assert got["choice"] in ("load", "recompute")
    for side in ("load_s", "recompute_s"):
        part = got[side]
        assert isinstance(part, dict)
        assert part["low"] <= part["value"] <= part["high"]
        assert part["basis"]["constants"]
    names = [c["name"] for c in got["load_s"]["basis"]["constants"]]  # type: ignore[index]
    assert "disk_bw" in names
