"""Hugging Face transformers: ``TieredCache`` for a model's KV, ``layout_of`` and ``identity_of`` for its pages.

Names are imported when they are first used, so that this package alone loads neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.integrations.transformers.adapters import adapter_state
    from kvtier.integrations.transformers.cache import TieredCache
    from kvtier.integrations.transformers.identity import identity_of
    from kvtier.integrations.transformers.layout import layout_of

_HOME = {
    "TieredCache": "cache",
    "adapter_state": "adapters",
    "identity_of": "identity",
    "layout_of": "layout",
}

__all__ = ["TieredCache", "adapter_state", "identity_of", "layout_of"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
