"""``kvtier run``: one prompt through a tiered cache, measured, explained and compared."""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvtier.announce import plain_record
from kvtier.cli.display import Display
from kvtier.cli.generate import Driver, Generation, chunk_calls, stop_tokens
from kvtier.cli.history import Call, History, Run, Source
from kvtier.cli.inputs import load_model, need_transformers, numerics, prompt_ids
from kvtier.cli.options import RunOptions
from kvtier.cli.report import LINKS, Report
from kvtier.cli.sizing import Sizes, plan_sizes
from kvtier.cli.verify import Comparison, compare, reference, tolerance_of
from kvtier.cost.tier_load import Expected, TierLoad, card_of, moved_load
from kvtier.errors import OffloadWarning

#: Time for the pages of a whole run to be acknowledged by a slow disk.
FLUSH_S = 300.0


def run(options: RunOptions) -> int:
    """Run and print; returns the exit status, 1 if a comparison failed.

    Raises:
        ConfigError: an option does not fit the model or the prompt.
    """
    from rich.console import Console

    console = Console(stderr=options.json)
    said: list[dict[str, Any]] = []

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        """They are in the report; printed by Python they would tear the live view."""
        text = str(message)
        said.append(dict(getattr(message, "record", None) or plain_record(text)))
        display.say(text, "yellow")

    with warnings.catch_warnings(), Display(console, quiet=options.json) as display:
        warnings.simplefilter("always", OffloadWarning)
        warnings.showwarning = show
        report = _Job(options, display).run()
    report.warnings = said
    if options.json:
        print(report.as_json())
    else:
        report.render(console)
    sys.stdout.flush()
    return 1 if report.failed else 0


@dataclass(frozen=True)
class _Outcome:
    """What a run did, for the report and for the comparison.

    Attributes:
        generation: what came out.
        restored: tokens of the prompt that the store had.
        source: how those were computed.
        calls: forward calls of the prefill.
        moved: bytes over each link for one decoded token.
    """

    generation: Generation
    restored: int
    source: Source
    calls: list[Call]
    moved: dict[str, float]


