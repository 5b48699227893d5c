"""Decoding over pages where they are: attention of each part of a sequence, merged exactly by log-sum-exp.

Mode ``exact-split``: pages in VRAM and the unsealed tail are read on the device, pages in host memory by the CPU; no KV
crosses the link, only queries and partial results do. Pages that are only on disk are read plane by plane and go to the
CPU's share. The attention mass of each page comes out of it for nothing: ``exp(lse_page - lse)``.

Origin: flash-decoding's split over tokens; the CPU's share as in FastDecode (arXiv 2403.11421) and HGCA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.attention.coded import decoded_table
from kvtier.attention.tables import LeasedPages, tail_table
from kvtier.attention.window import Row, plan_places
from kvtier.devices.base import Buffer, Event, Range
from kvtier.kernels.attention import Partial, merge, partial_attention
from kvtier.kernels.table import PageTable
from kvtier.layout import PLANE_ALIGN, Plane
from kvtier.store.lease import Lease
from kvtier.store.store import TieredStore


@dataclass(slots=True)
class Read:
    """What one layer of one sequence read.

    Attributes:
        part: attention over all of it, on the device.
        page_lse: float32 ``[heads, sealed pages]`` on the device; ``-inf`` for pages that were not read.
    """

    part: Partial
    page_lse: torch.Tensor


class PagedDecode:
    """Serves steps of one new token a row, layer by layer.

    Args:
        store: where the pages are.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.device = store.device
        self.layout = store.layout
        self.rows: list[Row] = []
        self.pages: list[LeasedPages] = []
        self._leased: dict[int, LeasedPages] = {}
        self._tails: list[PageTable | None] = []
        self._bounce: Buffer | None = None
        #: A row's share of attention by page, summed over the layers that told it, and their number.
        self._mass: list[torch.Tensor] = []
        self._told: list[int] = []

    def begin(self, rows: Sequence[Row]) -> None:
        """Start a step over ``rows``, ordered behind all that wrote their pages (``ExactStream.begin`` does it)."""
        self.rows = list(rows)
        leased = {id(row.lease): self._leased.get(id(row.lease)) for row in rows}
        self._leased = {
            id(row.lease): self._current(leased[id(row.lease)], row.lease) for row in rows
        }
        self.pages = [self._leased[id(row.lease)] for row in rows]
        self._tails = [tail_table(row, self.layout) for row in rows]
        for pages in self._leased.values():
            pages.check_host(self.device)
        compute = self.device.compute_stream()
        reads = [at for pages in self._leased.values() for at in pages.ranges]
        writes = [at.slot.range() for at in plan_places(rows, self.layout.page_tokens)]
        self.device.use(compute, "paged step", reads=reads, writes=writes)
        self._mass = [
            torch.zeros(len(pages), dtype=torch.float32, device=self.device.torch_device)
            for pages in self.pages
        ]
        self._told = [0] * len(rows)

    def attend(
        self, layer: int, q: torch.Tensor, scale: float | None, sink: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of one layer, over all that its rows hold.

        Args:
            q: ``[rows, heads, dim]`` after the rotary embedding, of the keys' dtype, on the device.
            scale: default ``1 / sqrt(dim)``.
            sink: ``[heads]``, a learned logit that takes part in the softmax and has no value.

        Returns:
            ``[rows, heads, v_dim]`` of ``q``'s dtype.
        """
        plane = self.layout.plane(layer)
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        outs = []
        for number in range(len(self.rows)):
            read = self.read(number, plane, q[number].contiguous(), scale)
            part = read.part if sink is None else merge([read.part, _sink(read.part, sink)])
            self.tell(number, layer, read.page_lse, part.lse)
            outs.append(part.out)
        return torch.stack(outs).to(q.dtype)

    def read(self, number: int, plane: Plane, q: torch.Tensor, scale: float) -> Read:
        """All pages and the tail of row ``number``: ``q`` is ``[heads, dim]``."""
        pages = self.pages[number]
        # Waits for the query alone; the device's share then runs beside the CPU's.
        query = q.to("cpu") if pages.host or pages.disk else q
        page_lse = torch.full(
            (q.shape[0], len(pages)), -torch.inf, dtype=torch.float32, device=q.device
        )
        parts: list[Partial] = []
        if pages.hot_table is not None:
            part, each = self.partial(q, pages.hot_table, plane, scale)
            parts.append(part)
            page_lse[:, pages.index("vram", q.device)] = each
        tail = self._tails[number]
        if tail is not None:
            parts.append(self.partial(q, tail, plane, scale)[0])
        if pages.host_table is not None:
            part, each = self._read_host(query, pages, pages.host_table, plane, scale)
            parts.append(Partial(part.out.to(q.device), part.lse.to(q.device)))
            page_lse[:, pages.index("host", q.device)] = each.to(q.device)
        if pages.disk:
            part, each = self._read_disk(query, pages, plane, scale)
            parts.append(Partial(part.out.to(q.device), part.lse.to(q.device)))
            page_lse[:, pages.index("disk", q.device)] = each.to(q.device)
        if not parts:  # a row of a padded batch that has not begun
            return Read(nothing(q, plane), page_lse)
        return Read(parts[0] if len(parts) == 1 else merge(parts), page_lse)

    def partial(
        self, q: torch.Tensor, table: PageTable, plane: Plane, scale: float, *, start: int = 0
    ) -> tuple[Partial, torch.Tensor]:
        """Attention over the pages of a table whose K part starts ``start`` bytes earlier than in a page."""
        return partial_attention(
            q, table,
            k_start=plane.k.offset - start, v_start=plane.v.offset - start,
            kv_heads=plane.k.heads, v_dim=plane.v.dim, scale=scale,
        )  # fmt: skip

    def tell(self, number: int, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        """Note what share of a layer's attention each sealed page of a row got, the mean over the heads."""
        if page_lse.shape[1]:
            shares = (page_lse - lse[:, None]).exp()
            self._mass[number] += shares.mean(0)
            self._told[number] += 1

    def masses(self) -> dict[bytes, float]:
        """Key -> share of attention in the step, of the sealed pages that got any: the mean over the layers that were
        read so, the sum over the rows that share a page."""
        found: dict[bytes, float] = {}
        for row, mass, told in zip(self.rows, self._mass, self._told, strict=True):
            if told:
                for key, share in zip(row.lease.keys, (mass / told).tolist(), strict=True):
                    if share > 0.0:
                        found[key] = found.get(key, 0.0) + share
        return found

    def rearrange(self, rows: Sequence[int]) -> None:
        """Row ``i`` goes on from what was row ``rows[i]``."""

    def forget(self) -> None:
        """The rows do not go on from what they were: cut back, or begun anew."""

    def end(self, event: Event) -> None:
        """``event`` is behind all work of the step."""

    def close(self) -> None:
        """Free everything, once the work on it is done."""
        self._leased.clear()
        self.pages.clear()
        self.rows.clear()
        if self._bounce is not None:
            self.device.free(self._bounce)
            self._bounce = None

    # ------------------------------------------------------------------ inside

    def _current(self, known: LeasedPages | None, lease: Lease) -> LeasedPages:
        if known is not None and known.lease is lease:
            return known
        return LeasedPages(lease, self.layout)

    def _read_host(
        self, q: torch.Tensor, pages: LeasedPages, table: PageTable, plane: Plane, scale: float
    ) -> tuple[Partial, torch.Tensor]:
        if pages.host_codec is None:
            return self.partial(q, table, plane, scale)
        decoded = decoded_table(table, pages.host_codec, plane)
        return self.partial(q, decoded, plane, scale, start=plane.offset)

    def _read_disk(
        self, q: torch.Tensor, pages: LeasedPages, plane: Plane, scale: float
    ) -> tuple[Partial, torch.Tensor]:
        stride = -(-plane.nbytes // PLANE_ALIGN) * PLANE_ALIGN
        need = stride * len(pages.disk)
        if self._bounce is None or self._bounce.nbytes < need:
            if self._bounce is not None:
                self.device.free(self._bounce)
            with torch.inference_mode(False):
                self._bounce = self.device.alloc_host(need)
        at = [
            Range(self._bounce, n * stride, n * stride + plane.nbytes)
            for n in range(len(pages.disk))
        ]
        outs = [self.device.host(place, write=True).numpy() for place in at]
        self.store.read_disk_planes([page for _, page in pages.disk], plane.layer, outs)
        table = PageTable(
            [self._bounce.raw()],
            [(0, place.start) for place in at],
            page_bytes=plane.nbytes,
            page_tokens=self.layout.page_tokens,
        )
        return self.partial(q, table, plane, scale, start=plane.offset)


def nothing(q: torch.Tensor, plane: Plane) -> Partial:
    """Attention of ``q``, ``[heads, dim]``, over no token."""
    heads, device = q.shape[0], q.device
    out = torch.zeros(heads, plane.v.dim, dtype=torch.float32, device=device)
    return Partial(out, torch.full((heads,), -torch.inf, dtype=torch.float32, device=device))


def _sink(like: Partial, sink: torch.Tensor) -> Partial:
    return Partial(torch.zeros_like(like.out), sink.to(like.lse).reshape(like.lse.shape))
