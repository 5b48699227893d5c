"""Copy and step times by formula, and that the emulated device agrees with them."""

import subprocess
import sys

import pytest

from kvtier.cost.decode import (
    LayerLoad,
    Slowdown,
    all_in_vram,
    step_time,
)
from kvtier.cost.links import LinkPath, link_path
from kvtier.cost.models import find_model, models
from kvtier.devices.cards import KERNEL_START_S, LinkModel, find_card
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError

MiB = 2**20
CARD = find_card("rtx-4060-ti-16gb")


def test_the_cost_of_a_load_is_known_without_torch() -> None:
    program = (
        "import sys, kvtier.stress.plan, kvtier.cli.stress_options; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_copy_is_latency_pieces_and_bytes() -> None:
    path = LinkPath("pinned", LinkModel(h2d=1e9, d2h=2e9, start_s=1e-3, per_piece_s=1e-6))
    assert path.seconds(10**6, 10) == pytest.approx(1e-3 + 10e-6 + 1e-3)
    assert path.seconds(10**6, 10, "d2h") == pytest.approx(1e-3 + 10e-6 + 0.5e-3)
    assert path.seconds(0) == path.host_seconds(0) == 0.0
    half = path.half_rate_bytes()
    assert path.effective_rate(half) == pytest.approx(0.5e9, rel=1e-3)


def test_small_pieces_fall_off_a_cliff_in_one_direction() -> None:
    path = link_path(find_card("h100-sxm5-80gb"))
    total = 64 * MiB
    big, small = (path.effective_rate(total, total // piece) for piece in (64 * 1024, 16 * 1024))
    assert big / small > 4
    down = path.effective_rate(total, total // (16 * 1024), "d2h")
    assert down > 3 * small


@pytest.mark.parametrize("kind", ["pinned", "pageable", "fallback"])
@pytest.mark.parametrize("pieces", [1, 32])
def test_an_emulated_copy_takes_what_the_formula_says(kind: str, pieces: int) -> None:
    path = link_path(CARD, kind)  # type: ignore[arg-type]
    device = EmulatedDevice(CARD, link=path.model, pinned=kind != "pageable", scale=1 / 16)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host, vram = device.alloc_host(2 * MiB), device.alloc(4 * MiB)
    step = 2 * MiB // pieces
    parts = [
        (vram.range(2 * n * step, (2 * n + 1) * step), host.range(n * step, (n + 1) * step))
        for n in range(pieces)
    ]
    stream = device.stream("h2d")
    began = device.now_s
    device.copy(stream, parts)
    stream.synchronize(10)
    wanted = path.seconds(32 * MiB, pieces)
    assert device.now_s - began == pytest.approx(wanted, rel=0.02)


def layers(count: int = 32, **bytes_: float) -> list[LayerLoad]:
    return [LayerLoad(pieces=8 if bytes_.get("cold") else 0, **bytes_) for _ in range(count)]  # type: ignore[arg-type]


def test_a_step_in_vram_is_its_bytes_over_its_bandwidth() -> None:
    time = step_time(layers(weights=1e8), CARD, link_path(CARD), efficiency=0.5, step_s=1e-3)
    kernels = 32 * 3 * KERNEL_START_S
    assert time.seconds == pytest.approx(32e8 / 144e9 + kernels + 1e-3)
    assert time.bound == "memory"


def test_copies_hide_behind_compute_and_the_other_way_round() -> None:
    link = link_path(CARD)
    few = step_time(layers(weights=1e8, cold=1e6), CARD, link)
    none = step_time(layers(weights=1e8, hot=0.0), CARD, link)
    assert few.seconds < none.seconds * 1.03
    much = step_time(layers(weights=1e6, cold=1e8), CARD, link)
    assert much.bound == "link"
    assert much.seconds == pytest.approx(much.copy_s + much.compute_s / 32 + much.fixed_s, rel=0.01)
    warm = step_time(layers(weights=1e6, cold=1e8), CARD, link, cold_start=False)
    assert much.seconds - warm.seconds == pytest.approx(much.copy_s / 32)


def test_pageable_copies_and_weights_behind_the_link_hide_nothing() -> None:
    load = layers(weights=1e8, cold=3e7)
    serial = step_time(load, CARD, link_path(CARD, "pageable"))
    parts = serial.compute_s + serial.copy_s + serial.host_s + serial.fixed_s
    assert serial.seconds == pytest.approx(parts)
    off = step_time(layers(weights=8e7, off=2e7), CARD, link_path(CARD))
    assert off.seconds == pytest.approx(off.compute_s + off.off_s + off.fixed_s)


def test_the_reference_cliff() -> None:
    """A fifth of an 8B model in system RAM: 42.5 -> 3.8 tokens/s, and only by a slow link class."""
    read = find_model("llama-3.1-8b").read_bytes(4.9)
    assert read == pytest.approx(4.6e9, rel=0.02)

    def slow(kind: str) -> Slowdown:
        load = layers(weights=0.8 * read / 32, off=0.2 * read / 32, hot=2e6)
        link = link_path(CARD, kind)  # type: ignore[arg-type]
        return Slowdown(step_time(load, CARD, link), step_time(all_in_vram(load), CARD, link))

    fallback = slow("fallback")
    assert 40 < fallback.baseline.tokens_per_s() < 44
    assert 3.5 < fallback.step.tokens_per_s() < 4.3
    assert fallback.level == "severe"
    assert slow("pinned").step.tokens_per_s() > 8


def test_models_have_sources_and_layouts() -> None:
    assert len(models()) > 40
    for model in models():
        assert model.source
        assert find_model(model.slug) is model
        if model.slug.startswith("deepseek-v4"):
            # Compressed KV is no pages of K and V.
            with pytest.raises(ConfigError, match="lay out in pages"):
                model.layout("bf16", 64)
            continue
        for dtype in ("bf16", "fp8", "int8", "int4"):
            full = model.layout(dtype, 64)
            divisor = model.divisor(dtype, 128)
            small = model.layout(dtype, 64, divisor)
            assert small.token_bytes * divisor == full.token_bytes
            assert sum(layer.paged for layer in full.layers) == model.attention_layers
    assert find_model("Llama-3.1-70B").layout("bf16", 64).token_bytes == 327_680
    assert find_model("llama-3.1-8b").layout("int4", 64).token_bytes == 32_768
    assert find_model("deepseek-v3").layout("bf16", 64).token_bytes == 70_272
    gemma = find_model("gemma-3-12b").layout("bf16", 64)
    assert sum(layer.window == 1024 for layer in gemma.layers) == 40


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("layers=32,heads=8", "heads"),
        ("layers=32", "kv_heads is missing"),
        ("layers=0,kv_heads=8,head_dim=128,params=8B", "layers"),
    ],
)
def test_a_model_that_is_not_known_says_what_is(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        find_model(text)


def test_a_model_by_numbers() -> None:
    model = find_model("layers=32,kv_heads=8,head_dim=128,params=8B")
    assert model.layout("bf16", 32).token_bytes == 131_072
    assert model.weight_bytes(4) == 4e9


def test_a_batch_reads_the_experts_it_touches_in_expectation() -> None:
    model = find_model("qwen3-30b-a3b")
    one, two, many = (model.read_bytes(8, n) for n in (1, 2, 1000))
    experts = 28.991e9 * (1 - (1 - 8 / 128) ** 2)
    assert two == pytest.approx(model.shared_params + experts, rel=1e-6)
    assert one < two < 2 * one
    assert many == pytest.approx(model.weight_bytes(8) - model.gathered_params, rel=1e-6)
