"""What ``kvtier replay`` prints for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvtier.replay.find_size import SizeFound
from kvtier.replay.headroom import Headroom
from kvtier.replay.machines import MachinesCell
from kvtier.replay.tier import Cell
from kvtier.replay.tiers import TiersCell
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.cli.replay import Replayed


def report(done: Replayed) -> None:
    """Print everything to stdout."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    _trace(console, done)
    if done.headroom:
        _headroom(console, done)
    gaps = {row.pages: row for row in done.headroom}
    cells = done.cells
    if plain := [cell for cell in cells if isinstance(cell, Cell)]:
        console.print(_cells(plain, gaps), "")
    if tiers := [cell for cell in cells if isinstance(cell, TiersCell)]:
        console.print(_tiers(tiers), "")
    if machines := [cell for cell in cells if isinstance(cell, MachinesCell)]:
        console.print(_machines(machines), "")
    if done.found:
        console.print(_found(done.found, done), "")
    if any(cell.times for cell in done.cells):
        console.print(_times(done.cells), "")
        assert done.basis is not None
        console.print("basis: " + ", ".join(f"{k} {v}" for k, v in done.basis.items()))
    for note in done.trace.notes:
        console.print(f"note: {note}")


def _trace(console: Console, done: Replayed) -> None:
    trace = done.trace
    refs = trace.block_refs
    size = f" ({format_size(trace.page_bytes)})" if trace.page_bytes else ""
    console.print(
        f"{trace.name} ({trace.format}): {trace.requests:,} requests in {trace.span_s:,.0f} s, {refs:,} blocks "
        f"of {trace.page_tokens} tokens{size} asked for, {trace.unique_pages:,} of them different"
    )
    share = done.infinite_hits / max(1, refs)
    console.print(f"with room for everything {_percent(share)} would hit\n")


def _headroom(console: Console, done: Replayed) -> None:
    table = _table("what there is to gain (prefix hits of one tier)", "blocks", "of all")
    for name in ("lru", "optimum", "best possible gain"):
        table.add_column(name, justify="right")
    for row in done.headroom:
        refs = max(1, row.block_refs)
        table.add_row(
            f"{row.pages:,}", _percent(row.share), _percent(row.lru_prefix_hits / refs),
            _percent(row.opt_prefix_hits / refs), f"{row.gain_points:.2f} points",
        )  # fmt: skip
    console.print(table)
    best = max(done.headroom, key=lambda row: row.gain_points)
    if best.gain_points < 1:
        console.print(
            "no policy can gain a point over lru at these sizes; only more room or other traffic can"
        )
    console.print()


def _cells(cells: Sequence[Cell], gaps: dict[int, Headroom]) -> Table:
    table = _table("policies", "policy", "blocks")
    names = ("prefix hits", "ratio", "raw ratio", "tokens", "of the gap", "evicted", "accesses/s")
    for name in names:
        table.add_column(name, justify="right")
    for cell in cells:
        gap = gaps.get(cell.pages)
        closed = gap.closed_by(cell) if gap is not None else None
        table.add_row(
            cell.policy, f"{cell.pages:,}", f"{cell.prefix_hits:,}", _percent(cell.prefix_ratio),
            _percent(cell.raw_ratio), _percent(cell.token_ratio),
            "-" if closed is None else f"{100 * closed:.1f} %", f"{cell.evicted:,}",
            f"{cell.accesses_per_s:,.0f}",
        )  # fmt: skip
    return table


def _tiers(cells: Sequence[TiersCell]) -> Table:
    table = _table("policies over all tiers", "policy", "tier")
    for name in ("blocks", "hits", "ratio", "tokens", "bytes hit", "came", "evicted"):
        table.add_column(name, justify="right")
    for cell in cells:
        for name, tier in cell.tiers.items():
            table.add_row(
                cell.policy, name, f"{tier.pages:,}", f"{tier.hits:,}", _percent(tier.hit_ratio),
                _percent(tier.token_ratio), format_size(tier.hit_bytes), f"{tier.inserted:,}",
                f"{tier.evicted:,}",
            )  # fmt: skip
        moved = ", ".join(f"{link} {format_size(n)}" for link, n in cell.link_bytes.items() if n)
        table.add_row(
            cell.policy, "all", f"{cell.pages:,}", f"{cell.prefix_hits:,}",
            _percent(cell.prefix_ratio), _percent(cell.token_ratio), "", "", "",
            end_section=True,
        )  # fmt: skip
        refused = f"; {cell.refused:,} blocks found no room" if cell.refused else ""
        table.caption = (f"{table.caption}\n" if table.caption else "") + (
            f"{cell.policy} moved {moved or 'nothing'}{refused}"
        )
    table.caption_justify = "left"
    return table


def _machines(cells: Sequence[MachinesCell]) -> Table:
    first = cells[0]
    title = f"{first.machines} machines, router {first.router}"
    if first.overflow_per_min is not None:
        title += f", overflow beyond {first.overflow_per_min:g} requests/min"
    table = _table(title, "policy", "blocks each")
    names = ("shared", "local", "from shared", "elsewhere", "nowhere", "hit ratio", "overflowed")
    for name in names:
        table.add_column(name, justify="right")
    for cell in cells:
        refs = max(1, cell.block_refs)
        table.add_row(
            cell.policy, f"{cell.pages:,}", f"{cell.shared_pages:,}",
            *(
                _percent(n / refs)
                for n in (
                    cell.local_hits, cell.shared_hits, cell.location_misses, cell.content_misses,
                )
            ),
            _percent(cell.prefix_ratio), f"{cell.overflowed:,}",
        )  # fmt: skip
    table.caption = (
        "elsewhere: misses for content that another machine has (location); nowhere: content"
    )
    table.caption_justify = "left"
    return table


def _found(found: Sequence[SizeFound], done: Replayed) -> Table:
    table = _table(f"smallest tier with {_percent(found[0].target)} prefix hits", "policy")
    for name in ("blocks", "of all", "bytes", "ratio there"):
        table.add_column(name, justify="right")
    for row in found:
        if row.pages is None:
            table.add_row(row.policy, "none", "", "", f"{_percent(row.prefix_ratio)} at most")
            continue
        size = done.trace.page_bytes
        share = row.pages / max(1, done.trace.unique_pages)
        table.add_row(
            row.policy, f"{row.pages:,}", _percent(share),
            format_size(row.pages * size) if size else "-", _percent(row.prefix_ratio),
        )  # fmt: skip
    return table


def _times(cells: Sequence[Any]) -> Table:
    table = _table("predicted, one request at a time", "policy", "blocks")
    for name in ("TTFT mean", "p50", "p95", "without cache", "prompt tokens/s", "decode tokens/s"):
        table.add_column(name, justify="right")
    for cell in cells:
        t = cell.times
        table.add_row(
            cell.policy, f"{cell.pages:,}",
            *(f"{s:.3f} s" for s in (t.ttft_mean_s, t.ttft_p50_s, t.ttft_p95_s, t.recompute_mean_s)),
            f"{t.prompt_tokens_per_s:,.0f}", f"{t.decode_tokens_per_s:.1f}",
        )  # fmt: skip
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
