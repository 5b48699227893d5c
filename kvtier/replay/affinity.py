"""To which conversation each entry belongs: what a router hashes by.

Where a trace names sessions, those. Else they are inferred from the pages: a request goes on with the
conversation whose last page, or last but one (the last may have been partial), is the last page it
shares with anything before; a request that shares less begins a conversation of its own. So a system
prompt that all begin with does not make all of them one.
"""

from __future__ import annotations

from array import array

from kvtier.trace.trace import REQUEST, Trace


def conversations(trace: Trace) -> array[int]:
    """A number for each entry; equal numbers belong together."""
    if any(session >= 0 for session in set(trace.sessions)):
        return trace.sessions
    found: array[int] = array("q")
    brought_by: dict[int, int] = {}
    ends: dict[int, int] = {}
    for at, pages in enumerate(trace.entries()):
        seen = 0
        for page in pages:
            if page not in brought_by:
                break
            seen += 1
        shared = pages[seen - 1] if seen else _parent(trace, pages)
        talk = ends.get(shared, at)
        if trace.kinds[at] != REQUEST:
            talk = brought_by.get(shared, at)
        found.append(talk)
        for page in pages:
            brought_by.setdefault(page, talk)
        ends.update((page, talk) for page in pages[-2:] if brought_by[page] == talk)
    return found


def _parent(trace: Trace, pages: list[int]) -> int:
    """The page before the first one, -1 if there is none."""
    return trace.parents[pages[0]] if pages else -1
