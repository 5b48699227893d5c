"""K, V and queries for attention that is really computed, made up so that what a query looks for is known.

Each page of a sequence has a direction, spread evenly over a circle and in no order along the sequence; its keys point
there, give or take a little. A query has a direction too, and the pages nearest to it score highest. It turns by a fixed
angle each step, so that a given share of the chosen pages is new (``Locality.churn``). The KV heads of a layer, and the
layers, look a little further on than their neighbours, so that they choose different pages, though not entirely.
A page that has left the choice comes back after a whole turn only: the slow end of what a model does.

All made of sequence, token, layer and step alone, so that what was read can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvtier.cost.churn import Locality
from kvtier.layout import Part
from kvtier.stress.pattern import pattern

#: Steps around the circle that never meet: the golden section.
_GOLDEN = (math.sqrt(5) - 1) / 2
#: Width over which the keys of a page spread, in radians.
_SPREAD = 0.01
#: What ``q . k`` of a page right ahead is, after scaling.
_LOGIT = 8.0


class Compass:
    """Makes them for one load.

    Args:
        page_tokens: of a page.
        group: query heads that share a KV head.
        share: of all pages that a query chooses, for which ``locality`` holds.
    """

    def __init__(self, page_tokens: int, group: int, share: float, locality: Locality) -> None:
        self._page_tokens = page_tokens
        self._group = group
        self._width = 2 * math.pi * share
        self._locality = locality

    def keys(
        self, part: Part, layer: int, numbers: Sequence[int], start: int, stop: int
    ) -> torch.Tensor:
        """K of tokens, ``[rows, heads, stop - start, dim]`` of the part's dtype. ``numbers`` are those of the
        sequences."""
        tokens = np.arange(start, stop)
        pages = tokens // self._page_tokens
        turns = pages[None] * _GOLDEN + np.array(numbers)[:, None] * _GOLDEN**2
        inside = (tokens % self._page_tokens / self._page_tokens - 0.5) * _SPREAD
        angle = 2 * math.pi * (turns % 1.0) + inside + self._north(layer)
        return self._pointing(angle[:, None], part, (len(numbers), part.heads, stop - start))

    def values(
        self, part: Part, layer: int, numbers: Sequence[int], start: int, stop: int
    ) -> torch.Tensor:
        """V of tokens, shaped as K: whole numbers that tell sequence, token and layer."""
        made = torch.from_numpy(pattern(layer, numbers, start, stop).astype(np.float32))
        shape = (len(numbers), part.heads, stop - start, part.dim)
        return made[:, None, :, None].expand(shape).to(getattr(torch, part.dtype)).contiguous()

    def queries(self, part: Part, layer: int, numbers: Sequence[int], step: int) -> torch.Tensor:
        """``[rows, heads, dim]`` of a decode step, for keys of ``part``."""
        near = self._locality
        heads = np.arange(part.heads * self._group)
        ahead = near.heads * (heads // self._group) / part.heads
        ahead = ahead + near.layers * ((layer * _GOLDEN) % 1.0)
        turns = np.array(numbers)[:, None] * _GOLDEN**3 * 2 * math.pi
        angle = turns + self._width * (step * near.churn + ahead)[None] + self._north(layer)
        q = self._pointing(angle, part, (len(numbers), len(heads)))
        return (q.float() * (_LOGIT * 2 / math.sqrt(part.dim))).to(q.dtype)

    @staticmethod
    def _north(layer: int) -> float:
        """Layers differ in where their circle begins, so that their keys do."""
        return layer * 0.7

    @staticmethod
    def _pointing(angle: np.ndarray, part: Part, shape: tuple[int, ...]) -> torch.Tensor:
        both = np.stack([np.cos(angle), np.sin(angle)], -1)
        wide = np.broadcast_to(np.tile(both, part.dim // 2), (*shape, part.dim))
        return torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32)).to(
            getattr(torch, part.dtype)
        )


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attention as in a textbook: ``q`` ``[heads, dim]``, ``k`` and ``v`` ``[kv_heads, tokens, dim]``, ``seen``
    bool ``[kv_heads, tokens]``; float64 ``[heads, v_dim]``."""
    kv_heads, _, dim = k.shape
    query = q.double().view(kv_heads, -1, dim) / math.sqrt(dim)
    scores = query @ k.double().transpose(1, 2)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ v.double()).reshape(q.shape[0], -1)
