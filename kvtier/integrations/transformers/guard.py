"""Whether a model is still the one whose pages a cache stores: its geometry, adapters and weights."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import zip_longest

import torch

from kvtier.errors import ConfigError, IdentityError, LayoutError, UnsupportedModelError
from kvtier.identity import ModelIdentity
from kvtier.integrations.transformers.adapters import active_adapters, adapter_state
from kvtier.integrations.transformers.attention import PREFIX
from kvtier.integrations.transformers.hook import mixed_adapters
from kvtier.integrations.transformers.identity import identity_of
from kvtier.integrations.transformers.layout import layout_of
from kvtier.integrations.transformers.weights import base_model
from kvtier.layout import PageLayout


class ModelGuard:
    """The model of a cache, held weakly, and what it was when the cache was made.

    Args:
        model: the model.
        layout: that of the store.
        identity: the model's identity, if it is known already.
        tenant: of the identity.
        kv_quantisation: of the store. An identity that says nothing of it gets it: the model is the same.

    Raises:
        LayoutError: the model's layers do not fit the store's layout.
        IdentityError: the identity cannot be determined, or was made with other adapters.
        ConfigError: the tenant is not that of the identity.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: PageLayout,
        identity: ModelIdentity | None,
        tenant: str,
        kv_quantisation: str = "",
    ) -> None:
        _check_geometry(model, layout)
        if identity is None:
            identity = identity_of(model, layout=layout, tenant=tenant)
        elif tenant and tenant != identity.tenant:
            raise ConfigError(
                f"tenant is {tenant!r}, but the identity was made for {identity.tenant!r}; "
                "give one of them"
            )
        elif replace(identity, adapters=active_adapters(model)) != identity:
            raise IdentityError(
                "the identity was made with other adapters than those that are active now; "
                "call identity_of(model) again"
            )
        if not identity.kv_quantisation:
            identity = replace(identity, kv_quantisation=kv_quantisation)
        self.identity = identity
        #: Whether the weights are known to be what they were.
        self.verified = True
        self._layout = layout
        self._adapters = adapter_state(model)
        self._model = weakref.ref(model)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, if it is still there."""
        return self._model()

    @property
    def eager(self) -> bool:
        """Whether attention is computed by transformers' plain matrix products at this moment."""
        model = self._model()
        if model is None:
            return False
        text = base_model(model).config.get_text_config(decoder=True)
        return str(getattr(text, "_attn_implementation", "")).removeprefix(PREFIX) == "eager"

    def check_identity(self) -> None:
        """Compare all weights, adapters and the configuration with what the pages are keyed by.

        Raises:
            IdentityError: something has changed.
        """
        model = self._model()
        if model is None:
            return
        now = identity_of(
            model,
            layout=self._layout,
            tenant=self.identity.tenant,
            revision=self.identity.revision or None,
            kv_quantisation=self.identity.kv_quantisation,
        )
        if now.digest != self.identity.digest:
            raise IdentityError(
                "the model has changed since the cache was made (weights, adapters or "
                "configuration); make a new TieredCache"
            )
        self.verified = True

    def check_adapters(self, columns: int) -> None:
        """The part of it that is cheap enough for every forward pass.

        Raises:
            IdentityError: other adapters act than when the cache was made.
            UnsupportedModelError: the rows of the batch run under different adapters.
        """
        model = self._model()
        if model is None:
            return
        if adapter_state(model) != self._adapters:
            raise IdentityError(
                f"the active adapters have changed under a cache that holds {columns} tokens "
                "computed with the old ones; make a new TieredCache for the new adapters"
            )
        if mixed_adapters(model):
            raise UnsupportedModelError(
                "the rows of this batch run under different adapters (adapter_names, activated "
                "LoRA), so no page has one identity; run one adapter at a time"
            )


def _check_geometry(model: torch.nn.Module, layout: PageLayout) -> None:
    """The store must have a plane for all that the model's layers will bring; dtypes are seen when they come."""
    mine = layout_of(model, page_tokens=layout.page_tokens)
    for have, want in zip_longest(layout.layers, mine.layers):
        shapes = [
            None if x is None else (x.kind, x.k_heads, x.k_dim, x.v_heads, x.v_dim, x.window)
            for x in (have, want)
        ]
        if shapes[0] != shapes[1]:
            raise LayoutError(
                f"the store's layout has {len(layout.layers)} layers, the model "
                f"{len(mine.layers)}, and they differ: {have} against {want}; make the store "
                "with layout_of(model)"
            )