class _Job:
    """One run: a model, a prompt, and what to do with them."""

    def __init__(self, options: RunOptions, display: Display) -> None:
        self.options = options
        self.display = display

    def run(self) -> Report:
        need_transformers()
        from kvtier.devices import open_device
        from kvtier.integrations.transformers import TieredCache, layout_of
        from kvtier.integrations.transformers.weights import weights_read
        from kvtier.store.store import TieredStore

        options = self.options
        with ExitStack() as stack:
            device = open_device(options.device)
            stack.callback(device.close)
            self.model, tokenizer = load_model(options, self.display)
            self.model.to(device.torch_device)
            self.ids = prompt_ids(options, tokenizer, self.model).to(device.torch_device)
            self.layout = layout_of(
                self.model,
                page_tokens=options.page_tokens,
                summaries=options.mode.startswith("select:"),
            )
            plan = plan_sizes(options, self.layout, self.ids.shape[1])
            self.weight_bytes = weights_read(self.model)
            self.card = card_of(device)
            expected = self._expected(options.max_new_tokens)
            store = stack.enter_context(
                TieredStore(
                    self.layout,
                    device=device,
                    vram=plan.vram,
                    host=plan.host,
                    disk=plan.disk,
                    path=options.store,
                    policy=options.policy,
                    host_codec=options.host_codec,
                    disk_codec=options.disk_codec,
                    expect=expected,
                )
            )
            planned = store.foresee(expected)
            columns = expected.tokens if options.mode == "auto" else 0
            cache = stack.enter_context(
                TieredCache(self.model, store, mode=options.mode, columns=columns)
            )
            self.mode = cache.mode
            if cache.mode_choice:
                self.display.say(cache.mode_choice)
            self.display.watch(store.stats)
            record = Run(
                identity=cache.identity.digest.hex(),
                numerics=numerics(self.model, device.name) + _mode_suffix(self.mode),
                tokens=self.ids[0].tolist(),
                prompt_tokens=self.ids.shape[1],
            )
            history = History(options.store) if options.store and plan.disk else None
            outcome = self._generate(cache, store, plan, history, record)
            since = time.perf_counter()
            cache.flush(FLUSH_S)
            flush_s = time.perf_counter() - since
            if history is not None:
                done = outcome.generation
                history.finish(record, done.tokens, done.ttft_s, outcome.restored)
            stats = store.stats()
            self.display.watch(lambda: stats)  # the store is about to close
            report = self._report(outcome, plan, cache, stats, device.name)
        report.text = tokenizer.decode(outcome.generation.tokens, skip_special_tokens=True)
        report.cold_ttft_s = record.cold_ttft_s
        report.flush_s = flush_s
        report.planned = planned
        if options.verify:
            report.comparison = self._compare(outcome)
        return report

    def _generate(
        self, cache: Any, store: Any, plan: Sizes, history: History | None, record: Run
    ) -> _Outcome:
        options, ids, prompt_tokens = self.options, self.ids, self.ids.shape[1]
        since = time.perf_counter()
        restored = cache.load_prefix(ids)
        calls = chunk_calls(restored, prompt_tokens, plan.chunk)
        source = Source([], [], True)
        if history is not None:
            record.calls = list(calls)
            restorable = (prompt_tokens - 1) // options.page_tokens * options.page_tokens
            source = history.begin(record, restored, restorable)
        if restored:
            self.display.say(f"restored {restored:,} of {prompt_tokens:,} tokens of the prompt")
        driver = Driver(self.model, cache)
        logits = driver.prefill(ids, calls, self.display.phase("prefill", prompt_tokens, restored))
        before = _link_bytes(store.stats())
        generation = driver.decode(
            logits,
            count=options.max_new_tokens,
            stop_ids=stop_tokens(self.model),
            keep_logits=options.verify,
            since=since,
            advance=self.display.phase("decode", options.max_new_tokens),
        )
        steps = max(1, len(generation.tokens) - 1)
        moved = {
            link: (nbytes - before[link]) / steps
            for link, nbytes in _link_bytes(store.stats()).items()
        }
        return _Outcome(generation, restored, source, calls, moved)

    def _report(
        self,
        outcome: _Outcome,
        plan: Sizes,
        cache: Any,
        stats: Any,
        device_name: str,
    ) -> Report:
        done, prompt_tokens = outcome.generation, self.ids.shape[1]
        kv_bytes = self.layout.sequence_bytes(prompt_tokens + len(done.tokens))
        measured: TierLoad | None = None
        if self.card is not None:
            card, link = self.card
            measured = moved_load(
                self.layout,
                card,
                self._expected(len(done.tokens)),
                link=link,
                link_bytes=outcome.moved["host->vram"],
                disk_bytes=outcome.moved["disk->host"],
            )
        return Report(
            model=self.options.model or "SmolLM2-135M-Instruct",
            device=device_name,
            policy=self.options.policy,
            mode=cache.mode,
            mode_choice=cache.mode_choice,
            pages_read=cache.pages_read,
            summary_bytes=cache.summary_bytes,
            page_tokens=self.options.page_tokens,
            chunk_tokens=plan.chunk,
            kv_bytes=kv_bytes,
            staging_bytes=cache.staging_bytes,
            prompt_tokens=prompt_tokens,
            restored_tokens=outcome.restored,
            generated_tokens=len(done.tokens),
            ttft_s=done.ttft_s,
            decode_tokens_per_s=done.decode_tokens_per_s,
            tiers=stats.tiers,
            links=stats.links,
            link_bytes_per_token=outcome.moved,
            measured=measured,
        )

    def _expected(self, new_tokens: int) -> Expected:
        """What the store is used for."""
        return Expected(self.ids.shape[1] + new_tokens, self.weight_bytes)

    def _compare(self, outcome: _Outcome) -> Comparison:
        self.display.say("the same with transformers' DynamicCache")
        calls = [*outcome.source.calls, *outcome.calls]
        theirs = reference(
            self.model,
            self.ids,
            source=outcome.source,
            restored=outcome.restored,
            calls=outcome.calls,
            tokens=self.options.max_new_tokens,
            stop_ids=stop_tokens(self.model),
            advance=self.display.phase("reference", sum(stop - start for start, stop in calls)),
        )
        return compare(
            outcome.generation,
            theirs,
            exact_source=outcome.source.exact,
            tolerance=tolerance_of(self.mode, self.model.dtype),
        )


def _mode_suffix(mode: str) -> str:
    """Pages that were decoded in another mode are not bit for bit those that a comparison would make."""
    return "" if mode == "exact-stream" else f", {mode}"


def _link_bytes(stats: Any) -> dict[str, int]:
    return {name: stats.links[name].bytes if name in stats.links else 0 for name in LINKS}
