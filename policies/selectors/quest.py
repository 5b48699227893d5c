"""Quest: pages by an upper bound of what their keys can score.

Origin: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv 2406.10774). For
each page the least and the largest value of each channel of its keys are kept; ``q+ . largest + q- . least`` is never
below the largest ``q . k`` of the page. A bound, but a loose one: one outlier among the keys lifts a whole page.

Cost: two rows of a summary read for each page, O(pages * dim) a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.selector import Query, Selector, check_reduction, reduce_group

if TYPE_CHECKING:
    import torch


class Quest(Selector):
    """Largest bound first.

    Args:
        reduce: see ``kvtier.selector.reduce_group``.

    Raises:
        ConfigError: ``reduce`` is unknown.
    """

    name: ClassVar[str] = "quest"
    summary_rows: ClassVar[int] = 2

    def __init__(self, *, reduce: str = "softmax-mean") -> None:
        self.reduce = check_reduction(self.name, reduce)

    def scores(self, query: Query) -> torch.Tensor:
        from kvtier.kernels.scores import quest_scores

        bounds = quest_scores(query.q, query.summaries)
        return reduce_group(bounds, query.kv_heads, self.reduce, query.scale)
