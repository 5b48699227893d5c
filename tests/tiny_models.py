"""Tiny random models of all kinds that a cache must serve, and a store in which they use all three tiers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from kvtier.devices.emulated import EmulatedDevice
from kvtier.integrations.transformers.cache import TieredCache
from kvtier.integrations.transformers.layout import layout_of
from kvtier.store.store import TieredStore

PAGE = 8
VOCAB = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large weights: with the usual ones random models repeat one token, and tests could not fail.
    "initializer_range": 0.2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-mha": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"sliding_window": 20, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": 20, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
}
KINDS = tuple(_KINDS)

#: ``cache`` since 5.24, ``past_key_values`` before.
KEYWORD = (
    "cache"
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    else "past_key_values"
)


def make(
    kind: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A random model of a kind; ``changes`` go into its configuration. Attention by default as transformers chooses."""
    model_name, config_name, options = _KINDS[kind]
    options = _COMMON | options | changes
    if kind == "deepseek":
        options.pop("head_dim")
    config = getattr(transformers, config_name)(**options, attn_implementation=attention)
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(config).to(dtype).eval()


def prompt(rows: int, tokens: int, *, seed: int = 0, pads: tuple[int, ...] = ()) -> dict[str, Any]:
    """``input_ids`` and ``attention_mask`` of random rows, padded on the left by ``pads``."""
    ids = torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


@dataclasses.dataclass
class Place:
    """A device and a folder that outlive stores, to restart on."""

    path: Path
    device: EmulatedDevice

    @contextlib.contextmanager
    def store(
        self,
        model: Any,
        *,
        vram: int = 5,
        host: int = 3,
        disk: int = 8 << 20,
        page: int = PAGE,
        **options: Any,
    ) -> Iterator[TieredStore]:
        """A store of ``vram`` and ``host`` pages; books are zero when it closes."""
        layout = layout_of(model, page_tokens=page)
        store = TieredStore(
            layout,
            device=self.device,
            vram=vram * layout.page_bytes,
            host=host * layout.page_bytes,
            disk=disk,
            path=self.path if disk else None,
            check=True,
            **options,
        )
        try:
            yield store
            stats = store.stats()
            assert (stats.leases, stats.owners) == (0, 0)
        finally:
            store.close()


@contextlib.contextmanager
def tiered(place: Place, model: Any, **sizes: Any) -> Iterator[TieredCache]:
    with place.store(model, **sizes) as store, TieredCache(model, store) as cache:
        yield cache


def generate(model: Any, cache: Any, given: dict[str, Any], **options: Any) -> Any:
    """``generate`` with a cache and raw logits in its output."""
    options = {"max_new_tokens": 12, "do_sample": False} | options
    torch.manual_seed(options.pop("seed", 0))
    return model.generate(
        **given,
        **{KEYWORD: cache},
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def forward(model: Any, cache: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{KEYWORD: cache}, **inputs).logits


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def prefilled(model: Any, given: dict[str, Any], columns: int) -> DynamicCache:
    """A ``DynamicCache`` with the first ``columns`` columns of a prompt, computed in one pass over all of it."""
    cache = dynamic(model)
    cache.activate_past_recording()
    inputs = dict(given)
    if "attention_mask" in inputs:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**inputs, **{KEYWORD: cache})
    cache.crop(columns - given["input_ids"].shape[1])
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
    return cache


def assert_same(a: Any, b: Any) -> None:
    """Two outputs of ``generate`` are equal bit for bit."""
    assert torch.equal(a.sequences, b.sequences)
    assert len(a.logits) == len(b.logits) > 0
    for x, y in zip(a.logits, b.logits, strict=True):
        assert torch.equal(x, y)


def used_all_tiers(store: TieredStore) -> bool:
    tiers = store.stats().tiers
    return all(tiers[tier].pages_in or tiers[tier].pages for tier in ("vram", "host", "disk"))
