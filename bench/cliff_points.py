"""Published measurements against the cost model's predictions.

    python bench/cliff_points.py                    the three files of bench/data
    python bench/cliff_points.py FILE [FILE ...]    other files with the same columns
    python bench/cliff_points.py --json
    python bench/cliff_points.py --refit            solve each fitted constant on its row again

A file is told by its columns: tokens/s with weights or KV off the card (``mechanism``), time to first
token (``cold_ttft_ms``), or decode rates by engine and method (``lane``). Every row is listed: with its
prediction and error, or as flagged by the lint, or as not usable with what is missing. Rows that a
constant was fitted on (``bench/data/fits.csv``) are shown and do not count.

Exit status 1 if the median or the worst error is above ``--median`` or ``--worst`` (none by default).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from points import first_token, lanes, offload
from points.outcome import Outcome, mark_fitted, summarise, table

from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.errors import ConfigError

DATA = Path(__file__).resolve().parent / "data"
FILES = ("cliff_points.csv", "ttft_points.csv", "sparseengine_points.csv")

#: Kind of file -> columns without which a row cannot be read.
KINDS = {
    "offload": ("id", "gpu", "gpu_mem_bw_gbs", "host_link", "host_memory", "model", "weights_gb",
                "bytes_read_per_token_gb", "slow_fraction", "what_is_slow", "mechanism",
                "context_tokens", "batch", "before_tps", "after_tps", "source"),
    "first token": ("source", "hardware", "model", "prompt_tokens", "cold_ttft_ms", "warm_ttft_ms",
                    "warm_tier", "note"),
    "lanes": ("model", "gpu", "tp", "input_len", "lane", "batch", "decode_tps"),
}  # fmt: skip
TITLES = {
    "offload": "Tokens/s with weights or KV off the card",
    "first token": "Time to first token, ms",
    "lanes": "Decoding with full, selected and dropped KV, tokens/s of all sequences",
}
UNITS = "GB = 1e9 bytes, GiB = 2**30 bytes"

Engines = dict[str, dict[str, float]]

#: Rounds of solving for one constant after the other.
SWEEPS = 8


def read(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Kind and rows of a file; cells that a row lacks are empty.

    Raises:
        ConfigError: it cannot be read, or its columns are of no kind.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [{k: (v or "").strip() for k, v in row.items() if isinstance(k, str)
                     and not isinstance(v, list)} for row in reader]  # fmt: skip
            columns = set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a CSV file") from None
    for kind, needed in KINDS.items():
        if set(needed) <= columns:
            return kind, rows
    nearest = max(KINDS, key=lambda kind: len(columns & set(KINDS[kind])))
    missing = [name for name in KINDS[nearest] if name not in columns]
    raise ConfigError(f"{path} has no column {missing[0]!r}, which files of {nearest} rows have")


@functools.cache
def fits() -> list[dict[str, str]]:
    """What was fitted: constant, scope, value, how, key of the row.

    ``solved``: so that the row is reproduced. ``slope``: a published slope over several rows, rounded;
    none of them counts, though none is reproduced exactly.
    """
    with (DATA / "fits.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def engines() -> Engines:
    """Constants that hold for an engine or a workload only."""
    found: Engines = {}
    for fit in fits():
        if fit["scope"]:
            found.setdefault(fit["scope"], {})[fit["constant"]] = float(fit["value"])
    return found


def predict(
    kind: str, rows: Sequence[Mapping[str, str]], constants: Constants, own: Engines
) -> list[Outcome]:
    """Every row of a file, in its order."""
    found: list[Outcome] = []
    for row in rows:
        if kind == "offload":
            found.append(offload.predict(row, constants))
        elif kind == "first token":
            found += first_token.predict(row, constants)
        else:
            found.append(lanes.predict(row, constants, own))
    keys = {fit["row"]: fit["constant"] for fit in fits()}
    return mark_fitted(found, keys)


def extras(
    kind: str, rows: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]
) -> tuple[str, list[str]]:
    """What a file tells beside its single rows."""
    if kind == "offload":
        return "Which placement is faster", offload.orderings(rows, DEFAULTS)
    if kind == "lanes":
        lines = lanes.batch_tables(rows, outcomes, DEFAULTS)
        return "Gains at the matched and at the largest batch, measured (predicted)", lines
    return "", []


def refit() -> list[str]:
    """Each fitted constant from its row alone, the others as they are, until nothing moves."""
    todo = [fit for fit in fits() if fit["how"] == "solved"]
    constants, own = DEFAULTS, engines()
    places = [_row_of(fit) for fit in todo]
    values = [float(fit["value"]) for fit in todo]
    for _ in range(SWEEPS):
        for place, fit in enumerate(todo):
            error = functools.partial(_error, fit, places[place], constants, own)
            values[place] = _root(error, values[place])
            constants, own = _with(fit, values[place], constants, own)
    return [
        f"{fit['constant']:26} {fit['scope'] or 'default':10} used {float(fit['value']):<12.4g} "
        f"refitted {value:<12.4g} on {fit['row']}"
        for fit, value in zip(todo, values, strict=True)
    ]


def _with(
    fit: Mapping[str, str], value: float, constants: Constants, own: Engines
) -> tuple[Constants, Engines]:
    """The constants with another value of a fitted one."""
    name, scope = fit["constant"], fit["scope"]
    if scope:
        return constants, {**own, scope: {**own.get(scope, {}), name: value}}
    return constants.with_value(name, value), own


def _error(
    fit: Mapping[str, str], place: tuple[str, Mapping[str, str]], constants: Constants,
    own: Engines, value: float,
) -> float:  # fmt: skip
    """Error of the row that a constant is fitted on, with ``value`` for it."""
    kind, row = place
    outcomes = predict(kind, [row], *_with(fit, value, constants, own))
    found = next(one.error for one in outcomes if one.key == fit["row"])
    assert found is not None
    return found


def _row_of(fit: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """Kind and row that a constant was fitted on."""
    kind, rows = read(DATA / fit["file"])
    for row in rows:
        if any(one.key == fit["row"] for one in predict(kind, [row], DEFAULTS, engines())):
            return kind, row
    raise ConfigError(f"{fit['file']} has no row {fit['row']!r}; correct bench/data/fits.csv")


def _root(error: Callable[[float], float], start: float) -> float:
    """Where ``error`` is 0, by bisection of the logarithm around ``start``; else ``start``."""
    low, high = math.log(start / 4), math.log(start * 4)
    sign = error(math.exp(low))
    if sign * error(math.exp(high)) > 0:
        return start
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if error(math.exp(middle)) * sign > 0 else (low, middle)
    return math.exp((low + high) / 2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--refit", action="store_true")
    parser.add_argument("--median", type=float, default=math.inf, help="allowed median error")
    parser.add_argument("--worst", type=float, default=math.inf, help="allowed worst error")
    args = parser.parse_args(argv)
    if args.refit:
        print("\n".join(refit()))
        return 0
    results, every = [], []
    try:
        for path in args.files or [DATA / name for name in FILES]:
            kind, rows = read(path)
            outcomes = predict(kind, rows, DEFAULTS, engines())
            results.append((path, kind, rows, outcomes))
            every += outcomes
    except ConfigError as error:
        print(f"cliff_points: error: {error}", file=sys.stderr)
        return 2
    total = summarise(every)
    if args.json:
        print(json.dumps(_json(results, total), indent=1))
    else:
        for path, kind, rows, outcomes in results:
            print(table(f"{TITLES[kind]} ({path.name})", outcomes))
            title, lines = extras(kind, rows, outcomes)
            if lines:
                print("\n".join(["", title, "", *lines]))
        print("\nConstants fitted, and the rows that do not count for it:\n")
        for fit in fits():
            where = fit["scope"] or "kvtier.cost.constants"
            print(f"{fit['constant']:26} {float(fit['value']):<10.4g} {where:22} {fit['row']}")
        if total:
            print(f"\nAll files: {total.count} rows not used for fitting, median error "
                  f"{total.median:.1%}, worst {total.worst:.1%} ({total.worst_key}). {UNITS}.")  # fmt: skip
    bad = total is not None and (total.median > args.median or total.worst > args.worst)
    return int(bad)


def _json(
    results: list[tuple[Path, str, list[dict[str, str]], list[Outcome]]], total: object
) -> object:
    return {
        "units": UNITS,
        "files": [
            {
                "file": path.name,
                "kind": kind,
                "rows": [one.to_json() for one in outcomes],
                "summary": summary.to_json() if (summary := summarise(outcomes)) else None,
                "notes": extras(kind, rows, outcomes)[1],
            }
            for path, kind, rows, outcomes in results
        ],
        "fits": fits(),
        "summary": total.to_json() if hasattr(total, "to_json") else None,
    }


if __name__ == "__main__":
    sys.exit(main())
