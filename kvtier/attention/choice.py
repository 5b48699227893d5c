"""Which pages a step reads, row by row and layer by layer: what a selector ranks highest, within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtier.attention.mode import Selection
from kvtier.errors import ConfigError
from kvtier.layout import PageLayout
from kvtier.selector import Query, Selector


@dataclass(slots=True)
class Choice:
    """The sealed pages that a layer of a row reads.

    Attributes:
        lists: int64 ``[lists, pages]``, ascending: places in the sequence, a list a KV head or one for all.
        places: all of them, each once, ascending.
    """

    lists: torch.Tensor
    places: list[int]


class Chooser:
    """Asks selectors, one a row, and remembers within a step what they chose.

    Args:
        selection: what was asked for.
        layers: layers that it is for, ascending.
        layout: of the pages.

    Raises:
        ConfigError: a dense layer, or one that others go by, is not among the model's layers of full attention.
    """

    def __init__(self, selection: Selection, layers: Sequence[int], layout: PageLayout) -> None:
        self.selection = selection
        self.layout = layout
        total = len(layout.layers)
        for layer in selection.dense:
            if layer >= total:
                raise ConfigError(f"dense={layer}: the model has layers 0 to {total - 1}")
        selector = selection.make()
        #: Layers that read every page.
        self.dense = selection.dense | selector.dense_layers(total)
        for layer in set(layers) - self.dense:
            if selector.source(layer) not in layers:
                raise ConfigError(
                    f"selector {selector.name!r} has layer {layer} go by layer {selector.source(layer)}, which is "
                    "none of full attention; name only such layers"
                )
        #: Whether some layer may leave pages out.
        self.lossy = bool(set(layers) - self.dense)
        self._selectors: list[Selector] = []
        self._budgets: list[int] = []
        self._always: list[list[int]] = []
        self._chosen: dict[tuple[int, int], Choice] = {}

    def resize(self, rows: int) -> None:
        """A batch of so many rows, all of them new."""
        self._selectors = [self.selection.make() for _ in range(rows)]

    def rearrange(self, rows: Sequence[int]) -> None:
        """Row ``i`` goes on from what was row ``rows[i]``."""
        old, taken = self._selectors, set[int]()
        self._selectors = []
        for row in rows:
            self._selectors.append(copy.deepcopy(old[row]) if row in taken else old[row])
            taken.add(row)

    def begin(self, pages: Sequence[int], tails: Sequence[int]) -> None:
        """A step over rows of so many sealed and unsealed pages."""
        self._chosen.clear()
        budget = self.selection.budget
        self._budgets = [
            budget.pages(sealed + tail, self.layout) - tail
            for sealed, tail in zip(pages, tails, strict=True)
        ]
        self._always = [
            self._always_read(sealed, most)
            for sealed, most in zip(pages, self._budgets, strict=True)
        ]

    def budget(self, row: int) -> int:
        """Sealed pages that a layer of a row may read."""
        return self._budgets[row]

    def source(self, row: int, layer: int) -> int:
        """The layer that ``layer`` goes by."""
        return self._selectors[row].source(layer)

    def known(self, row: int, layer: int) -> Choice | None:
        """What has been chosen in this step already."""
        return self._chosen.get((row, self.source(row, layer)))

    def choose(self, row: int, layer: int, query: Callable[[], Query]) -> Choice:
        """What a layer of a row reads."""
        choice = self.known(row, layer)
        if choice is None:
            choice = self._chosen[row, self.source(row, layer)] = self.rank(row, query())
        return choice

    def rank(self, row: int, query: Query) -> Choice:
        """What would be chosen for a query.

        Raises:
            ConfigError: the selector's scores have another shape than they must have.
        """
        selector = self._selectors[row]
        scores = selector.scores(query)
        if tuple(scores.shape) != (query.kv_heads, query.pages):
            raise ConfigError(
                f"selector {selector.name!r} gave scores of shape {list(scores.shape)}; they must be "
                f"[kv_heads, pages], {[query.kv_heads, query.pages]} here"
            )
        if self.selection.scope == "layer":
            scores = scores.mean(0, keepdim=True)
        # topk takes NaN for the largest number.
        scores = torch.where(scores.isnan(), -torch.inf, scores)
        scores[:, self._always[row]] = torch.inf
        lists = scores.topk(self._budgets[row], dim=1).indices.sort(dim=1).values
        places = {place for each in lists.tolist() for place in each}
        return Choice(lists, sorted(places))

    def observe(self, row: int, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        """See ``Selector.observe``."""
        self._selectors[row].observe(layer, page_lse, lse)

    def _always_read(self, total: int, budget: int) -> list[int]:
        """Places that every layer reads: the first pages and the recent ones, as far as the budget goes."""
        sinks, recent = self.selection.always(budget, self.layout.page_tokens)
        sinks = min(sinks, total)
        recent = min(recent, total - sinks)
        return [*range(sinks), *range(total - recent, total)]
