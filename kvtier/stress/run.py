"""A whole load: every context, and the smallest memory that meets a rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvtier.devices.cards import Card, cards
from kvtier.devices.spec import CardSpec
from kvtier.errors import ConfigError
from kvtier.stress.load import Watch, run_context
from kvtier.stress.plan import LoadPlan, find_cliff, with_vram
from kvtier.stress.report import ContextResult, StressReport, Sweep, empty_report
from kvtier.stress.spec import LoadSpec

#: Memory sizes between which ``sweep_vram`` chooses: half a GiB apart, up to the largest cards.
SWEEP_STEP = 512 * 2**20
_SWEEP_SIZES = 2 * 512

#: Told of each context's result as soon as it is there.
Done = Callable[[ContextResult], None]


def run_load(
    spec: LoadSpec,
    *,
    watch: Watch | None = None,
    done: Done | None = None,
    trace: Path | None = None,
) -> StressReport:
    """Run every context on a card and a store of its own.

    What will be slow is told first, as an OffloadWarning for the worst context.

    Args:
        watch: see ``run_context``.
        trace: file for the Chrome trace; with several contexts, ``-CONTEXT`` is added to its name.

    Raises:
        ConfigError: a context does not fit; nothing was run.
    """
    plans = [LoadPlan(spec, context) for context in spec.contexts]
    for plan in plans:
        plan.check()
    report = empty_report(plans, find_cliff(spec))
    for one in report.warnings:
        one.announce(stacklevel=2)
    for plan in plans:
        result = run_context(plan, watch=watch, trace=_trace_name(trace, plan, len(plans)))
        report.contexts.append(result)
        if done is not None:
            done(result)
    return report


def sweep_vram(
    spec: LoadSpec,
    target_tps: float,
    *,
    watch: Watch | None = None,
    done: Done | None = None,
    trace: Path | None = None,
) -> StressReport:
    """The smallest memory with which the card reaches ``target_tps`` at the largest context.

    Searched by prediction in steps of 512 MiB, then run on the emulated card; the cards of the table
    are compared by prediction alone.

    Raises:
        ConfigError: no size reaches the rate.
    """
    context = max(spec.contexts)
    least, most = 1, _SWEEP_SIZES
    best = _rate(with_vram(spec, most * SWEEP_STEP), context)
    met = best is not None and best >= target_tps
    while met and most - least > 1:
        middle = (least + most) // 2
        rate = _rate(with_vram(spec, middle * SWEEP_STEP), context)
        if rate is not None and rate >= target_tps:
            most = middle
        else:
            least = middle
    chosen = with_vram(spec, most * SWEEP_STEP) if met else spec
    chosen = replace(chosen, contexts=(context,))
    if not met:
        ceiling = f"{best:.1f} tokens/s" if best is not None else "nothing"
        raise ConfigError(
            f"--target-tps is {target_tps:g}, but {spec.card.card.name} reaches {ceiling} at "
            f"{context} tokens with all the memory it could have; its bandwidth is the limit: give "
            "a lower rate, fewer tokens, or a faster --card"
        )
    report = run_load(chosen, watch=watch, done=done, trace=trace)
    result = report.contexts[0]
    report.sweep = Sweep(
        target_tps=target_tps,
        context=context,
        vram=most * SWEEP_STEP,
        predicted_tps=result.predicted_tps,
        emulated_tps=result.emulated_tps,
        step=SWEEP_STEP,
        below_tps=_rate(with_vram(spec, (most - 1) * SWEEP_STEP), context),
        cards=_cards_that_meet(spec, target_tps, context),
    )
    return report


def _rate(spec: LoadSpec, context: int) -> float | None:
    """Predicted tokens/s; None if it does not run."""
    plan = LoadPlan(spec, context)
    try:
        plan.check()
    except ConfigError:
        return None
    return plan.predicted.step.tokens_per_s(spec.sessions)


def _cards_that_meet(
    spec: LoadSpec, target_tps: float, context: int
) -> list[tuple[str, int, float]]:
    found = []
    for card in cards():
        rate = _rate(replace(spec, card=_like(spec.card, card), vram=None), context)
        if rate is not None and rate >= target_tps:
            found.append((card.name, card.vram_bytes, rate))
    return sorted(found, key=lambda item: (item[1], -item[2]))[:5]


def _like(spec: CardSpec, card: Card) -> CardSpec:
    """Another card with the same kind of link."""
    return CardSpec(card, spec.kind, card.link_model(spec.kind))


def _trace_name(trace: Path | None, plan: LoadPlan, count: int) -> Path | None:
    if trace is None or count == 1:
        return trace
    return trace.with_name(f"{trace.stem}-{plan.context}{trace.suffix}")
