"""The next layer's queries, guessed from the current layer's hidden state.

The residual stream changes little from one layer to the next, so the next layer's query projection, applied to what the
current layer is fed, gives nearly the queries to come, early enough to fetch their pages while this layer computes.
Origin: InfiniGen (Lee et al., OSDI 2024) and ArkVale (NeurIPS 2024). A guess moves pages; it never changes a result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kvtier.errors import UnsupportedModelError
from kvtier.integrations.transformers.weights import base_model


class HiddenForesight:
    """Watches a model's layers while it is open.

    Args:
        model: of the usual make: ``layers``, each with ``input_layernorm`` and ``self_attn.q_proj``, and a rotary
            embedding that the layers are given as ``position_embeddings``.

    Raises:
        UnsupportedModelError: the model is made otherwise.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        inner = base_model(model)
        decoder = getattr(inner, "base_model", inner)
        self._layers = list(getattr(decoder, "layers", ()))
        attentions = [getattr(layer, "self_attn", None) for layer in self._layers]
        self._rotate: Callable[..., Any] | None = (
            getattr(sys.modules[type(attentions[0]).__module__], "apply_rotary_pos_emb", None)
            if attentions
            else None
        )
        usual = all(
            hasattr(layer, "input_layernorm")
            and hasattr(attention, "q_proj")
            and hasattr(attention, "head_dim")
            for layer, attention in zip(self._layers, attentions, strict=True)
        )
        if not self._layers or not usual or self._rotate is None:
            raise UnsupportedModelError(
                f"the queries of {type(inner).__name__} cannot be guessed from its hidden states; use prefetch=last"
            )
        self._hidden: torch.Tensor | None = None
        self._positions: tuple[torch.Tensor, torch.Tensor] | None = None
        self._handles = [
            layer.register_forward_pre_hook(self._watch, with_kwargs=True) for layer in self._layers
        ]

    def __call__(self, layer: int) -> torch.Tensor | None:
        """``[rows, heads, dim]`` of a layer in this step of decoding; ``None`` outside one."""
        hidden, positions = self._hidden, self._positions
        if hidden is None or positions is None or hidden.shape[1] != 1:
            return None
        block = self._layers[layer]
        attention = block.self_attn
        with torch.no_grad():
            q = attention.q_proj(block.input_layernorm(hidden))
            q = q.view(*hidden.shape[:-1], -1, attention.head_dim)
            if hasattr(attention, "q_norm"):
                q = attention.q_norm(q)
            q = q.transpose(1, 2)
            assert self._rotate is not None
            q, _ = self._rotate(q, q, *positions)
        rows: torch.Tensor = q[:, :, 0]
        return rows

    def close(self) -> None:
        """Stop watching. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hidden = self._positions = None

    def _watch(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        positions = kwargs.get("position_embeddings")
        self._hidden = hidden.detach() if isinstance(hidden, torch.Tensor) else None
        self._positions = positions if isinstance(positions, tuple) else None
