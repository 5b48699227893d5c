"""The selector: which pages a step of decoding reads. It may change results, so it is always asked for by name.

A selector ranks the sealed pages of one sequence in one layer; how many of the best are read is the budget's
business (``kvtier.attention.budget``), and the first pages, the recent ones and the unsealed tail are read in any
case. It never moves a page: that is the residency policy's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtier.errors import ConfigError
from kvtier.plugins import Plugins

if TYPE_CHECKING:
    import torch

    from kvtier.kernels.summary import PageSummaries

#: How the scores of the query heads that share a KV head become one.
Reduction = Literal["softmax-mean", "max", "mean"]
REDUCTIONS: tuple[Reduction, ...] = ("softmax-mean", "max", "mean")

_PLUGINS = Plugins("kvtier.selectors", "selector")


@dataclass(slots=True)
class Query:
    """One layer of one sequence in a step of decoding.

    Attributes:
        layer: its number.
        q: ``[heads, dim]``, after the rotary embedding, on the device, of the keys' dtype.
        scale: what ``q . k`` is multiplied with before the softmax.
        kv_heads: KV heads; query head ``h`` belongs to KV head ``h // (heads / kv_heads)``.
        pages: sealed pages of the sequence.
        summaries: what is known of the pages' keys, where it lies.
        shares: reads everything and gives the true share of attention of each page, float32 ``[heads, pages]``; what
            is missing to 1 is the unsealed tail's. As dear as dense attention.
    """

    layer: int
    q: torch.Tensor
    scale: float
    kv_heads: int
    pages: int
    summaries: PageSummaries
    shares: Callable[[], torch.Tensor]

    @property
    def summary(self) -> torch.Tensor:
        """``[pages, 4, kv_heads, dim]``, as ``kvtier.kernels.summarise_pages`` makes it; copied anew each time."""
        return self.summaries.gather()


class Selector(ABC):
    """Ranks pages. One object serves one sequence, and is asked layer by layer in the model's order.

    It may keep what it learns from step to step. Where a sequence splits in two (beams) the object is copied with
    ``copy.deepcopy``; where it is cut back (draft tokens that were wrong), forked or begun anew, it is replaced by a new one.
    """

    #: Name in messages and statistics.
    name: ClassVar[str]
    #: Rows of a page's summary that ``scores`` reads, of the four; for predictions.
    summary_rows: ClassVar[int] = 4
    #: Whether it asks for ``Query.page_lse``, which reads all pages; for predictions.
    reads_pages: ClassVar[bool] = False

    def dense_layers(self, layers: int) -> frozenset[int]:
        """Layers, besides the caller's own, that must read every page."""
        return frozenset()

    def observe(  # noqa: B027
        self, layer: int, page_lse: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """A layer has been read: float32 ``[heads, pages]`` and ``[heads]``, log-sum-exp of each sealed page (``-inf``
        for what was not read) and of all that was read."""

    def source(self, layer: int) -> int:
        """The layer whose ranking ``layer`` goes by. What it returns for ``source(layer)`` must be itself."""
        return layer

    @abstractmethod
    def scores(self, query: Query) -> torch.Tensor:
        """float32 ``[kv_heads, pages]`` on the query's device; higher is read first. ``-inf``: not unless there is
        nothing else."""


def load_selector(spec: str) -> Callable[[], Selector]:
    """What makes selectors of ``NAME``, ``NAME:key=value,...``, ``module:Class`` or ``module:Class:key=value,...``, one
    a sequence.

    Names are the entry points of the group ``kvtier.selectors``.

    Raises:
        ConfigError: unknown name, class or parameter, or a value that is not of the parameter's type.
    """
    cls, values, _ = _PLUGINS.load(spec, Selector)  # type: ignore[type-abstract]
    cls(**values)
    return lambda: cls(**values)


def check_reduction(selector: str, how: str) -> str:
    """``how``, if it is a reduction.

    Raises:
        ConfigError: it is not.
    """
    if how not in REDUCTIONS:
        raise ConfigError(f"selector {selector!r}: reduce={how!r}; use {', '.join(REDUCTIONS)}")
    return how


def reduce_group(scores: torch.Tensor, kv_heads: int, how: str, scale: float) -> torch.Tensor:
    """float32 ``[heads, pages]``, in units of ``q . k``, to ``[kv_heads, pages]``.

    ``softmax-mean``: the mean over the group of the softmax over pages, so that each query head has one vote. ``max``
    and ``mean``: of the scores themselves.
    """
    heads, pages = scores.shape
    grouped = scores.view(kv_heads, heads // kv_heads, pages)
    if how == "softmax-mean":
        return (grouped * scale).softmax(-1).mean(1)
    if how == "max":
        return grouped.amax(1)
    return grouped.mean(1)
