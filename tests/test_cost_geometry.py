"""Bytes of KV, of recurrent state and of weights, by hand-checked numbers and by properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cost import find_model, fixed_state_bytes, kv_bytes, max_context, max_sequences
from kvtier.cost.geometry import LayerShape, layers_bytes
from kvtier.cost.kv_dtype import KVDtype, kv_dtype, kv_dtypes
from kvtier.cost.models import ModelShape, models
from kvtier.errors import ConfigError

MiB, GiB = 2**20, 2**30

# formats


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32), ("bf16", 16), ("fp16", 16), ("f16", 16), ("fp8", 8), ("fp8_e5m2", 8),
        ("int8", 8.5), ("int4", 4.5), ("nvfp4", 4.5), ("mxfp4", 4.25), ("q8_0", 34 * 8 / 32),
        ("q4_0", 18 * 8 / 32), ("q4_1", 20 * 8 / 32), ("q5_0", 22 * 8 / 32), ("q5_1", 24 * 8 / 32),
        ("int4:group=64", 4.25), ("int4:group=64,zero=16", 4.5), ("int8:group=128", 8.125),
        ("BF16", 16),
    ],
)  # fmt: skip
def test_an_element_takes_its_bits_and_its_share_of_the_scales(name: str, bits: float) -> None:
    assert kv_dtype(name).element_bits == bits
    assert kv_dtype(kv_dtype(name)) == kv_dtype(name)


def test_formats_say_where_their_scales_come_from() -> None:
    assert all(one.source for one in kv_dtypes())
    assert "32 values" in kv_dtype("int8").describe()
    assert kv_dtype("fp8").describe() == "fp8 (8 bits)"


@pytest.mark.parametrize(
    ("text", "part"),
    [("fp7", "fp8"), ("int4:size=3", "size=3"), ("int4:group=x", "group=x"), ("bf16:scale=16", "group"),
     ("", "KV dtype")],
)  # fmt: skip
def test_an_unknown_format_names_the_known_ones(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        kv_dtype(text)


# layers

layer = st.one_of(
    st.builds(LayerShape, st.just("full"), st.integers(1, 4096), st.integers(1, 4096)),
    st.builds(LayerShape, st.just("sliding"), st.integers(1, 512), st.integers(1, 512), st.integers(1, 5000)),
    st.builds(LayerShape, st.just("latent"), st.integers(1, 512), st.integers(0, 64)),
    st.builds(LayerShape, st.just("compressed"), st.integers(1, 512), st.just(0), st.integers(0, 256), st.integers(1, 128)),
    st.builds(LayerShape, st.just("state"), state_bytes=st.integers(0, 10**7)),
    st.just(LayerShape("none")),
)  # fmt: skip
formats = st.sampled_from(["fp32", "bf16", "fp8", "int8", "int4", "nvfp4", "int4:group=64,zero=8"])


@given(layers=st.lists(layer, min_size=1, max_size=8), tokens=st.integers(0, 10**6), more=st.integers(0, 10**5), dtype=formats)  # fmt: skip
def test_a_sequence_is_the_sum_of_its_layers_and_never_shrinks(
    layers: list[LayerShape], tokens: int, more: int, dtype: str
) -> None:
    model = ModelShape("m", tuple(layers), 1e9)
    now, later = (model.sequence_bytes(n, dtype) for n in (tokens, tokens + more))
    one_by_one = sum(layers_bytes([one], tokens, dtype) for one in layers)
    assert now == pytest.approx(one_by_one)
    assert later >= now
    kv = model.kv(tokens, dtype)
    assert kv.total == now
    # What is not window or state grows by the token, up to a last entry that is not full yet.
    rates = sum(one.token_bytes(kv_dtype(dtype)) for one in layers if one.rate)
    grown = now - kv.fixed
    assert grown <= kv.per_token * tokens * (1 + 1e-9)
    assert grown >= kv.per_token * tokens - rates - 1e-6 * now


@given(window=st.integers(1, 5000), tokens=st.integers(0, 10**6), dtype=formats)
def test_a_window_clips(window: int, tokens: int, dtype: str) -> None:
    sliding = ModelShape("m", (LayerShape("sliding", 64, 32, window),), 1e9)
    full = ModelShape("m", (LayerShape("full", 64, 32),), 1e9)
    clipped = min(tokens, window)
    assert sliding.sequence_bytes(tokens, dtype) == full.sequence_bytes(clipped, dtype)
    assert sliding.token_bytes(dtype) == 0


def test_shared_layers_store_nothing_and_are_read() -> None:
    layers = (
        LayerShape("full", 8, 8),
        LayerShape("sliding", 8, 8, 16),
        LayerShape("shared", source=0),
    )
    model = ModelShape("m", layers, 1e9)
    assert model.sequence_bytes(100, "bf16") == 32 * 100 + 32 * 16
    assert model.layer_kv(100, "bf16") == [3200, 512, 3200]
    assert model.read_kv_bytes(100, "bf16") == 6912
    with pytest.raises(ConfigError, match="earlier layer"):
        ModelShape("m", (LayerShape("shared", source=0), LayerShape("full", 8, 8)), 1e9)


@pytest.mark.parametrize(
    ("kind", "values", "part"),
    [("full", {"k": -1}, "k of a layer"), ("sliding", {"k": 1}, "window 0"), ("none", {"k": 1}, "none"),
     ("compressed", {"k": 1}, "rate"), ("full", {"k": 1, "rate": 4}, "rate")],
)  # fmt: skip
def test_layers_that_cannot_be(kind: str, values: dict[str, int], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        LayerShape(kind, **values)  # type: ignore[arg-type]


# published numbers


@pytest.mark.parametrize(
    ("name", "growth", "fixed"),
    [
        ("llama-2-7b", 524_288, 0),
        ("llama-3.1-70b", 327_680, 0),
        ("qwen3-14b", 163_840, 0),
        ("qwen3.5-27b", 65_536, 156_893_184),
        ("gemma-3-27b", 81_920, 416 * MiB),
        ("gemma-2-27b", 188_416, 23 * 4096 * 16 * 128 * 2 * 2),
        ("deepseek-v3", 70_272, 0),
        ("deepseek-v4-flash", 5_964, 5_636_096),
        ("gpt-oss-20b", 24_576, 3_145_728),
        ("opt-30b", 1_376_256, 0),
        ("qwen3.8-flash-next", 30_409, 0),
        ("deepseek-v4.1-flash", 890, 0),
        ("mistral-7b-v0.1", 0, 512 * MiB),
    ],
)
def test_bytes_per_token_and_per_sequence_in_bf16(name: str, growth: float, fixed: float) -> None:
    kv = find_model(name).kv(100_000, "bf16")
    assert kv.per_token == pytest.approx(growth)
    assert kv.fixed == fixed


def test_mla_stores_the_latent_and_the_rope_key() -> None:
    """61 layers x (512 + 64) x 2 bytes; the rope part is no option, and GPUs do not split it."""
    assert kv_bytes(1, mla_layers=61, latent=512, rope=64).per_token == 70_272
    assert kv_bytes(1, full_layers=61, latent=512, rope=64).per_token == 70_272
    assert kv_bytes(1, mla_layers=61, latent=512, rope=64, shards=8).per_token == 70_272
    assert (
        kv_bytes(1, full_layers=61, kv_heads=128, head_dim=192, v_head_dim=128).per_token
        == 4_997_120
    )
    assert kv_bytes(1, full_layers=80, kv_heads=8, head_dim=128, shards=4).per_token == 81_920
    assert kv_bytes(1, full_layers=80, kv_heads=8, head_dim=128, shards=16).per_token == 40_960


def test_a_quantised_model_that_keeps_its_indexer_in_16_bits() -> None:
    """vLLM logs 1.77 times the tokens in fp8, not twice (vllm#54426)."""
    model = find_model("qwen3.8-flash-next")
    assert model.token_bytes("fp8") == pytest.approx(17_223, rel=0.001)
    assert model.token_bytes("bf16") / model.token_bytes("fp8") == pytest.approx(1.77, abs=0.005)


def test_state_is_the_matrix_and_the_last_inputs_of_the_convolution() -> None:
    numbers = {"linear_layers": 48, "v_heads": 48, "k_dim": 128, "v_dim": 128}
    assert fixed_state_bytes(**numbers) == 144 * MiB
    assert fixed_state_bytes(**numbers, conv_channels=10_240, conv_kernel=4) == 149.625 * MiB
    three = fixed_state_bytes(**numbers, conv_channels=10_240, conv_kernel=4, snapshots=3)
    assert three / MiB == pytest.approx(448.88, abs=0.01)
    with pytest.raises(ConfigError, match="v_heads"):
        fixed_state_bytes(linear_layers=1, v_heads=-1, k_dim=1, v_dim=1)


def test_an_8_gb_card_with_a_7b_model_in_4_gb() -> None:
    card = {"vram": 8e9, "weights": 4e9}
    assert max_context(**card, bytes_per_token=131_072) == 30_517
    assert max_context(**card, bytes_per_token=131_072, overhead=0.5e9) == 26_702
    assert max_context(**card, bytes_per_token=524_288) == 7_629
    assert max_context(**card, bytes_per_token=57_344) == 69_754
    llama = find_model("llama-3.1-8b")
    assert max_context(**card, bytes_per_token=llama.token_bytes("q8_0")) == 57_444
    # Published as 108,504, which is 30,517 tokens x 64/18, so two lost to the rounding before.
    assert max_context(**card, bytes_per_token=llama.token_bytes("q4_0")) == 108_506
    assert max_context(vram=4e9, weights=8e9, bytes_per_token=1) == 0


def test_sessions_of_a_hybrid_model_pay_for_their_state() -> None:
    """8 GiB hold 12 sessions of 8,192 tokens on the 27B, not the 16 that KV alone would give."""
    model = find_model("qwen3.8-27b")
    pool = {"pool_bytes": 8 * GiB, "tokens": 8192, "bytes_per_token": model.token_bytes("bf16")}
    assert max_sequences(**pool, fixed_bytes=model.state_bytes) == 12
    assert max_sequences(**pool) == 16
    assert max_sequences(**pool, fixed_bytes=model.state_bytes, state_slots=5) == 5


# weights


def test_input_and_output_tokens_use_different_weights() -> None:
    model = find_model("deepseek-v4.1-flash")
    assert model.active_prefill_params == 8e9
    assert model.active_decode_params == pytest.approx(16e9, rel=0.01)
    assert model.params == pytest.approx(763e9, rel=0.01)
    assert model.weight_bytes() == pytest.approx(510.3e9, rel=1e-3)
    experts = model.group_bytes().experts * model.expert_share(1)
    assert experts == pytest.approx(4.5e9, rel=0.01)
    assert model.sequence_bytes(1_000_000, "fp8") == 0.89e9


def test_a_batch_touches_the_expected_number_of_experts() -> None:
    """By drawing them: 8 of 128 for each of B tokens."""
    import random

    model, draw = find_model("qwen3-30b-a3b"), random.Random(3)
    for batch in (1, 2, 8, 32):
        seen = [
            len({e for _ in range(batch) for e in draw.sample(range(128), 8)}) for _ in range(400)
        ]
        mean = sum(seen) / len(seen)
        assert 128 * model.expert_share(batch) == pytest.approx(mean, rel=0.01)
    assert model.active_params == pytest.approx(3.04e9, rel=0.01)
    with pytest.raises(ConfigError, match="sequences"):
        model.expert_share(-1)


@given(batch=st.integers(1, 500), more=st.integers(1, 500))
def test_more_sequences_never_read_fewer_weights(batch: int, more: int) -> None:
    for model in models()[::7]:
        one, two = model.read_bytes(4.5, batch), model.read_bytes(4.5, batch + more)
        assert one <= two <= model.weight_bytes(4.5)


def test_embedding_rows_are_looked_up_unless_they_are_the_head() -> None:
    untied, tied = find_model("llama-3.1-8b"), find_model("llama-3.2-1b")
    assert untied.weight_bytes(16) - untied.read_bytes(16) == 128_256 * 4096 * 2
    assert tied.weight_bytes(16) == tied.read_bytes(16)


def test_every_row_of_the_table_is_sound() -> None:
    for model in models():
        assert model.shared_params > 0, model.name
        assert min(model.expert_params, model.gathered_params, model.idle_params) >= 0, model.name
        assert model.active_decode_params <= model.params
        assert "geometry" in model.source
        assert len(model.layers) in range(16, 127)
        total = model.sequence_bytes(5000, "bf16")
        assert 0 < total < 10 * GiB, model.name
        assert model.describe


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("layers=32,kv_heads=8,head_dim=128,params=8B,prefill=9B", "prefill"),
        ("layers=32,kv_heads=8,head_dim=128,params=8B,sliding=4", "window"),
        ("layers=32,kv_heads=8,head_dim=128,params=8B,experts=8,experts_per_token=2", "active"),
        ("layers=32,kv_heads=8,head_dim=128,params=8B,active=9B", "active"),
        ("layers=4,kv_heads=8,head_dim=128,params=8B,sliding=5,window=8", "sliding"),
    ],
)
def test_numbers_that_contradict_each_other(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        find_model(text)


def test_a_mixture_of_experts_by_numbers() -> None:
    text = (
        "layers=48,kv_heads=4,head_dim=128,params=30.5B,active=3.3B,experts=128,experts_per_token=8"
    )
    given_, row = find_model(text + ",prefill=2B"), find_model("qwen3-30b-a3b")
    assert given_.expert_params == pytest.approx(row.expert_params, rel=0.01)
    assert (given_.active_prefill_params, given_.active_params) == (2e9, pytest.approx(3.3e9))
    short = find_model("layers=8,kv_heads=8,head_dim=128,params=8B,sliding=6,window=512")
    assert (short.count("full"), short.count("sliding")) == (2, 6)


def test_other_names_of_a_row() -> None:
    for name, row in (
        ("Qwen3.8-27B", "Qwen3.5-27B"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen3-30B-A3B"),
    ):
        assert find_model(name).name == row


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ({"tokens": -1, "full_layers": 1, "kv_heads": 1, "head_dim": 1}, "tokens"),
        (
            {
                "tokens": 1,
                "full_layers": 1,
                "kv_heads": 1,
                "head_dim": 1,
                "dtype": "bf16",
                "bytes": 2,
            },
            "one of them",
        ),
        ({"tokens": 1}, "nothing is kept"),
        ({"tokens": 1, "full_layers": 1, "kv_heads": 1, "head_dim": 1, "shards": 0}, "shards"),
        ({"tokens": 1, "sliding_layers": 1, "kv_heads": 1, "head_dim": 1}, "window"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, float], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        kv_bytes(**inputs)  # type: ignore[arg-type]


def test_a_format_of_ones_own() -> None:
    mine = KVDtype("mine", 3, group=16, scale_bits=8)
    assert find_model("llama-3.1-8b").token_bytes(mine) == 65_536 * 3.5 / 8


def test_a_page_holds_its_tokens_in_every_layer_that_keeps_kv() -> None:
    assert find_model("llama-3.1-8b").page_bytes(16, "bf16") == 2 * MiB
    assert find_model("gemma-3-27b").page_bytes(16, "bf16") == 16 * 507_904
    assert find_model("deepseek-v2-lite").page_bytes(64, "bf16") == 64 * 31_104
    with pytest.raises(ConfigError, match="page_tokens"):
        find_model("llama-3.1-8b").page_bytes(0)
