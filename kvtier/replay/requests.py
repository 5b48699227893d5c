"""What a policy is told of the requests of a trace."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.policy import ANONYMOUS, Request
from kvtier.trace.trace import Trace


def request_maker(trace: Trace) -> Callable[[int], Request]:
    """A function from the number of an entry to what is known of it."""
    if not trace.hints and all(session < 0 for session in set(trace.sessions)):
        return lambda at: ANONYMOUS
    sessions, hints, times = trace.sessions, trace.hints, trace.times

    def make(at: int) -> Request:
        session = sessions[at] if sessions[at] >= 0 else None
        said = hints.get(at)
        if said is None:
            return Request(id=at, session=session)
        return Request(
            id=at,
            session=session,
            priority=said.priority,
            ttl_s=said.ttl_s,
            next_use_at=None if said.next_use_s is None else times[at] + said.next_use_s,
        )

    return make
