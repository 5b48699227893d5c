"""Mode ``select``: a step of decoding reads the pages that a selector ranks highest, and always the first ones, the
recent ones and the tail.

Chosen pages in VRAM are read where they are or copied aside; the planes of those that are not come over the link, one
layer's while another computes where a guess sent them ahead. Which pages are in VRAM changes what a step costs, never
what it gives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from kvtier.attention.choice import Choice, Chooser
from kvtier.attention.mode import Selection
from kvtier.attention.paged import PagedDecode, Read
from kvtier.attention.planes import PlaneHalf, PlaneStage
from kvtier.attention.summaries import SummaryIndex
from kvtier.attention.window import Row
from kvtier.devices.base import Event
from kvtier.errors import ConfigError, DeviceOOMError, PageLostError
from kvtier.kernels.attention import Partial, merge
from kvtier.kernels.pages import gather_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import Plane
from kvtier.selector import Query
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
        self.chooser = Chooser(selection, layers, store.layout)
        self.stage = PlaneStage(store)
        #: What guesses the next layer's queries from the current hidden state.
        self.foresight: Foresight | None = None
        self._indexes: list[SummaryIndex] = []
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
            TierFullError: the VRAM tier has no room for them; nothing was changed.
        """
        if len(pages) != len(self._indexes):
            self._resize(len(pages))
        lacking = [index.lacking(count) for index, count in zip(self._indexes, pages, strict=True)]
        if any(lacking):
            # For all rows or for none.
            slots = iter(self.store.lend(sum(lacking), "summaries"))
            for index, count in zip(self._indexes, lacking, strict=True):
                index.grow(list(itertools.islice(slots, count)))

    def begin(self, rows: Sequence[Row]) -> None:
        super().begin(rows)
        for index, row in zip(self._indexes, rows, strict=True):
            index.follow(row.lease)
        memory = [each for index in self._indexes for each in index.ranges]
        if memory:
            self.device.use(self.device.compute_stream(), "read summaries", reads=memory)
        tails = [0 if tail is None else len(tail) for tail in self._tails]
        self.chooser.begin([len(pages) for pages in self.pages], tails)
        self.stage.begin()
        self._uses.clear()

    def attend(
        self, layer: int, q: torch.Tensor, scale: float | None, sink: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = super().attend(layer, q, scale, sink)
        if self.selection.prefetch in ("last", "hidden"):
            for number in range(len(self.rows)):
                self._queries[number, layer] = q[number]
        self._send_ahead(layer)
        return out

    def read(self, number: int, plane: Plane, q: torch.Tensor, scale: float) -> Read:
        layer = plane.layer
        if layer in self.chooser.dense or not self._selects(number):
            read = super().read(number, plane, q, scale)
        else:
            query = functools.partial(self._query, number, plane, q, scale)
            choice = self.chooser.choose(number, layer, query)
            self.counts["pages read"] += choice.lists.shape[1]
            self.counts["layer reads"] += 1
            read = self._read_chosen(number, plane, q, scale, choice)
        self.chooser.observe(number, layer, read.page_lse, read.part.lse)
        return read

    def tell(self, number: int, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        # Dense layers read every page at any rate: they would make all pages look used.
        if layer not in self.chooser.dense or not self.leaves_out:
            super().tell(number, layer, page_lse, lse)

    def end(self, event: Event) -> None:
        for index in self._indexes:
            index.used(event)

    def hottest(self, count: int) -> list[Page]:
        """At most ``count`` pages that most layers of the last step chose."""
        most = self._uses.most_common(count)
        return [self.rows[number].lease.pages[place] for (number, place), _ in most]

    def rearrange(self, rows: Sequence[int]) -> None:
        if max(rows, default=0) >= len(self._indexes):
            self._resize(0)
            return
        self.chooser.rearrange(rows)
        old: list[SummaryIndex | None] = list(self._indexes)
        self._indexes = []
        for row in rows:
            index, old[row] = old[row], None
            # An index that holds nothing is false.
            self._indexes.append(SummaryIndex(self.store) if index is None else index)
        for index in old:
            if index is not None:
                index.close()
        before, self._queries = self._queries, {}
        for (number, layer), q in before.items():
            for at, row in enumerate(rows):
                if row == number:
                    self._queries[at, layer] = q
        self._uses.clear()

    def forget(self) -> None:
        self.chooser.resize(len(self._indexes))
        self._queries.clear()
        self._uses.clear()

    def chosen(self, number: int, layer: int) -> torch.Tensor | None:
        """int64 ``[lists, pages]``: what a layer of a row has read of its sealed pages in this step, a list a KV head
        or one for all; ``None`` for all of them."""
        if layer in self.chooser.dense or not self._selects(number):
            return None
        known = self.chooser.known(number, layer)
        assert known is not None, f"layer {layer} has not been read in this step"
        return known.lists

    def selects(self, layer: int) -> bool:
        """Whether a layer of this step leaves out pages of some row."""
        return layer not in self.chooser.dense and self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Whether some layer of this step does not read all pages of some row."""
        return self.chooser.lossy and any(map(self._selects, range(len(self.pages))))

    @property
    def summary_bytes(self) -> int:
        """VRAM in which summaries are kept."""
        return sum(index.nbytes for index in self._indexes)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            for index in self._indexes:
                stack.callback(index.close)
            # First, for it waits for all work, also that of a step that was never ended.
            stack.callback(self.stage.close)
        self._indexes = []

    def _resize(self, rows: int) -> None:
        """A batch of another size: what rows had stands for others now."""
        while len(self._indexes) > rows:
            self._indexes.pop().close()
        while len(self._indexes) < rows:
            self._indexes.append(SummaryIndex(self.store))
        self.forget()

    # ------------------------------------------------------------------ the choice

    def _selects(self, number: int) -> bool:
        """Whether a row has more pages than a layer may read."""
        return self.chooser.budget(number) < len(self.pages[number])

    def _query(self, number: int, plane: Plane, q: torch.Tensor, scale: float) -> Query:
        return Query(
            layer=plane.layer,
            q=q,
            scale=scale,
            kv_heads=plane.k.heads,
            pages=len(self.pages[number]),
            summaries=self._indexes[number].layer(plane.layer),
            shares=functools.partial(self._true_shares, number, plane, q, scale),
        )

    def _true_shares(
        self, number: int, plane: Plane, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.counts["layers read to choose"] += 1
        read = PagedDecode.read(self, number, plane, q, scale)
        return (read.page_lse - read.part.lse[:, None]).exp()

    # ------------------------------------------------------------------ reading what was chosen

    def _read_chosen(
        self, number: int, plane: Plane, q: torch.Tensor, scale: float, choice: Choice
    ) -> Read:
        pages, places = self.pages[number], choice.places
        self._uses.update((number, place) for place in places)
        half = self.stage.half(plane.layer)
        missed = self.stage.fetch(half, plane, number, pages, places)
        self.counts["planes"] += len(places)
        self.counts["planes fetched late"] += missed
        self.counts["planes not in VRAM"] += sum(place not in pages.hot_row for place in places)
        if len(choice.lists) == 1:
            return self._read_together(number, plane, q, scale, places, half)
        return self._read_by_head(number, plane, q, scale, choice, half)

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
        choice: Choice,
        half: PlaneHalf,
    ) -> Read:
        """Each KV head reads pages of its own: all chosen planes are brought together, then each head picks its."""
        pages, tail = self.pages[number], self._tails[number]
        chosen, places = choice.lists, choice.places
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
        rows_of = [0] * len(pages)
        for place in places:
            rows_of[place] = half.slots[number, place]
        place_to_row = torch.tensor(rows_of, device=q.device)
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
        """Start the copies of what the next layer is likely to choose. If they cannot be made, nothing is lost."""
        how = self.selection.prefetch
        following = next((n for n in self.layers if n > layer), None)
        if how == "none" or following is None or following in self.chooser.dense:
            return
        guessed = self.foresight(following) if how == "hidden" and self.foresight else None
        plane = self.layout.plane(following)
        half: PlaneHalf | None = None
        for number, pages in enumerate(self.pages):
            if not (pages.host or pages.disk) or not self._selects(number):
                continue
            places = self._guess(number, plane, guessed)
            if places:
                half = half or self.stage.half(following)
                with contextlib.suppress(PageLostError, DeviceOOMError):
                    self.counts["planes sent ahead"] += self.stage.fetch(
                        half, plane, number, pages, places
                    )

    def _guess(self, number: int, plane: Plane, guessed: torch.Tensor | None) -> list[int]:
        pages, layer = self.pages[number], plane.layer
        known = self.chooser.known(number, layer)
        if known is not None:
            return known.places
        if self.selection.prefetch == "random":
            most = min(len(pages), self.chooser.budget(number))
            return self._chance.sample(range(len(pages)), most)
        q = self._queries.get((number, layer)) if guessed is None else guessed[number].contiguous()
        if q is None or self.chooser.source(number, layer) != layer:
            return []
        scale = 1.0 / math.sqrt(q.shape[-1])
        return self.chooser.rank(number, self._query(number, plane, q, scale)).places


def _by_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[Partial, torch.Tensor]:
    """Attention of ``q`` ``[heads, dim]`` over each KV head's own pages, ``[kv_heads, pages, tokens, dim]``, in float32;
    and the log-sum-exp of each page, ``[heads, pages]``."""
    kv_heads, pages, tokens, dim = k.shape
    query = q.float().view(kv_heads, -1, dim) * scale
    scores = query @ k.reshape(kv_heads, pages * tokens, dim).transpose(1, 2)
    heads = q.shape[0]
    page_lse = scores.view(heads, pages, tokens).logsumexp(-1)
    lse = page_lse.logsumexp(-1)
    weights = (scores - lse.view(kv_heads, -1, 1)).exp()
    out = weights @ v.reshape(kv_heads, pages * tokens, -1)
    return Partial(out.reshape(heads, -1), lse), page_lse
