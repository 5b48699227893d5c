"""Sessions of coding agents in the format of kv-cache-tester.

One JSON object a session, one file each (a folder of them is one trace) or one a line: ``id``,
``block_size``, ``hash_id_scope`` (``global``: equal ids mean equal blocks in all sessions; else ids
count within the session) and ``requests``, each with ``t`` (seconds since the session began), ``in``
and ``out`` (tokens) and ``hash_ids``. An entry of type ``subagent`` has ``requests`` of its own; they
become a session beside their parent. Sessions say nothing of when they began: session i is started
``gap_s * i`` seconds into the trace, in the order of file names or lines.

Source of the format: callanjfox/kv-cache-tester, docs/trace_replay_tester.md and its traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvtier.errors import ConfigError, TraceError
from kvtier.trace.lines import Bad, Source, count, ids, load_json, mapping, need, number
from kvtier.trace.trace import Trace, TraceBuilder

#: Seconds between the starts of two sessions.
GAP_S = 60.0
_DEPTH_MAX = 16


class _Request(NamedTuple):
    time_s: float
    session: str
    keys: list[Any]
    tokens: int
    output: int


class _Session(NamedTuple):
    block: int
    requests: list[_Request]


def read_sessions(
    sources: Sequence[Source], page_tokens: int | None = None, gap_s: float = GAP_S
) -> Trace:
    """All sessions of all files, merged by time.

    Raises:
        ConfigError: ``gap_s`` is negative, or the sessions have different block sizes.
    """
    if not 0 <= gap_s < float("inf"):
        raise ConfigError(f"the gap between sessions is {gap_s!r}; it must be >= 0 seconds")
    requests: list[_Request] = []
    block, first, index = 0, "", 0
    for source in sources:
        for number_, session in _sessions(source, index):
            if block and session.block != block:
                raise TraceError(
                    f"{source.path}:{number_}: block_size is {session.block}, but {block} in {first}; "
                    "replay sessions of one block size at a time"
                )
            block, first = session.block, first or str(source.path)
            start = gap_s * index
            requests += [r._replace(time_s=r.time_s + start) for r in session.requests]
            index += 1
    requests.sort(key=lambda r: r.time_s)
    name = sources[0].path.name if len(sources) == 1 else sources[0].path.parent.name
    builder = TraceBuilder(name, "kv-cache-tester")
    for r in requests:
        builder.add(r.time_s, r.keys, tokens=r.tokens, output_tokens=r.output, session=r.session)
    trace = builder.finish(
        page_tokens=page_tokens or block or 1, skipped=sum(s.skipped for s in sources)
    )
    if index > 1:
        trace.notes.append(
            f"{index} sessions, started {gap_s:g} s apart; that spacing is an assumption"
        )
    return trace


def _sessions(source: Source, index: int) -> Iterator[tuple[int, _Session]]:
    """The sessions of a file with their lines: one a line, or one over many lines."""
    lines = list(source.lines())
    try:
        many = len(lines) > 1 and "requests" in mapping(load_json(lines[0][1]))
    except Bad:
        many = False
    texts = lines if many else [(1, b"".join(line for _, line in lines))] if lines else []
    for at, (number_, text) in enumerate(texts):
        try:
            session = _session(load_json(text), index + at)
        except Bad as error:
            source.bad(number_, str(error))
        else:
            yield number_, session


def _session(value: Any, index: int) -> _Session:
    fields = mapping(value)
    block = count(need(fields, "block_size"), "block_size")
    if not block:
        raise Bad("block_size is 0")
    name = f"{index}"
    local = name if fields.get("hash_id_scope") != "global" else None
    found: list[_Request] = []
    _collect(need(fields, "requests"), name, local, found, 0)
    return _Session(block, found)


def _collect(
    entries: object, name: str, local: str | None, found: list[_Request], depth: int
) -> None:
    if not isinstance(entries, list):
        raise Bad("requests is not a list")
    if depth > _DEPTH_MAX:
        raise Bad(f"subagents are nested more than {_DEPTH_MAX} deep")
    last = 0.0
    for at, entry in enumerate(entries):
        fields = mapping(entry)
        try:
            time_s = number(need(fields, "t"), "t")
            if fields.get("type") == "subagent":
                _collect(need(fields, "requests"), f"{name}.{at}", local, found, depth + 1)
                continue
            keys: list[Any] = list(ids(need(fields, "hash_ids"), "hash_ids"))
            tokens, output = (count(fields.get(f, 0), f) for f in ("in", "out"))
            if time_s < last:
                raise Bad(f"time goes back: {time_s:g} s after {last:g} s")
        except Bad as error:
            raise Bad(f"request {at + 1}: {error}") from None
        last = time_s
        if local is not None:
            keys = [(local, key) for key in keys]
        found.append(_Request(time_s, name, keys, tokens, output))
