"""Watching a model's forward calls for the token ids that go into a cache.

``generate`` never shows ids to a cache, but each page's key needs them. A forward pre-hook sees exactly the
ids, mask and cache object of every forward pass: greedy, beams, chunked prefill, draft tokens.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvtier.integrations.transformers.cache import TieredCache

#: Inputs that change KV without being in the token ids.
_OTHER_INPUTS = ("inputs_embeds", "pixel_values", "input_features", "image_embeds", "encoder_hidden_states", "token_type_ids")


@dataclass(slots=True)
class ForwardInputs:
    """What one forward pass is fed.

    Attributes:
        input_ids: ``[rows, columns]`` or ``None`` if the ids do not tell all.
        attention_mask: two-dimensional mask or ``None``.
        position_ids: ``[rows, columns]`` (or one row for all) or ``None`` if the model counts itself.
    """

    input_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None = None

    @property
    def rows(self) -> int | None:
        return None if self.input_ids is None else self.input_ids.shape[0]

    @property
    def columns(self) -> int | None:
        return None if self.input_ids is None else self.input_ids.shape[1]

    def ids(self) -> list[list[int]] | None:
        """The ids as integers; waits for the device if they are there."""
        return None if self.input_ids is None else self.input_ids.tolist()


def watch_forward(model: torch.nn.Module, cache: TieredCache) -> Callable[[], None]:
    """Tell ``cache`` of every forward pass of ``model`` that uses it, until the function returned is called.

    Holds the cache weakly: a cache that is dropped without ``close`` takes its hook with it.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = list(inspect.signature(inner.forward).parameters)
    watcher = weakref.ref(cache)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = watcher()
        if target is None:
            handle.remove()
            return
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("cache") is not target and given.get("past_key_values") is not target:
            return
        ids = given.get("input_ids")
        if any(given.get(name) is not None for name in _OTHER_INPUTS):
            ids = None
        target.expect(ForwardInputs(ids, _flat(given.get("attention_mask")), _flat(given.get("position_ids"))))

    handle = inner.register_forward_pre_hook(hook, with_kwargs=True)
    return handle.remove


def _flat(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) and value.dim() == 2 else None
