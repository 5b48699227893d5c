"""How many weights a ``config.json`` describes, and which a token uses. Norms are left out."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cost.hf_fields import Fields
from kvtier.cost.hf_layers import attention_dims, layer_kinds, mamba_widths

#: Model types whose MLP has two matrices; all others have a gate too.
_UNGATED = frozenset(
    ("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom", "mpt", "falcon",
     "starcoder2", "phi", "nemotron", "nemotron_h", "persimmon", "biogpt", "xglm")
)  # fmt: skip

#: Model types whose query projection is twice as wide, for a gate on the output of attention.
_GATED_QUERY = ("qwen3_next", "qwen3_5", "qwen4_exp")


@dataclass(frozen=True)
class Params:
    """Weights by the groups of ``kvtier.cost.shape``; ``active_width``: of the MLP a token uses."""

    shared: float
    experts: float
    gathered: float
    expert_count: int
    experts_per_token: int
    active_width: int


def count_params(fields: Fields) -> Params:
    """Weights from the geometry."""
    hidden, vocab = fields.need("hidden"), fields.number("vocab")
    kinds = layer_kinds(fields)
    experts = fields.number("experts")
    used = min(experts, fields.number("experts_per_token", 1))
    sparse = _sparse_layers(fields, len(kinds)) if experts > 1 else [False] * len(kinds)
    matrices = 2 if fields.type in _UNGATED else 3
    shared, routed, widest = 0.0, 0.0, 0
    expert_width = fields.number("expert_width") or fields.number("intermediate")
    own_mlp = fields.type not in (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "nemotron_h",
        "zamba",
        "zamba2",
    )
    names = fields.get("layer_types") or fields.get("hybrid_override_pattern") or []
    for index, kind in enumerate(kinds):
        shared += _mixer(fields, index, kind)
        is_sparse = sparse[index]
        if fields.type == "nemotron_h" and index < len(names):
            is_sparse = str(names[index]).lower() in ("moe", "e")
        if is_sparse:
            routed += experts * matrices * hidden * expert_width
            width = _shared_width(fields, expert_width)
            shared += matrices * hidden * width + hidden * experts
            widest = max(widest, used * expert_width + width)
        plain_mlp = kind == "none" and fields.type == "nemotron_h" and not is_sparse
        # LongCat's two attention blocks of a layer have a dense MLP each beside the experts.
        if fields.type == "longcat_flash" or (own_mlp and not is_sparse) or plain_mlp:
            width = _dense_width(fields, index)
            shared += matrices * hidden * width
            widest = max(widest, width)
    if fields.type in ("zamba", "zamba2"):
        # One or a few attention blocks that all hybrid layers share, each with its own MLP.
        blocks = fields.number("num_mem_blocks", 1)
        shared += blocks * 4 * (2 * hidden) * hidden + blocks * 3 * hidden * _dense_width(fields, 0)
        widest = _dense_width(fields, 0)
    tied = bool(fields.get("tie_word_embeddings", False))
    embedding = float(vocab * hidden)
    gathered = 0.0 if tied else embedding
    if per_layer := fields.number("hidden_size_per_layer_input"):
        rows = fields.number("vocab_size_per_layer_input") or vocab
        gathered += rows * per_layer * len(kinds)
    if fields.type in ("gpt2", "gpt_bigcode", "opt"):
        gathered += fields.number("context") * hidden
    return Params(
        shared + embedding,
        routed,
        gathered,
        experts if routed else 0,
        used if routed else 0,
        widest,
    )


def _dense_width(fields: Fields, index: int) -> int:
    """Width of a dense MLP."""
    hidden = fields.need("hidden")
    width = fields.get("intermediate_size_mlp") or fields.get("intermediate")
    ffn = fields.get("ffn_config")
    if isinstance(ffn, dict) and ffn.get("ffn_hidden_size"):
        width = ffn["ffn_hidden_size"]
    if isinstance(width, list) and width:
        width = width[index] if index < len(width) else width[-1]
    if isinstance(width, int) and not isinstance(width, bool) and width > 0:
        return _adjusted(fields, width)
    if fields.number("shared_width"):
        return fields.number("shared_width")
    if fields.type in _UNGATED:
        return int(hidden * fields.get("expansion_ratio", 4))
    return fields.number("expert_width") or 4 * hidden


def _adjusted(fields: Fields, width: int) -> int:
    """LFM2 computes the width it uses from the one it states."""
    if fields.type.startswith("lfm2") and fields.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3 * fields.get("block_ffn_dim_multiplier", 1.0))
        multiple = fields.number("block_multiple_of", 256)
        return -(-width // multiple) * multiple
    if fields.type == "recurrent_gemma":
        return width // 2
    return width


def _shared_width(fields: Fields, expert_width: int) -> int:
    """Width of the experts that every token uses."""
    if fields.number("shared_width"):
        return fields.number("shared_width")
    if fields.type == "llama4_text":
        return expert_width
    return fields.number("shared_experts") * expert_width


def _sparse_layers(fields: Fields, count: int) -> list[bool]:
    """Which layers have routed experts."""
    if fields.type == "longcat_flash":
        return [i % 2 == 0 for i in range(count)]
    types = fields.get("mlp_layer_types")
    if isinstance(types, list):
        return [str(one) != "dense" for one in types[:count]]
    if fields.type == "llama4_text":
        some = fields.get("moe_layers")
        step = fields.number("interleave_moe_layer_step", 1)
        return [i in some if some else (i + 1) % step == 0 for i in range(count)]
    if period := fields.number("expert_layer_period"):
        offset = fields.number("expert_layer_offset")
        return [i % period == offset for i in range(count)]
    if period := fields.number("moe_layer_interval"):
        first = fields.number("moe_layer_start_index")
        return [i >= first and (i + 1) % period == 0 for i in range(count)]
    frequency = fields.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return [bool(one) for one in frequency[:count]]
    first = fields.number("first_k_dense_replace")
    step = fields.number("decoder_sparse_step", 1) or 1
    dense = fields.get("mlp_only_layers") or ()
    return [
        i >= first and i % max(1, int(frequency)) == 0 and (i + 1) % step == 0 and i not in dense
        for i in range(count)
    ]


def _mixer(fields: Fields, index: int, kind: str) -> float:
    """Weights of a layer's attention or recurrence."""
    hidden = fields.need("hidden")
    if kind == "none":
        return 0.0
    if kind == "conv":
        return 4.0 * hidden * hidden + hidden * fields.number("conv_L_cache")
    if kind == "recurrent":
        return _recurrence(fields)
    if kind == "hybrid":
        mixed = 0.0 if fields.type.startswith("zamba") else _attention(fields, index, kind)
        return mixed + _recurrence(fields)
    return _attention(fields, index, kind)


