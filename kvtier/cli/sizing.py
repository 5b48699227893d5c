"""Sizes of a run: tiers and prefill calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cli.options import RunOptions
from kvtier.errors import ConfigError
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.layout import PageLayout

#: The demo's disk limit in multiples of the KV: pages, B-tree, and room for copies on write.
DEMO_DISK_FACTOR = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, in bytes and tokens."""

    vram: int
    host: int
    disk: int
    chunk: int
    kv_bytes: int


def plan_sizes(options: RunOptions, layout: PageLayout, prompt_tokens: int) -> Sizes:
    """Tier sizes and chunk: what was asked for, and for the demo a third of the KV in VRAM and in
    host RAM.

    Raises:
        ConfigError: the VRAM tier holds less than two pages.
    """
    page = layout.page_bytes
    kv_bytes = layout.sequence_bytes(prompt_tokens + options.max_new_tokens)
    third = kv_bytes // 3 // page * page
    vram = third if options.vram is None else options.vram
    host = third if options.host is None else options.host
    disk = kv_bytes * DEMO_DISK_FACTOR if options.disk is None else options.disk
    least = 2 * page
    if vram < least:
        what = "a third of the prompt's KV" if options.vram is None else "--vram"
        raise ConfigError(
            f"{what} is {vram} bytes, but two pages of {options.page_tokens} tokens take {least} "
            f"bytes ({format_size(least)}); give --vram {-(-least // 1024)}KiB or more"
        )
    # the pages of one call stay in VRAM until it ends, beside those it evicts
    room = vram // page // 2 * options.page_tokens
    wanted = max(options.page_tokens, options.chunk // options.page_tokens * options.page_tokens)
    return Sizes(vram, host, disk, min(wanted, room), kv_bytes)
