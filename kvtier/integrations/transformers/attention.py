"""Attention through transformers' attention interface, for the modes that read pages where they are.

A cache in such a mode registers an attention implementation and sets it on its model while it is open: ``kvtier_sdpa``
where the model had ``sdpa``. In a step of decoding it hands the new K out with a mark on it; the implementation sees the
mark and asks the cache for the result. Without a mark it is the model's former attention: prefill, other caches, no
cache at all.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.errors import UnsupportedModelError
from kvtier.integrations.transformers.foresight import HiddenForesight
from kvtier.integrations.transformers.weights import base_model

if TYPE_CHECKING:
    from kvtier.attention.engine import AttentionEngine

#: What the names of the implementations begin with; the former one's name follows.
PREFIX = "kvtier_"

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
    *,
    former: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers calls it: ``query`` is ``[rows, heads, tokens, dim]``; the result ``[rows, tokens, heads, dim]``.

    Args:
        former: the implementation for everything without a mark.

    Raises:
        UnsupportedModelError: the layer caps its logits or drops attention out.
    """
    marked = getattr(key, _MARK, None)
    if marked is None:
        plain = ALL_ATTENTION_FUNCTIONS.get(former) or _eager(module)
        result: tuple[torch.Tensor, torch.Tensor | None] = plain(
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
def register(former: str) -> str:
    """Make transformers know the implementation that goes back to ``former``; its name."""
    name = PREFIX + former
    AttentionInterface.register(name, functools.partial(attention, former=former))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[former])
    return name


def _eager(module: torch.nn.Module) -> Callable[..., Any]:
    """The attention that a model's own file defines."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


def _decoder(model: torch.nn.Module) -> Any:
    """The part of a model whose attention reads the cache; not, say, the encoder of its images."""
    inner = base_model(model)
    return inner.get_decoder() or inner


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
        inner = _decoder(model)
        cap = getattr(inner.config, "attn_logit_softcapping", None)
        if cap:
            raise UnsupportedModelError(
                f"{type(inner).__name__} uses softcap={cap}, which only mode exact-stream supports"
            )
        self._foresight: HiddenForesight | None = None
        self._model = weakref.ref(inner)
        count, former = self._users.get(inner, (0, inner.config._attn_implementation))
        if count == 0:
            if former not in ALL_MASK_ATTENTION_FUNCTIONS:
                raise UnsupportedModelError(
                    f"attention {former!r} of {type(inner).__name__} makes no masks that can be taken over; use "
                    "model.set_attn_implementation('sdpa') first, or mode exact-stream"
                )
            name = register(former)
            inner.set_attn_implementation(name)
            if inner.config._attn_implementation != name:
                raise UnsupportedModelError(
                    f"{type(inner).__name__} does not take another attention implementation; use mode exact-stream"
                )
        self._users[inner] = (count + 1, former)
        self._open = True
        selection = engine.mode.selection
        if selection is not None and selection.prefetch == "hidden":
            try:
                self._foresight = engine.foresee(HiddenForesight(model))
            except BaseException:
                self.close()
                raise

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
