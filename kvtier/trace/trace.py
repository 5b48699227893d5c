"""A trace in memory: who asked for which pages, and when.

Pages are numbered 0, 1, 2, ... in the order of their first appearance, and all numbers of all
requests lie in one array with the offsets of the requests beside it, so that a reference costs 8
bytes. A page stands for the whole prefix up to its end, as everywhere in kvtier: equal numbers mean
equal prefixes.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: What an entry of a trace is: a request looks its pages up and stores those that are missing; an
#: addition stores pages that nobody looked up (generated tokens); a removal drops pages, and all that
#: follow them, on demand; an end says that a session asks for its pages no more.
REQUEST, ADD, REMOVE, END = 0, 1, 2, 3


class Hints(NamedTuple):
    """What the requester said about the future of its pages; ``None`` where it said nothing.

    Attributes:
        priority: higher stays longer.
        ttl_s: seconds after which the pages are of no use.
        next_use_s: seconds until the pages are expected to be used again.
    """

    priority: int | None = None
    ttl_s: float | None = None
    next_use_s: float | None = None


@dataclass
class Trace:
    """Entries in the order of time.

    Attributes:
        name: of the file, for reports.
        format: which reader made it.
        page_tokens: tokens of a full page; 1 if the format knows no tokens.
        page_bytes: bytes of a page, if the format knows; ``sizes`` where they differ.
        pages: all page numbers of all entries, root first within an entry.
        starts: ``len + 1`` offsets into ``pages``.
        times: seconds since the first entry, never decreasing.
        tokens: prompt tokens of each entry. output_tokens: tokens generated.
        kinds: REQUEST, ADD, REMOVE or END of each entry.
        sessions: number of the session of each entry, -1 if unknown.
        parents: for each page the page before it in its sequence, -1 for a first one.
        depths: number of pages before it.
        sizes: bytes of each page, or ``None`` if all are ``page_bytes``.
        hints: by entry; only of entries that have some.
        skipped: bad records that were left out on request.
        notes: what a reader of results should know, in sentences.
    """

    name: str
    format: str
    page_tokens: int
    page_bytes: int | None
    pages: array[int]
    starts: array[int]
    times: array[float]
    tokens: array[int]
    output_tokens: array[int]
    kinds: bytearray
    sessions: array[int]
    parents: array[int]
    depths: array[int]
    sizes: array[int] | None = None
    hints: dict[int, Hints] = field(default_factory=dict)
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def requests(self) -> int:
        """Entries that are requests."""
        return self.kinds.count(REQUEST)

    @property
    def unique_pages(self) -> int:
        return len(self.parents)

    @property
    def block_refs(self) -> int:
        """Pages asked for by requests, each as often as it was asked for."""
        if self.requests == len(self):
            return len(self.pages)
        starts = self.starts
        return sum(
            starts[i + 1] - starts[i] for i, kind in enumerate(self.kinds) if kind == REQUEST
        )

    @property
    def span_s(self) -> float:
        return self.times[-1] - self.times[0] if self.times else 0.0

    def entry(self, index: int) -> list[int]:
        """The pages of one entry, root first."""
        return self.pages[self.starts[index] : self.starts[index + 1]].tolist()

    def entries(self) -> Iterator[list[int]]:
        """The pages of every entry."""
        pages, starts = self.pages, self.starts
        for at in range(len(self)):
            yield pages[starts[at] : starts[at + 1]].tolist()

    def with_followers(self, pages: Sequence[int]) -> list[int]:
        """These pages and all behind them, the deepest first."""
        found = set(pages)
        queue = list(found)
        while queue:
            new = [page for page in self._followers.get(queue.pop(), ()) if page not in found]
            found.update(new)
            queue += new
        return sorted(found, key=lambda page: -self.depths[page])

    @functools.cached_property
    def _followers(self) -> dict[int, list[int]]:
        """Page -> the pages right behind it."""
        found: dict[int, list[int]] = {}
        for page, parent in enumerate(self.parents):
            if parent >= 0:
                found.setdefault(parent, []).append(page)
        return found

    def size_of(self, page: int, default: int) -> int:
        """Bytes of a page."""
        return default if self.sizes is None else self.sizes[page]


class TraceBuilder:
    """Collects entries and numbers their pages.

    Args:
        name, format: see ``Trace``.
    """

    def __init__(self, name: str, format: str) -> None:
        self._trace = Trace(
            name, format, 1, None, array("q"), array("q", [0]), array("d"), array("q"), array("q"),
            bytearray(), array("q"), array("q"), array("q"),
        )  # fmt: skip
        self._numbers: dict[Hashable, int] = {}
        self._sessions: dict[Hashable, int] = {}
        self._sizes: array[int] | None = None
        self._rechained = 0
        self._repeated = 0

    def __len__(self) -> int:
        return len(self._trace)

    @property
    def last_time(self) -> float:
        times = self._trace.times
        return times[-1] if times else float("-inf")

    def add(
        self,
        time_s: float,
        keys: Sequence[Hashable],
        *,
        tokens: int = 0,
        output_tokens: int = 0,
        session: Hashable | None = None,
        kind: int = REQUEST,
        hints: Hints | None = None,
        after: Hashable | None = None,
        size: int | None = None,
        chained: bool = True,
    ) -> None:
        """One more entry. Checks nothing; readers do.

        Args:
            keys: identities of its pages, root first.
            after: identity of the page before the first one (for additions).
            size: bytes of each of the pages.
            chained: whether the pages are one sequence; otherwise each stands alone.
        """
        trace, numbers = self._trace, self._numbers
        parents, depths = trace.parents, trace.depths
        before = -1 if after is None else numbers.get(after, -1)
        found: list[int] = []
        for key in keys:
            page = numbers.get(key)
            if page is None:
                page = numbers[key] = len(parents)
                parents.append(before)
                depths.append(depths[before] + 1 if before >= 0 else 0)
                if self._sizes is not None:
                    self._sizes.append(size or 0)
            elif kind == REQUEST and chained and parents[page] != before:
                self._rechained += 1
            if size is not None:
                if self._sizes is None:
                    self._sizes = array("q", [0] * len(parents))
                self._sizes[page] = max(size, self._sizes[page])
            found.append(page)
            if chained:
                before = page
        if chained and len(found) > 1 and len(set(found)) != len(found):
            self._repeated += 1
        if hints is not None:
            trace.hints[len(trace)] = hints
        trace.pages.extend(found)
        trace.starts.append(len(trace.pages))
        trace.times.append(time_s)
        trace.tokens.append(tokens)
        trace.output_tokens.append(output_tokens)
        trace.kinds.append(kind)
        trace.sessions.append(
            -1 if session is None else self._sessions.setdefault(session, len(self._sessions))
        )

    def knows(self, key: Hashable) -> bool:
        """Whether a page with this identity has appeared."""
        return key in self._numbers

    def finish(self, *, page_tokens: int, page_bytes: int | None = None, skipped: int = 0) -> Trace:
        """The trace, its times counted from the first entry."""
        trace = self._trace
        trace.page_tokens, trace.page_bytes, trace.skipped = page_tokens, page_bytes, skipped
        trace.sizes = self._sizes
        if trace.times and trace.times[0]:
            first = trace.times[0]
            trace.times = array("d", [t - first for t in trace.times])
        if self._rechained:
            trace.notes.append(
                f"{self._rechained} references name a page behind another predecessor than at its first "
                "appearance; its ids do not stand for whole prefixes, so prefix hits may mean little"
            )
        if self._repeated:
            trace.notes.append(f"{self._repeated} entries name a page more than once")
        if skipped:
            trace.notes.append(f"{skipped} bad records were skipped")
        return trace
