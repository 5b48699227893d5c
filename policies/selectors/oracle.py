"""Oracle: pages by the attention mass that they really get. For tests and tables: the best that any choice of as many
pages can recall.

It reads every key to choose which pages to read, so it saves nothing.

Cost: that of dense attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.selector import Query, Selector

if TYPE_CHECKING:
    import torch


class Oracle(Selector):
    """Largest true mass first, summed over the heads that share a list."""

    name: ClassVar[str] = "oracle"
    summary_rows: ClassVar[int] = 0
    reads_pages: ClassVar[bool] = True

    def scores(self, query: Query) -> torch.Tensor:
        shares = query.shares()
        heads, pages = shares.shape
        return shares.view(query.kv_heads, heads // query.kv_heads, pages).mean(1)
