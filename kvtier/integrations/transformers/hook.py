"""Watching a model's forward passes for what goes into a cache.

``generate`` never shows token ids to a cache, but each page's key needs them. Hooks on the decoder see the
exact ids, mask, positions and cache object of every pass (greedy, beams, chunked prefill, draft tokens),
whether ``generate``, the model or the decoder alone is called, with and without PEFT around it, and the end
of each pass, however it ends.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtier.integrations.transformers.weights import base_model

if TYPE_CHECKING:
    from kvtier.integrations.transformers.cache import TieredCache

#: Inputs that change KV without being in the token ids.
_OTHER_INPUTS = (
    "inputs_embeds",
    "pixel_values",
    "input_features",
    "image_embeds",
    "encoder_hidden_states",
    "token_type_ids",
    "per_layer_inputs",
)


@dataclass(slots=True)
class ForwardInputs:
    """What one forward pass is fed.

    Attributes:
        input_ids: ``[rows, columns]`` or ``None``.
        attention_mask: two-dimensional mask over all columns, cached ones included, or ``None``.
        position_ids: ``[rows, columns]`` (or one row for all) or ``None`` if the model counts itself.
        opaque: the ids do not tell all that the KV depends on (embeddings, images, a mask of four
            dimensions, positions of more than two): nothing of this pass may be shared.
        masked: a mask of another form is given: which tokens are hidden from which is the caller's choice.
    """

    input_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None = None
    opaque: bool = False
    masked: bool = False


def watch_forward(model: torch.nn.Module, cache: TieredCache) -> Callable[[], None]:
    """Tell ``cache`` of the begin (``expect``) and the end (``finished``) of every forward pass of ``model``
    that uses it, until the function returned is called.

    Holds the cache weakly: a cache that is dropped without ``close`` takes its hooks with it.
    """
    inner = base_model(model)
    decoder = getattr(inner, "base_model", inner)
    names = list(inspect.signature(decoder.forward).parameters)
    watcher = weakref.ref(cache)
    watched = weakref.ref(decoder)

    def target_of(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TieredCache | None:
        target = watcher()
        if target is None:
            remove()
            return None
        # A deep copy of the model brings this hook along, but is another model.
        if module is not watched():
            return None
        used = any(value is target for value in (*args, *kwargs.values()))
        return target if used else None

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = target_of(module, args, kwargs)
        if target is not None:
            target.expect(_inputs(dict(zip(names, args, strict=False)) | kwargs))

    def after(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        target = target_of(module, args, kwargs)
        if target is not None:
            target.finished(complete=output is not None)

    handles = [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def mixed_adapters(model: torch.nn.Module) -> bool:
    """Whether PEFT runs the rows of a batch, or parts of them, under different adapters in this pass
    (``adapter_names=``, activated LoRA). It hangs hooks on every LoRA layer for the time of a call."""
    if not hasattr(model, "peft_config"):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return any(
                getattr(getattr(hook, "func", hook), "__module__", "").startswith("peft.")
                for hook in module._forward_pre_hooks.values()
            )
    return False


def _inputs(given: dict[str, Any]) -> ForwardInputs:
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    opaque = any(given.get(name) is not None for name in _OTHER_INPUTS)
    return ForwardInputs(
        given.get("input_ids"),
        _flat(mask),
        _flat(positions),
        opaque or any(x is not None and _flat(x) is None for x in (mask, positions)),
        mask is not None and _flat(mask) is None,
    )


def _flat(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) and value.dim() == 2 else None
