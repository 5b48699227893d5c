"""kvtier's own trace format, version 1: what ``docs/trace-format.md`` describes.

JSON lines. The first is a header; each further one is an entry. Pages are numbered in the order of
their first appearance, and a number is given to a page once: an entry lists its pages as runs
``[first, count]`` of numbers, and the keys of those that are new. So a conversation of thousands of
pages costs one run and the few keys that its last turn added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvtier.errors import TraceError
from kvtier.trace.lines import Bad, Source, count, in_order, load_json, mapping, need, number
from kvtier.trace.trace import ADD, END, REMOVE, REQUEST, Hints, Trace, TraceBuilder

VERSION = 1
#: The header's field that says it is one; its value is the version.
MAGIC = "kvtier_trace"

KINDS = {"request": REQUEST, "add": ADD, "remove": REMOVE, "session_end": END}
#: Pages of an entry at most, so that a damaged run cannot fill the memory.
PAGES_MAX = 1 << 24

Record = dict[str, Any]


class Operation(NamedTuple):
    """A copy between tiers as it happened.

    Attributes:
        time_s: when it ended, on the clock of the entries.
        link: such as ``host->vram``.
        nbytes: payload.
        queue_s: seconds from when it was asked for until it began, as far as the host can tell.
        copy_s: seconds from then until its end was noticed.
        failed: it moved nothing usable.
    """

    time_s: float
    link: str
    nbytes: int
    queue_s: float
    copy_s: float
    failed: bool


def read_native(source: Source, page_tokens: int | None = None) -> Trace:
    """A trace that kvtier has recorded."""
    entries = _Entries(TraceBuilder(source.path.name, "kvtier"))
    header, cut = _scan(source, entries.take)
    trace = entries.builder.finish(
        page_tokens=page_tokens or header.page_tokens,
        page_bytes=header.page_bytes,
        skipped=source.skipped,
    )
    if entries.dropped:
        trace.notes.append(
            f"{entries.dropped} records were dropped while recording; hits may differ from the live store's"
        )
    if cut:
        trace.notes.append("the recording was cut off: its last line is not whole and was left out")
    return trace


def read_operations(source: Source) -> list[Operation]:
    """The tier operations of a trace, in the order in which they ended; empty if none were recorded.

    Raises:
        TraceError: not a kvtier trace, or more bad records than may be skipped.
    """
    found: list[Operation] = []

    def take(record: Record) -> None:
        if record.get("kind") == "op":
            link = need(record, "link")
            if not isinstance(link, str):
                raise Bad("link is not text")
            times = (number(need(record, name), name) for name in ("t", "queue_s", "copy_s"))
            time_s, queue_s, copy_s = times
            nbytes = count(need(record, "bytes"), "bytes")
            found.append(
                Operation(time_s, link, nbytes, queue_s, copy_s, bool(record.get("failed")))
            )

    _scan(source, take)
    return found


class _Header(NamedTuple):
    page_tokens: int
    page_bytes: int | None


def _scan(source: Source, take: Callable[[Record], None]) -> tuple[_Header, bool]:
    """The header, and whether the last line is cut off; hands every other record to ``take``."""
    header: _Header | None = None
    for line, text in source.lines():
        try:
            record = mapping(load_json(text))
            if header is None:
                header = _header(record)
            else:
                take(record)
        except Bad as error:
            if header is None:
                raise TraceError(f"{source.path}:{line}: {error}") from None
            if not text.endswith(b"\n"):
                return header, True  # what a crash leaves; every line before it is whole
            source.bad(line, str(error))
    if header is None:
        raise TraceError(f"{source.path}:1: the file is empty")
    return header, False


def _header(record: Record) -> _Header:
    version = need(record, MAGIC)
    if version != VERSION:
        raise Bad(f"{MAGIC} is {version!r}; this kvtier reads version {VERSION}")
    tokens = count(record.get("page_tokens", 1), "page_tokens")
    nbytes = count(record.get("page_bytes", 0), "page_bytes")
    return _Header(tokens or 1, nbytes or None)


class _Entries:
    """Puts entries into a builder."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.dropped = 0
        #: Key of each page number since the last start of the key table.
        self._keys: list[str] = []

    def take(self, record: Record) -> None:
        kind = record.get("kind", "request")
        if kind in ("op", "end"):
            return
        if kind == "keys":
            self._keys.clear()
        elif kind == "dropped":
            self.dropped += count(need(record, "records"), "records")
        elif isinstance(kind, str) and kind in KINDS:
            self._entry(record, KINDS[kind])
        else:
            known = ", ".join((*KINDS, "keys", "op", "dropped", "end"))
            raise Bad(f"kind is {str(kind)[:40]!r}; known are {known}")

    def _entry(self, record: Record, kind: int) -> None:
        time_s = in_order(number(need(record, "t"), "t"), self.builder.last_time)
        new = record.get("new", [])
        if not isinstance(new, list) or not all(type(key) is str for key in new):
            raise Bad("new is not a list of texts")
        at = count(record.get("at", len(self._keys)), "at")
        if new and at != len(self._keys):
            way = "go back" if at < len(self._keys) else "leave a gap"
            raise Bad(f"page numbers {way}: {at} is defined where {len(self._keys)} is next")
        self._keys.extend(new)
        try:
            fields = self._fields(record)
        except Bad:
            if new:
                del self._keys[at:]
            raise
        self.builder.add(time_s, kind=kind, chained=kind in (REQUEST, ADD), **fields)

    def _fields(self, record: Record) -> dict[str, Any]:
        """What ``TraceBuilder.add`` takes."""
        after = record.get("after")
        if after is not None and count(after, "after") >= len(self._keys):
            raise Bad(f"after is page {after}, which no line before defines")
        session = record.get("session")
        if session is not None and type(session) not in (str, int):
            raise Bad("session is neither text nor a whole number")
        return {
            "keys": self._pages(record, self._keys),
            "after": None if after is None else self._keys[after],
            "session": session,
            "tokens": count(record.get("tokens", 0), "tokens"),
            "output_tokens": count(record.get("output_tokens", 0), "output_tokens"),
            "hints": _hints(record["hints"]) if "hints" in record else None,
        }

    @staticmethod
    def _pages(record: Record, keys: list[str]) -> list[str]:
        """The keys that the runs of an entry name."""
        runs = need(record, "pages")
        if not isinstance(runs, list):
            raise Bad("pages is not a list of runs [first, count]")
        found: list[str] = []
        for run in runs:
            if not isinstance(run, list) or len(run) != 2:
                raise Bad("pages has a run that is not [first, count]")
            first, length = count(run[0], "the first page of a run"), count(run[1], "a run's count")
            if first + length > len(keys):
                raise Bad(
                    f"pages {first} to {first + length - 1} are not all defined by a line before"
                )
            if len(found) + length > PAGES_MAX:
                raise Bad(f"more than {PAGES_MAX} pages in an entry")
            found += keys[first : first + length]
        return found


def _hints(value: object) -> Hints:
    fields = mapping(value)
    priority = fields.get("priority")
    if priority is not None and type(priority) is not int:
        raise Bad("priority is not a whole number")
    times = {
        name: None if fields.get(name) is None else number(fields[name], name)
        for name in ("ttl_s", "next_use_s")
    }
    return Hints(priority, times["ttl_s"], times["next_use_s"])
