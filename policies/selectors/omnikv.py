"""OmniKV: a few filter layers read every page, and the layers behind each go by what it attended to.

Origin: Hao et al., "OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs" (ICLR 2025). Attention of
neighbouring layers looks alike, so one layer can choose for several, and their pages can be fetched while layers in
between still compute. Here the unit is the page: its score is the largest share of attention that any head of the filter
layer gave it; all heads go by one list.

Which layers make good filters differs from model to model, and bad ones cost quality badly: there is no default.
``kvtier calibrate-filters`` measures a model.

Cost: dense attention in the filter layers, O(pages * heads) elsewhere.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from kvtier.errors import ConfigError
from kvtier.selector import Query, Selector

if TYPE_CHECKING:
    import torch


class OmniKV(Selector):
    """Largest share in the last filter layer first.

    Args:
        filters: layers that choose, ascending, joined by "+" ("2+8+18").
        wait: layers behind each filter that read every page too, so that the copies of those after them have time.

    Raises:
        ConfigError: ``filters`` is empty or not a list of layers, or ``wait`` is negative.
    """

    name: ClassVar[str] = "omnikv"
    summary_rows: ClassVar[int] = 0

    def __init__(self, *, filters: str = "", wait: int = 1) -> None:
        if not filters:
            raise ConfigError(
                "selector 'omnikv' needs filters=LAYER+LAYER+..., measured for the model; "
                "'kvtier calibrate-filters' finds and stores them"
            )
        if not re.fullmatch(r"\d+(\+\d+)*", filters):
            raise ConfigError(
                f"selector 'omnikv': filters={filters!r}; give layers joined by '+', e.g. 2+8+18"
            )
        self.filters = tuple(int(x) for x in filters.split("+"))
        if list(self.filters) != sorted(set(self.filters)):
            raise ConfigError(
                f"selector 'omnikv': filters={filters!r}; give each layer once, ascending"
            )
        if wait < 0:
            raise ConfigError(f"selector 'omnikv': wait={wait}; give 0 or more layers")
        self.wait = wait
        self._shares: dict[int, torch.Tensor] = {}

    def dense_layers(self, layers: int) -> frozenset[int]:
        if self.filters[-1] >= layers:
            raise ConfigError(
                f"selector 'omnikv': filter layer {self.filters[-1]} is not one of the model's {layers} "
                "layers; calibrate the filters for this model"
            )
        waits = {f + n for f in self.filters for n in range(self.wait + 1)}
        return frozenset(n for n in range(layers) if n < self.filters[0] or n in waits)

    def observe(self, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        if layer in self.filters:
            self._shares[layer] = (page_lse - lse[:, None]).amax(0)

    def source(self, layer: int) -> int:
        return max((f for f in self.filters if f <= layer), default=layer)

    def scores(self, query: Query) -> torch.Tensor:
        return self._shares[self.source(query.layer)].expand(query.kv_heads, -1)
