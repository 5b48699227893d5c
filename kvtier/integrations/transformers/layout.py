"""The page layout of a transformers model, and which models are refused.

The layers come from the same function from which transformers' own ``DynamicCache`` takes them.
What a layer stores is what its attention passes to ``Cache.update``: K and V heads after rope, or,
for multi-head latent attention, the compressed latent (kv_lora_rank) as K and the shared rope key
(qk_rope_head_dim) as V.

Refused are models where the KV of a token depends on more than the tokens up to it (bidirectional
and encoder-decoder attention, rope that changes with the length), or is no KV of single tokens
(recurrent, convolution, chunked layers), or is shared between layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from kvtier.errors import UnsupportedModelError
from kvtier.layout import LayerLayout, PageLayout

#: Models whose ``update`` receives the latent. Others with kv_lora_rank may expand it first.
LATENT_MODELS = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"})

#: Models that let the tokens of an image or of the prompt see each other in both directions.
BIDIRECTIONAL_MODELS = frozenset(
    {
        "paligemma",
        "colpali",
        "pi0",
        "gemma3",
        "gemma3n",
        "gemma4",
        "git",
        "t5gemma",
        "t5gemma2",
        "diffusion_gemma",
    }
)

#: rope types whose frequencies depend on the length of the sequence.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic", "su"})


def text_config(model_or_config: nn.Module | PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's configuration.

    Raises:
        UnsupportedModelError: the model has no transformers configuration.
    """
    return _whole_config(model_or_config).get_text_config(decoder=True)


def _whole_config(model_or_config: nn.Module | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(model_or_config, PreTrainedConfig):
        return model_or_config
    config = getattr(model_or_config, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"{type(model_or_config).__name__} has no transformers configuration; "
            "give a transformers model"
        )
    return config


def layout_of(
    model_or_config: nn.Module | PreTrainedConfig,
    page_tokens: int = 32,
    dtype: torch.dtype | str | None = None,
    *,
    summaries: bool = False,
) -> PageLayout:
    """The page layout of a decoder-only transformers model (transformers 5.20 or newer).

    Args:
        model_or_config: the model, with or without PEFT around it, or its configuration.
        page_tokens: tokens in a page.
        dtype: dtype of K and V as computed; by default that of the model's weights, or the
            configuration's.
        summaries: keep a summary of each page's keys in it, as the modes ``select:...`` need.

    Raises:
        UnsupportedModelError: the model cannot be served exactly; the message says why and what to
            do.
        LayoutError: the geometry or the dtype is unusable.
    """
    config = text_config(model_or_config)
    whole = _whole_config(model_or_config)
    refuse_unsupported(whole, config)
    name = dtype_name(model_or_config, dtype)
    kinds, options = _layers_of(config)
    layers: list[LayerLayout] = []
    for index, (kind, option, layer) in enumerate(
        zip(kinds, options, config.per_layer_config, strict=True)
    ):
        if kind == "dummy":
            layers.append(LayerLayout("none"))
        elif kind == "full_attention" and getattr(layer, "kv_lora_rank", None):
            layers.append(LayerLayout.mla(layer.kv_lora_rank, layer.qk_rope_head_dim, name))
        elif kind in ("full_attention", "sliding_attention"):
            heads, dim = _geometry(layer)
            layers.append(
                LayerLayout.attention(heads, dim, name, window=option.get("sliding_window"))
            )
        else:
            raise UnsupportedModelError(
                f"layer {index} of {config.model_type} is of type {kind!r}; only full_attention "
                "and sliding_attention "
                "keep one K and V a token. Use transformers' own cache for this model"
            )
    return PageLayout(layers, page_tokens, summaries)


def dtype_name(
    model_or_config: nn.Module | PreTrainedConfig, dtype: torch.dtype | str | None = None
) -> str:
    """torch's name of the dtype of K and V (``"bfloat16"``).

    Raises:
        UnsupportedModelError: it is not given and cannot be determined.
    """
    if dtype is None and not isinstance(model_or_config, PreTrainedConfig):
        dtype = getattr(model_or_config, "dtype", None)
    elif dtype is None:
        dtype = getattr(model_or_config, "dtype", None) or getattr(
            text_config(model_or_config), "dtype", None
        )
    if dtype is None:
        raise UnsupportedModelError(
            "the configuration does not say the dtype of K and V; give dtype="
        )
    return str(dtype).removeprefix("torch.")


def rope_types(config: PreTrainedConfig) -> set[str]:
    """The types of all rope parameters, which may be one set or one a layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = {str(rope["rope_type"])} if "rope_type" in rope else set()
    return found | {
        str(part["rope_type"])
        for part in rope.values()
        if isinstance(part, Mapping) and "rope_type" in part
    }


def refuse_unsupported(whole: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if KV depends on more than the tokens up to it."""
    name = config.model_type
    if getattr(whole, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoder-only models are supported"
        )
    if whole.model_type in BIDIRECTIONAL_MODELS:
        raise UnsupportedModelError(
            f"{whole.model_type} attends in both directions within images or prompts, so the KV of "
            "a prefix depends on "
            "what follows; use its text-only model"
        )
    if (
        getattr(config, "use_bidirectional_attention", None)
        or getattr(config, "is_causal", True) is False
    ):
        raise UnsupportedModelError(
            f"{name} is configured for bidirectional attention, so the KV of a prefix depends on "
            "what follows; "
            "only causal attention is supported"
        )
    for rope in sorted(rope_types(config) & LENGTH_DEPENDENT_ROPE):
        raise UnsupportedModelError(
            f"{name} uses rope of type {rope!r}, whose keys depend on the length of the sequence; "
            "use a fixed type such as 'yarn' or 'llama3', or transformers' own cache"
        )
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedModelError(
            f"{name} shares KV between layers; this is not supported yet, use transformers' own "
            "cache"
        )
    if getattr(config, "kv_lora_rank", None) and name not in LATENT_MODELS:
        raise UnsupportedModelError(
            f"{name} has latent attention of an unknown form; known are "
            f"{', '.join(sorted(LATENT_MODELS))}"
        )


def _layers_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    try:
        from transformers.cache_utils import get_layer_types_and_kwargs
    except ImportError as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} does not tell its layer types; install 5.20 "
            "or newer"
        ) from error
    return get_layer_types_and_kwargs(config)


def _geometry(layer: PreTrainedConfig) -> tuple[int, int]:
    """KV heads and head_dim of one layer, with the fallbacks that the models use."""
    try:
        query_heads = layer.num_attention_heads
        heads = getattr(layer, "num_key_value_heads", None) or query_heads
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
    except AttributeError as error:
        raise UnsupportedModelError(
            f"the geometry of {layer.model_type}'s attention cannot be determined: {error}; build "
            "the PageLayout by hand"
        ) from error
    return heads, dim
