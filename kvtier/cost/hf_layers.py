"""What each layer of a ``config.json`` keeps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.cost.geometry import LayerShape
from kvtier.cost.hf_fields import PATTERNS, Fields
from kvtier.errors import ConfigError

#: Names of layer kinds in files -> ours.
_KINDS = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full",
    "global_attention": "full", "*": "full", "indexed_attention": "full", "dynamic": "full",
    "sliding_attention": "sliding", "sliding": "sliding", "local": "sliding",
    "local_attention": "sliding", "chunked_attention": "chunked",
    "linear_attention": "recurrent", "mamba": "recurrent", "mamba2": "recurrent", "m": "recurrent",
    "recurrent": "recurrent", "kda": "recurrent", "gated_delta_net": "recurrent",
    "conv": "conv", "short_conv": "conv",
    "hybrid": "hybrid",
    "mlp": "none", "moe": "none", "-": "none", "e": "none",
    "compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca",
}  # fmt: skip

#: model_type -> kind of all layers, where nothing else is possible.
_UNIFORM = {"mamba": "recurrent", "mamba2": "recurrent", "falcon_mamba": "recurrent",
            "falcon_h1": "hybrid", "bamba": "recurrent"}  # fmt: skip

#: Recurrent state is kept in fp32 by llama.cpp, and by vLLM for the models that say so.
_STATE_BYTES = 4


def layer_kinds(fields: Fields) -> list[str]:
    """``full``, ``sliding``, ``chunked``, ``recurrent``, ``conv``, ``hybrid``, ``none``, ``csa`` or
    ``hca`` for each layer.

    Raises:
        ConfigError: a list has the wrong length, or a kind that is not known.
    """
    listed = _listed(fields)
    if listed is not None:
        return listed
    # A layer of LongCat is two blocks of attention.
    count = fields.need("layers") * (2 if fields.type == "longcat_flash" else 1)
    every = fields.get("full_attention_interval")
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern"))
    if fields.type in _UNIFORM:
        return [_UNIFORM[fields.type]] * count
    if every or (fields.get("linear_num_value_heads") and fields.type in PATTERNS):
        n = every or PATTERNS[fields.type]
        return ["full" if (i + 1) % n == 0 else "recurrent" for i in range(count)]
    if fields.type == "llama4_text":
        rope = fields.get("no_rope_layers")
        local = rope or [(i + 1) % PATTERNS["llama4_text"] for i in range(count)]
        return ["chunked" if one else "full" for one in local]
    if not fields.number("window") or fields.get("use_sliding_window") is False:
        return ["full"] * count
    if isinstance(pattern, str):
        return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(count)]
    pattern = pattern or PATTERNS.get(fields.type)
    if pattern:
        return ["sliding" if (i + 1) % int(pattern) else "full" for i in range(count)]
    if not fields.type:
        raise ConfigError(
            f"{str(fields.path)!r} has a sliding_window, but lacks the field model_type that tells which "
            "layers it is for; add model_type or layer_types"
        )
    if fields.get("use_sliding_window"):
        first = fields.number("max_window_layers")
        return ["full" if i < first else "sliding" for i in range(count)]
    return ["sliding"] * count


def _listed(fields: Fields) -> list[str] | None:
    """Kinds that a file lists one by one, whatever the list is called."""
    types = fields.get("layer_types")
    letters = fields.get("hybrid_override_pattern")
    if types is None and isinstance(letters, str):
        types = list(letters)
    if types is not None:
        kinds = []
        for one in types:
            kind = _KINDS.get(str(one).lower())
            if kind is None:
                raise fields.wrong(
                    "layer_types", one, f"give one of {', '.join(k for k in _KINDS if len(k) > 1)}"
                )
            kinds.append(kind)
        if fields.get("layers") is None:
            return kinds
        count = fields.need("layers")
        if fields.get("block_types") and kinds:
            kinds = (kinds * (count // len(kinds) + 1))[:count]
            return ["sliding" if kind == "full" else kind for kind in kinds]
        if len(kinds) != count:
            raise ConfigError(
                f"{str(fields.path)!r}: layer_types has {len(kinds)} entries, but num_hidden_layers "
                f"is {count}; make them agree"
            )
        return kinds
    count = fields.number("layers")
    some: Sequence[Any] | None = fields.get("hybrid_layer_pattern")
    if some is not None:
        return ["sliding" if one else "full" for one in some[:count]]
    some = fields.get("attn_type_list")
    if some is not None:
        return ["full" if one else "recurrent" for one in some[:count]]
    kda = fields.get("linear_attn_config")
    if isinstance(kda, dict):
        full = set(kda.get("full_attn_layers", ()))
        return ["full" if i + 1 in full else "recurrent" for i in range(count)]
    for key, chosen, other in (
        ("attn_layer_indices", "full", "recurrent"),
        ("full_attn_idxs", "full", "conv"),
        ("hybrid_layer_ids", "hybrid", "recurrent"),
    ):
        some = fields.get(key)
        if some is not None:
            return [chosen if i in set(some) else other for i in range(count)]
    period = fields.number("attn_layer_period")
    if period and fields.get("mamba_state"):
        offset = fields.number("attn_layer_offset")
        return ["full" if i % period == offset else "recurrent" for i in range(count)]
    return None


def layer_shapes(fields: Fields) -> tuple[LayerShape, ...]:
    """What each layer keeps, in order."""
    kinds = layer_kinds(fields)
    shapes = [_shape(fields, index, kind) for index, kind in enumerate(kinds)]
    shared = fields.number("num_kv_shared_layers")
    factor = fields.number("cla_share_factor", 1) if fields.get("use_cla") else 1
    owners = len(shapes) - shared
    if owners < 1:
        raise fields.wrong("num_kv_shared_layers", shared, f"give fewer than {len(shapes)}")
    for index in range(len(shapes)):
        if index >= owners:
            same = [n for n in range(owners) if kinds[n] == kinds[index]] or [owners - 1]
            shapes[index] = LayerShape("shared", source=same[-1])
        elif index % factor:
            shapes[index] = LayerShape("shared", source=index - index % factor)
    return tuple(shapes)


def _shape(fields: Fields, index: int, kind: str) -> LayerShape:
    if kind == "none":
        return LayerShape("none")
    if kind == "conv":
        cached = fields.need("conv_L_cache") - 1
        return LayerShape("state", state_bytes=fields.need("hidden") * cached * _STATE_BYTES)
    if kind == "recurrent":
        return LayerShape("state", state_bytes=state_bytes(fields))
    if kind in ("csa", "hca"):
        return _compressed(fields, kind)
    window = 0
    if kind == "chunked":
        window = fields.need("attention_chunk_size")
    elif kind == "sliding":
        window = fields.need("window")
    # A window that a sequence cannot outgrow is none.
    if 0 < fields.number("context") <= window:
        window = 0
    name = "sliding" if window else "full"
    state = state_bytes(fields) if kind == "hybrid" else 0
    if fields.get("kv_lora_rank"):
        extra = _indexer_bytes(fields)
        latent, rope = fields.need("kv_lora_rank"), fields.number("qk_rope_head_dim", 64)
        return LayerShape(
            "sliding" if window else "latent", latent, rope, window, extra_bytes=extra
        )
    heads, k_dim, v_dim = attention_dims(fields, index, bool(window))
    extra = _indexer_bytes(fields) if not window else 0.0
    return LayerShape(name, heads * k_dim, heads * v_dim, window, 0, extra, state)  # type: ignore[arg-type]


def attention_dims(fields: Fields, index: int, windowed: bool) -> tuple[int, int, int]:
    """KV heads of a layer, and the width of a head of K and of V."""
    override: dict[str, Any] = {}
    for key, value in (fields.get("per_layer_config") or {}).items():
        if int(key) == index:
            override = value
    heads = fields.need("heads")
    kv = fields.get("kv_heads", heads)
    attention = fields.get("attn_config")
    if isinstance(attention, dict) and attention.get("kv_n_heads"):
        kv = attention["kv_n_heads"]
    if fields.type == "gpt_bigcode" and fields.get("multi_query"):
        kv = 1
    if fields.type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        new = fields.get("new_decoder_architecture")
        kv = kv if new else 1 if fields.get("multi_query") else heads
    if isinstance(kv, list):
        kv = kv[index] if index < len(kv) else kv[-1]
    if isinstance(kv, bool) or not isinstance(kv, int) or kv < 0:
        raise fields.wrong("kv_heads", kv, "give a whole number of heads")
    width = fields.get("head_dim")
    if width is None:
        hidden = fields.need("hidden")
        if hidden % heads:
            raise fields.wrong(
                "heads", heads, f"it does not divide hidden_size {hidden}; add head_dim"
            )
        width = hidden // heads
    value_width = fields.get("v_head_dim", width)
    if windowed:
        kv = fields.get("swa_num_key_value_heads", kv)
        width = fields.get("swa_head_dim", width)
        value_width = fields.get("swa_v_head_dim", fields.get("v_head_dim", width))
    elif fields.get("global_head_dim"):
        width = value_width = fields.need("global_head_dim")
        kv = fields.get("num_global_key_value_heads", kv)
    if "head_dim" in override:
        width = value_width = override["head_dim"]
    kv = override.get("num_key_value_heads", kv)
    return int(kv), int(width), int(override.get("v_head_dim", value_width))


def _indexer_bytes(fields: Fields) -> float:
    """Keys of a sparse indexer, a token: fp8 with an fp32 scale per 128 values (vLLM, DeepSeek V3.2),
    or 16 bits where the file has another kind of indexer."""
    if width := fields.number("index_head_dim"):
        return width + 4 * -(-width // 128)
    width = fields.number("indexer_head_dim")
    heads = fields.number("indexer_kv_heads", 1)
    return 2.0 * heads * width / (fields.number("indexer_compress_ratio") or 1)


def _compressed(fields: Fields, kind: str) -> LayerShape:
    """DeepSeek V4: a window of single-head KV and an entry of it for each ``rate`` tokens."""
    name = {"csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}[kind]
    rates = fields.get("compress_rates")
    rate = rates.get(name) if isinstance(rates, dict) else None
    if not rate:
        raise fields.wrong("compress_rates", rates, f"give the rate of {name}")
    extra = _indexer_bytes(fields) if kind == "csa" else 0.0
    return LayerShape(
        "compressed", fields.need("head_dim"), 0, fields.number("window"), int(rate), extra
    )


def state_bytes(fields: Fields) -> int:
    """Recurrent state of one layer: the matrix of each head, and the ``kernel - 1`` last inputs of
    the convolution. fp32.

    Raises:
        ConfigError: the fields name no kind of recurrence that is known.
    """
    hidden = fields.need("hidden")
    if fields.get("linear_num_value_heads"):
        v_heads, k_dim = fields.need("linear_num_value_heads"), fields.need("linear_key_head_dim")
        k_heads = fields.need("linear_num_key_heads")
        v_dim = fields.number("linear_value_head_dim", k_dim)
        conv = 2 * k_heads * k_dim + v_heads * v_dim
        values = v_heads * k_dim * v_dim + conv * (fields.number("linear_conv_kernel_dim", 4) - 1)
    elif kda := fields.get("linear_attn_config"):
        width = kda["num_heads"] * kda["head_dim"]
        values = width * kda["head_dim"] + 3 * width * (kda.get("short_conv_kernel_size", 4) - 1)
    elif fields.get("linear_num_heads") and fields.get("linear_head_dim"):
        head = fields.need("linear_head_dim")
        width = fields.need("linear_num_heads") * head
        values = width * head + 3 * width * (fields.number("linear_conv_kernel_dim", 4) - 1)
    elif fields.type.startswith("minimax"):
        heads = fields.need("heads")
        width = fields.number("head_dim") or hidden // heads
        values = heads * width * width
    elif fields.type == "recurrent_gemma":
        width = fields.number("lru_width") or hidden
        values = width + width * (fields.number("conv1d_width", 4) - 1)
    elif fields.get("mamba_state"):
        inner, conv = mamba_widths(fields)
        values = inner * fields.need("mamba_state") + conv * (fields.number("mamba_conv", 4) - 1)
    else:
        raise ConfigError(
            f"{str(fields.path)!r} has recurrent layers, but none of linear_num_value_heads, "
            "linear_attn_config or mamba_d_state that tells their state; add them"
        )
    return values * _STATE_BYTES


def mamba_widths(fields: Fields) -> tuple[int, int]:
    """Inner width of a Mamba layer, and the channels of its convolution."""
    heads = fields.number("mamba_heads")
    if not heads and fields.type == "mamba2":
        heads = fields.number("num_heads")
    expanded = fields.number("mamba_expand", 2) * fields.need("hidden")
    if not heads:
        # Mamba 1: the convolution sees the inner values alone.
        inner = fields.number("mamba_d_inner") or (
            fields.number("intermediate") if fields.type in ("mamba", "falcon_mamba") else 0
        )
        return inner or expanded, inner or expanded
    head_dim = fields.number("mamba_head_dim")
    if fields.type == "mamba2":
        head_dim = fields.number("head_dim", 64)
    inner = fields.number("mamba_d_ssm") or (heads * head_dim if head_dim else expanded)
    return inner, inner + 2 * fields.number("mamba_groups", 1) * fields.need("mamba_state")
