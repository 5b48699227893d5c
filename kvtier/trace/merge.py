"""Larger blocks out of a trace's pages."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.trace.trace import REQUEST, Trace, TraceBuilder


def merge_blocks(trace: Trace, block_tokens: int) -> Trace:
    """The trace with blocks of ``block_tokens`` tokens, each made of consecutive pages.

    A page stands for its whole prefix, so a block is named by its last page. A block that an entry
    does not fill to the end is left out, as a store shares only pages that are full.

    Raises:
        ConfigError: not a multiple of the trace's pages, or pages that are no sequences.
    """
    factor, rest = divmod(block_tokens, trace.page_tokens)
    if rest or factor < 1:
        raise ConfigError(
            f"blocks of {block_tokens} tokens cannot be made of pages of {trace.page_tokens}; "
            f"give a multiple of {trace.page_tokens}"
        )
    if trace.sizes is not None:
        raise ConfigError("the pages of this trace are no sequences; they cannot be merged")
    if factor == 1:
        return trace
    builder = TraceBuilder(trace.name, trace.format)
    depths, cut = trace.depths, 0
    for at, pages in enumerate(trace.entries()):
        kind = trace.kinds[at]
        if kind == REQUEST:
            keys = pages[factor - 1 :: factor]
            cut += len(pages) % factor != 0
        else:
            keys = [page for page in pages if (depths[page] + 1) % factor == 0]
        session = trace.sessions[at]
        builder.add(
            trace.times[at],
            keys,
            tokens=trace.tokens[at],
            output_tokens=trace.output_tokens[at],
            session=None if session < 0 else session,
            kind=kind,
            hints=trace.hints.get(at),
            after=_before(trace, keys, factor) if kind != REQUEST and keys else None,
            chained=kind == REQUEST or len(keys) > 0,
        )
    merged = builder.finish(
        page_tokens=block_tokens,
        page_bytes=trace.page_bytes * factor if trace.page_bytes else None,
        skipped=trace.skipped,
    )
    merged.notes = [*trace.notes]
    if cut:
        merged.notes.append(
            f"merged to blocks of {block_tokens} tokens; {cut} requests do not fill their last block, "
            "which was left out"
        )
    return merged


def _before(trace: Trace, keys: list[int], factor: int) -> int | None:
    """The block before the first of an addition."""
    page = keys[0]
    for _ in range(factor):
        page = trace.parents[page]
        if page < 0:
            return None
    return page
