"""``kvtier advise``: prints the options, as a page for people or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtier.cli.advise_options import AdviseOptions
from kvtier.cli.profile_option import profile_words
from kvtier.cost.basis import UNITS
from kvtier.cost.prompt_cache import SOURCE
from kvtier.cost.warning import rate
from kvtier.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.cost.advice import Advice
    from kvtier.cost.constants import Constant
    from kvtier.cost.hosted import Hosted
    from kvtier.cost.mix import Option

#: Constants that the figures rest on.
CONSTANTS = ("matrix_efficiency", "attention_efficiency", "step_s", "restore_efficiency", "disk_bw")


def advise(options: AdviseOptions) -> int:
    """Print; returns the exit status."""
    if options.json:
        print(json.dumps(to_json(options), indent=2))
        return 0
    from rich.console import Console

    render(options, Console())
    return 0


def to_json(options: AdviseOptions) -> dict[str, Any]:
    """Plain values; see docs/advise.md."""
    advice = options.advice
    demand, means = advice.demand, advice.means
    constants = _constants(advice)
    return {
        "model": advice.model.name,
        "gpu": means.card.name,
        "budget": {"vram_bytes": means.vram, "ram_bytes": means.host, "disk_bytes": means.disk},
        "workload": {
            "prompt_tokens": demand.prompt,
            "shared_tokens": demand.shared,
            "retrieved_tokens": demand.short - demand.shared,
            "sessions": demand.sessions,
            "requests_per_minute": demand.requests,
            "turns": demand.turns,
            "output_tokens": demand.output,
            "working_set_bytes": round(advice.working_set),
        },
        "goals": {
            "requests_per_minute": demand.requests,
            "ttft_s": advice.goals.ttft_s,
            "tps": advice.goals.tps,
        },
        "met": advice.options[0].met,
        "options": [one.to_json() for one in advice.options],
        "hosted": options.hosted.to_json(),
        "warnings": [one.to_json() for one in advice.warnings],
        "basis": {"constants": [c.to_json() for c in constants], "command": "kvtier calibrate"},
        "profile": None if options.profile is None else options.profile.summary(means.card),
        "units": UNITS,
    }


def render(options: AdviseOptions, console: Console) -> None:
    """The question, the ranked table, what each misses, the hosted API, what it rests on."""
    advice = options.advice
    demand, means = advice.demand, advice.means
    many = "s" if demand.sessions > 1 else ""
    _say(
        console,
        f"{advice.model.name} on {means.card.name}, {format_size(means.host)} of RAM and "
        f"{format_size(means.disk)} of disk for KV: {demand.sessions:,} session{many} of {demand.turns:,} "
        f"turn{'s' if demand.turns > 1 else ''}, prompts up to {demand.prompt:,} tokens "
        f"({demand.shared:,} shared), {demand.output:,} out, {demand.requests:g} requests a minute; all "
        f"sessions: {format_size(advice.working_set)} of {advice.kv_dtype} KV",
        "bold",
    )
    _table(advice.options, console)
    best = advice.options[0]
    goals = _goals(advice)
    if best.met:
        _say(console, f"best: {best.mix.name} (goals: {goals})", "green")
    else:
        nearest = f"; nearest: {best.mix.name}" if best.possible else ""
        _say(console, f"nothing meets all goals ({goals}){nearest}", "red")
    for number, one in enumerate(advice.options, 1):
        missed = [f"misses: {', '.join(one.unmet)}"] if one.unmet and one.possible else one.unmet
        remarks = [*missed, *one.notes]
        if remarks:
            _say(console, f"  {number}: {'; '.join(remarks)}")
    if any(one.gain.get("from_batch", 1.0) != 1.0 for one in advice.options if one.mix.retrieval):
        gain = next(one.gain for one in advice.options if one.mix.retrieval)
        _say(
            console,
            f"retrieval decodes {gain['matched_batch']:.2f}x as fast at as many requests, and more of them "
            f"fit: another {gain['from_batch']:.2f}x, which is of the largest batch alone",
        )
    for warning in advice.warnings:
        head, _, _ = warning.text.partition(" Instead: ")
        _say(console, f"an engine that always loads: {head}", "yellow")
    _hosted(options.hosted, console)
    measured = [c.name for c in _constants(advice) if c.measured]
    table = [c.name for c in _constants(advice) if not c.measured]
    _say(
        console,
        f"predicted, not measured. {profile_words(options.profile, measured, table)}. GB = 1e9 bytes, GiB = "
        "2^30 bytes.",
        "dim",
    )


def _table(found: list[Option], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0)
    for title in ("", "mix", "1st token", "tok/s", "req/min", "found", "VRAM", "RAM", "disk"):
        side = "left" if title == "mix" else "right"
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for number, one in enumerate(found, 1):
        style = None if one.met else "red"
        if not one.possible:
            table.add_row(str(number), _short(one), *["-"] * 7, style=style)
            continue
        table.add_row(
            str(number),
            _short(one),
            "grows" if one.ttft_s is None else f"{one.ttft_s:.3g} s",
            rate(one.tps),
            f"{one.rate:,.3g}" if one.rate < 1000 else f"{one.rate:,.0f}",
            f"{one.hit_share:.0%}",
            *(_gib(one, tier) for tier in ("vram", "host", "disk")),
            style=style,
        )
    console.print(table)
    _say(
        console,
        "1st token: mean, under these requests (grows: the queue does). tok/s: of a request. req/min: that can be sustained. found: of "
        "the prompt tokens. VRAM, RAM, disk: GiB needed, weights included; ! more than there is, so part is lost.",
        "dim",
    )


def _short(one: Option) -> str:
    """``prefix, VRAM+RAM``: the mix in the width of a column."""
    names = {"vram": "VRAM", "host": "RAM", "disk": "disk"}
    parts = ["prefix"] if one.mix.reuse else []
    if one.mix.tiers:
        parts.append("+".join(names[tier] for tier in one.mix.tiers))
    if one.mix.retrieval:
        parts.append("retrieval")
    return ", ".join(parts) or "no cache"


def _gib(one: Option, tier: str) -> str:
    use = one.tiers[tier]
    if not use.needed:
        return "-"
    return f"{use.needed / 2**30:,.1f}" + ("" if use.met else "!")


def _goals(advice: Advice) -> str:
    goals = [f"{advice.demand.requests:g} requests a minute"]
    if advice.goals.ttft_s is not None:
        goals.append(f"first token in {advice.goals.ttft_s:g} s")
    if advice.goals.tps is not None:
        goals.append(f"{advice.goals.tps:g} tokens/s a request")
    return ", ".join(goals)


def _hosted(hosted: Hosted, console: Console) -> None:
    cache = hosted.cache
    again = cache.break_even_rereads
    even = "never" if again is None else f"after {again} re-read{'s' if again > 1 else ''}"
    words = (
        f"hosted API with a prompt cache: {hosted.best_cached:,} tokens of the last prompt can be cached, "
        f"{hosted.hit_share:.0%} of all are found; input costs {hosted.cost_ratio:.0%} of the uncached price; "
        f"a write pays off {even}"
    )
    if hosted.machines > 1:
        words += (
            f"; {hosted.machines} machines share a prefix, so {hosted.location_misses:.0%} of the later turns "
            "reach one that has not seen the session (misses of location, not of content)"
        )
    if hosted.idle:
        words += (
            f"; turns are more than {cache.idle_minutes:g} minutes apart, so sessions are forgotten"
        )
    _say(console, words)
    _say(
        console,
        f"  terms: from {cache.minimum:,} tokens in steps of {cache.step}, {cache.discount:.0%} off, writes "
        f"+{cache.write_surcharge:.0%}, {cache.machine_rate:g} requests a minute a machine ({SOURCE})",
        "dim",
    )


def _constants(advice: Advice) -> tuple[Constant, ...]:
    from kvtier.cost.prefill import vram_constant
    from kvtier.cost.slow_links import slow_link

    card = advice.means.card
    link = slow_link("pinned", card, advice.constants).constants
    return (*advice.constants.pick(*CONSTANTS, vram_constant(card)), *link)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
