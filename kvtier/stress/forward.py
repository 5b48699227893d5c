"""One layer of a pass of a model that is not there: its K and V, its time, and whether attention got the right bytes.

The mode decides what a layer reads. Time comes from bytes: weights, summaries and KV in VRAM at the card's memory
bandwidth, attention by the processor at the rate of the cost model, beside the kernels of the same layer. Copies over
the link take their time by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.attention.engine import AttentionEngine
from kvtier.attention.select import SelectDecode
from kvtier.cost.links import DISK_RATE
from kvtier.devices.base import Buffer, Range
from kvtier.devices.emulated import EmulatedDevice
from kvtier.layout import SUMMARY_ROWS, Plane
from kvtier.store.store import TieredStore
from kvtier.stress.compass import Compass, dense_attention
from kvtier.stress.in_place import always_pages, budget_pages
from kvtier.stress.pattern import compare, same, values
from kvtier.stress.plan import LoadPlan

#: Virtual seconds for the work of a step.
LONGEST_WAIT_S = 3600.0
#: Share of the pages that queries look for where nothing selects.
_LOOKED_FOR = 0.1
#: How far attention may be from a textbook's, in V, which goes up to 250: three roundings to bfloat16.
_NEAR = 3.0


class Weights:
    """Memory of the weights, of which only the size matters.

    Attributes:
        vram: those in VRAM. off: those behind the link, which pass through ``scratch`` layer by layer.
    """

    def __init__(self, plan: LoadPlan, device: EmulatedDevice) -> None:
        self._device = device
        scale = 1 / plan.divisor

        def reserve(nbytes: float, *, host: bool = False) -> Buffer | None:
            size = round(nbytes * scale)
            return device.reserve(size, host=host) if size else None

        self.vram = reserve(plan.weights_in_vram)
        self.scratch = reserve(plan.off_layer)
        self.off = reserve(plan.spec.weights_off * plan.weights, host=True)

    def free(self) -> None:
        for buffer in (self.vram, self.scratch, self.off):
            if buffer is not None:
                self._device.free(buffer)


class Forward:
    """Runs the layers of a pass.

    Args:
        engine: gathers, reads in place, or selects.
    """

    def __init__(
        self, plan: LoadPlan, store: TieredStore, engine: AttentionEngine, weights: Weights
    ) -> None:
        self.plan, self.spec = plan, plan.spec
        self.store, self.engine, self.weights = store, engine, weights
        self.device: EmulatedDevice = store.device  # type: ignore[assignment]
        self.layers = engine.stream.layers
        #: Bytes compared with what was written.
        self.checked = 0
        self._scale = 1 / plan.divisor
        self._compass: Compass | None = None
        if plan.computes:
            selection, share = plan.mode.selection, _LOOKED_FOR
            if selection is not None:
                free = budget_pages(plan, selection) - always_pages(plan, selection)
                share = free / max(1, plan.context // self.spec.page_tokens)
            self._compass = Compass(self.spec.page_tokens, plan.group, share, self.spec.locality)
        if isinstance(engine.paged, SelectDecode):
            engine.foresee(self._next_queries)
        #: Pages that a row's layer chose in the last step, and the share of new ones, summed over all.
        self._last: dict[tuple[int, int], set[int]] = {}
        self._fresh, self._compared = 0.0, 0
        self._numbers: list[int] = []
        self._before = 0

    def run(self, numbers: list[int], before: int, new: int) -> None:
        """All layers of a pass of ``new`` tokens of the sequences ``numbers``, which have ``before`` each."""
        self._numbers, self._before = numbers, before
        for layer in self.layers:
            self._layer(layer, new)

    @property
    def selected(self) -> dict[str, float]:
        """See ``ContextResult.selected``; empty if nothing was selected."""
        paged = self.engine.paged
        if not isinstance(paged, SelectDecode) or not paged.counts["layer reads"]:
            return {}
        counts, reads = paged.counts, paged.counts["layer reads"]
        return {
            "budget": counts["pages read"] / reads,
            "planes": counts["planes"] / reads,
            "cold": counts["planes not in VRAM"] / reads,
            "late": counts["planes fetched late"] / reads,
            "churn": self._fresh / max(1, self._compared),
        }

    # ------------------------------------------------------------------ a layer

    def _layer(self, layer: int, new: int) -> None:
        plane, numbers = self.store.layout.plane(layer), self._numbers
        place, stop = self.layers.index(layer), self._before + new
        checks = self.spec.payload and (self._before + place) % len(self.layers) == 0
        reads = self._weights_behind(place)
        k, v = self._made(plane, numbers, self._before, stop)
        read_before = self._from_disk()
        if self.engine.reads_in_place(layer):
            self.engine.update(layer, k, v)
            self._attend(plane, place, reads, checks)
        else:
            got = self.engine.update(layer, k, v)
            if checks:
                start = stop - got[0].shape[2]
                self.checked += self._compare(got, plane, start, stop)
            self._kernel(place, new, self._gathered(place, sum(side.nbytes for side in got)), reads)
        if self.spec.disk:
            # The disk is no part of the emulated card; the host waits while it reads.
            self.device.host_work((self._from_disk() - read_before) / (DISK_RATE * self._scale))

    def _made(
        self, plane: Plane, numbers: Sequence[int], start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens."""
        if self._compass is not None:
            layer = plane.layer
            return (
                self._compass.keys(plane.k, layer, numbers, start, stop),
                self._compass.values(plane.v, layer, numbers, start, stop),
            )
        k, v = (
            values(part, plane.layer, numbers, start, stop, payload=self.spec.payload)
            for part in (plane.k, plane.v)
        )
        return k, v

    def _compare(self, got: Sequence[torch.Tensor], plane: Plane, start: int, stop: int) -> int:
        if self._compass is None:
            return sum(compare(side, plane.layer, self._numbers, stop) for side in got)
        made = self._made(plane, self._numbers, start, stop)
        return sum(same(side, want, plane.layer) for side, want in zip(got, made, strict=True))

    def _weights_behind(self, place: int) -> list[Range]:
        """Bring a layer's weights over the link, as when a kernel touches memory that the driver has paged out: nothing
        hides it."""
        off, scratch = self.weights.off, self.weights.scratch
        if off is None or scratch is None:
            return []
        size = scratch.nbytes
        start = min(place * size, off.nbytes - size)
        compute = self.device.compute_stream()
        self.device.copy(compute, [(scratch.range(), off.range(start, start + size))])
        return [scratch.range()]

    def _kernel(self, place: int, new: int, kv_bytes: float, reads: list[Range]) -> None:
        """The kernels of a layer: its weights, and so many bytes besides."""
        plan, vram = self.plan, self.weights.vram
        if vram is not None:
            share = vram.nbytes // len(self.layers)
            reads = [*reads, vram.range(place * share, (place + 1) * share)]
        model = self.spec.model
        active = model.active_params or model.params
        self.device.compute(
            self.device.compute_stream(),
            f"layer {self.layers[place]}",
            nbytes=plan.read / plan.paged_layers * self._scale + kv_bytes,
            flops=2 * active * new * len(self._numbers) / plan.paged_layers * self._scale,
            reads=reads,
        )

    def _gathered(self, place: int, filled: int) -> int:
        """What a layer's gathering and attention move: hot bytes are read and written on their way into
        staging memory and read again by attention, cold ones are there already and read once."""
        cold = sum(at.nbytes for at in self.engine.stream.half(self.layers[place]).cold)
        return 3 * filled - 2 * cold

    def _from_disk(self) -> int:
        return self.store.stats().links["disk->host"].bytes if self.spec.disk else 0

    # ------------------------------------------------------------------ reading in place

    def _attend(self, plane: Plane, place: int, reads: list[Range], checks: bool) -> None:
        """A layer of a decode step that reads pages where they are."""
        paged = self.engine.paged
        assert paged is not None
        selects = isinstance(paged, SelectDecode) and paged.selects(plane.layer)
        self._kernel(place, 1, self._summaries(plane) if selects else 0, reads)
        if selects and any(pages.host or pages.disk for pages in paged.pages):
            # The choice is needed on the host, which asks for the copies.
            self.device.compute_stream().record().synchronize(LONGEST_WAIT_S)
        before = paged.counts.copy() if isinstance(paged, SelectDecode) else None
        if self._compass is not None:
            q = self._queries(plane)
            out = self.engine.attend(plane.layer, q, None)
            if checks:
                self.checked += self._check(plane, q, out)
        if not selects:
            self._read_all(plane)
            return
        assert isinstance(paged, SelectDecode)
        assert before is not None
        self._count_new(paged, plane.layer)
        done = paged.counts - before
        if done["layers read to choose"]:
            self._read_all(plane)
        moves = done["pages read"]
        if paged.selection.scope == "head":
            # Read and written on their way together, so that each head can pick its own.
            moves += 2 * (done["planes"] - done["planes not in VRAM"])
        self._attention(plane, moves * plane.nbytes + sum(self._tail_bytes(plane)))

    def _count_new(self, paged: SelectDecode, layer: int) -> None:
        for row in range(len(self._numbers)):
            lists = paged.chosen(row, layer)
            if lists is None:
                continue
            now, last = set(lists[0].tolist()), self._last.get((row, layer))
            self._last[row, layer] = now
            if last is not None:
                self._fresh += len(now - last) / len(now)
                self._compared += 1

    def _read_all(self, plane: Plane) -> None:
        """All pages of all rows: the device reads its own while the processor reads those in host memory."""
        paged = self.engine.paged
        assert paged is not None
        constants = self.spec.constants
        cpu_rate = constants["cpu_attention_bw"] * self._scale
        for pages, tail in zip(paged.pages, self._tail_bytes(plane), strict=True):
            cold = (len(pages.host) + len(pages.disk)) * plane.nbytes
            if cold:
                # The query is needed on the host.
                self.device.compute_stream().record().synchronize(LONGEST_WAIT_S)
            self._attention(plane, len(pages.hot) * plane.nbytes + tail)
            if cold:
                self.device.host_work(cold / cpu_rate + constants["handover_s"])

    def _attention(self, plane: Plane, nbytes: float) -> None:
        self.device.compute(self.device.compute_stream(), f"attention {plane.layer}", nbytes=nbytes)

    def _summaries(self, plane: Plane) -> float:
        """Bytes that choosing reads."""
        paged = self.engine.paged
        assert isinstance(paged, SelectDecode)
        part = self.store.layout.summary_parts[plane.layer]
        assert part is not None
        rows = paged.selection.make().summary_rows
        return sum(len(pages) for pages in paged.pages) * part.nbytes * rows / SUMMARY_ROWS

    def _tail_bytes(self, plane: Plane) -> list[int]:
        """KV of the unsealed tokens of each row."""
        paged = self.engine.paged
        assert paged is not None
        page = self.store.layout.page_tokens
        length = self._before + 1
        return [(length - len(pages) * page) * plane.nbytes // page for pages in paged.pages]

    def _queries(self, plane: Plane) -> torch.Tensor:
        assert self._compass is not None
        return self._compass.queries(plane.k, plane.layer, self._numbers, self._before)

    def _next_queries(self, layer: int) -> torch.Tensor | None:
        """For ``prefetch=hidden``: what a model could tell of the next layer, at its best."""
        return self._queries(self.store.layout.plane(layer))

    def _check(self, plane: Plane, q: torch.Tensor, out: torch.Tensor) -> int:
        """Compare what was read byte for byte, and what came out with attention as in a textbook; the bytes.

        Raises:
            AssertionError: they differ.
        """
        paged, page = self.engine.paged, self.store.layout.page_tokens
        assert paged is not None
        checked = 0
        for row, number in enumerate(self._numbers):
            k, v = (side[0] for side in self._made(plane, [number], 0, self._before + 1))
            lists = paged.chosen(row, plane.layer) if isinstance(paged, SelectDecode) else None
            pages = len(paged.pages[row])
            seen = torch.ones(plane.k.heads, self._before + 1, dtype=torch.bool)
            if lists is not None:
                marks = torch.zeros(len(lists), pages, dtype=torch.bool).scatter_(1, lists, True)
                seen[:, : pages * page] = marks.repeat_interleave(page, 1)
            want = dense_attention(q[row], k, v, seen)
            if not bool(((out[row].double() - want).abs() <= _NEAR).all()):
                raise AssertionError(
                    f"attention of layer {plane.layer} is off by {(out[row].double() - want).abs().max():.3g}"
                )
            places = range(pages) if lists is None else lists.unique().tolist()
            for place in places:
                checked += self._check_page(plane, row, place, k, v)
        return checked

    def _check_page(
        self, plane: Plane, row: int, place: int, k: torch.Tensor, v: torch.Tensor
    ) -> int:
        paged, page = self.engine.paged, self.store.layout.page_tokens
        assert paged is not None
        got: torch.Tensor | None = None
        if isinstance(paged, SelectDecode):
            got = paged.stage.held(plane, row, place)
        if got is None:
            slot = paged.rows[row].lease.copies[place].slot
            if slot is None:
                return 0  # only on disk: its checksum was verified when it was read
            at = slot.start + plane.offset
            got = slot.slab.raw()[at : at + plane.nbytes]
        made = [
            side[:, place * page : (place + 1) * page]
            .transpose(0, 1)
            .contiguous()
            .view(torch.uint8)
            for side in (k, v)
        ]
        return same(got, torch.cat([side.flatten() for side in made]), plane.layer)
