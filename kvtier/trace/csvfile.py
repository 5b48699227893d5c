"""Plain CSV: time (seconds), key, size (bytes); one access a line, a header line if there is one.

The columns may come in another order if a header names them (``time`` or ``timestamp``, ``key`` or
``id``, ``size`` or ``bytes``). A key is any text. Keys are pages without a sequence: each stands
alone, so that prefix hits are plain hits.
"""

from __future__ import annotations

import csv

from kvtier.trace.lines import Bad, Source, count, in_order, number
from kvtier.trace.trace import Trace, TraceBuilder

_NAMES = {
    "time": 0, "timestamp": 0, "t": 0,
    "key": 1, "id": 1, "obj": 1,
    "size": 2, "bytes": 2, "nbytes": 2,
}  # fmt: skip


def read_csv(source: Source, page_tokens: int | None = None) -> Trace:
    """A CSV trace; a key is one page of ``page_tokens`` tokens (1 by default)."""
    builder = TraceBuilder(source.path.name, "csv")
    order = [0, 1, 2]
    tokens = page_tokens or 1
    for number_, line in source.lines():
        try:
            row = _row(line)
            columns = header(row)
            if columns is not None and not len(builder) and not source.skipped:
                order = columns
                continue
            if len(row) <= max(order):
                raise Bad(f"{len(row)} columns; time, key and size are needed")
            time_s = number(_value(row[order[0]], "time"), "time")
            size = count(_value(row[order[2]], "size"), "size")
            key = row[order[1]].strip()
            if not key:
                raise Bad("the key is empty")
            in_order(time_s, builder.last_time)
        except Bad as error:
            source.bad(number_, str(error))
        else:
            builder.add(time_s, [key], tokens=tokens, size=size, chained=False)
    return builder.finish(page_tokens=tokens, skipped=source.skipped)


def header(row: list[str]) -> list[int] | None:
    """Columns of time, key and size, if the row names them."""
    found: dict[int, int] = {}
    for at, name in enumerate(row):
        meaning = _NAMES.get(name.strip().lower())
        if meaning is not None:
            found.setdefault(meaning, at)
    return [found[0], found[1], found[2]] if len(found) == 3 else None


def _row(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()]), [])
    except UnicodeDecodeError:
        raise Bad("not UTF-8") from None
    except csv.Error as error:
        raise Bad(f"not CSV: {error}") from None


def _value(text: str, name: str) -> float | int:
    try:
        return float(text)
    except ValueError:
        raise Bad(f"{name} is {text[:40]!r}, not a number") from None
