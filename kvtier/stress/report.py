"""What a load did, as plain data. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.cost.cliff import Level
from kvtier.cost.warning import CostWarning, worst
from kvtier.stress import in_place
from kvtier.stress.plan import Cliff, LoadPlan


@dataclass
class ContextResult:
    """One context. Bytes at full size; seconds of virtual time, simulated and not measured.

    Attributes:
        mode: of the run. choice: why, where ``auto`` had to choose.
        vram: where VRAM goes: part -> bytes.
        selected: of mode ``select``, means over layers that select and steps: ``budget`` and ``planes``, pages that a
            head and that all heads of a layer choose, ``cold``, those not in VRAM, ``late``, those whose copies were
            not sent ahead, and ``churn``, share of a layer's pages that it did not choose a step before.
            predicted_selected: the same, as far as it was predicted.
        predicted_tps, emulated_tps: tokens/s of all sequences while decoding; emulated is 0 if no
            step was done.
        baseline_tps: predicted with everything in VRAM.
        level: of the predicted slowdown. bound: what a step waits for most, predicted.
        steps: decode steps. prefill_s, decode_s: virtual seconds.
        pages, cold_pages: sealed pages after decoding, and those of them not in VRAM.
        evicted: tier -> pages that left it.
        moved: link -> bytes while decoding.
        failures: kind of error -> times. rebuilt: times that lost sequences were computed anew.
        checked_bytes: bytes of K and V compared with what was written (size of the run).
        warnings: records of all OffloadWarnings of the run (``kvtier.announce``).
        books: what does not add up; empty if all does.
        error: why the context was given up, "" if it was not.
        cpu_s: CPU seconds of this machine.
    """

    context: int
    predicted_tps: float
    baseline_tps: float
    level: Level
    bound: str
    mode: str = "exact-stream"
    choice: dict[str, Any] | None = None
    vram: dict[str, int] = field(default_factory=dict)
    selected: dict[str, float] = field(default_factory=dict)
    predicted_selected: dict[str, float] = field(default_factory=dict)
    emulated_tps: float = 0.0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    pages: int = 0
    cold_pages: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    rebuilt: int = 0
    checked_bytes: int = 0
    books: list[str] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    cpu_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Emulated over predicted tokens/s."""
        return self.emulated_tps / self.predicted_tps

    @property
    def ok(self) -> bool:
        return not self.error and not self.books


@dataclass
class Sweep:
    """The smallest memory that meets a rate at the largest context.

    Attributes:
        target_tps: tokens/s asked for. context: tokens.
        vram: bytes by prediction, confirmed by ``emulated_tps``; None if no size does.
        mode: of the run. choice: why, where ``auto`` had to choose.
        vram: where VRAM goes: part -> bytes.
        selected: of mode ``select``, means over layers that select and steps: ``budget`` and ``planes``, pages that a
            head and that all heads of a layer choose, ``cold``, those not in VRAM, ``late``, those whose copies were
            not sent ahead, and ``churn``, share of a layer's pages that it did not choose a step before.
            predicted_selected: the same, as far as it was predicted.
        predicted_tps, emulated_tps: at ``vram``.
        step: bytes between sizes tried. below_tps: predicted one step below.
        cards: (name, bytes, tokens/s) of cards of the table that meet it by prediction, smallest
            first.
    """

    target_tps: float
    context: int
    vram: int | None
    predicted_tps: float
    emulated_tps: float
    step: int
    below_tps: float | None
    cards: list[tuple[str, int, float]]


@dataclass
class StressReport:
    """A load and its results.

    Attributes:
        warnings: of the worst context, by prediction; what ``kvtier plan`` says of the same load.
    """

    card: str
    link: str
    model: str
    kv_dtype: str
    sessions: int
    policy: str
    mode: str
    locality: str
    page_tokens: int
    divisor: int
    payload: bool
    weight_bytes: float
    weights_off: float
    vram: int
    host: int
    disk: int
    warnings: list[CostWarning]
    cliff: Cliff
    contexts: list[ContextResult] = field(default_factory=list)
    sweep: Sweep | None = None

    @property
    def failed(self) -> bool:
        """Whether a context was given up or its books do not add up."""
        return any(not result.ok for result in self.contexts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        for result, plain in zip(self.contexts, data["contexts"], strict=True):
            plain["ratio"] = result.ratio
            plain["ok"] = result.ok
        data["warnings"] = [one.to_json() for one in self.warnings]
        data["failed"] = self.failed
        data["note"] = "all rates and times are simulated on an emulated card, none is measured"
        return data


def empty_result(plan: LoadPlan) -> ContextResult:
    """The result of a context before it has run."""
    slow, sessions = plan.predicted, plan.spec.sessions
    return ContextResult(
        context=plan.context,
        predicted_tps=slow.step.tokens_per_s(sessions),
        baseline_tps=slow.baseline.tokens_per_s(sessions),
        level=slow.level,
        bound=slow.step.bound,
        mode=plan.mode.text,
        choice=None if plan.choice is None else plan.choice.to_json(),
        vram=plan.split,
        predicted_selected=in_place.predicted_selection(plan),
    )


def empty_report(plans: Sequence[LoadPlan], cliff: Cliff) -> StressReport:
    """The report of a load, ``plans`` being its contexts."""
    plan = max(plans, key=lambda plan: plan.context)
    spec = plan.spec
    return StressReport(
        card=spec.card.card.name,
        link=f"{spec.card.kind}, {plan.link.rate(1 << 30) / 1e9:.3g} GB/s",
        model=spec.model.name,
        kv_dtype=spec.kv_dtype,
        sessions=spec.sessions,
        policy=spec.policy,
        mode=spec.mode,
        locality=str(spec.locality),
        page_tokens=spec.page_tokens,
        divisor=plan.divisor,
        payload=spec.payload,
        weight_bytes=plan.weights,
        weights_off=spec.weights_off,
        vram=plan.vram,
        host=spec.host,
        disk=spec.disk,
        warnings=worst([one for each in plans for one in each.outlook.warnings()]),
        cliff=cliff,
    )
