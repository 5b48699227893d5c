"""Mode ``exact-stream``: every page that a layer needs is gathered into staging memory, in order and bit for bit.

While a layer computes, the pages of the next one that are not in VRAM are already on their way. Hot pages
are gathered by the compute stream itself. Two halves of staging memory alternate between layers; an event in
each direction guards every reuse:

* the copy stream waits for all compute work up to the layer before, which was the last to read the half;
* the compute stream waits for the copies into the half before it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.attention.staging import Half, Staging
from kvtier.attention.window import Piece, Row, Window, plan_window
from kvtier.devices.base import Buffer, Event, Range, Stream
from kvtier.errors import ConfigError, LayoutError
from kvtier.kernels.gather import gather_run, scatter_tokens
from kvtier.layout import Part
from kvtier.store.lease import Lease
from kvtier.store.store import TieredStore


class ExactStream:
    """Serves the layers of one batch of sequences, step by step.

    Args:
        store: where the pages are.
        columns: tokens to make staging room for at first.
    """

    def __init__(self, store: TieredStore, *, columns: int = 0) -> None:
        self.store = store
        self.device = store.device
        self.layout = store.layout
        planes = [plane for plane in self.layout.planes if plane is not None]
        self.layers = [plane.layer for plane in planes]
        self._next = {a: b for a, b in zip(self.layers, self.layers[1:], strict=False)}
        self._parity = {layer: n % 2 for n, layer in enumerate(self.layers)}
        tokens = self.layout.page_tokens
        self.staging = Staging(
            self.device,
            k_token_bytes=max(plane.k.nbytes // tokens for plane in planes),
            v_token_bytes=max(plane.v.nbytes // tokens for plane in planes),
            columns=columns,
        )
        self._dtypes = {
            plane.layer: (getattr(torch, plane.k.dtype), getattr(torch, plane.v.dtype)) for plane in planes
        }
        self._rows: list[Row] = []
        self._before = 0
        self._columns = 0
        self._windows: dict[int, Window] = {}
        self._fetched: int | None = None
        self._compute: Stream | None = None
        #: All work of the last step, for a step on another stream.
        self._done: Event | None = None
        #: Leases behind whose pages' writes the compute stream is ordered.
        self._ordered: set[Lease] = set()

    # ------------------------------------------------------------------ a step

    def begin(self, rows: Sequence[Row], before: int, columns: int) -> None:
        """Start a step.

        Args:
            rows: the sequences; ``pad + before + new`` is the same for all: ``columns``.
            before, columns: columns before and after the step.

        Raises:
            DeviceOOMError: there is no VRAM outside the tier for the staging memory.
        """
        for row in rows:
            if row.pad + row.before + row.new != columns:
                raise ConfigError(f"a row ends at column {row.pad + row.before + row.new}, the step at {columns}")
        self._rows, self._before, self._columns = list(rows), before, columns
        self._windows.clear()
        self._fetched = None
        self.staging.fit(len(rows), columns, self.store.timeout_s)
        self._order(self.device.compute_stream())

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's new K and V and return all that the layer attends to.

        Args:
            k, v: ``[rows, heads, q, dim]``, of the layout's dtypes, on the store's device.

        Returns:
            K and V, ``[rows, heads, columns seen, dim]``: views of staging memory, valid until the next but one
            layer's ``update`` in stream order.

        Raises:
            PageLostError: a page on disk turned out to be damaged.
            CopyFailedError: a copy of a page failed.
        """
        assert self._compute is not None
        plane = self.layout.plane(layer)
        self._check(layer, k, v, plane.k, plane.v)
        window = self._window(layer)
        half = self.staging.halves[self._parity[layer]]
        if self._fetched != layer:
            self._fetch(layer, window, half, self._compute)
        following = self._next.get(layer)
        if following is not None:
            self._fetch(following, self._window(following), self.staging.halves[self._parity[following]], self._compute)
        if half.ready is not None:
            self._compute.wait(half.ready)
            half.ready = None
        self._gather(layer, window, half, k, v)
        rows, seen = len(self._rows), window.stop - window.start
        k_range = Range(half.k, 0, rows * self.staging.columns * (plane.k.nbytes // self.layout.page_tokens))
        v_range = Range(half.v, 0, rows * self.staging.columns * (plane.v.nbytes // self.layout.page_tokens))
        self.device.use(self._compute, f"attention of layer {layer}", reads=self._filled(k_range, v_range, plane.k, plane.v, seen))
        k_type, v_type = self._dtypes[layer]
        return (
            self.staging.tensor(half.k, plane.k, k_type, rows, seen),
            self.staging.tensor(half.v, plane.v, v_type, rows, seen),
        )

    def end(self) -> tuple[str, Event]:
        """The step's last layer has been served: (stream name, event) that stand for all its work."""
        assert self._compute is not None
        self._done = self._compute.record()
        return self._compute.name, self._done

    def order_after(self, event: Event) -> None:
        """The next step starts after ``event``."""
        self._compute, self._done = None, event

    def close(self) -> None:
        """Free the staging memory."""
        self._ordered.clear()
        self.staging.release(self.store.timeout_s)

    # ------------------------------------------------------------------ inside

    def _order(self, compute: Stream) -> None:
        """Put the step behind all that wrote what it reads and used what it overwrites."""
        if compute is not self._compute:
            if self._done is not None:
                compute.wait(self._done)
            self._ordered.clear()
        self._compute = compute
        for row in self._rows:
            for slot in row.tails:
                for event in slot.after:
                    compute.wait(event)
                slot.after.clear()
            if row.lease not in self._ordered:
                for copy in row.lease.copies:
                    if copy.tier == "vram" and copy.written is not None:
                        compute.wait(copy.written)
        self._ordered = {row.lease for row in self._rows}

    def _window(self, layer: int) -> Window:
        width = self.layout.layers[layer].window
        start = 0 if width is None else max(self._before - width + 1, 0)
        window = self._windows.get(start)
        if window is None:
            window = self._windows[start] = plan_window(self._rows, start, self._columns, self.layout.page_tokens)
        return window

    def _fetch(self, layer: int, window: Window, half: Half, compute: Stream) -> None:
        """Start the copies of a layer's cold pages into its half."""
        self._fetched = layer
        if not window.cold:
            return
        stream = self.device.stream("h2d")
        stream.wait(compute.record())
        plane = self.layout.plane(layer)
        parts: list[tuple[Range, Range]] = []
        for piece in window.host:
            assert piece.slot is not None
            parts += self._cold_parts(half.k, plane.k, piece, piece.slot.range(plane.k.offset, plane.k.nbytes))
            parts += self._cold_parts(half.v, plane.v, piece, piece.slot.range(plane.v.offset, plane.v.nbytes))
        if window.disk:
            size = -(-plane.nbytes // 16) * 16
            bounce = self.staging.bounce(half, len(window.disk) * size, self.store.timeout_s)
            at = [Range(bounce, n * size, n * size + plane.nbytes) for n in range(len(window.disk))]
            outs: list[np.ndarray] = [self.device.host(place, write=True).numpy() for place in at]
            pages = [piece.page for piece in window.disk if piece.page is not None]
            self.store.read_disk_planes(pages, layer, outs)
            for piece, place in zip(window.disk, at, strict=True):
                k_bytes = Range(bounce, place.start, place.start + plane.k.nbytes)
                v_bytes = Range(bounce, k_bytes.stop, place.stop)
                parts += self._cold_parts(half.k, plane.k, piece, k_bytes)
                parts += self._cold_parts(half.v, plane.v, piece, v_bytes)
        self.device.copy(stream, parts)
        self.store.count_streamed(sum(source.nbytes for _, source in parts), len(parts))
        half.ready = stream.record()
        if window.disk:
            half.bounced = half.ready

    def _cold_parts(self, target: Buffer, part: Part, piece: Piece, source: Range) -> list[tuple[Range, Range]]:
        """The copy of a piece's K or V, of which ``source`` is the whole page's, into its place in ``target``."""
        token = part.nbytes // self.layout.page_tokens
        if not token:
            return []
        there = self.staging.part_range(target, token, piece.row, piece.column, piece.last - piece.first)
        return [(there, Range(source.buffer, source.start + piece.first * token, source.start + piece.last * token))]

    def _gather(self, layer: int, window: Window, half: Half, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append the new tokens and gather the hot pages, in one launch on the compute stream."""
        assert self._compute is not None
        plane, tokens, page_bytes = self.layout.plane(layer), self.layout.page_tokens, self.layout.page_bytes
        sides = [
            (part, buffer, values.detach(), part.nbytes // tokens)
            for part, buffer, values in ((plane.k, half.k, k), (plane.v, half.v, v))
            if part.nbytes
        ]
        whole_pages = [Range(run.slab, run.start, run.start + run.pages * page_bytes) for run in window.runs]
        reads = list(whole_pages)
        writes: list[Range] = []
        new: list[tuple[Range, torch.Tensor]] = []
        old: list[tuple[Range, Range]] = []
        runs: list[tuple[Range, Part, Range, int]] = []
        blanks: list[Range] = []
        for part, buffer, values, token in sides:
            for number, row in enumerate(self._rows):
                new += self._appends(row, values[number], part, token)
            for piece in window.hot:
                assert piece.slot is not None
                source = piece.slot.range(part.offset + piece.first * token, (piece.last - piece.first) * token)
                reads.append(source)
                old.append((self.staging.part_range(buffer, token, piece.row, piece.column, piece.last - piece.first), source))
            for run, whole in zip(window.runs, whole_pages, strict=True):
                runs.append((self.staging.part_range(buffer, token, run.row, run.column, run.pages * tokens), part, whole, run.pages))
            for row_number, columns in window.blank:
                blanks.append(self.staging.part_range(buffer, token, row_number, 0, columns))
        writes += [target for target, _ in new]
        writes += [target for target, _ in old]
        writes += [target for target, *_ in runs]
        writes += blanks

        def kernel() -> None:
            for target, value in new:
                scatter_tokens(target.raw(), value)
            for target, source in old:
                target.raw().copy_(source.raw())
            for target, part, whole, pages in runs:
                gather_run(
                    target.raw(), whole.raw(), start=0, pages=pages, page_bytes=page_bytes,
                    part_offset=part.offset, part_bytes=part.nbytes,
                )  # fmt: skip
            for blank in blanks:
                blank.raw().zero_()

        self.device.launch(self._compute, f"append and gather layer {layer}", kernel, reads=reads, writes=writes)

    def _appends(self, row: Row, values: torch.Tensor, part: Part, token: int) -> list[tuple[Range, torch.Tensor]]:
        """The new tokens of a row, cut at page boundaries: (bytes in a tail, ``[heads, tokens, dim]``)."""
        parts = []
        tokens = self.layout.page_tokens
        sealed = len(row.lease.copies)
        at = row.before
        while at < row.before + row.new:
            index, first = divmod(at, tokens)
            count = min(tokens - first, row.before + row.new - at)
            source = row.skip + at - row.before
            slot = row.tails[index - sealed]
            parts.append((slot.range(part.offset + first * token, count * token), values[:, source : source + count]))
            at += count
        return parts

    def _filled(self, k_range: Range, v_range: Range, k: Part, v: Part, seen: int) -> list[Range]:
        """The ranges of a half that attention reads: the first ``seen`` columns of each row."""
        ranges = []
        for whole, part in ((k_range, k), (v_range, v)):
            token = part.nbytes // self.layout.page_tokens
            for row in range(len(self._rows)):
                ranges.append(self.staging.part_range(whole.buffer, token, row, 0, seen))
        return ranges

    def _check(self, layer: int, k: torch.Tensor, v: torch.Tensor, k_part: Part, v_part: Part) -> None:
        rows = len(self._rows)
        columns = self._columns - self._before
        for name, x, part, dtype in (("K", k, k_part, self._dtypes[layer][0]), ("V", v, v_part, self._dtypes[layer][1])):
            want = (rows, part.heads, columns, part.dim)
            if tuple(x.shape) != want or x.dtype != dtype:
                raise LayoutError(
                    f"{name} of layer {layer} is {x.dtype} {tuple(x.shape)}, the store's layout and this step want "
                    f"{dtype} {want} [rows, heads, tokens, dim]; build the layout with layout_of(model)"
                )
            if x.device.type != self.device.torch_device.type:
                raise LayoutError(f"{name} of layer {layer} is on {x.device}, the store on {self.device.torch_device}; use one device")
