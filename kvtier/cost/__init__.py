"""What a placement costs: estimates that name their inputs. Needs neither torch nor a device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.cost.batches import largest_batch, matched_batch
    from kvtier.cost.budget import Budget, memory_budget
    from kvtier.cost.geometry import (
        fixed_state_bytes,
        kv_bytes,
        max_context,
        max_sequences,
        tokens_in_pool,
    )
    from kvtier.cost.kv_dtype import kv_dtype
    from kvtier.cost.lint import plausibility
    from kvtier.cost.models import ModelShape, find_model, models
    from kvtier.cost.modes import decode_estimate
    from kvtier.cost.prefill import prefill_time
    from kvtier.cost.prompt_cache import PromptCache, cached_tokens
    from kvtier.cost.restore import restore_or_recompute
    from kvtier.cost.split import offload_decode, prefer
    from kvtier.cost.streaming import crossover_tokens, kv_step_ms, stream_ms
    from kvtier.cost.workload import Workload

_HOMES = {
    "Workload": "modes",
    "decode_estimate": "modes",
    "largest_batch": "batches",
    "matched_batch": "batches",
    "prefill_time": "prefill",
    "PromptCache": "prompt_cache",
    "cached_tokens": "prompt_cache",
    "restore_or_recompute": "restore",
    "offload_decode": "split",
    "prefer": "split",
    "crossover_tokens": "streaming",
    "kv_step_ms": "streaming",
    "stream_ms": "streaming",
    "plausibility": "lint",
    "Budget": "budget",
    "memory_budget": "budget",
    "fixed_state_bytes": "geometry",
    "kv_bytes": "geometry",
    "max_context": "geometry",
    "max_sequences": "geometry",
    "tokens_in_pool": "geometry",
    "kv_dtype": "kv_dtype",
    "ModelShape": "models",
    "find_model": "models",
    "models": "models",
}

__all__ = [
    "Budget",
    "ModelShape",
    "PromptCache",
    "Workload",
    "cached_tokens",
    "crossover_tokens",
    "decode_estimate",
    "find_model",
    "fixed_state_bytes",
    "kv_bytes",
    "kv_dtype",
    "kv_step_ms",
    "largest_batch",
    "matched_batch",
    "max_context",
    "max_sequences",
    "memory_budget",
    "models",
    "offload_decode",
    "plausibility",
    "prefer",
    "prefill_time",
    "restore_or_recompute",
    "stream_ms",
    "tokens_in_pool",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
