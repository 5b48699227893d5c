"""What a mode that reads pages where they are reads in a step of a load. Sizes in bytes at full size. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtier.attention.mode import Mode, Selection
from kvtier.cost.churn import Traffic, traffic
from kvtier.cost.decode import LayerLoad
from kvtier.cost.in_place import InPlaceLoad
from kvtier.cost.workload import Selection as Chosen
from kvtier.layout import SUMMARY_ROWS, PageLayout

if TYPE_CHECKING:
    from kvtier.stress.plan import LoadPlan

#: What a half of the memory through which planes come has room for at least, and beyond what it needs:
#: ``kvtier.attention.planes``.
_HALF_PLANES, _HALF_SPARE = 16, 1.5


def summary_slots(plan: LoadPlan, layout: PageLayout) -> int:
    """Slots of the VRAM tier, of that layout, that the summaries of all pages take."""
    pages = plan.columns // plan.spec.page_tokens
    return plan.spec.sessions * layout.summary_slots(pages)


def plane_bytes(plan: LoadPlan, selection: Selection) -> int:
    """VRAM for planes on their way: two halves, and as much again, which a half that grows needs for a moment."""
    spec = plan.spec
    pages = plan.context // spec.page_tokens
    lists = plan.kv_heads if selection.scope == "head" else 1
    chosen = min(pages, lists * budget_pages(plan, selection))
    half = max(_HALF_PLANES, math.ceil(spec.sessions * chosen * _HALF_SPARE))
    widest = max(plane.nbytes for plane in plan.layout.planes if plane is not None)
    return 4 * half * widest


def budget_pages(plan: LoadPlan, selection: Selection) -> int:
    """Sealed pages that a layer of a sequence reads."""
    pages = plan.context // plan.spec.page_tokens
    return max(1, selection.budget.pages(pages + 1, plan.layout) - 1)


def always_pages(plan: LoadPlan, selection: Selection) -> int:
    """Of these, those that are read whatever the query: the first ones and the recent ones."""
    return sum(selection.always(budget_pages(plan, selection), plan.spec.page_tokens))


def traffic_of(plan: LoadPlan, selection: Selection) -> Traffic:
    """Pages that one sequence chooses in a layer and step."""
    cold = plan.cold_pages / max(1, plan.pages)
    return traffic(
        plan.context // plan.spec.page_tokens,
        budget_pages(plan, selection),
        1 - cold,
        plan.spec.locality,
        always=always_pages(plan, selection),
        heads=plan.kv_heads if selection.scope == "head" else 1,
        guessed=selection.prefetch in ("last", "hidden"),
        vram_pages=plan.tier_pages / plan.spec.sessions,
    )


def predicted_selection(plan: LoadPlan) -> dict[str, float]:
    """What ``ContextResult.selected`` should be; empty without a selection."""
    selection = plan.mode.selection
    if selection is None:
        return {}
    found = traffic_of(plan, selection)
    free = 1 - always_pages(plan, selection) / found.read
    return {
        "budget": found.read,
        "planes": found.planes,
        "cold": found.missing,
        "late": found.late,
        "churn": plan.spec.locality.churn * free,
    }


def selection_of(plan: LoadPlan, selection: Selection) -> Chosen:
    """The same for ``kvtier.cost.modes``."""
    spec, selector = plan.spec, selection.make()
    budget = budget_pages(plan, selection)
    layers = len(plan.planes)
    dense = selection.dense | selector.dense_layers(len(plan.layout.layers))
    return Chosen(
        tokens=budget * spec.page_tokens,
        page_tokens=spec.page_tokens,
        summaries=float(selector.summary_rows),
        dense=min(1.0, len(dense) / layers),
        locality=spec.locality,
        always=always_pages(plan, selection) / budget,
        heads=plan.kv_heads if selection.scope == "head" else 1,
        gathered=selection.scope == "head",
        guessed=selection.prefetch in ("last", "hidden"),
    )


def loads(plan: LoadPlan, mode: Mode) -> list[InPlaceLoad]:
    """One entry a layer with a plane."""
    return [_load(plan, mode, index) for index in range(len(plan.layers))]


def moved(plan: LoadPlan, mode: Mode) -> tuple[float, int]:
    """Bytes of pages that move to VRAM in a step, and their number."""
    if mode.selection is None:
        return 0.0, 0
    pages = traffic_of(plan, mode.selection).moved * plan.spec.sessions
    return pages * plan.layout.page_bytes, math.ceil(pages)


def _load(plan: LoadPlan, mode: Mode, index: int) -> InPlaceLoad:
    load, plane = plan.layers[index], plan.planes[index]
    rows = plan.spec.sessions
    if plan.layout.layers[plane.layer].kind != "full":
        # Gathered, as all layers are in mode exact-stream.
        return InPlaceLoad(
            weights=load.weights, off=load.off, kv=3 * load.hot + load.cold, ahead=load.cold,
            ahead_pieces=load.pieces, submissions=bool(load.cold), disk=load.disk,
        )  # fmt: skip
    selection = mode.selection
    pages = plan.context // plan.spec.page_tokens
    if selection is None or _dense(plan, selection, plane.layer, pages):
        return InPlaceLoad(
            weights=load.weights, off=load.off, kv=load.hot, cpu=load.cold,
            handovers=rows if load.cold else 0,
        )  # fmt: skip
    found = traffic_of(plan, selection)
    gathered = 2 * (found.planes - found.missing) if selection.scope == "head" else 0.0
    part = plan.layout.summary_parts[plane.layer]
    assert part is not None
    selector = selection.make()
    rank = selector.summary_rows * part.nbytes / SUMMARY_ROWS
    whole = load if selector.reads_pages else LayerLoad()
    # A plane is one run of bytes in its page and in the memory that it goes to.
    ahead, late = rows * found.ahead, rows * found.late
    return InPlaceLoad(
        weights=load.weights,
        off=load.off,
        summaries=rows * pages * rank,
        # The tail is half full in the mean.
        kv=rows * (gathered + found.read + 0.5) * plane.nbytes + whole.hot,
        cpu=whole.cold,
        handovers=rows if whole.cold else 0,
        ahead=ahead * plane.nbytes,
        ahead_pieces=math.ceil(ahead),
        late=late * plane.nbytes,
        late_pieces=math.ceil(late),
        submissions=rows * ((ahead > 0) + (late > 0)),
    )


def _dense(plan: LoadPlan, selection: Selection, layer: int, pages: int) -> bool:
    dense = selection.dense | selection.make().dense_layers(len(plan.layout.layers))
    return layer in dense or budget_pages(plan, selection) >= pages
