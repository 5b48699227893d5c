"""What of a store's traffic goes into a trace file. Used under the store's lock only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.layout import PageLayout
from kvtier.policy import Request
from kvtier.trace.record import Recorder
from kvtier.trace.trace import Hints

#: Environment variables: a file to record every store of the process to, and whether to salt its keys.
TRACE_FILE, TRACE_SALTED = "KVTIER_TRACE", "KVTIER_TRACE_SALTED"
#: Files that are tried for ``KVTIER_TRACE``: the name itself, then with a number.
_NAMES = 10_000


class Recording:
    """Hands what happens to a recorder, if there is one.

    Args:
        layout: geometry of the pages.
        trouble: told of records that were dropped.
    """

    def __init__(self, layout: PageLayout, trouble: Callable[[str], None]) -> None:
        self._layout = layout
        self._trouble = trouble
        self._recorder: Recorder | None = None

    def start(
        self,
        path: str | os.PathLike[str],
        *,
        operations: bool = False,
        salted: bool = False,
        wait_s: float = 0.0,
    ) -> Recorder:
        """Begin to record; see ``TieredStore.record``."""
        if self._recorder is not None and not self._recorder.closed:
            raise ConfigError(
                f"the store is recorded to {self._recorder.path} already; close that recording first"
            )
        self._recorder = Recorder(
            path,
            page_tokens=self._layout.page_tokens,
            page_bytes=self._layout.page_bytes,
            operations=operations,
            salted=salted,
            wait_s=wait_s,
            trouble=self._trouble,
        )
        return self._recorder

    def start_from_environment(self) -> None:
        """Begin to record to ``KVTIER_TRACE`` if that is set; a file that exists is left alone, and a
        number added to the name."""
        wanted = os.environ.get(TRACE_FILE)
        if not wanted:
            return
        salted = os.environ.get(TRACE_SALTED, "") not in ("", "0")
        path = Path(wanted)
        for number in range(1, _NAMES):
            try:
                self.start(path, salted=salted)
                return
            except ConfigError:
                if not path.exists():
                    raise
            path = Path(wanted).with_name(f"{Path(wanted).stem}.{number}{Path(wanted).suffix}")
        raise ConfigError(f"{TRACE_FILE} is {wanted}; {_NAMES} traces of that name exist")

    def lookup(self, keys: Sequence[bytes], found: int, request: Request) -> None:
        """Somebody asked for ``keys``, of which the first ``found`` were there."""
        if self._recorder is None:
            return
        hints = None
        if (
            request.priority is not None
            or request.ttl_s is not None
            or request.next_use_at is not None
        ):
            wait = request.next_use_at
            hints = Hints(
                request.priority,
                request.ttl_s,
                None if wait is None else max(0.0, wait - time.monotonic()),
            )
        self._recorder.request(
            keys,
            found,
            tokens=len(keys) * self._layout.page_tokens,
            session=request.session,
            hints=hints,
        )

    def stored(self, key: bytes, parent: bytes | None) -> None:
        """A page that others can find came in, or came again."""
        if self._recorder is not None:
            self._recorder.stored(key, parent)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Somebody wanted these gone."""
        if self._recorder is not None:
            self._recorder.removed(keys)

    def session_ended(self, keys: Sequence[bytes], session: Hashable) -> None:
        """A session needs these pages no more."""
        if self._recorder is not None:
            self._recorder.session_ended(keys, session)

    def copied(
        self, link: str, nbytes: int, asked: float, began: float, *, failed: bool = False
    ) -> None:
        """A copy that was asked for and began at these times (``time.monotonic``) has ended now."""
        if self._recorder is not None:
            now = time.monotonic()
            began = min(max(asked, began), now)
            self._recorder.operation(link, nbytes, began - asked, now - began, failed=failed)

    def close(self, timeout_s: float) -> list[str]:
        """End the recording. Returns in words what is not in the file."""
        if self._recorder is None:
            return []
        lost = self._recorder.close(timeout_s)
        return [f"{lost} records are not in the trace {self._recorder.path}"] if lost else []