def _attention(fields: Fields, index: int, kind: str) -> float:
    hidden, heads = fields.need("hidden"), fields.need("heads")
    latent, q_rank = fields.number("kv_lora_rank"), fields.number("q_lora_rank")
    if latent:
        nope, rope = fields.number("qk_nope_head_dim", 128), fields.number("qk_rope_head_dim", 64)
        value = fields.number("v_head_dim", nope)
        query = heads * (nope + rope)
        count = q_rank * (hidden + query) if q_rank else hidden * query
        count += hidden * (latent + rope) + latent * heads * (nope + value)
        count += heads * value * hidden
        if fields.get("index_head_dim"):
            width = fields.need("index_head_dim")
            index_heads = fields.number("index_n_heads")
            count += q_rank * index_heads * width + hidden * (width + index_heads)
        return float(count)
    if kind in ("csa", "hca"):
        width = fields.need("head_dim")
        groups, rank = fields.number("o_groups", 1), fields.number("o_lora_rank")
        out = heads * width * rank + groups * rank * hidden if rank else heads * width * hidden
        return float(q_rank * (hidden + heads * width) + hidden * width * 2 + out)
    kv, k_dim, v_dim = attention_dims(fields, index, kind in ("sliding", "chunked"))
    gate = 2 if fields.type.startswith(_GATED_QUERY) else 1
    shared = fields.number("num_kv_shared_layers")
    if shared and index >= fields.need("layers") - shared:
        kv = 0
    return float(hidden * (heads * k_dim * gate + kv * (k_dim + v_dim) + heads * v_dim))


def _recurrence(fields: Fields) -> float:
    hidden = fields.need("hidden")
    if fields.get("linear_num_value_heads"):
        k_width = fields.need("linear_num_key_heads") * fields.need("linear_key_head_dim")
        v_heads = fields.need("linear_num_value_heads")
        v_width = v_heads * fields.number("linear_value_head_dim", 128)
        conv = (2 * k_width + v_width) * fields.number("linear_conv_kernel_dim", 4)
        return float(hidden * (2 * k_width + 2 * v_width + 2 * v_heads) + conv + v_width * hidden)
    kda = fields.get("linear_attn_config") or {}
    if heads := kda.get("num_heads") or fields.number("linear_num_heads"):
        head = kda.get("head_dim") or fields.number("linear_head_dim")
        width = heads * head
        # q, k, v and out; decay and gate through a bottleneck of one head; beta.
        return float(4 * hidden * width + 2 * head * (hidden + width) + hidden * heads)
    if fields.type.startswith("minimax"):
        width = fields.need("heads") * (fields.number("head_dim") or hidden // fields.need("heads"))
        return float(5 * hidden * width)
    if fields.type == "recurrent_gemma":
        width = fields.number("lru_width") or hidden
        heads = fields.need("heads")
        return float(3 * hidden * width + 2 * heads * (width // heads) ** 2)
    inner, conv = mamba_widths(fields)
    state = fields.need("mamba_state")
    kernel = fields.number("mamba_conv", 4)
    if heads := fields.number("mamba_heads") or (
        fields.number("num_heads") if fields.type == "mamba2" else 0
    ):
        return float(hidden * (inner + conv + heads) + conv * kernel + inner * hidden)
    rank = fields.get("mamba_dt_rank", fields.get("time_step_rank", "auto"))
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    return float(
        2 * hidden * inner
        + inner * (kernel + 2 * state + 2 * rank)
        + inner * state
        + inner * hidden
    )
