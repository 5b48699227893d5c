"""Rows of ``sparseengine_points.csv``: decode rates of engines with all KV read, with some of it
selected, and with most of it dropped.

What a method reads comes from its published settings (``lanes.csv``); what an engine spends a step
beside reading, from one row each (``fits.csv``).
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.cost.batches import kv_pool, largest
from kvtier.cost.constants import Constants
from kvtier.cost.modes import decode_estimate
from kvtier.cost.workload import Mode, Selection, Workload
from points.outcome import Outcome, unusable
from points.text import bits_of, card_of, model_of, number

Row = Mapping[str, str]

#: Tokens generated before the middle of what was timed: 32 to warm up, 256 timed.
GENERATED = 32 + 128

#: Tokens generated in all, which have to fit.
OUTPUT = 2048

SETTINGS = Path(__file__).resolve().parent.parent / "data" / "lanes.csv"


@functools.cache
def settings() -> dict[str, dict[str, str]]:
    """Method -> what it reads and keeps."""
    with SETTINGS.open(newline="") as file:
        return {row["lane"]: row for row in csv.DictReader(file)}


def key_of(row: Row) -> str:
    return f"{row['model']} {row['input_len']} {row['lane']} x{row['batch']}"


def predict(row: Row, constants: Constants, engines: Mapping[str, Mapping[str, float]]) -> Outcome:
    """Tokens/s of all sequences.

    Args:
        engines: engine -> constants that are its own.
    """
    key = key_of(row)
    measured = number(row["decode_tps"])
    if not measured:
        return unusable(key, "decode_tps is not stated")
    found = workload(row)
    if isinstance(found, str):
        return unusable(key, found)
    work, mode = found
    engine = row["lane"].partition("-")[0]
    for name, value in {**engines.get("all", {}), **engines.get(engine, {})}.items():
        constants = constants.with_value(name, value, f"fitted for {engine}")
    got = decode_estimate(work, mode, constants=constants)
    rule = f"{mode}, {work.gpus} x {work.card.name}"
    return Outcome(key, "point", "tokens/s", measured, got.tps, got.low, got.high, rule)


def workload(row: Row) -> tuple[Workload, Mode] | str:
    """What the row decoded and by which mode, or why that is not known."""
    card, model = card_of(row["gpu"]), model_of(row["model"])
    method = row["lane"].rpartition("-")[2]
    known = settings()
    if card is None:
        return f"{row['gpu']!r} is not in the table of cards"
    if model is None:
        return f"{row['model']!r} is not in the table of models"
    if method not in known:
        return f"what method {method!r} reads is not known; add it to lanes.csv"
    tokens, batch = number(row["input_len"]), number(row["batch"])
    if not tokens or not batch:
        return "input_len or batch is not stated"
    read = known[method]
    mode: Mode = "vram"
    selection = Selection()
    if int(read["tokens"]):
        mode = "select" if read["keeps"] == "all" else "evict"
        kept = int(read["tokens"]) + (GENERATED if mode == "evict" else 0)
        selection = Selection(
            kept, int(read["page_tokens"]), float(read["summaries"]), float(read["dense_share"])
        )
    work = Workload(
        model, card, int(tokens) + GENERATED, int(batch), weight_bits=bits_of(row["model"]),
        gpus=int(number(row["tp"]) or 1), selection=selection,
    )  # fmt: skip
    return work, mode


def batch_tables(
    rows: Sequence[Row], outcomes: Sequence[Outcome], constants: Constants
) -> list[str]:
    """Matched and largest batch, measured (and predicted): what selecting and what dropping gains,
    each against full attention of the first engine that has it. Two comparisons, because the second
    is of different numbers of sequences."""
    lines = []
    groups: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    said = {one.key: one.predicted for one in outcomes}
    for row in rows:
        rate, batch = number(row["decode_tps"]), number(row["batch"])
        if rate and batch:
            groups.setdefault((row["model"], row["input_len"]), {})[row["lane"], int(batch)] = rate
    for (model, length), rates in groups.items():
        base = next((lane for lane, _ in rates if lane.endswith(("vanilla", "dense"))), None)
        if base is None:
            continue
        most = {lane: max(b for name, b in rates if name == lane) for lane, _ in rates}
        first = next(row for row in rows if (row["model"], row["input_len"]) == (model, length))
        lines.append(f"{model}, {length} tokens; {base} runs at most {most[base]} sequences")
        for lane in most:
            if lane == base:
                continue

            gain = functools.partial(_gain, first, rates, said, lane, base)
            same = sorted(b for name, b in rates if name == lane and (base, b) in rates)
            matched = ", ".join(f"{gain(b, b)} at {b}" for b in same)
            top = gain(most[lane], most[base])
            found = workload({**first, "lane": lane})
            fits = ""
            if not isinstance(found, str):
                work, mode = found
                # The whole run has to fit, not the part that was timed.
                kept = work.selection
                if mode == "evict":
                    kept = replace(kept, tokens=kept.tokens - GENERATED + OUTPUT)
                whole = replace(work, context=int(length) + OUTPUT, selection=kept)
                count = largest(whole, mode, kv_pool(work, constants))
                fits = f"; predicted to fit {count}"
                fits += ", as many as all KV does" if mode == "select" else ""
            lines.append(
                f"  {lane}: matched batch {matched or 'not measured'}; largest batch {top} with "
                f"{most[lane]} against {most[base]} sequences{fits}"
            )
    return lines


def _gain(
    row: Row, rates: Mapping[tuple[str, int], float], said: Mapping[str, float | None],
    lane: str, base: str, batch: int, other: int,
) -> str:  # fmt: skip
    """Measured (predicted) factor of one method at ``batch`` over another at ``other``."""
    mine, its = (
        said.get(key_of({**row, "lane": name, "batch": str(count)}))
        for name, count in ((lane, batch), (base, other))
    )
    seen = f"{rates[lane, batch] / rates[base, other]:.2f}x"
    return f"{seen} ({mine / its:.2f}x)" if mine and its else seen
