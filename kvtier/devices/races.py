"""Races by happens-before: vector clocks and a log of who touched which bytes.

Every stream has a clock that counts its operations; recording an event copies the stream's clock,
waiting for it joins the copy into the waiter's (Lamport clocks as vectors: Fidge 1988, Mattern
1989). An access is ordered before another if the other's clock has seen its count. Two accesses to
the same byte, at least one of them a write, must be ordered; whether they *happened* to run apart
does not matter.

The log of a buffer is a list of disjoint segments. A segment keeps its last write and the reads
since that are not ordered before each other (the idea of FastTrack, Flanagan and Freund 2009): a
later access that is ordered after an earlier one supersedes it. Whatever the host has waited for
is ordered before all that is still to be submitted, and is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import RaceError

#: Count of operations seen, one number a stream.
Clock = list[int]


def join(clock: Clock, other: Sequence[int]) -> None:
    """Make ``clock`` know all that ``other`` knows. ``other`` may be shorter, never longer."""
    for index, count in enumerate(other):
        if count > clock[index]:
            clock[index] = count


class Access(NamedTuple):
    """One operation's touch: operation ``seq`` of stream ``stream``. ``who`` is for messages."""

    stream: int
    seq: int
    who: object


#: What is known of a segment: the last write and the reads since, None and () if forgotten.
_State = tuple[Access | None, tuple[Access, ...]]

_UNTOUCHED: _State = (None, ())


class AccessLog:
    """Accesses to the ``nbytes`` bytes of one buffer, called ``what`` in messages.

    ``read`` and ``write`` raise RaceError, leaving the log as it is, if ``[start, stop)`` was
    touched by an access that ``clock`` has not seen. ``by`` is the new access; None for the host,
    whose accesses are ordered before everything submitted later and so need no entry. ``host`` is
    the host's clock. Cost: logarithm of the number of segments, plus the segments touched.
    """

    __slots__ = ("_nbytes", "_starts", "_states", "_what", "_written")

    def __init__(self, nbytes: int, what: str) -> None:
        self._nbytes = nbytes
        self._what = what
        self._starts = [0]
        self._states = [_UNTOUCHED]
        #: State after the newest write: pieces of one operation share it.
        self._written = _UNTOUCHED

    def __len__(self) -> int:
        """Segments in the log."""
        return len(self._starts)

    def write(
        self, start: int, stop: int, clock: Clock, by: Access | None, who: object = "the host"
    ) -> None:
        if start >= stop:
            return
        starts, states = self._starts, self._states
        first = bisect_right(starts, start) - 1
        last = bisect_left(starts, stop, first)
        checked: _State | None = None
        before: _State | None = None
        for old in states[first:last]:
            if old is checked or old is before:
                continue
            before, checked = checked, old
            write, reads = old
            if write is not None and clock[write[0]] < write[1]:
                self._conflict(start, stop, who, "writes", write, "writes", clock)
            for read in reads:
                if clock[read[0]] < read[1]:
                    self._conflict(start, stop, who, "writes", read, "reads", clock)
        state = _UNTOUCHED
        if by is not None:
            if self._written[0] is not by:
                self._written = (by, ())
            state = self._written
        if self._exact(first, last, start, stop):
            states[first] = state
        else:
            self._replace(first, last, start, stop, [start], [state])

    def read(
        self,
        start: int,
        stop: int,
        clock: Clock,
        by: Access | None,
        host: Clock,
        who: object = "the host",
    ) -> None:
        if start >= stop:
            return
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop, first)
        starts: list[int] = []
        states: list[_State] = []
        # Without an entry for the new access, only what the host has seen may be forgotten.
        seen = host if by is None else clock
        former: _State | None = None
        # Pieces of one operation share their state, and so share what becomes of it.
        known: dict[int, _State] = {}
        for index in range(first, last):
            old = self._states[index]
            found = known.get(id(old))
            if found is None:
                write, reads = old
                if write is not None:
                    stream, seq, _ = write
                    if clock[stream] < seq:
                        self._conflict(start, stop, who, "reads", write, "writes", clock)
                    if host[stream] >= seq:
                        write = None
                if reads:
                    reads = tuple([read for read in reads if seen[read[0]] < read[1]])
                if by is not None:
                    reads = (*reads, by)
                found = (write, reads) if write is not None or reads else _UNTOUCHED
                known[id(old)] = found
            if found is not former and found != former:
                starts.append(max(start, self._starts[index]))
                states.append(found)
                former = found
        if self._exact(first, last, start, stop):
            self._states[first] = states[0]
        else:
            self._replace(first, last, start, stop, starts, states)

    def _exact(self, first: int, last: int, start: int, stop: int) -> bool:
        """Whether ``[start, stop)`` is one whole segment."""
        return (
            last == first + 1
            and self._starts[first] == start
            and stop == (self._starts[last] if last < len(self._starts) else self._nbytes)
        )

    def _replace(
        self,
        first: int,
        last: int,
        start: int,
        stop: int,
        starts: list[int],
        states: list[_State],
    ) -> None:
        """Put new segments in place of ``[first, last)``, which cover ``[start, stop)`` and maybe
        more."""
        if self._starts[first] < start:
            starts.insert(0, self._starts[first])
            states.insert(0, self._states[first])
        end = self._starts[last] if last < len(self._starts) else self._nbytes
        if stop < end:
            starts.append(stop)
            states.append(self._states[last - 1])
        self._starts[first:last] = starts
        self._states[first:last] = states

    def _conflict(
        self,
        start: int,
        stop: int,
        who: object,
        does: str,
        earlier: Access,
        did: str,
        clock: Clock,
    ) -> None:
        seen = clock[earlier.stream]
        stale = (
            f" (what was waited for on that stream ends with its operation {seen}, and this is its "
            f"operation {earlier.seq}: the event is stale)"
            if seen
            else ""
        )
        raise RaceError(
            f"{who} {does} bytes [{start}, {stop}) of {self._what}, but nothing orders it after "
            f"{earlier.who}, which {did} some of them{stale}; record an event after the earlier "
            "operation and wait for it first"
        )
