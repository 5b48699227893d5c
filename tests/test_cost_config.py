"""A model from its config.json: against transformers' own models and caches, and files that lack something."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvtier.cost import find_model
from kvtier.cost.hf_fields import DEFAULTS
from kvtier.errors import ConfigError

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def model(folder: Path, values: dict[str, Any] | str):  # type: ignore[no-untyped-def]
    text = values if isinstance(values, str) else json.dumps(values, default=str)
    (folder / "config.json").write_text(text)
    return find_model(str(folder))


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


# against transformers

#: model_type -> sizes small enough to run. What is not named is the class's own default.
TINY: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 16}, "mixtral": {"sliding_window": 16},
    "qwen2": {}, "qwen3": {"head_dim": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phi3": {"sliding_window": 16, "pad_token_id": 0}, "phi": {}, "granite": {}, "olmoe": {},
    "gemma": {"head_dim": 32}, "gemma2": {"head_dim": 32, "sliding_window": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "num_hidden_layers": 6},
    "gpt_oss": {"head_dim": 32, "sliding_window": 16, "num_local_experts": 4},
    "cohere2": {"sliding_window": 16, "head_dim": 16}, "starcoder2": {},
    "exaone4": {"sliding_window": 16}, "olmo3": {"sliding_window": 16},
    "smollm3": {"pad_token_id": 0}, "falcon": {}, "gpt2": {}, "gpt_bigcode": {}, "opt": {"ffn_dim": 128}, "mpt": {},
    "gpt_neox": {}, "bloom": {},
    "deepseek_v2": {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                    "topk_group": 1},
    "qwen3_next": {"head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 16, "linear_value_head_dim": 24, "num_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {"head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                     "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "jamba": {"mamba_d_state": 8, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
              "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}  # fmt: skip

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


def tiny_config(kind: str) -> Any:
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    values = {**SMALL, **TINY[kind]}
    old = {"gpt2", "gpt_bigcode"}
    if kind in old:
        values = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 512}
    if kind == "mpt":
        values = {"n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 100}
    if kind in ("falcon", "bloom", "opt", "gpt_neox", "phi"):
        values = without(values, "num_key_value_heads")
    if kind.startswith("deepseek"):
        values["num_key_value_heads"] = 4
    return AutoConfig.for_model(kind, **values)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", TINY)
def test_bytes_equal_those_of_transformers_own_cache(kind: str, tmp_path: Path) -> None:
    """Two prompts of unlike length through a tiny model: what the cache then holds, layer by layer.

    Its sliding layers keep ``window - 1`` tokens between steps, and its convolutions as many inputs as
    their kernel is wide; both are counted the field's way here: the window, and one input less.
    """
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, DynamicCache

    config = tiny_config(kind)
    ours = model(tmp_path, config.to_dict())
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    held: dict[int, float] = {}
    for tokens in (24, 48):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            net(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
        assert len(cache.layers) == len(ours.layers)
        for shape, layer in zip(ours.layers, cache.layers, strict=True):
            keys = getattr(layer, "keys", None)
            kept = 0.0
            if keys is not None and keys.numel():
                kept = (keys.numel() + layer.values.numel()) * 4
                per_token = kept / keys.shape[-2]
                if shape.window:
                    assert keys.shape[-2] == shape.window - 1
                    kept += per_token
                assert per_token == (shape.k + shape.v) * 4
            held[tokens] = held.get(tokens, 0.0) + kept
    growth = (held[48] - held[24]) / 24
    assert ours.token_bytes("fp32") == growth
    state = ours.state_bytes
    for tokens, kept in held.items():
        assert ours.sequence_bytes(tokens, "fp32") - state == kept
    has_state = any(layer.state_bytes for layer in ours.layers)
    assert has_state == (
        kind in ("qwen3_next", "qwen3_5_text", "falcon_h1", "bamba", "jamba", "lfm2")
    )
    if has_state:
        assert state == recurrent_bytes(cache)


def recurrent_bytes(cache: Any) -> float:
    """State in transformers' cache in fp32, each convolution an input narrower."""
    total = 0.0
    for layer in cache.layers:
        for name in ("recurrent_states", "ssm_states", "conv_states"):
            tensors = getattr(layer, name, None) or {}
            for one in filter(lambda one: one is not None, tensors.values()):
                width = one.shape[-1] - (name == "conv_states")
                total += one.numel() / one.shape[-1] * width * 4
    return total


