"""What an emulated device did, as Chrome trace JSON.

The format is the "JSON Object Format" of the Trace Event documentation of Chromium, read by
chrome://tracing and Perfetto: complete events (``ph: X``) with times in microseconds, names of rows
as metadata (``ph: M``). The process "engines" shows what kept each engine busy, the process
"streams" the same operations by the stream that ordered them. Kernels may share an engine, and
events of one row must not overlap in part, so an engine has as many rows as it ran at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtier.devices.operations import TraceEntry

_ENGINES, _STREAMS = 1, 2


def chrome_trace(entries: Iterable[TraceEntry], name: str) -> dict[str, Any]:
    """Trace events of ``entries``, in the order of their start. ``name`` is the device's."""
    events: list[dict[str, Any]] = [
        _meta("process_name", _ENGINES, 0, f"{name}: engines"),
        _meta("process_name", _STREAMS, 0, f"{name}: streams"),
    ]
    rows: dict[tuple[int, str, int], int] = {}
    free: dict[str, list[float]] = {}
    for entry in sorted(entries, key=lambda e: (e.start_s, e.end_s)):
        lane = _lane(free.setdefault(entry.engine, []), entry)
        for process, what, number in ((_ENGINES, entry.engine, lane), (_STREAMS, entry.stream, 0)):
            row = rows.get((process, what, number))
            if row is None:
                row = rows[process, what, number] = len(rows) + 1
                title = what if number == 0 else f"{what} {number + 1}"
                events.append(_meta("thread_name", process, row, title))
            events.append(_event(entry, process, row))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"device": name, "time": "virtual, simulated and not measured"},
    }


def write_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Write a trace as JSON."""
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _lane(free: list[float], entry: TraceEntry) -> int:
    """The first row of the engine that is free when the operation starts."""
    for number, until in enumerate(free):
        if until <= entry.start_s:
            free[number] = entry.end_s
            return number
    free.append(entry.end_s)
    return len(free) - 1


def _event(entry: TraceEntry, process: int, row: int) -> dict[str, Any]:
    seconds = entry.end_s - entry.start_s
    args: dict[str, Any] = {
        "stream": entry.stream,
        "engine": entry.engine,
        "bytes": entry.nbytes,
        "waited_us": (entry.start_s - entry.submitted_s) * 1e6,
    }
    if seconds > 0:
        args["GB/s"] = entry.nbytes / seconds / 1e9
    if entry.error:
        args["error"] = entry.error
    return {
        "ph": "X",
        "name": entry.name,
        "cat": entry.kind,
        "pid": process,
        "tid": row,
        "ts": entry.start_s * 1e6,
        "dur": seconds * 1e6,
        "args": args,
    }


def _meta(what: str, process: int, row: int, title: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": title}}
