"""kvtier: a language model's KV cache in three tiers: VRAM, pinned host RAM, LMDB on disk.

    import kvtier

    store = kvtier.TieredStore(layout, vram="4GiB", host="16GiB", disk="100GiB", path="kv")

Names are imported when they are first used: ``import kvtier`` loads neither torch nor lmdb.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.devices import open_device
    from kvtier.identity import AdapterIdentity, ModelIdentity
    from kvtier.keys import KeyChain, page_keys
    from kvtier.layout import LayerLayout, PageLayout
    from kvtier.session.session import Session
    from kvtier.store.aio import AsyncStore
    from kvtier.store.lease import Lease
    from kvtier.store.store import TieredStore

__version__ = "0.1.0"

_HOME = {
    "AdapterIdentity": "kvtier.identity",
    "AsyncStore": "kvtier.store.aio",
    "KeyChain": "kvtier.keys",
    "LayerLayout": "kvtier.layout",
    "Lease": "kvtier.store.lease",
    "ModelIdentity": "kvtier.identity",
    "PageLayout": "kvtier.layout",
    "Session": "kvtier.session.session",
    "TieredStore": "kvtier.store.store",
    "open_device": "kvtier.devices",
    "page_keys": "kvtier.keys",
}

__all__ = [
    "AdapterIdentity",
    "AsyncStore",
    "KeyChain",
    "LayerLayout",
    "Lease",
    "ModelIdentity",
    "PageLayout",
    "Session",
    "TieredStore",
    "open_device",
    "page_keys",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
