"""One layer of a ``TieredCache``, as transformers sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from kvtier.integrations.transformers.cache import TieredCache


class TieredLayer(CacheLayerMixin):
    """Passes a layer's calls on to the cache, which knows all layers and steps.

    ``is_sliding`` layers answer with the same lengths and offsets as transformers' own dynamic sliding layer,
    so that masks, and with them results, are the same bit for bit.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: TieredCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self._window = window
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pages are made when tokens come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.serve(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.columns_of(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = self._cache.columns_of(self._index)
        if self._window is None:
            return columns + query_length, 0
        return min(columns, self._window - 1) + query_length, max(columns - self._window + 1, 0)

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

    # The cache does these once for all layers; transformers calls them on the cache, or on each layer in turn.

    def reset(self) -> None:
        self._cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("crop the whole TieredCache, not one of its layers")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise NotImplementedError("reorder the whole TieredCache, not one of its layers")

    def offload(self) -> None:
        """The tiers do it."""

    def prefetch(self) -> None:
        """The tiers do it."""
