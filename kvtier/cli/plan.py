"""``kvtier plan``: prints the answer, as a page for people or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtier.cli.chart import Chart, Mark, Series, write_chart
from kvtier.cli.plan_options import PlanOptions
from kvtier.cli.profile_option import profile_words
from kvtier.cost.warning import CostWarning, rate
from kvtier.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.cost.budget import Budget
    from kvtier.cost.coded import Codecs
    from kvtier.cost.plan import Plan, Row

STYLES = {"severe": "bold red", "warning": "red", "notice": "yellow"}
_BAR = 48

#: Parts of the budget by what the bar shows them as.
_BAR_PARTS = (
    ("weights", "blue", ("weights",)),
    ("KV", "green", ("kv", "state", "page rounding")),
    ("buffers", "magenta", ()),
)


def plan(options: PlanOptions) -> int:
    """Print; returns the exit status.

    Raises:
        ConfigError: the plot cannot be written.
    """
    from rich.console import Console

    console = Console()
    if options.list_models or options.list_gpus:
        _lists(options, console)
        return 0
    answer = options.plan
    assert answer is not None
    for one in answer.warnings:
        _log(one)
    if options.plot is not None:
        write_chart(chart(answer), options.plot)
    if options.json:
        print(json.dumps(answer.to_json(), indent=2))
    else:
        render(answer, console)
        if options.plot is not None:
            _say(console, f"plot: {options.plot}")
    return 0


def _log(one: CostWarning) -> None:
    """Raise the warning for whoever calls from Python, and log it; on a terminal it is printed below."""
    import warnings

    from kvtier.errors import OffloadWarning

    with warnings.catch_warnings():
        # The page below says it; printed by Python it would come twice.
        warnings.filterwarnings("ignore", category=OffloadWarning)
        one.announce()


def render(answer: Plan, console: Console) -> None:
    """The page: what it is, the budget, the table, the warnings, what it rests on."""
    load = answer.placed or answer.asked
    model, card = load.model, load.card
    assumed = (
        "" if load.weight_bits is not None or model.stored else ", assumed: give --weights-dtype"
    )
    _say(console, "")
    _say(
        console,
        f"{model.name} ({model.describe} layers; {format_size(model.weight_bytes(load.weight_bits))} of "
        f"weights at {load.bits:.3g} bits{assumed}; {format_size(model.token_bytes(load.kv_dtype))} of "
        f"{load.kv_dtype} KV a token) on {card.name} ({card.memory_bandwidth / 1e9:.0f} GB/s), "
        f"{load.sequences} sequence{'s' if load.sequences > 1 else ''}",
        "bold",
    )
    _bar(load.budget, load.context, console)
    _tell_codecs(load.codecs, console)
    if answer.placed is None:
        need = format_size(-load.budget.free)
        _say(
            console,
            f"does not fit at {load.context:,} tokens, whatever is off the card: {need} too much",
            "red",
        )
        for fix in load.budget.remedies():
            _say(console, f"  would fit: {fix.text}")
    elif answer.worked_out:
        _say(
            console,
            f"does not fit at {load.context:,} tokens; this much must be off the card: "
            f"{_off(load.weights_off, load.kv_off)}",
            "yellow",
        )
    _table(answer.rows, console)
    if answer.sweep:
        _cliff(answer, console)
    for one in answer.warnings:
        _warning(one, console)
    if not answer.warnings and answer.placed is not None:
        _say(
            console,
            "no warnings: everything that is read is in VRAM, or costs less than 1.3x",
            "green",
        )
    if answer.claim is not None:
        style = "green" if answer.claim.plausible else "bold red"
        _say(console, f"claim at {load.context:,} tokens: {answer.claim.text}", style)
    _basis(answer, console)


def _tell_codecs(codecs: Codecs, console: Console) -> None:
    tiers = (("host RAM", codecs.host, codecs.host_share), ("disk", codecs.disk, codecs.disk_share))
    told = [f"in {where} as {name}, {part:.0%}" for where, name, part in tiers if name != "none"]
    if told:
        _say(console, f"of what it takes in VRAM, KV takes {'; '.join(told)} (not bit for bit)")


def _bar(budget: Budget, context: int, console: Console) -> None:
    from rich.text import Text

    named = {name: sum(budget.part(p) for p in parts) for name, _, parts in _BAR_PARTS}
    named["buffers"] = budget.used - named["weights"] - named["KV"]
    whole = max(budget.usable, budget.used)
    bar, words = Text("  "), Text("  ")
    for name, style, _ in _BAR_PARTS:
        bar.append("█" * round(_BAR * named[name] / whole), style=style)
        words.append(f"{name} {named[name] / 2**30:.2f}", style=style)
        words.append("  ")
    bar.append("░" * max(0, _BAR + 2 - len(bar)), style="dim")
    left = (
        f"free {budget.free / 2**30:.2f}"
        if budget.free >= 0
        else f"TOO MUCH by {-budget.free / 2**30:.2f}"
    )
    words.append(f"{left}  of {budget.usable / 2**30:.2f} GiB at {context:,} tokens")
    console.print(bar, soft_wrap=True)
    console.print(words, soft_wrap=True)
    longest = budget.longest_context()
    if longest:
        _say(console, f"  longest context that fits so: {longest:,} tokens")


def _table(rows: list[Row], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    titles = ("context", "prefill", "ms/tok", "tok/s", "band", "in VRAM", "slower", "", "off card")
    for name in titles:
        side = "left" if name in ("", "off card") else "right"
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        if row.load is None:
            table.add_row(f"{row.context:,}", *["-"] * 6, "does not", "fit", style="red")
            continue
        estimate, load = row.load.estimate, row.load
        off = (("W", load.weights_off), ("KV", load.kv_off))
        table.add_row(
            f"{row.context:,}",
            "-" if load.prefill_s is None else f"{load.prefill_s:.3g} s",
            f"{1e3 * estimate.seconds:.4g}",
            rate(estimate.tps),
            f"{rate(estimate.low)}-{rate(estimate.high)}",
            rate(estimate.baseline_tps),
            f"{estimate.slowdown:.1f}x",
            estimate.level if estimate.level != "none" else "",
            " ".join(f"{share:.0%} {name}" for name, share in off if share),
            style=STYLES.get(estimate.level),
        )
    console.print(table)


def _off(weights: float, kv: float) -> str:
    parts = [
        f"{share:.0%} of {name}" for name, share in (("weights", weights), ("KV", kv)) if share
    ]
    return ", ".join(parts)


def _cliff(answer: Plan, console: Console) -> None:
    fits, begins = answer.cliff["fits_up_to"], answer.cliff["begins"]
    words = "not everything is in VRAM at any context"
    if fits:
        words = f"everything fits in VRAM up to {fits:,} tokens"
    elif fits is None:
        words = "memory does not limit the context"
    levels = [f"{name} from {at:,}" for name, at in begins.items() if at is not None]
    _say(console, f"the cliff: {words}" + (f"; {', '.join(levels)} tokens" if levels else ""))


def _warning(one: CostWarning, console: Console) -> None:
    head, _, rest = one.text.partition(" Instead: ")
    _say(console, head, STYLES[one.level])
    for remedy in one.remedies:
        _say(console, f"  instead: {remedy}")
    assert rest


def _basis(answer: Plan, console: Console) -> None:
    load = answer.placed or answer.asked
    constants = load.estimate.basis.constants
    measured = [c.name for c in constants if c.measured]
    table = [c.name for c in constants if not c.measured]
    told = profile_words(answer.profile, measured, table)
    _say(
        console,
        f"predicted, not measured. {told}. Band: the constants' and the link class's. GB = 1e9 bytes, GiB = "
        f"2^30 bytes. Measures the same: {load.estimate.basis.command}",
        "dim",
    )


def chart(answer: Plan) -> Chart:
    """Tokens/s over the context, with its band, the rate in VRAM, and where the cliff begins."""
    rows = [row for row in answer.curve if row.load is not None]
    loads = [(row.context, row.load.estimate) for row in rows if row.load is not None]
    marks = [
        Mark(at, f"{name} from {at:,}")
        for name, at in answer.cliff["begins"].items()
        if at is not None and at > 1
    ]
    fits = answer.cliff["fits_up_to"]
    if fits:
        marks.append(Mark(fits, f"fits up to {fits:,}"))
    asked = answer.asked
    off = _off(asked.weights_off, asked.kv_off)
    return Chart(
        title=f"{asked.model.name} on {asked.card.name}, {asked.kv_dtype} KV"
        + (f", {off} off the card" if off else "")
        + f", {asked.link} link",
        series=[
            Series(
                "as placed (predicted)",
                [(n, e.tps) for n, e in loads],
                [(n, e.low, e.high) for n, e in loads],
            ),
            Series("everything in VRAM", [(n, e.baseline_tps) for n, e in loads], style="dashes"),
        ],
        marks=marks,
        notes=[one.text[:140] for one in answer.warnings[:1]],
    )


def _lists(options: PlanOptions, console: Console) -> None:
    from kvtier.cost.models import models
    from kvtier.devices.cards import cards

    known: dict[str, Any] = {}
    if options.list_models:
        known["models"] = [
            {
                "name": m.slug,
                "params": m.params,
                "kv_bytes_per_token_bf16": m.token_bytes("bf16"),
                "layers": m.describe,
            }
            for m in models()
        ]
    if options.list_gpus:
        known["gpus"] = [
            {
                "name": c.slug,
                "vram_bytes": c.vram_bytes,
                "bandwidth": c.memory_bandwidth,
                "bf16_flops": c.bf16_flops,
                "unified": c.unified,
            }
            for c in cards()
        ]
    if options.json:
        print(json.dumps(known, indent=2))
        return
    for m in known.get("models", ()):
        _say(
            console,
            f"{m['name']:<28} {m['params'] / 1e9:>8.2f}B  {m['kv_bytes_per_token_bf16'] / 1024:>8.1f} KiB/token  "
            f"{m['layers']}",
        )
    for c in known.get("gpus", ()):
        flops = f"{c['bf16_flops'] / 1e12:>7.0f} TFLOPS" if c["bf16_flops"] else f"{'-':>14}"
        _say(
            console,
            f"{c['name']:<28} {c['vram_bytes'] / 2**30:>6.0f} GiB  {c['bandwidth'] / 1e9:>6.0f} GB/s {flops}",
        )


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
