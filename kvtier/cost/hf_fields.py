"""The fields of a ``config.json`` under the many names they go by.

Transformers leaves fields out of nested text configs that equal the class's default, and a few model
types rely on defaults at the top level too (Gemma's head_dim of 256). ``DEFAULTS`` has those that
geometry needs, from the configuration classes of transformers 5.24.0. The number of layers and the
width are never assumed: a file without them is no description of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

#: Our name -> the names it has in files, the first one used in messages.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"),
    "kv_heads": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_kv"),
    "intermediate": (
        "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "hidden_dim", "inter_dim",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "context": (
        "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length",
        "model_max_length", "seq_length",
    ),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    "experts": (
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
    ),
    "experts_per_token": (
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
        "experts_per_token", "moe_top_k", "num_selected_experts", "n_activated_experts",
    ),
    "expert_width": (
        "moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size",
        "moe_inter_dim",
    ),
    "shared_width": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size", "share_expert_dim",
    ),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert",
                       "moe_num_shared_experts"),
    "layer_types": ("layer_types", "layers_block_type", "block_types"),
    "mamba_heads": ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_headdim", "mamba_head_dim"),
    "mamba_state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "mamba_conv": ("mamba_d_conv", "conv_kernel", "d_conv"),
    "mamba_groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "mamba_expand": ("mamba_expand", "expand"),
}  # fmt: skip

_GEMMA3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip

#: model_type -> fields of its configuration class that files leave out. Each equals the default of
#: transformers 5.24.0, which a test checks.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096,
               "tie_word_embeddings": True},
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
                     "vocab_size": 262400, "sliding_window": 512, "num_kv_shared_layers": 15,
                     "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
                     "tie_word_embeddings": True},
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "vocab_size": 262144, "sliding_window": 512, "tie_word_embeddings": True},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "mistral": {"num_key_value_heads": 8, "vocab_size": 32000, "intermediate_size": 14336,
                "num_attention_heads": 32},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "ministral3": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4,
                   "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                   "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                   "decoder_sparse_step": 1},
    "qwen3_5_text": {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
                     "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                     "linear_value_head_dim": 128, "linear_num_key_heads": 16,
                     "linear_num_value_heads": 32, "vocab_size": 248320},
    "qwen3_5_moe_text": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
                         "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                         "linear_value_head_dim": 128, "linear_num_key_heads": 16,
                         "linear_num_value_heads": 32, "vocab_size": 248320, "num_experts": 256,
                         "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                         "shared_expert_intermediate_size": 512},
    "llama4_text": {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                    "attention_chunk_size": 8192, "num_local_experts": 16,
                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096, "tie_word_embeddings": True},
    "starcoder2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"tie_word_embeddings": True},
    "gpt_bigcode": {"multi_query": True, "tie_word_embeddings": True},
    "gpt_neo": {"tie_word_embeddings": True},
    "opt": {"tie_word_embeddings": True},
    "bloom": {"tie_word_embeddings": True},
    "mpt": {"tie_word_embeddings": True},
    "falcon": {"multi_query": True, "tie_word_embeddings": True},
    "smollm3": {"tie_word_embeddings": True},
    "olmo3": {"sliding_window": 4096},
    "exaone4": {"sliding_window": 4096},
    "jamba": {"num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
              "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
              "expert_layer_offset": 1},
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3, "tie_word_embeddings": True},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"],
                        "tie_word_embeddings": True},
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                    "v_head_dim": 128},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                    "v_head_dim": 128},
}  # fmt: skip

#: model_type -> n: where no list says which layers are full, every n-th is.
PATTERNS = {
    "gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma4_text": 6, "gemma3n_text": 5, "cohere2": 4,
    "olmo3": 4, "exaone4": 4, "llama4_text": 4, "qwen3_next": 4, "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
}  # fmt: skip

#: More is a damaged file.
_MAX_LAYERS = 4096

#: Keys under which composite models keep their language model.
_NESTED = (
    "text_config", "llm_config", "language_config", "language_model", "thinker_config",
    "decoder_config", "text_model",
)  # fmt: skip


@dataclass(frozen=True)
class Fields:
    """Fields of the language model in a file.

    Attributes:
        path: of the file. values: as read. type: ``model_type``, empty if there is none.
    """

    path: Path
    values: dict[str, Any]
    type: str

    def get(self, name: str, default: Any = None) -> Any:
        """A field by our name or by a name of the file; ``default`` where it is missing or null."""
        names = NAMES.get(name, (name,))
        for source in (self.values, DEFAULTS.get(self.type, {})):
            for one in names:
                if source.get(one) is not None:
                    return source[one]
        return default

    def number(self, name: str, default: int = 0) -> int:
        """A whole number >= 0; the largest of a list. ConfigError if it is anything else."""
        value = self.get(name, default)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise self.wrong(name, value, "give a whole number")
        if value < 0:
            raise self.wrong(name, value, "give a number >= 0")
        if name == "layers" and value > _MAX_LAYERS:
            raise self.wrong(name, value, f"give at most {_MAX_LAYERS}")
        return int(value)

    def need(self, name: str) -> int:
        """A whole number > 0. ConfigError names the field that is missing, and the fix."""
        first, *others = NAMES.get(name, (name,))
        if self.get(name) is None:
            also = f" (or {', '.join(others[:3])})" if others else ""
            raise ConfigError(
                f"{str(self.path)!r} lacks the field {first}{also}; add it, or give the model by "
                "numbers (layers=...,kv_heads=...,head_dim=...,params=...)"
            )
        value = self.number(name)
        if not value:
            raise self.wrong(name, value, "give a number > 0")
        return value

    def wrong(self, name: str, value: object, fix: str) -> ConfigError:
        names = [one for one in NAMES.get(name, (name,)) if one in self.values]
        field = names[0] if names else NAMES.get(name, (name,))[0]
        return ConfigError(f"{str(self.path)!r}: the field {field} is {value!r}; {fix}")


def text_fields(path: Path, values: dict[str, Any]) -> Fields:
    """The fields of the language model, out of whatever it is nested in."""
    while True:
        nested = next((values[key] for key in _NESTED if isinstance(values.get(key), dict)), None)
        own = any(one in values for one in NAMES["layers"])
        if nested is None or (own and not any(one in nested for one in NAMES["layers"])):
            break
        outer: dict[str, Any] = {k: values[k] for k in ("tie_word_embeddings", "quantization_config", "dtype",
                                        "torch_dtype") if k in values}  # fmt: skip
        values = {**outer, **nested}
    if values.get("is_encoder_decoder"):
        raise ConfigError(
            f"{str(path)!r} describes an encoder-decoder model; give a decoder-only one"
        )
    return Fields(path, values, str(values.get("model_type", "")))
