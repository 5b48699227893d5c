"""``kvtier replay``: read the trace, run the replays, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtier.cli.replay_options import ReplayOptions
from kvtier.errors import ConfigError
from kvtier.replay.headroom import BASE, BEST, Headroom, headroom, infinite_prefix_hits
from kvtier.replay.sweep import FindJob, Job, MachinesJob, TierJob, TiersJob, run_jobs
from kvtier.trace.merge import merge_blocks
from kvtier.trace.read import read_trace
from kvtier.trace.trace import Trace

if TYPE_CHECKING:
    from kvtier.replay.cost import Predictor

EXIT_NOT_REACHED = 1


@dataclass
class Replayed:
    """Everything that is reported.

    Attributes:
        cells: one a policy and size. found: with --find-size, one a policy.
        infinite_hits: prefix hits with room for everything.
        basis: of predicted times.
    """

    trace: Trace
    infinite_hits: int
    headroom: list[Headroom]
    cells: list[Any]
    found: list[Any]
    basis: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        trace = self.trace
        return {
            "trace": {
                "name": trace.name,
                "format": trace.format,
                "requests": trace.requests,
                "block_refs": trace.block_refs,
                "unique_blocks": trace.unique_pages,
                "block_tokens": trace.page_tokens,
                "block_bytes": trace.page_bytes,
                "prompt_tokens": sum(trace.tokens),
                "span_s": trace.span_s,
                "infinite_prefix_hits": self.infinite_hits,
                "skipped": trace.skipped,
                "notes": trace.notes,
            },
            "headroom": [row.as_dict() for row in self.headroom],
            "cells": [cell.as_dict() for cell in self.cells],
            "find_size": [found.as_dict() for found in self.found],
            "basis": self.basis,
        }


def replay(options: ReplayOptions) -> int:
    """Run ``kvtier replay``; returns the exit status."""
    predictor = _predictor(options)
    trace = read_trace(
        options.trace,
        format=options.format,
        skip_bad=options.skip_bad,
        page_tokens=options.page_tokens,
        session_gap_s=options.session_gap_s,
    )
    if options.block_tokens is not None:
        trace = merge_blocks(trace, options.block_tokens)
        if not trace.block_refs:
            raise ConfigError(
                f"--block-tokens is {options.block_tokens}, more than any request has; give less"
            )
    given = options.page_bytes or (predictor.page_bytes(trace.page_tokens) if predictor else None)
    trace = replace(trace, page_bytes=given or trace.page_bytes)
    done = _run(trace, options, predictor)
    if options.plot is not None:
        _plot(done, options)
    if options.json:
        print(json.dumps(done.as_dict()))
    else:
        from kvtier.cli.replay_report import report

        report(done)
    reached = all(
        found.pages is not None for found in done.found if found.policy in options.policies
    )
    return 0 if reached else EXIT_NOT_REACHED


def _predictor(options: ReplayOptions) -> Predictor | None:
    if options.model is None or options.gpu is None:
        return None
    from kvtier.replay.cost import Predictor

    return Predictor(
        options.model, options.gpu, kv_dtype=options.kv_dtype, weight_bits=options.weight_bits
    )


def _run(trace: Trace, options: ReplayOptions, predictor: Predictor | None) -> Replayed:
    sizes = _sizes(trace, options)
    asked = _asked(trace, options, sizes)
    gap = _gap_jobs(trace, options, sizes)
    jobs: dict[Job, None] = dict.fromkeys([*gap, *asked])
    results = dict(zip(jobs, _with_progress(trace, list(jobs), options), strict=True))
    rows = [results[job] for job in gap]
    found = [r for r in results.values() if hasattr(r, "target")]
    cells = [results[job] for job in asked] if not found else []
    if predictor is not None:
        for cell in cells:
            cell.times = predictor.times(cell.served, _tokens(trace), trace.page_tokens)
    return Replayed(
        trace,
        infinite_prefix_hits(trace),
        headroom(trace, rows[::2], rows[1::2]) if rows and not found else [],
        cells,
        found,
        predictor.describe() if predictor is not None else None,
    )


def _sizes(trace: Trace, options: ReplayOptions) -> list[int]:
    """Pages of one tier, each size once."""
    shares = [max(1, round(share * trace.unique_pages)) for share in options.shares]
    return list(dict.fromkeys([*shares, *options.pages]))


def _asked(trace: Trace, options: ReplayOptions, sizes: Sequence[int]) -> list[Job]:
    """The replays that the options ask for, policy by policy."""
    order: Any = options.order
    jobs: list[Job] = []
    if options.tiers and trace.sizes is None:
        if trace.page_bytes is None:
            raise ConfigError(
                "sizes in bytes need the bytes of a block, which this trace does not tell; give --page-bytes, "
                "or --model and --gpu"
            )
    elif options.tiers and sum(1 for size in options.tiers.values() if size) > 1:
        raise ConfigError(
            "the blocks of this trace differ in size; replay them in one tier, one of --vram, --host and --disk"
        )
    for spec in options.policies:
        if options.find is not None:
            jobs.append(FindJob(spec, options.find, order, options.leaf_first))
        elif options.machines is not None:
            jobs += [
                MachinesJob(
                    spec, pages, options.machines, options.router, options.overflow_per_min,
                    shared, order,
                )
                for pages in sizes
                for shared in dict.fromkeys((0, options.shared_pages))
            ]  # fmt: skip
        elif options.tiers and trace.sizes is not None:
            size = next(size for size in options.tiers.values() if size)
            jobs.append(TierJob(spec, _mean_pages(trace, size), order, False, size))
        elif options.tiers:
            assert trace.page_bytes is not None
            jobs.append(
                TiersJob(
                    spec, tuple(options.tiers.items()), trace.page_bytes, order,
                    options.host_write, options.disk_write,
                )
            )  # fmt: skip
        else:
            jobs += [TierJob(spec, pages, order, options.leaf_first) for pages in sizes]
    return jobs


def _gap_jobs(trace: Trace, options: ReplayOptions, sizes: Sequence[int]) -> list[Job]:
    """The replays of ``lru`` and of the optimum, in turn, that say what there is to gain."""
    if not options.headroom:
        return []
    order: Any = options.order
    if options.find is not None:
        return [FindJob(spec, options.find, order) for spec in (BASE, BEST)]
    if options.tiers:
        if trace.sizes is not None or trace.page_bytes is None:
            return []
        sizes = [sum(size // trace.page_bytes for size in options.tiers.values())]
    many = options.machines or 1
    return [TierJob(spec, pages * many, order) for pages in sizes if pages for spec in (BASE, BEST)]


def _mean_pages(trace: Trace, size: int) -> int:
    assert trace.sizes is not None
    return max(1, size * len(trace.sizes) // max(1, sum(trace.sizes)))


def _tokens(trace: Trace) -> list[int]:
    """Prompt tokens of each entry; where a trace does not say, all tokens of its pages."""
    starts = trace.starts
    return [
        tokens or (starts[at + 1] - starts[at]) * trace.page_tokens
        for at, tokens in enumerate(trace.tokens)
    ]


def _with_progress(trace: Trace, jobs: Sequence[Job], options: ReplayOptions) -> list[Any]:
    if not sys.stderr.isatty():
        return run_jobs(trace, jobs, workers=options.workers)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{len(jobs)} replays", total=1.0)
        return run_jobs(
            trace,
            jobs,
            workers=options.workers,
            progress=lambda share: bar.update(task, completed=share),
        )


def _plot(done: Replayed, options: ReplayOptions) -> None:
    from kvtier.replay.plot import write_plot

    assert options.plot is not None
    cells = list(done.cells)
    known = {(cell.policy, cell.pages) for cell in cells}
    for row in done.headroom:
        for name, hits in ((BASE, row.lru_prefix_hits), (BEST, row.opt_prefix_hits)):
            if (name, row.pages) not in known:
                cells.append(replace(done.cells[0], policy=name, pages=row.pages, prefix_hits=hits))
    floor = 1 - done.infinite_hits / max(1, done.trace.block_refs)
    write_plot(options.plot, cells, f"{done.trace.name}: miss ratio", floor)
