"""Attention through transformers' attention interface, for the modes that read pages where they are.

A cache in such a mode registers ``kvtier`` as an attention implementation and sets it on its model while it is open. In
a step of decoding it hands the new K out with a mark on it; the implementation sees the mark and asks the cache for the
result. Without a mark it is transformers' sdpa attention: prefill, other caches, no cache at all.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvtier.errors import UnsupportedModelError
from kvtier.integrations.transformers.foresight import HiddenForesight
from kvtier.integrations.transformers.weights import base_model

if TYPE_CHECKING:
    from kvtier.attention.engine import AttentionEngine

#: The name under which transformers knows it.
NAME = "kvtier"

_MARK = "kvtier_read"


def mark(k: torch.Tensor, engine: AttentionEngine, layer: int) -> torch.Tensor:
    """A view of ``k`` by which attention finds the way back to the engine."""
    view = k.view(k.shape)
    setattr(view, _MARK, (weakref.ref(engine), layer))
    return view


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: ``query`` is ``[rows, heads, tokens, dim]``; the result ``[rows, tokens, heads, dim]``.

    Raises:
        UnsupportedModelError: the layer caps its logits or drops attention out.
    """
    marked = getattr(key, _MARK, None)
    if marked is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    for name, given in (("softcap", kwargs.get("softcap")), ("dropout", dropout)):
        if given:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses {name}={given}, which only mode exact-stream supports"
            )
    engine, layer = marked[0](), marked[1]
    assert engine is not None, "the cache is gone in the middle of a step"
    out = engine.attend(layer, query[:, :, 0], scaling, kwargs.get("s_aux"))
    return out[:, None], None


@functools.cache
def register() -> None:
    """Make transformers know the implementation."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


class Attached:
    """Has a model use this attention as long as any cache needs it, and puts its former one back then.

    Args:
        model: of the cache.
        engine: of the cache; gets its guesses about queries from the model if its mode asks for that.

    Raises:
        UnsupportedModelError: the model cannot be given another attention, or its queries cannot be guessed.
    """

    #: Model -> (caches that need it, what it used before).
    _users: ClassVar[weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, str]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, model: torch.nn.Module, engine: AttentionEngine) -> None:
        register()
        self._foresight: HiddenForesight | None = None
        selection = engine.mode.selection
        if selection is not None and selection.prefetch == "hidden":
            self._foresight = engine.foresee(HiddenForesight(model))
        self._model = weakref.ref(base_model(model))
        inner = base_model(model)
        count, former = self._users.get(inner, (0, inner.config._attn_implementation))
        if count == 0:
            try:
                inner.set_attn_implementation(NAME)
            except ValueError as error:
                raise UnsupportedModelError(
                    f"{type(inner).__name__} cannot be given another attention: {error}; use mode exact-stream"
                ) from error
        self._users[inner] = (count + 1, former)
        self._open = True

    def close(self) -> None:
        """Idempotent."""
        if self._foresight is not None:
            self._foresight.close()
        inner = self._model()
        if self._open and inner is not None:
            count, former = self._users.pop(inner)
            if count > 1:
                self._users[inner] = (count - 1, former)
            else:
                inner.set_attn_implementation(former)
        self._open = False
