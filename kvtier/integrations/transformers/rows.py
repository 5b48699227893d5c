"""Operations on all rows of a batch at once: room for new tokens, permutations, the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import ConfigError, TierFullError
from kvtier.integrations.transformers.feed import Feed
from kvtier.session.session import Session


def reserve_all(sessions: Sequence[Session], news: Sequence[int]) -> None:
    """Room for the new tokens of all rows, or of none.

    Raises:
        TierFullError: there is not enough; names a size of forward pass that works.
    """
    taken: list[tuple[Session, int]] = []
    try:
        for session, new in zip(sessions, news, strict=True):
            taken.append((session, len(session.reserve(new))))
    except BaseException as error:
        for session, count in taken:
            _give_back(session, count)
        if isinstance(error, TierFullError):
            raise _with_remedy(error, sessions, max(news)) from None
        raise


def give_back_spare(sessions: Sequence[Session]) -> None:
    """Return the tails that hold no token."""
    for session in sessions:
        have = len(session.pages) + len(session.tails)
        _give_back(session, have - session.store.layout.pages(session.length))


def select_rows(old: Sequence[Session], rows: Sequence[int]) -> list[Session]:
    """Sessions of which each goes on from ``old[row]``. All are taken over, forked or closed; if that fails, ``old`` is
    as it was."""
    last = {row: at for at, row in enumerate(rows)}
    new: list[Session] = []
    try:
        for at, row in enumerate(rows):
            # The last taker of a row gets the row itself.
            new.append(old[row] if last[row] == at else old[row].fork())
    except BaseException:
        for session in new:
            if session not in old:
                session.close()
        raise
    for row, session in enumerate(old):
        if row not in last:
            session.close()
    return new


def check_prompt(prompt: Sequence[Sequence[int]], sessions: Sequence[Session], feed: Feed) -> bool:
    """Compare what is fed with the prompt that was announced; whether all of it has been fed with this pass.

    Raises:
        ConfigError: it is another one.
    """
    fed = 0
    for row, (session, tokens) in enumerate(zip(sessions, feed.tokens, strict=True)):
        rest = prompt[row][session.length : session.length + feed.news[row]]
        fed += session.length + feed.news[row] >= len(prompt[row])
        for n, (given, want) in enumerate(zip(tokens or (), rest, strict=False)):
            if given != want:
                raise ConfigError(
                    f"row {row} is fed token {given} at place {session.length + n} of the prompt, "
                    f"load_prefix was given {want} there; pass the whole prompt to both, or "
                    "reset() the cache"
                )
    return fed == len(sessions)


def _with_remedy(error: TierFullError, sessions: Sequence[Session], tokens: int) -> TierFullError:
    store, rows = sessions[0].store, len(sessions)
    layout = store.layout
    pages = store.sizes["vram"] // layout.page_bytes // rows
    chunk = max(1, pages // 2) * layout.page_tokens
    hint = ""
    if pages < 2:
        hint = f"; make vram at least {2 * rows * layout.page_bytes} bytes, two pages a row"
    elif tokens > chunk:
        hint = f"; feed at most {chunk} tokens a forward pass (prefill_chunk_size={chunk})"
    return TierFullError(
        f"{error}{hint}",
        tier=error.tier,
        needed_bytes=error.needed_bytes,
        holders=error.holders,
    )


def _give_back(session: Session, count: int) -> None:
    """Return the last ``count`` tails of a session."""
    if count > 0:
        spare = session.tails[-count:]
        del session.tails[-count:]
        session.store.give_tails(spare, [session.store.device.compute_stream().record()])
