"""KV cache events of vLLM (and of SGLang, which sends the same), as a request trace.

The file holds event batches as the publisher sends them: either the msgpack payloads (the third
frame of each message) one after another, as they are, or the same batches as JSON, one a line. A
batch is ``[ts, [event, ...], rank]`` or an object with ``ts`` and ``events``; an event is
``["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, ...]`` or an object with
``type`` and fields of those names. Hashes are integers, bytes or text. Token ids are not kept.

Events tell what an engine stored, not what it was asked for, so requests are reconstructed:

* ``BlockStored`` behind a block is a request for all blocks up to that one, and for the new ones.
* Behind the last block that was stored less than ``CONTINUE_S`` before, it continues that request
  (a further chunk of the prompt, or a generated block): an addition, not a lookup.
* A request that found all its blocks stores nothing and leaves no event. So hit ratios come out low.
* ``BlockRemoved`` is the engine's own eviction; a replay decides that anew.
* ``AllBlocksCleared`` drops everything.

Only the engine's own tier (medium GPU, or none named) and its first KV cache group are used.

Source of the format: vllm-project/vllm, vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

from kvtier.trace.lines import Bad, Source, count, in_order, load_json, mapping, need, number
from kvtier.trace.msgpack import Unpacker
from kvtier.trace.trace import ADD, REMOVE, Trace, TraceBuilder

#: Seconds within which a block stored behind the last one of a request belongs to it.
CONTINUE_S = 1.0

_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


def read_vllm_json(source: Source, page_tokens: int | None = None) -> Trace:
    """Batches as JSON lines."""
    return _read(source, page_tokens, _json)


def read_vllm_msgpack(source: Source, page_tokens: int | None = None) -> Trace:
    """Msgpack payloads, one after another; in errors a record's number stands for the line."""
    return _read(source, page_tokens, _msgpack)


def _json(source: Source) -> Iterator[tuple[int, Any]]:
    for line, text in source.lines():
        try:
            batch = load_json(text)
        except Bad as error:
            source.bad(line, str(error))
        else:
            yield line, batch


def _msgpack(source: Source) -> Iterator[tuple[int, Any]]:
    with source.open() as file:
        try:
            data = file.read()
        except (EOFError, OSError, zlib.error) as error:
            source.bad(1, f"the gzip data is damaged or cut off: {error}")
            return
    unpacker = Unpacker(data)
    record = 0
    while not unpacker.done:
        record += 1
        try:
            batch = unpacker.value()
        except Bad as error:
            source.bad(record, f"not msgpack, and nothing behind it can be read: {error}")
            return
        yield record, batch


def _read(
    source: Source,
    page_tokens: int | None,
    batches: Callable[[Source], Iterator[tuple[int, Any]]],
) -> Trace:
    requests = _Requests(TraceBuilder(source.path.name, "vllm"))
    for record, batch in batches(source):
        try:
            requests.batch(batch)
        except Bad as error:
            source.bad(record, str(error))
    trace = requests.builder.finish(
        page_tokens=page_tokens or requests.block or 1, skipped=source.skipped
    )
    trace.notes.append(
        "requests were reconstructed from what the engine stored; those that found all their blocks "
        "are not in it, so hit ratios come out low"
    )
    if requests.lost:
        trace.notes.append(
            f"{requests.lost} blocks follow one that the events never mention (events were lost, or "
            "began late); their prefixes are shorter than they were"
        )
    return trace


