"""ArkVale's box: pages by an estimate of the largest score among their keys.

Origin: Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction" (NeurIPS 2024),
the digest they call cuboid-mean. The middle of each channel's range and the mean distance of the keys from it span a box
that is smaller than the one that covers all keys: no bound, but it ranks pages better than Quest's.

Cost: three rows of a summary read for each page, O(pages * dim) a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.selector import Query, Selector, check_reduction, reduce_group

if TYPE_CHECKING:
    import torch


class ArkBox(Selector):
    """Largest estimate first.

    Args:
        reduce: see ``kvtier.selector.reduce_group``.

    Raises:
        ConfigError: ``reduce`` is unknown.
    """

    name: ClassVar[str] = "arkbox"
    summary_rows: ClassVar[int] = 3

    def __init__(self, *, reduce: str = "softmax-mean") -> None:
        self.reduce = check_reduction(self.name, reduce)

    def scores(self, query: Query) -> torch.Tensor:
        from kvtier.kernels.scores import arkbox_scores

        estimates = arkbox_scores(query.q, query.summaries)
        return reduce_group(estimates, query.kv_heads, self.reduce, query.scale)
