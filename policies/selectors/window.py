"""Window: the most recent pages, whatever the query. A control: what a selector must beat.

Origin: the first tokens and a recent window, StreamingLLM (Xiao et al., arXiv 2309.17453); the first pages are read in
any case. It cannot find anything that lies far back.

Cost: O(pages).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.selector import Query, Selector

if TYPE_CHECKING:
    import torch


class Window(Selector):
    """Latest page first."""

    name: ClassVar[str] = "window"
    summary_rows: ClassVar[int] = 0

    def scores(self, query: Query) -> torch.Tensor:
        import torch

        order = torch.arange(query.pages, dtype=torch.float32, device=query.q.device)
        return order.expand(query.kv_heads, -1)