COUNTED = [
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "qwen3_5_text", "qwen3_5_moe_text", "phi3", "phi", "gemma", "gemma2", "gemma3_text", "gpt_oss",
    "cohere2", "starcoder2", "llama4_text", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "deepseek_v4", "glm4_moe_lite", "kimi_linear", "jamba", "bamba", "granitemoehybrid", "falcon_h1",
    "nemotron_h", "mamba2", "lfm2", "minimax", "minimax_m2", "mimo_v2_flash", "olmo_hybrid",
    "recurrent_gemma", "gpt2", "gpt_neox", "gpt_bigcode", "falcon", "opt", "mpt", "ernie4_5_moe",
]  # fmt: skip


@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_equal_those_of_the_class_defaults(kind: str, tmp_path: Path) -> None:
    """The model of the class's default configuration, without memory for its weights."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    theirs = sum(parameter.numel() for parameter in net.parameters())
    assert model(tmp_path, config.to_dict()).params == pytest.approx(theirs, rel=0.002)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind).to_dict()
    for name, value in DEFAULTS[kind].items():
        assert config[name] == value, name


# the variety of files


def test_a_nested_text_config_may_leave_its_defaults_out(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it was published: five fields, and a tower that is no part of this."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024}  # fmt: skip
    values = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"num_hidden_layers": 27},
    }
    found, row = model(tmp_path, values), find_model("gemma-3-4b")
    assert found.kv(5000).per_token == row.kv(5000).per_token
    assert found.kv(5000).fixed == row.kv(5000).fixed
    assert found.params == pytest.approx(row.params, rel=0.001)


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        ({"sliding_window": 64}, ["sliding"] * 4),
        ({"sliding_window": None}, ["full"] * 4),
        ({"sliding_window": 8192}, ["full"] * 4),
        ({"sliding_window": 64, "use_sliding_window": False}, ["full"] * 4),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
         ["full"] * 3 + ["sliding"]),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, ["sliding", "full"] * 2),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, ["sliding"] * 3 + ["full"]),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2},
         ["full", "sliding"] * 2),
        ({"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 64},
         ["sliding", "full"] * 2),
        ({"num_kv_shared_layers": 2}, ["full", "full", "shared", "shared"]),
        ({"use_cla": True, "cla_share_factor": 2}, ["full", "shared"] * 2),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 16}, ["latent"] * 4),
        ({"hybrid_override_pattern": "M*-E", "model_type": "nemotron_h", "ssm_state_size": 16,
          "mamba_num_heads": 8, "mamba_head_dim": 8}, ["state", "full", "none", "none"]),
        ({"linear_attn_config": {"full_attn_layers": [4], "num_heads": 2, "head_dim": 8}},
         ["state"] * 3 + ["full"]),
        ({"hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window_size": 64},
         ["full"] + ["sliding"] * 3),
        ({"attn_type_list": [0, 0, 0, 1], "model_type": "minimax_text_01"}, ["state"] * 3 + ["full"]),
        ({"full_attention_interval": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
          "linear_key_head_dim": 8}, ["state"] * 3 + ["full"]),
    ],
)  # fmt: skip
def test_which_layers_are_which(tmp_path: Path, change: dict[str, Any], shapes: list[str]) -> None:
    found = model(tmp_path, {**LLAMA, **change})
    assert [layer.kind for layer in found.layers] == shapes


@pytest.mark.parametrize(
    ("change", "elements"),
    [
        ({}, 4 * 2 * 2 * 64),
        ({"num_key_value_heads": None}, 4 * 2 * 8 * 64),
        ({"head_dim": 32}, 4 * 2 * 2 * 32),
        ({"head_dim": 32, "v_head_dim": 16}, 4 * 2 * (32 + 16)),
        ({"num_key_value_heads": [1, 2, 3, 4]}, 10 * 2 * 64),
        ({"model_type": "falcon", "multi_query": True}, 4 * 2 * 64),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
          "num_kv_heads": 4, "num_key_value_heads": None}, 4 * 2 * 4 * 64),
        ({"per_layer_config": {"3": {"head_dim": 128}}}, 3 * 2 * 2 * 64 + 2 * 2 * 128),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 16}, 4 * 80),
        ({"num_kv_shared_layers": 2}, 2 * 2 * 2 * 64),
    ],
)  # fmt: skip
def test_elements_a_token_adds(tmp_path: Path, change: dict[str, Any], elements: int) -> None:
    assert model(tmp_path, {**LLAMA, **change}).token_bytes("fp16") == 2 * elements


def test_names_of_other_families(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257,
            "n_positions": 1024}  # fmt: skip
    found = model(tmp_path, gpt2)
    assert found.token_bytes("fp16") == 36_864
    assert found.params == pytest.approx(124.4e6, rel=0.01)


# weights


def test_bytes_follow_the_dtype_or_the_quantisation(tmp_path: Path) -> None:
    plain = model(tmp_path, {**LLAMA, "torch_dtype": "bfloat16"})
    assert plain.weight_bytes() == plain.params * 2
    assert model(tmp_path, {**LLAMA, "dtype": "float32"}).native_bits == 32
    embedding = 1000 * 512
    inner = plain.params - 2 * embedding
    for config, bits in (
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 20 / 32),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}}, 4 + 20 / 128),
    ):  # fmt: skip
        found = model(tmp_path, {**LLAMA, "quantization_config": config})
        assert found.weight_bytes() == pytest.approx((inner * bits + 2 * embedding * 16) / 8)


def test_gpt_oss_keeps_all_but_its_experts_in_16_bits(tmp_path: Path) -> None:
    values = {"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "vocab_size": 201088,
              "num_attention_heads": 64, "intermediate_size": 2880, "num_local_experts": 32,
              "num_experts_per_tok": 4, "max_position_embeddings": 131072,
              "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    found = model(tmp_path, values)
    # The published checkpoint of gpt-oss-20b has 13.76 GB.
    assert found.weight_bytes() == pytest.approx(13.76e9, rel=0.01)
    assert found.active_params == pytest.approx(3.6e9, rel=0.01)


def test_real_sizes_come_from_the_files_beside_it(tmp_path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, nbytes in (("model.embed_tokens.weight", 100), ("lm_head.weight", 200),
                         ("model.layers.0.mlp.experts.3.up_proj.weight", 1000),
                         ("model.visual.patch.weight", 50), ("model.norm.weight", 7)):  # fmt: skip
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    stored = model(tmp_path, LLAMA).group_bytes()
    assert (stored.shared, stored.experts, stored.gathered, stored.idle) == (207, 1000, 100, 50)
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="safetensors header"):
        model(tmp_path, LLAMA)


def test_the_index_alone_tells_the_sum(tmp_path: Path) -> None:
    index = {
        "metadata": {"total_size": 12345},
        "weight_map": {"a": "model-00001-of-00002.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model(tmp_path, LLAMA).weight_bytes() == pytest.approx(12345)


# what is not right


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers"),
        (without(LLAMA, "num_attention_heads"), "num_attention_heads"),
        (without(LLAMA, "hidden_size"), "hidden_size"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({**LLAMA, "num_attention_heads": 7}, "head_dim"),
        ({**LLAMA, "num_key_value_heads": -2}, "kv_heads|num_key_value_heads"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types has 1"),
        ({**LLAMA, "layer_types": ["novel"] * 4}, "novel"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "linear_num_value_heads"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({**LLAMA, "num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
        ({}, "num_hidden_layers"),
        ("[1, 2]", "list"),
        ("{", "no JSON"),
    ],
)
def test_one_line_names_the_field_and_the_fix(tmp_path: Path, values: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        model(tmp_path, values)
    assert "\n" not in str(caught.value)
    assert "give" in str(caught.value) or "add" in str(caught.value) or "make" in str(caught.value)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    for name in ("config.json", "model.gguf"):
        with pytest.raises(ConfigError, match="does not exist"):
            find_model(str(tmp_path / name))


HYBRID = {
    **LLAMA, "model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
    "sliding_window": 64, "quantization_config": {"quant_method": "awq", "bits": 4},
}  # fmt: skip


@pytest.mark.parametrize("field", HYBRID)
@pytest.mark.parametrize(
    "value", [None, 0, -1, 1.5, "x", True, [], {}, 10**7, [1], ["a"], {"a": 1}]
)
def test_a_value_of_the_wrong_kind_is_an_error_or_ignored(
    tmp_path: Path, field: str, value: object
) -> None:
    """Whatever stands in a field: a model of finite size, or one ConfigError of one line."""
    try:
        found = model(tmp_path, {**HYBRID, field: value})
    except ConfigError as caught:
        message = str(caught)
    else:
        message = ""
        assert 0 <= found.sequence_bytes(1000) < float("inf")
    assert "\n" not in message


def test_a_window_without_a_model_type_could_be_of_any_layer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type"):
        model(tmp_path, {**without(LLAMA, "model_type"), "sliding_window": 64})
