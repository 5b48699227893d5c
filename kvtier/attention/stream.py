"""Mode ``exact-stream``: every page that a layer needs is gathered into staging memory, in order and bit for bit.

While a layer computes, the pages of the next one that are not in VRAM are already on their way. Hot pages
are gathered by the compute stream itself, ahead of attention. Two halves of staging memory alternate between
layers (one does where nothing has to come from below); an event in each direction guards every reuse:

* the copy stream waits for all compute work up to the layer before, which was the last to read the half;
* the compute stream waits for the copies into the half before it reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kvtier.attention.coded import CodedPlanes, Wanted
from kvtier.attention.staging import Half, Staging
from kvtier.attention.window import Piece, Place, Row, Window, WindowPlanner, plan_places
from kvtier.devices.base import Event, Range, Stream
from kvtier.errors import ConfigError, LayoutError
from kvtier.kernels.gather import gather_run, scatter_tokens
from kvtier.layout import Plane
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
        self._serve(self.layers)
        tokens = self.layout.page_tokens
        self.staging = Staging(
            self.device,
            k_token_bytes=max(plane.k.nbytes // tokens for plane in planes),
            v_token_bytes=max(plane.v.nbytes // tokens for plane in planes),
            columns=columns,
        )
        self._coded = CodedPlanes(store)
        self._dtypes = {
            plane.layer: (getattr(torch, plane.k.dtype), getattr(torch, plane.v.dtype))
            for plane in planes
        }
        self._rows: list[Row] = []
        self._before = 0
        self._columns = 0
        self._planner = WindowPlanner(tokens)
        #: Where the step's new tokens go; whether all that it reads is in VRAM.
        self._places: list[Place] = []
        self._hot = True
        self._device_type = self.device.torch_device.type
        #: Give attention copies of its own, contiguous by head: some matrix products round otherwise
        #: on the strides of staging memory. Costs one layer's KV in memory outside of kvtier's.
        self.contiguous = False
        self._shared_views: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._fetched: int | None = None
        self._compute: Stream | None = None
        #: All work of the last step, for a step on another stream.
        self._done: Event | None = None
        #: Leases behind whose pages' writes the compute stream is ordered.
        self._ordered: set[Lease] = set()

    # ------------------------------------------------------------------ a step

    def begin(
        self, rows: Sequence[Row], before: int, columns: int, layers: Sequence[int] | None = None
    ) -> None:
        """Start a step.

        Args:
            rows: the sequences; ``pad + before + new`` is the same for all: ``columns``.
            before, columns: columns before and after the step.
            layers: those that ``update`` will be called for, ascending; the others get ``append``. Default: all.

        Raises:
            DeviceOOMError: there is no VRAM outside the tier for the staging memory.
            CopyFailedError: the copy that brought a page into VRAM failed.
        """
        for row in rows:
            if row.pad + row.before + row.new != columns:
                raise ConfigError(
                    f"a row ends at column {row.pad + row.before + row.new}, the step at {columns}"
                )
        self._rows, self._before, self._columns = list(rows), before, columns
        self._serve(self.layers if layers is None else layers)
        self._planner.begin(rows, columns)
        self._shared_views.clear()
        self._fetched = None
        if self._served:
            # What follows in a last page that is not full is copied along with its run.
            room = columns + self.layout.page_tokens - 1
            self.staging.fit(len(rows), room, self.store.timeout_s)
        compute = self.device.compute_stream()
        self._order(compute)
        self._places = plan_places(rows, self.layout.page_tokens)
        if self._served:
            self._announce(compute)

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's new K and V and return all that the layer attends to.

        Args:
            k, v: ``[rows, heads, q, dim]``, of the layout's dtypes, on the store's device.

        Returns:
            K and V, ``[rows, heads, columns seen, dim]``: views of staging memory, valid until the next layer's
            ``update`` in stream order.

        Raises:
            LayoutError: K or V have another shape, dtype or device.
            PageLostError: a page on disk turned out to be damaged.
            CopyFailedError: a copy of a page failed.
        """
        compute = self._compute
        assert compute is not None
        plane = self.layout.plane(layer)
        dtypes = self._dtypes[layer]
        self._check(layer, plane, k, v)
        window = self._window(layer)
        # With nothing to fetch one half does for all layers, and is still in the processor's cache.
        half = self.half(layer)
        if not self._hot:
            if self._fetched != layer:
                self._fetch(layer, window, half, compute)
            following = self._next.get(layer)
            if following is not None:
                other = self.staging.halves[self._parity[following]]
                self._fetch(following, self._window(following), other, compute)
            if half.ready is not None:
                compute.wait(half.ready)
                half.ready = None
            # Gathering and attention are one piece of work.
            filled = self._filled(plane, half, seen=window.stop - window.start)
            self.device.use(compute, f"layer {layer}", reads=half.cold, writes=filled)
        if k.requires_grad or v.requires_grad:
            k, v = k.detach(), v.detach()
        self._append(plane, k, v)
        self._gather(window, plane, half)
        return self._views(half, plane, dtypes, window.stop - window.start)

    def half(self, layer: int) -> Half:
        """The half of staging memory that a layer of this step is served from."""
        return self.staging.halves[0 if self._hot else self._parity[layer]]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append one layer's new K and V, as ``update``, and leave reading to somebody else, who has announced the
        writes into the tails.

        Raises:
            LayoutError: K or V have another shape, dtype or device.
        """
        plane = self.layout.plane(layer)
        self._check(layer, plane, k, v)
        self._append(plane, k.detach(), v.detach())

    @property
    def compute(self) -> Stream:
        """The stream that the step's work is on."""
        return self._compute or self.device.compute_stream()

    def end(self) -> tuple[str, Event]:
        """The step's last layer has been served: (stream name, event) that stand for all its work."""
        compute = self.compute
        self._done = compute.record()
        return compute.name, self._done

    def close(self) -> None:
        """Free the staging memory."""
        self._ordered.clear()
        self._shared_views.clear()
        self._coded.close()
        self.staging.release(self.store.timeout_s)

    @property
    def nbytes(self) -> int:
        """VRAM in use."""
        return self.staging.nbytes + self._coded.nbytes

    # ------------------------------------------------------------------ inside

    def _serve(self, layers: Sequence[int]) -> None:
        self._served = layers
        self._next = dict(itertools.pairwise(layers))
        self._parity = {layer: n % 2 for n, layer in enumerate(layers)}

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
        return self._planner.window(start)

    def _fetch(self, layer: int, window: Window, half: Half, compute: Stream) -> None:
        """Start the copies of a layer's cold pages into its half."""
        self._fetched = layer
        half.cold = []
        if not window.cold:
            return
        stream = self.device.stream("h2d")
        stream.wait(compute.record())
        plane = self.layout.plane(layer)
        parts: list[tuple[Range, Range]] = []
        coded: list[Wanted] = []
        for piece in window.host:
            assert piece.slot is not None
            places = self._cold(half, plane, piece)
            if piece.slot.codec is None:
                parts += [(to, piece.slot.range(plane.offset + at, to.nbytes)) for to, at in places]
            else:
                coded.append(Wanted(piece.slot, places))
        if window.disk:
            size = -(-plane.nbytes // 16) * 16
            bounce = self.staging.bounce(half, len(window.disk) * size, self.store.timeout_s)
            at = [Range(bounce, n * size, n * size + plane.nbytes) for n in range(len(window.disk))]
            outs: list[np.ndarray] = [self.device.host(place, write=True).numpy() for place in at]
            pages = [piece.page for piece in window.disk if piece.page is not None]
            self.store.read_disk_planes(pages, layer, outs)
            for piece, place in zip(window.disk, at, strict=True):
                parts += [
                    (to, Range(bounce, place.start + at, place.start + at + to.nbytes))
                    for to, at in self._cold(half, plane, piece)
                ]
        half.cold = [to for to, _ in parts] + [to for each in coded for to, _ in each.parts]
        try:
            if parts:
                self.device.copy(stream, parts)
            self._coded.bring(stream, plane, coded)
        finally:
            half.ready = stream.record()
        self.store.count_streamed(sum(source.nbytes for _, source in parts), len(parts))
        if window.disk:
            half.bounced = half.ready

    def _cold(self, half: Half, plane: Plane, piece: Piece) -> list[tuple[Range, int]]:
        """Where a piece's K and V go, and where they begin in the page's plane."""
        places = []
        for side, part in enumerate((plane.k, plane.v)):
            token = part.nbytes // self.layout.page_tokens
            if token:
                to = self.staging.start(side, token, piece.row, piece.column)
                at = side * plane.k.nbytes + piece.first * token
                nbytes = (piece.last - piece.first) * token
                places.append((Range(half.buffer, to, to + nbytes), at))
        return places

    def _filled(self, plane: Plane, half: Half, seen: int) -> list[Range]:
        """The first ``seen`` columns of all rows in a half, and what may be copied behind them: K and V."""
        seen += self.layout.page_tokens - 1
        ranges = []
        for side, part in enumerate((plane.k, plane.v)):
            token = part.nbytes // self.layout.page_tokens
            for row in range(len(self._rows)):
                at = self.staging.start(side, token, row, 0)
                ranges.append(Range(half.buffer, at, at + seen * token))
        return ranges

    def _gather(self, window: Window, plane: Plane, half: Half) -> None:
        """Bring the hot pages' planes and the padding into their places in a half."""
        page_tokens, page_bytes = self.layout.page_tokens, self.layout.page_bytes
        staging, target = self.staging, half.buffer.raw()
        # K and V of equal size go in one copy.
        sides = 2 if plane.k.nbytes == plane.v.nbytes else 1
        for side, part in enumerate((plane.k, plane.v)[: 3 - sides]):
            token = part.nbytes // page_tokens
            if not token:
                continue
            for run in window.runs:
                gather_run(
                    target, staging.start(side, token, run.row, run.column),
                    run.slab.raw(), run.start + part.offset + run.first * token,
                    pages=run.pages, page_bytes=page_bytes, nbytes=run.tokens * token,
                    sides=sides, to_side=staging.v_start, start_side=plane.k.nbytes,
                )  # fmt: skip
        for row, blank in window.blank:
            for side, part in enumerate((plane.k, plane.v)):
                token = part.nbytes // page_tokens
                at = staging.start(side, token, row, 0)
                target[at : at + blank * token].zero_()

    def _views(
        self, half: Half, plane: Plane, dtypes: tuple[torch.dtype, torch.dtype], seen: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's attention reads of a half. Layers of equal geometry share it within a step."""
        k, v = plane.k, plane.v
        if self.contiguous:
            rows = len(self._rows)
            return (
                self.staging.tensor(half, 0, k, dtypes[0], rows, seen).contiguous(),
                self.staging.tensor(half, 1, v, dtypes[1], rows, seen).contiguous(),
            )
        key = (id(half), k.heads, k.dim, v.heads, v.dim, dtypes, seen)
        views = self._shared_views.get(key)
        if views is None:
            rows = len(self._rows)
            views = self._shared_views[key] = (
                self.staging.tensor(half, 0, k, dtypes[0], rows, seen),
                self.staging.tensor(half, 1, v, dtypes[1], rows, seen),
            )
        return views

    def _append(self, plane: Plane, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the new tokens of all rows (``[rows, heads, tokens, dim]``) into their tails."""
        page_tokens = self.layout.page_tokens
        for at in self._places:
            slab, page = at.slot.slab.raw(), at.slot.start
            for part, values in ((plane.k, k), (plane.v, v)):
                if part.nbytes:
                    cut = values[at.row]
                    if at.tokens != values.shape[2]:
                        cut = cut[:, at.source : at.source + at.tokens]
                    first = at.first * part.nbytes // page_tokens
                    scatter_tokens(slab, page + part.offset + first, cut)

    def _announce(self, compute: Stream) -> None:
        """Tell the device what the step reads and writes in VRAM. Where nothing comes from below, that is all it
        needs to know; otherwise each layer tells what it does in staging memory."""
        windows = {id(x): x for x in map(self._window, self._served)}.values()
        self._hot = not any(window.cold for window in windows)
        # Windows differ in their start: the longest one has the pages of all.
        reads = min(windows, key=lambda window: window.start).pages
        writes = [at.slot.range() for at in self._places]
        if self._hot:
            for half in self.staging.halves:
                half.cold = []
                writes.append(half.buffer.range())
        self.device.use(compute, "step", reads=reads, writes=writes)

    def _check(self, layer: int, plane: Plane, k: torch.Tensor, v: torch.Tensor) -> None:
        rows, count = len(self._rows), self._columns - self._before
        for name, x, part, dtype in (
            ("K", k, plane.k, self._dtypes[layer][0]),
            ("V", v, plane.v, self._dtypes[layer][1]),
        ):
            if x.dtype is not dtype or x.shape != (rows, part.heads, count, part.dim):
                raise LayoutError(
                    f"{name} of layer {layer} is {x.dtype} {tuple(x.shape)}, the store's layout and "
                    f"this step want {dtype} {(rows, part.heads, count, part.dim)} [rows, heads, "
                    "tokens, dim]; build the layout with layout_of(model)"
                )
            if x.device.type != self._device_type:
                raise LayoutError(
                    f"{name} of layer {layer} is on {x.device}, the store on "
                    f"{self.device.torch_device}; use one device"
                )
