"""``kvtier stress``: runs loads, shows them live, and prints what came out."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvtier.cli.chart import Chart, Mark, Series, write_chart
from kvtier.cli.stress_options import StressOptions
from kvtier.errors import OffloadWarning
from kvtier.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.stress.report import ContextResult, StressReport

_REFRESH_S = 0.25
_STYLES = {"severe": "bold red", "warning": "red", "notice": "yellow"}


def stress(options: StressOptions) -> int:
    """Run and print; returns the exit status, 1 if a context failed.

    Raises:
        ConfigError: a load does not fit the card; nothing was run.
    """
    import torch
    from rich.console import Console

    from kvtier.stress.run import run_load, sweep_vram

    # A run moves few bytes at a time: more threads only wait for each other.
    torch.set_num_threads(1)

    console = Console(stderr=options.json)
    reports: list[StressReport] = []
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        view = stack.enter_context(View(console, quiet=options.json))
        warnings.simplefilter("always", OffloadWarning)
        warnings.showwarning = lambda message, *_, **__: view.say(str(message), "yellow")
        for spec in options.loads:
            if spec.disk:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-stress-"))
                spec = replace(spec, path=Path(folder))
            view.load(spec.kv_dtype)
            trace = options.trace
            if trace is not None and len(options.loads) > 1:
                trace = trace.with_name(f"{trace.stem}-{spec.kv_dtype}{trace.suffix}")
            if options.target_tps is not None:
                report = sweep_vram(
                    spec, options.target_tps, watch=view.watch, done=view.done, trace=trace
                )
            else:
                report = run_load(spec, watch=view.watch, done=view.done, trace=trace)
            reports.append(report)
    failed = any(report.failed for report in reports)
    if options.json:
        print(json.dumps(_as_json(reports, failed), indent=2))
    else:
        for report in reports:
            render(report, console)
    if options.plot is not None:
        write_chart(chart(reports), options.plot)
    sys.stdout.flush()
    return 1 if failed else 0


class View:
    """A progress bar and a live table on a terminal; one line a context elsewhere.

    Args:
        console: where to write.
        quiet: write nothing unless ``console`` is a terminal.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = console
        self._quiet = quiet and not console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), console=console
        )
        self._task = self._progress.add_task("starting", total=1)
        self._live = Live(self._progress, console=console, transient=True)
        self._dtype = ""
        self._shown = 0.0

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def load(self, dtype: str) -> None:
        """A load begins."""
        self._dtype = dtype

    def say(self, text: str, style: str = "") -> None:
        if not self._quiet:
            self._console.print(
                text, style=style or None, markup=False, highlight=False, soft_wrap=True
            )

    def watch(self, phase: str, done: int, total: int, store: Any) -> None:
        """A step was done."""
        now = time.monotonic()
        if not self._console.is_terminal or now - self._shown < _REFRESH_S:
            return
        self._shown = now
        from rich.console import Group

        name = f"{phase} ({self._dtype} KV)"
        self._progress.update(self._task, description=name, completed=done, total=total)
        self._live.update(Group(self._progress, _live_table(store.stats())))

    def done(self, result: ContextResult) -> None:
        """A context is done."""
        self.say(
            f"{result.context:,} tokens, {self._dtype} KV: {result.emulated_tps:.2f} tokens/s "
            f"emulated, {result.predicted_tps:.2f} predicted, {result.steps} steps, "
            f"{result.cpu_s:.1f} CPU s" + (f"; {result.error}" if result.error else ""),
            "red" if result.error else "",
        )


def _live_table(stats: Any) -> Any:
    from rich.table import Table

    table = Table("tier", "pages", "full", "came", "went")
    for name, tier in stats.tiers.items():
        if tier.capacity_bytes:
            full = f"{tier.used_bytes / tier.capacity_bytes:.0%}"
            table.add_row(
                name,
                *(f"{n:,}" for n in (tier.pages,)),
                full,
                f"{tier.pages_in:,}",
                f"{tier.pages_out:,}",
            )
    return table


