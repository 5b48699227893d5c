"""Mode ``select``: a step of decoding reads the pages that a selector ranks highest, and always the first ones, the
recent ones and the tail.

Chosen pages in VRAM are read where they are or copied aside; the planes of those that are not come over the link, one
layer's while another computes where a guess sent them ahead. Which pages are in VRAM changes what a step costs, never
what it gives.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from kvtier.attention.mode import Selection
from kvtier.attention.paged import PagedDecode, Read
from kvtier.attention.planes import PlaneHalf, PlaneStage
from kvtier.attention.summaries import SummaryIndex
from kvtier.attention.window import Row
from kvtier.devices.base import Event
from kvtier.errors import ConfigError
from kvtier.kernels.attention import Partial, merge
from kvtier.kernels.pages import gather_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import Plane
from kvtier.selector import Query, Selector
from kvtier.store.page import Page
from kvtier.store.store import TieredStore

#: Layer -> next layer's queries ``[rows, heads, dim]``, or None if they cannot be told.
Foresight = Callable[[int], torch.Tensor | None]


class SelectDecode(PagedDecode):
    """Serves steps of one new token a row; layers of ``dense`` read all pages as ``PagedDecode`` does.

    Args:
        store: where the pages are; its layout has summaries.
        selection: what was asked for.
        layers: layers to serve, ascending.

    Raises:
        ConfigError: the layout has no summaries, or a dense layer does not exist.
    """

    def __init__(self, store: TieredStore, selection: Selection, layers: Sequence[int]) -> None:
        super().__init__(store)
        if not store.layout.summaries:
            raise ConfigError(
                f"mode select:{selection.spec} needs summaries in the pages; build the store with "
                "layout_of(model, summaries=True)"
            )
        self.selection = selection
        self.layers = list(layers)
        total = len(store.layout.layers)
        for layer in selection.dense:
            if layer >= total:
                raise ConfigError(f"dense={layer}: the model has layers 0 to {total - 1}")
        self.dense = selection.dense | selection.make().dense_layers(total)
        self.stage = PlaneStage(store)
        #: What guesses the next layer's queries from the current hidden state.
        self.foresight: Foresight | None = None
        self._indexes: dict[int, SummaryIndex] = {}
        self._selectors: dict[int, Selector] = {}
        self._chosen: dict[tuple[int, int], torch.Tensor] = {}
        #: (row, layer) -> the last step's query.
        self._queries: dict[tuple[int, int], torch.Tensor] = {}
        self._chance = random.Random(0)
        #: (row, place) -> layers of the step that chose a page.
        self._uses: Counter[tuple[int, int]] = Counter()
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------------ a step

    def reserve(self, pages: Sequence[int]) -> None:
        """Room for the summaries of so many pages a row; before the step's leases are taken.

        Raises:
            DeviceOOMError, TierFullError: there is no VRAM for them.
        """
        if len(pages) != len(self._indexes):
            self._renumber(len(pages))
        for number, count in enumerate(pages):
            self._indexes[number].reserve(count)

    def begin(self, rows: Sequence[Row]) -> None:
        super().begin(rows)
        for number, row in enumerate(rows):
            self._indexes[number].follow(row.lease)
        self.stage.begin()
        self._chosen.clear()
        self._uses.clear()

    def attend(
        self, layer: int, q: torch.Tensor, scale: float | None, sink: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = super().attend(layer, q, scale, sink)
        for number in range(len(self.rows)):
            self._queries[number, layer] = q[number]
        self._send_ahead(layer)
        return out

    def read(self, number: int, plane: Plane, q: torch.Tensor, scale: float) -> Read:
        layer, pages = plane.layer, self.pages[number]
        budget = self._budget(number)
        if layer in self.dense or budget >= len(pages):
            read = super().read(number, plane, q, scale)
        else:
            chosen = self._choose(number, layer, q, scale)
            self.counts["pages read"] += chosen.shape[1]
            self.counts["layer reads"] += 1
            read = self._read_chosen(number, plane, q, scale, chosen)
        self._selectors[number].observe(layer, read.page_lse, read.part.lse)
        return read

    def end(self, event: Event) -> None:
        for index in self._indexes.values():
            index.used(event)

    def wanted(self) -> list[list[Page]]:
        """For each row the pages outside VRAM that the step chose, those that most layers chose first."""
        found: list[list[Page]] = [[] for _ in self.rows]
        for (number, place), _ in self._uses.most_common():
            if place not in self.pages[number].hot_row:
                found[number].append(self.rows[number].lease.pages[place])
        return found

    def chosen(self, number: int, layer: int) -> torch.Tensor | None:
        """int64 ``[lists, pages]``: what a layer of a row has read of its sealed pages in this step, a list a KV head
        or one for all; ``None`` for all of them."""
        if layer in self.dense or self._budget(number) >= len(self.pages[number]):
            return None
        return self._chosen[number, self._selectors[number].source(layer)]

    def selects(self, layer: int) -> bool:
        """Whether a layer of this step leaves out pages of some row."""
        return layer not in self.dense and self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Whether some layer of this step does not read all pages of some row."""
        return any(self._budget(n) < len(pages) for n, pages in enumerate(self.pages))

    @property
    def nbytes(self) -> int:
        """VRAM in use, besides pages."""
        return self.stage.nbytes + sum(index.nbytes for index in self._indexes.values())

    @property
    def summary_bytes(self) -> int:
        """Of these, summaries."""
        return sum(index.nbytes for index in self._indexes.values())

    def close(self) -> None:
        super().close()
        self._renumber(0)
        self.stage.close()

    def _renumber(self, rows: int) -> None:
        """A batch of another size: what rows had stands for others now."""
        for number in [n for n in self._indexes if n >= rows]:
            self._indexes.pop(number).close()
        for number in range(rows):
            self._indexes.setdefault(number, SummaryIndex(self.store))
        self._selectors = {n: self.selection.make() for n in range(rows)}
        self._queries.clear()

    # ------------------------------------------------------------------ the choice

    def _budget(self, number: int) -> int:
        """Sealed pages that a layer of a row may read."""
        pages, tail = self.pages[number], self._tails[number]
        tails = 0 if tail is None else len(tail)
        return self.selection.budget.pages(len(pages) + tails, self.layout) - tails

    def _always(self, number: int) -> list[int]:
        """Places that every layer reads: the first pages and the recent ones, as far as the budget goes."""
        total, budget = len(self.pages[number]), self._budget(number)
        sinks = min(self.selection.sinks, total, budget - 1)
        recent = self.selection.recent
        if isinstance(recent, float):
            recent = max(1, math.floor(budget * recent))
        else:
            recent = -(-recent // self.layout.page_tokens)
        recent = min(recent, total - sinks, budget - sinks)
        return [*range(sinks), *range(total - recent, total)]

    def _choose(self, number: int, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """int64 ``[lists, pages]``, ascending: the places that a layer of a row reads, a list a KV head or one for
        all."""
        selector = self._selectors[number]
        source = selector.source(layer)
        chosen = self._chosen.get((number, source))
        if chosen is None:
            chosen = self._chosen[number, source] = self._rank(number, layer, q, scale)
        return chosen

    def _rank(self, number: int, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        plane = self.layout.plane(layer)
        scores = self._selectors[number].scores(
            Query(
                layer=layer,
                q=q,
                scale=scale,
                kv_heads=plane.k.heads,
                pages=len(self.pages[number]),
                summary=self._indexes[number].layer(layer),
                page_lse=functools.partial(self._true_lse, number, plane, q, scale),
            )
        )
        if self.selection.scope == "layer":
            scores = scores.mean(0, keepdim=True)
        scores = scores.clone()
        scores[:, self._always(number)] = torch.inf
        return scores.topk(self._budget(number), dim=1).indices.sort(dim=1).values

    def _true_lse(self, number: int, plane: Plane, q: torch.Tensor, scale: float) -> torch.Tensor:
        self.counts["layers read to choose"] += 1
        return PagedDecode.read(self, number, plane, q, scale).page_lse

    # ------------------------------------------------------------------ reading what was chosen

    def _read_chosen(
        self, number: int, plane: Plane, q: torch.Tensor, scale: float, chosen: torch.Tensor
    ) -> Read:
        pages = self.pages[number]
        places = chosen.unique().tolist()
        self._uses.update((number, place) for place in places)
        half = self.stage.half(plane.layer)
        missed = self.stage.fetch(half, plane, number, pages, places)
        self.counts["planes"] += len(places)
        self.counts["planes fetched late"] += missed
        self.counts["planes not in VRAM"] += sum(place not in pages.hot_row for place in places)
        if len(chosen) == 1:
            return self._read_together(number, plane, q, scale, places, half)
        return self._read_by_head(number, plane, q, scale, places, chosen, half)

    def _read_together(
        self,
        number: int,
        plane: Plane,
        q: torch.Tensor,
        scale: float,
        places: list[int],
        half: PlaneHalf,
    ) -> Read:
        """All heads read the same pages: those in VRAM where they are."""
        pages, tail = self.pages[number], self._tails[number]
        page_lse = self._unread(q, len(pages))
        hot = [place for place in places if place in pages.hot_row]
        cold = [place for place in places if place not in pages.hot_row]
        parts: list[Partial] = []
        if hot:
            assert pages.hot_table is not None
            table = pages.hot_table.take([pages.hot_row[place] for place in hot])
            part, each = self.partial(q, table, plane, scale)
            parts.append(part)
            page_lse[:, hot] = each
        if cold:
            self._arrive(half, plane)
            table = self._staged(half, plane, [half.slots[number, place] for place in cold])
            part, each = self.partial(q, table, plane, scale, start=plane.offset)
            parts.append(part)
            page_lse[:, cold] = each
        if tail is not None:
            parts.append(self.partial(q, tail, plane, scale)[0])
        return Read(merge(parts), page_lse)

    def _read_by_head(
        self,
        number: int,
        plane: Plane,
        q: torch.Tensor,
        scale: float,
        places: list[int],
        chosen: torch.Tensor,
        half: PlaneHalf,
    ) -> Read:
        """Each KV head reads pages of its own: all chosen planes are brought together, then each head picks its."""
        pages, tail = self.pages[number], self._tails[number]
        hot = [
            place
            for place in places
            if place in pages.hot_row and (number, place) not in half.slots
        ]
        numbers = self.stage.extend(half, number, hot) if hot else []
        self._arrive(half, plane, own=numbers)
        if hot:
            assert pages.hot_table is not None
            table = pages.hot_table.take([pages.hot_row[place] for place in hot])
            rows = self._rows(half, plane)[numbers[0] : numbers[0] + len(numbers)]
            gather_pages(table, rows, start=plane.offset, nbytes=plane.nbytes)
        at = torch.tensor([half.slots[number, place] for place in places], device=q.device)
        place_to_row = torch.zeros(len(pages), dtype=torch.int64, device=q.device)
        place_to_row[places] = at
        k, v = (self._pick(half, plane, side, place_to_row[chosen], q.dtype) for side in (0, 1))
        part, each = _by_head(q, k, v, scale)
        page_lse = self._unread(q, len(pages))
        group = q.shape[0] // plane.k.heads
        page_lse.scatter_(1, chosen.repeat_interleave(group, 0), each)
        if tail is not None:
            part = merge([part, self.partial(q, tail, plane, scale)[0]])
        return Read(part, page_lse)

    def _pick(
        self, half: PlaneHalf, plane: Plane, side: int, rows: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """float32 ``[kv_heads, pages, tokens, dim]`` of the staged planes ``rows``, ``[kv_heads, pages]``."""
        part = (plane.k, plane.v)[side]
        at = part.offset - plane.offset
        values = self._rows(half, plane)[:, at : at + part.nbytes].view(dtype)
        values = values.view(-1, self.layout.page_tokens, part.heads, part.dim)
        heads = torch.arange(part.heads, device=rows.device)[:, None]
        return values.permute(2, 0, 1, 3)[heads, rows].float()

    def _rows(self, half: PlaneHalf, plane: Plane) -> torch.Tensor:
        """uint8 ``[planes, bytes of the plane]``: a half, one row a plane."""
        assert half.buffer is not None
        rows = half.buffer.raw()[: half.room * self.stage.stride].view(half.room, -1)
        return rows[:, : plane.nbytes]

    def _staged(self, half: PlaneHalf, plane: Plane, numbers: Sequence[int]) -> PageTable:
        assert half.buffer is not None
        return PageTable(
            [half.buffer.raw()],
            [(0, number * self.stage.stride) for number in numbers],
            page_bytes=plane.nbytes,
            page_tokens=self.layout.page_tokens,
        )

    def _arrive(self, half: PlaneHalf, plane: Plane, own: Sequence[int] = ()) -> None:
        """Order compute work behind the copies into a half, and announce what it reads and writes there."""
        compute = self.device.compute_stream()
        self.stage.wait(half, compute)
        writes = [self.stage.place(half, n, plane.nbytes) for n in own]
        self.device.use(compute, f"layer {plane.layer}", reads=half.cold, writes=writes)

    def _unread(self, q: torch.Tensor, pages: int) -> torch.Tensor:
        return torch.full((q.shape[0], pages), -torch.inf, dtype=torch.float32, device=q.device)

    # ------------------------------------------------------------------ sending ahead

    def _send_ahead(self, layer: int) -> None:
        """Start the copies of what the next layer is likely to choose."""
        how = self.selection.prefetch
        following = next((n for n in self.layers if n > layer), None)
        if how == "none" or following is None or following in self.dense:
            return
        guessed = self.foresight(following) if how == "hidden" and self.foresight else None
        plane = self.layout.plane(following)
        half: PlaneHalf | None = None
        for number, pages in enumerate(self.pages):
            if not (pages.host or pages.disk) or self._budget(number) >= len(pages):
                continue
            places = self._guess(number, following, guessed)
            if places:
                half = half or self.stage.half(following)
                self.counts["planes sent ahead"] += self.stage.fetch(
                    half, plane, number, pages, places
                )

    def _guess(self, number: int, layer: int, guessed: torch.Tensor | None) -> list[int]:
        pages = self.pages[number]
        selector = self._selectors[number]
        known = self._chosen.get((number, selector.source(layer)))
        if known is not None:
            return known.unique().tolist()
        if self.selection.prefetch == "random":
            return self._chance.sample(range(len(pages)), min(len(pages), self._budget(number)))
        q = self._queries.get((number, layer)) if guessed is None else guessed[number]
        if q is None or selector.source(layer) != layer:
            return []
        return self._rank(number, layer, q, 1.0 / math.sqrt(q.shape[-1])).unique().tolist()


def _by_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[Partial, torch.Tensor]:
    """Attention of ``q`` ``[heads, dim]`` over each KV head's own pages, ``[kv_heads, pages, tokens, dim]``, in float32;
    and the log-sum-exp of each page, ``[heads, pages]``."""
    kv_heads, pages, tokens, dim = k.shape
    query = q.float().view(kv_heads, -1, dim) * scale
    scores = query @ k.reshape(kv_heads, pages * tokens, dim).transpose(1, 2)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.reshape(kv_heads, pages * tokens, -1)
    heads = q.shape[0]
    page_lse = scores.view(heads, pages, tokens).logsumexp(-1)
    return Partial(out.reshape(heads, -1), lse.reshape(heads)), page_lse