class _Requests:
    """Requests made from events."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.block = 0
        self.lost = 0
        self._parents: dict[Any, Any] = {}
        #: Last block of a request that may go on -> when it was stored.
        self._tips: dict[Any, float] = {}

    def batch(self, batch: Any) -> None:
        """One batch; all of it is checked before any of it counts."""
        if isinstance(batch, list):
            if len(batch) < 2:
                raise Bad(f"a batch of {len(batch)} fields; a time and a list of events are needed")
            ts, events = batch[0], batch[1]
        else:
            fields = mapping(batch)
            ts, events = need(fields, "ts"), need(fields, "events")
        time_s = in_order(number(ts, "ts"), self.builder.last_time)
        if not isinstance(events, list):
            raise Bad("events is not a list")
        checked = [_event(event) for event in events]
        for kind, fields in checked:
            if kind == "AllBlocksCleared":
                self._clear(time_s)
            elif kind == "BlockStored" and _own_tier(fields):
                self._stored(time_s, fields)

    def _stored(self, time_s: float, fields: dict[str, Any]) -> None:
        hashes, parent = fields["block_hashes"], fields.get("parent_block_hash")
        if not hashes:
            return
        self.block = self.block or fields["block_size"]
        goes_on = time_s - self._tips.pop(parent, float("-inf")) <= CONTINUE_S
        if parent is not None and parent not in self._parents:
            self.lost += 1
        prefix = self._chain(parent)
        before = parent
        for block in hashes:
            self._parents.setdefault(block, before)
            before = block
        self._tips[hashes[-1]] = time_s
        if len(self._tips) > 1 << 16:
            self._tips = {b: t for b, t in self._tips.items() if time_s - t <= CONTINUE_S}
        if goes_on:
            self.builder.add(time_s, hashes, kind=ADD, after=parent)
        else:
            keys = prefix + hashes
            self.builder.add(time_s, keys, tokens=len(keys) * self.block)

    def _chain(self, block: Any) -> list[Any]:
        """The block and all before it, root first."""
        chain: list[Any] = []
        seen: set[Any] = set()
        while block is not None and block in self._parents and block not in seen:
            seen.add(block)
            chain.append(block)
            block = self._parents[block]
        return chain[::-1]

    def _clear(self, time_s: float) -> None:
        self.builder.add(time_s, list(self._parents), kind=REMOVE, chained=False)
        self._parents.clear()
        self._tips.clear()


def _own_tier(fields: dict[str, Any]) -> bool:
    return fields.get("medium") in (None, "GPU") and not fields.get("group_idx")


def _event(event: Any) -> tuple[str, dict[str, Any]]:
    """Kind and fields of an event, checked."""
    if isinstance(event, list):
        kind = event[0] if event else None
        fields = dict(zip(_names(kind), event[1:], strict=False))
    else:
        fields = mapping(event)
        kind = need(fields, "type")
        _names(kind)
    if kind == "AllBlocksCleared":
        return kind, fields
    hashes = need(fields, "block_hashes")
    if not isinstance(hashes, list):
        raise Bad("block_hashes is not a list")
    for block in (*hashes, *([p] if (p := fields.get("parent_block_hash")) is not None else ())):
        if type(block) not in (int, str, bytes):
            raise Bad("a block hash is neither a whole number nor text nor bytes")
    if kind == "BlockStored":
        fields = {**fields, "block_size": count(need(fields, "block_size"), "block_size")}
        if not fields["block_size"]:
            raise Bad("block_size is 0")
    return str(kind), fields


def _names(kind: object) -> tuple[str, ...]:
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise Bad(f"{str(kind)[:40]!r} is no event; known are {', '.join(_FIELDS)}")
    return _FIELDS[kind]


def looks_like_json(line: bytes) -> bool:
    """Whether a line is a batch."""
    try:
        value = load_json(line)
    except Bad:
        return False
    if isinstance(value, dict):
        return "events" in value and "ts" in value
    return (
        isinstance(value, list)
        and len(value) >= 2
        and not isinstance(value[0], list | dict | str)
        and isinstance(value[1], list)
    )


def looks_like_msgpack(head: bytes) -> bool:
    """Whether a file begins with a batch: an array of two or three values whose first is a float, or
    a map with such names."""
    as_array = head[:1] in (b"\x92", b"\x93") and head[1:2] in (b"\xca", b"\xcb")
    as_map = head[:1] in (b"\x82", b"\x83", b"\x84") and head[1:3] in (b"\xa2t", b"\xa6e")
    return as_array or as_map
