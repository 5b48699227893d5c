"""Device code, and a torch reference for each kernel.

One function a kernel. On CPU tensors it runs the reference; on CUDA tensors it launches the kernel of
the same name from ``kvtier.cu`` through CuPy, on torch's current stream of that device. Where CuPy or
the compiler is missing it says so once and runs the reference on the device.

Importing this package loads neither torch nor CuPy; a name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.kernels.attention import (
        Partial,
        merge,
        merge_partials,
        partial_attention,
    )
    from kvtier.kernels.launch import Launcher
    from kvtier.kernels.mass import add_page_mass
    from kvtier.kernels.moves import move_pieces
    from kvtier.kernels.pages import gather_pages, scatter_pages
    from kvtier.kernels.quantise import Quantised, dequantise, quantise_keys, quantise_values
    from kvtier.kernels.scores import arkbox_scores, quest_scores
    from kvtier.kernels.summary import PageSummaries, summarise_pages
    from kvtier.kernels.table import PageTable

_HOMES = {
    "Launcher": "launch",
    "PageSummaries": "summary",
    "PageTable": "table",
    "Partial": "attention",
    "Quantised": "quantise",
    "add_page_mass": "mass",
    "arkbox_scores": "scores",
    "dequantise": "quantise",
    "gather_pages": "pages",
    "merge": "attention",
    "merge_partials": "attention",
    "move_pieces": "moves",
    "partial_attention": "attention",
    "quantise_keys": "quantise",
    "quantise_values": "quantise",
    "quest_scores": "scores",
    "scatter_pages": "pages",
    "summarise_pages": "summary",
}

__all__ = [
    "Launcher",
    "PageSummaries",
    "PageTable",
    "Partial",
    "Quantised",
    "add_page_mass",
    "arkbox_scores",
    "dequantise",
    "gather_pages",
    "merge",
    "merge_partials",
    "move_pieces",
    "partial_attention",
    "quantise_keys",
    "quantise_values",
    "quest_scores",
    "scatter_pages",
    "summarise_pages",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
