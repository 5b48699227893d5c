"""Which token ranges of which pages a layer reads in a step, and where they go in its staging memory.

Computed once a step for each distinct window, not once a layer; and of the sealed pages only once a lease, so that a
decode step does not count all pages of a long sequence again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.devices.base import Buffer, Range
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
    """Tokens ``[first, first + tokens)`` of each of ``pages`` pages that lie behind each other, in a slab as in the
    sequence. More than one page only if they are whole."""

    row: int
    column: int
    slab: Buffer
    start: int
    pages: int
    first: int
    tokens: int


@dataclass(slots=True)
class Place:
    """Where ``tokens`` new tokens of a row go: behind the first ``first`` ones of a tail. In the step's input they
    start at column ``source``."""

    row: int
    slot: Slot
    first: int
    tokens: int
    source: int


@dataclass(slots=True)
class Piece:
    """Tokens ``[first, last)`` of one page in host memory (``slot``) or on disk (``page``)."""

    row: int
    column: int
    first: int
    last: int
    slot: Slot | None = None
    page: Page | None = None


@dataclass(slots=True)
class Window:
    """What one kind of layer reads in a step: columns ``[start, stop)`` of all rows.

    Attributes:
        runs: what is in VRAM; ``pages`` are the whole pages of it, for a device to check.
        host, disk: what is not.
        blank: (row, columns at its start that hold no token).
    """

    start: int
    stop: int
    runs: list[Run] = field(default_factory=list)
    pages: list[Range] = field(default_factory=list)
    host: list[Piece] = field(default_factory=list)
    disk: list[Piece] = field(default_factory=list)
    blank: list[tuple[int, int]] = field(default_factory=list)

    @property
    def cold(self) -> bool:
        return bool(self.host or self.disk)


def plan_places(rows: Sequence[Row], page_tokens: int) -> list[Place]:
    """The new tokens of all rows, cut at page boundaries."""
    places = []
    for number, row in enumerate(rows):
        sealed = len(row.lease.copies)
        at, stop = row.before, row.before + row.new
        while at < stop:
            index, first = divmod(at, page_tokens)
            count = min(page_tokens - first, stop - at)
            source = row.skip + at - row.before
            places.append(Place(number, row.tails[index - sealed], first, count, source))
            at += count
    return places


class WindowPlanner:
    """Sorts the tokens that a step reads by where they are.

    Args:
        page_tokens: tokens in a page.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._rows: Sequence[Row] = ()
        self._stop = 0
        self._windows: dict[int, Window] = {}
        #: The sealed pages' part of windows, and the leases and paddings for which it holds.
        self._sealed: dict[int, Window] = {}
        self._valid_for: list[tuple[Lease, int]] = []

    def begin(self, rows: Sequence[Row], stop: int) -> None:
        """A step over ``rows`` that ends at column ``stop``."""
        self._rows, self._stop = rows, stop
        now = [(row.lease, row.pad) for row in rows]
        if now != self._valid_for:
            self._sealed.clear()
            self._valid_for = now
        else:
            # The windows of sliding layers have moved on; those of full ones stay.
            self._sealed = {start: x for start, x in self._sealed.items() if start in self._windows}
        self._windows = {}

    def window(self, start: int) -> Window:
        """Columns ``[start, stop)`` of all rows."""
        window = self._windows.get(start)
        if window is None:
            window = self._windows[start] = self._plan(start)
        return window

    def _plan(self, start: int) -> Window:
        sealed = self._sealed.get(start)
        if sealed is None:
            sealed = self._sealed[start] = self._plan_sealed(start)
        window = Window(
            start, self._stop, list(sealed.runs), list(sealed.pages), sealed.host, sealed.disk
        )
        for number, row in enumerate(self._rows):
            if row.pad > start:
                window.blank.append((number, min(row.pad, self._stop) - start))
            behind = len(row.lease.copies)
            for index, slot in enumerate(row.tails):
                self._add(window, number, row, behind + index, row.before + row.new, slot)
        return window

    def _plan_sealed(self, start: int) -> Window:
        window = Window(start, self._stop)
        for number, row in enumerate(self._rows):
            total = len(row.lease.copies) * self.page_tokens
            for index in range(max(start - row.pad, 0) // self.page_tokens, len(row.lease.copies)):
                copy = row.lease.copies[index]
                if copy.tier == "vram":
                    assert copy.slot is not None
                    self._add(window, number, row, index, total, copy.slot)
                    continue
                column, lo, hi = self._cut(start, row, index, total)
                if copy.tier == "host":
                    window.host.append(Piece(number, column, lo, hi, slot=copy.slot))
                else:
                    window.disk.append(Piece(number, column, lo, hi, page=row.lease.pages[index]))
        return window

    def _cut(self, start: int, row: Row, index: int, total: int) -> tuple[int, int, int]:
        """Of a page: (its first column inside the window, first token, last token)."""
        begin = index * self.page_tokens
        lo = max(start - row.pad - begin, 0)
        return begin + lo + row.pad - start, lo, min(total - begin, self.page_tokens)

    def _add(
        self, window: Window, number: int, row: Row, index: int, total: int, slot: Slot
    ) -> None:
        """A page in VRAM; one that goes on where the last one ends becomes part of its run. So does the last
        page, though it is not full: one copy of what follows in it costs less than a copy of its own."""
        column, lo, hi = self._cut(window.start, row, index, total)
        if lo >= hi:
            return
        last = window.runs[-1] if window.runs else None
        if (
            last is not None
            and lo == 0
            and last.tokens == self.page_tokens
            and last.row == number
            and last.slab is slot.slab
            and last.start + last.pages * slot.nbytes == slot.start
            and last.column + last.pages * self.page_tokens == column
        ):
            # A new one: the sealed part of the window keeps its own.
            window.runs[-1] = Run(
                number, last.column, last.slab, last.start, last.pages + 1, 0, last.tokens
            )
            window.pages[-1] = Range(slot.slab, last.start, slot.start + slot.nbytes)
        else:
            window.runs.append(Run(number, column, slot.slab, slot.start, 1, lo, hi - lo))
            window.pages.append(slot.range())