def render(report: StressReport, console: Console) -> None:
    """The end of a load, for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    size = "full size, no bytes" if not report.payload else f"1/{report.divisor} of full size"
    say("")
    say(
        f"{report.model}, {format_size(report.weight_bytes)} of weights"
        + (f" ({report.weights_off:.0%} behind the link)" if report.weights_off else "")
        + f", {report.kv_dtype} KV, {report.sessions} session(s), mode {report.mode}, policy {report.policy}, pages of "
        f"{report.page_tokens} tokens"
    )
    say(
        f"on an emulated {report.card}, {format_size(report.vram)} of VRAM in use, link {report.link}; "
        f"{size}; all rates simulated, none measured"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("context", "predicted", "emulated", "ratio", "slower", "", "bound", "cold pages"):
        table.add_column(name, justify="left" if name in ("", "bound") else "right", no_wrap=True)
    for r in report.contexts:
        table.add_row(
            f"{r.context:,}",
            f"{r.predicted_tps:.2f}",
            f"{r.emulated_tps:.2f}" if r.steps else "-",
            f"{r.ratio:.3f}" if r.steps else "-",
            f"{r.baseline_tps / r.predicted_tps:.1f}x",
            r.level if r.level != "none" else "",
            r.bound,
            f"{r.cold_pages:,} of {r.pages:,}",
            style=_STYLES.get(r.level),
        )
    console.print(table)
    say(
        "tokens/s of all sequences; slower: than with everything in VRAM; bound: what a step waits for"
    )
    for r in report.contexts:
        evicted = ", ".join(f"{n:,} pages from {name}" for name, n in r.evicted.items() if n)
        books = "the books add up" if not r.books else "the books do NOT add up"
        moved = [
            f"{format_size(nbytes / max(1, r.steps))} {name}"
            for name, nbytes in r.moved.items()
            if nbytes
        ]
        say(
            f"{r.context:,} tokens: evicted {evicted or 'nothing'}; a step moved "
            f"{', '.join(moved) or 'nothing'}; {books}"
        )
        if r.choice is not None:
            say(f"{r.context:,} tokens: mode {r.choice['text']}")
        if r.selected:
            say(f"{r.context:,} tokens: {_selected_words(r)}")
        if r.failures:
            told = ", ".join(f"{n} x {name}" for name, n in sorted(r.failures.items()))
            say(f"{r.context:,} tokens: {told}; sequences computed anew {r.rebuilt} time(s)")
        if r.error:
            say(f"{r.context:,} tokens: given up: {r.error}", "red")
        for text in r.books:
            say(f"{r.context:,} tokens: {text}", "red")
        for record in r.warnings:
            say(f"{r.context:,} tokens: {record['text']}", "yellow")
    checked = sum(r.checked_bytes for r in report.contexts)
    if report.payload:
        say(f"compared byte for byte: {format_size(checked)} of K and V that attention read")
    say(_cliff_words(report))
    if report.sweep is not None:
        _render_sweep(report, say)


def _selected_words(r: ContextResult) -> str:
    found, planned = r.selected, r.predicted_selected
    return (
        f"a layer chose {found['budget']:.0f} pages a head, {found['planes']:.1f} in all, {found['cold']:.1f} of them not "
        f"in VRAM ({planned['cold']:.1f} predicted), {found['late']:.1f} of those not sent ahead; {found['churn']:.0%} "
        f"were new each step; summaries take {format_size(r.vram.get('summaries', 0))} of VRAM"
    )


def _cliff_words(report: StressReport) -> str:
    cliff = report.cliff
    fits = (
        f"everything fits in VRAM up to {cliff.fits:,} tokens"
        if cliff.fits
        else "not everything is in VRAM at any context"
    )
    levels = [f"{name} from {at:,}" for name, at in cliff.begins.items() if at is not None]
    words = f"the cliff: {fits}" + (
        f"; slower than in VRAM: {', '.join(levels)} tokens" if levels else ""
    )
    return words + (f"; too long from {cliff.limit:,}" if cliff.limit is not None else "")


def _render_sweep(report: StressReport, say: Any) -> None:
    sweep = report.sweep
    assert sweep is not None
    assert sweep.vram is not None
    below = (
        f"{sweep.below_tps:.2f} with {format_size(sweep.step)} less"
        if sweep.below_tps is not None
        else f"does not run with {format_size(sweep.step)} less"
    )
    say(
        f"{sweep.target_tps:g} tokens/s at {sweep.context:,} tokens needs {format_size(sweep.vram)} "
        f"of usable VRAM on this card: {sweep.emulated_tps:.2f} emulated, {sweep.predicted_tps:.2f} "
        f"predicted, {below}"
    )
    cards = [f"{name} ({format_size(vram)}, {tps:.1f}/s)" for name, vram, tps in sweep.cards]
    say("smallest cards of the table that meet it by prediction: " + (", ".join(cards) or "none"))


def _as_json(reports: list[StressReport], failed: bool) -> dict[str, Any]:
    loads = [report.as_dict() for report in reports]
    said = [one for load in loads for one in load["warnings"]]
    said += [one for load in loads for context in load["contexts"] for one in context["warnings"]]
    return {"loads": loads, "failed": failed, "warnings": said}


def chart(reports: list[StressReport]) -> Chart:
    """Tokens/s over context, predicted and emulated."""
    series = []
    for report in reports:
        name = f"{report.kv_dtype} KV"
        ran = [r for r in report.contexts if r.steps]
        series += [
            Series(
                f"{name}, predicted",
                [(r.context, r.predicted_tps) for r in report.contexts],
                style="dashes",
            ),
            Series(f"{name}, emulated", [(r.context, r.emulated_tps) for r in ran], style="dots"),
        ]
    return Chart(
        title=f"{reports[0].model} on an emulated {reports[0].card}",
        series=series,
        y="tokens/s (simulated)",
        marks=[
            Mark(at, f"{name} from {at:,}")
            for name, at in reports[0].cliff.begins.items()
            if at is not None
        ],
    )
