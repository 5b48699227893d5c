"""Mooncake traces, and Qwen-Bailian traces, which are made the same way.

One JSON object a line, often gzip: ``timestamp`` (ms; Bailian: seconds), ``input_length`` and
``output_length`` (tokens), ``hash_ids`` (one id a block of the prompt, root first; an id stands for
its whole prefix; the last block may be partial). Bailian adds ``chat_id`` and ``parent_chat_id``,
from which sessions are made. The block size is not in the file: 512 tokens in Mooncake's own traces,
16 in Bailian's; here it is inferred from the lengths, or given.

Source of the formats: kvcache-ai/Mooncake, FAST25-release/traces; alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

import math
from typing import Any

from kvtier.trace.lines import Bad, Source, count, ids, in_order, mapping, need, number
from kvtier.trace.trace import Trace, TraceBuilder


def read_mooncake(source: Source, page_tokens: int | None = None) -> Trace:
    """A Mooncake trace; ``page_tokens`` if it is not to be inferred."""
    return _read(source, page_tokens, "mooncake", 1e-3)


def read_bailian(source: Source, page_tokens: int | None = None) -> Trace:
    """A Qwen-Bailian trace."""
    return _read(source, page_tokens, "bailian", 1.0)


def _read(source: Source, page_tokens: int | None, format: str, unit_s: float) -> Trace:
    builder = TraceBuilder(source.path.name, format)
    blocks = BlockSize()
    chats: dict[Any, Any] = {}

    def parse(record: Any) -> None:
        fields = mapping(record)
        time_s = number(need(fields, "timestamp"), "timestamp") * unit_s
        keys = ids(need(fields, "hash_ids"), "hash_ids")
        tokens = count(fields.get("input_length", 0), "input_length")
        output = count(fields.get("output_length", 0), "output_length")
        session = None
        if "chat_id" in fields:
            chat = _chat(fields["chat_id"], "chat_id")
            parent = _chat(fields.get("parent_chat_id", -1), "parent_chat_id")
            session = chats[chat] = chats.get(parent, chat)
        in_order(time_s, builder.last_time)
        builder.add(time_s, keys, tokens=tokens, output_tokens=output, session=session)
        blocks.add(tokens, len(keys))

    for _ in source.records(parse):
        pass
    return builder.finish(page_tokens=page_tokens or blocks.guess(), skipped=source.skipped)


def _chat(value: object, name: str) -> object:
    if type(value) not in (int, str):
        raise Bad(f"{name} is {value!r}, neither a whole number nor text")
    return value


class BlockSize:
    """Infers tokens per block from (tokens, blocks) of requests.

    If the last block of a request may be partial, ``(blocks - 1) * B < tokens <= blocks * B``; if only full
    blocks are named, ``blocks * B <= tokens < (blocks + 1) * B``. A power of two that fits all requests in
    one of the two ways is taken, else the smallest size that fits in the first, else the mean, or the power
    of two within 2 % of it.
    """

    def __init__(self) -> None:
        self._partial = (1, 1 << 53)
        self._full = (1, 1 << 53)
        self._tokens = self._blocks = 0

    def add(self, tokens: int, blocks: int) -> None:
        """One more request."""
        if not tokens or not blocks:
            return
        self._tokens += tokens
        self._blocks += blocks
        most = (tokens - 1) // (blocks - 1) if blocks > 1 else 1 << 53
        self._partial = _common(self._partial, -(-tokens // blocks), most)
        self._full = _common(self._full, tokens // (blocks + 1) + 1, tokens // blocks)

    def guess(self) -> int:
        """Tokens per block, at least 1."""
        if not self._blocks:
            return 1
        for low, high in (self._partial, self._full):
            power = 1 << (low - 1).bit_length()
            if low <= power <= high:
                return power
        low, high = self._partial
        if low <= high:
            return low
        mean = self._tokens / self._blocks
        power = 1 << max(0, round(math.log2(mean)))
        return power if abs(mean / power - 1) < 0.02 else max(1, round(mean))


def _common(span: tuple[int, int], low: int, high: int) -> tuple[int, int]:
    return max(span[0], low), min(span[1], high)
