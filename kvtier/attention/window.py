"""Which token ranges of which pages a layer reads in a step, and where they go in its staging memory.

Computed once a step for each distinct window, not once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.devices.base import Buffer
from kvtier.store.lease import Lease
from kvtier.store.page import Page
from kvtier.tiers.memory import Slot


@dataclass(slots=True)
class Row:
    """One sequence in a step.

    Attributes:
        lease: its sealed pages, where they are.
        tails: its unsealed slots behind them.
        pad: columns before its first token (left padding).
        before: tokens before the step.
        new: tokens that the step appends.
        skip: columns of the step's input before the first of them (left padding inside the step).
    """

    lease: Lease
    tails: Sequence[Slot]
    pad: int
    before: int
    new: int
    skip: int


@dataclass(slots=True)
class Run:
    """Whole pages that lie behind each other, in a slab as in the sequence."""

    row: int
    column: int
    slab: Buffer
    start: int
    pages: int


@dataclass(slots=True)
class Piece:
    """Tokens ``[first, last)`` of one page; ``slot`` for VRAM and host, ``page`` for disk."""

    row: int
    column: int
    first: int
    last: int
    slot: Slot | None = None
    page: Page | None = None


@dataclass(slots=True)
class Window:
    """What one kind of layer reads in a step: columns ``[start, stop)`` of all rows."""

    start: int
    stop: int
    runs: list[Run] = field(default_factory=list)
    hot: list[Piece] = field(default_factory=list)
    host: list[Piece] = field(default_factory=list)
    disk: list[Piece] = field(default_factory=list)
    #: (row, columns at its start that hold no token)
    blank: list[tuple[int, int]] = field(default_factory=list)

    @property
    def cold(self) -> bool:
        return bool(self.host or self.disk)


def plan_window(rows: Sequence[Row], start: int, stop: int, page_tokens: int) -> Window:
    """Sort the tokens in columns ``[start, stop)`` of all rows by where they are."""
    window = Window(start, stop)
    for number, row in enumerate(rows):
        if row.pad > start:
            window.blank.append((number, min(row.pad, stop) - start))
        first = max(start - row.pad, 0)
        total = row.before + row.new
        sealed = len(row.lease.copies)
        shift = row.pad - start
        for index in range(first // page_tokens, -(-total // page_tokens)):
            begin = index * page_tokens
            lo, hi = max(first - begin, 0), min(total - begin, page_tokens)
            column = begin + lo + shift
            if index < sealed:
                copy = row.lease.copies[index]
                if copy.tier == "disk":
                    window.disk.append(Piece(number, column, lo, hi, page=row.lease.pages[index]))
                    continue
                slot = copy.slot
                assert slot is not None
                if copy.tier == "host":
                    window.host.append(Piece(number, column, lo, hi, slot))
                    continue
            else:
                slot = row.tails[index - sealed]
            if hi - lo < page_tokens:
                window.hot.append(Piece(number, column, lo, hi, slot))
                continue
            last = window.runs[-1] if window.runs else None
            if (
                last is not None
                and last.row == number
                and last.slab is slot.slab
                and last.start + last.pages * slot.nbytes == slot.start
                and last.column + last.pages * page_tokens == column
            ):
                last.pages += 1
            else:
                window.runs.append(Run(number, column, slot.slab, slot.start, 1))
    return window
