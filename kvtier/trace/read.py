"""Reading a trace: which format a file has, and its reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError, TraceError
from kvtier.trace.csvfile import header, read_csv
from kvtier.trace.lines import Bad, Source, load_json
from kvtier.trace.mooncake import read_bailian, read_mooncake
from kvtier.trace.native import MAGIC, read_native
from kvtier.trace.sessions import GAP_S, read_sessions
from kvtier.trace.trace import Trace
from kvtier.trace.vllm_events import (
    looks_like_json,
    looks_like_msgpack,
    read_vllm_json,
    read_vllm_msgpack,
)

Reader = Callable[[Source, int | None], Trace]

READERS: dict[str, Reader] = {
    "kvtier": read_native,
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "vllm-json": read_vllm_json,
    "vllm-msgpack": read_vllm_msgpack,
    "csv": read_csv,
}
#: All names of formats.
FORMATS = (*READERS, "kv-cache-tester")


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",
    skip_bad: int = 0,
    page_tokens: int | None = None,
    session_gap_s: float = GAP_S,
) -> Trace:
    """A trace from a file, plain or gzip, or from a folder of kv-cache-tester sessions.

    Args:
        format: one of ``FORMATS``, or ``auto`` to tell by the content.
        skip_bad: bad records that may be left out.
        page_tokens: tokens of a page, where the file does not say or is not to be believed.
        session_gap_s: seconds between the starts of sessions (kv-cache-tester only).

    Raises:
        TraceError: the file cannot be read; names file, line and reason.
        ConfigError: an unknown format, or a number out of range.
    """
    path = Path(path)
    if format != "auto" and format not in FORMATS:
        raise ConfigError(f"the format {format!r} is unknown; known are {', '.join(FORMATS)}")
    if page_tokens is not None and page_tokens < 1:
        raise ConfigError(f"page_tokens is {page_tokens}; it must be 1 or more")
    if path.is_dir():
        return _folder(path, format, skip_bad, page_tokens, session_gap_s)
    source = Source(path, skip_bad)
    if format == "auto":
        format = detect(source)
    if format == "kv-cache-tester":
        trace = read_sessions([source], page_tokens, session_gap_s)
    else:
        trace = READERS[format](source, page_tokens)
    if not trace.requests:
        raise TraceError(f"{path}: there is no request in it (read as {format})")
    return trace


def _folder(path: Path, format: str, skip_bad: int, page_tokens: int | None, gap_s: float) -> Trace:
    if format not in ("auto", "kv-cache-tester"):
        raise TraceError(f"{path}: is a folder; only kv-cache-tester sessions come in folders")
    files = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
    if not files:
        raise TraceError(f"{path}: there is no *.json in the folder")
    budget = _Budget(skip_bad)
    sources = [_Shared(file, budget) for file in files]
    trace = read_sessions(sources, page_tokens, gap_s)
    if not trace.requests:
        raise TraceError(f"{path}: there is no request in it")
    return trace


class _Budget:
    """Bad records that all files of a folder together may have."""

    def __init__(self, skip_bad: int) -> None:
        self.left = skip_bad


class _Shared(Source):
    """A file of a folder."""

    def __init__(self, path: Path, budget: _Budget) -> None:
        super().__init__(path, max(0, budget.left))
        self._budget = budget

    def bad(self, line: int, reason: str) -> None:
        self.skip_bad = self.skipped + self._budget.left
        super().bad(line, reason)
        self._budget.left -= 1


def detect(source: Source) -> str:
    """The format of a file, by its first line.

    Raises:
        TraceError: the file is empty, or of no known format.
    """
    head = source.head()
    if not head.strip():
        reason = "the gzip data is damaged" if source.path.stat().st_size else "the file is empty"
        raise TraceError(f"{source.path}:1: {reason}")
    if looks_like_msgpack(head):
        return "vllm-msgpack"
    line = next((text for text in head.split(b"\n") if text.strip()), b"").strip()
    name = _json_format(line) if line[:1] in (b"{", b"[") else _csv_format(line)
    if name is None:
        raise TraceError(
            f"{source.path}:1: no known trace format; name one of {', '.join(FORMATS)} with --format"
        )
    return name


def _json_format(line: bytes) -> str | None:
    if looks_like_json(line):
        return "vllm-json"
    try:
        record = load_json(line)
    except Bad:
        # A line longer than the probe, one object over many lines, or one that is damaged.
        record = {name: None for name in _SIGNS if f'"{name}"'.encode() in line} or (
            {"requests": None} if line in (b"{", b"[") else {}
        )
    if not isinstance(record, dict):
        return None
    return next((format for name, format in _SIGNS.items() if name in record), None)


#: A field that only one format has -> the format; the first that is there decides.
_SIGNS = {
    MAGIC: "kvtier",
    "chat_id": "bailian",
    "requests": "kv-cache-tester",
    "block_size": "kv-cache-tester",
    "hash_ids": "mooncake",
    "timestamp": "mooncake",
}


def _csv_format(line: bytes) -> str | None:
    try:
        row = line.decode().split(",")
    except UnicodeDecodeError:
        return None
    if header(row) is not None:
        return "csv"
    try:
        float(row[0]), float(row[2])
    except (ValueError, IndexError):
        return None
    return "csv"
