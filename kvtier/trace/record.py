"""Recording a store's traffic in kvtier's own format (``kvtier.trace.native``).

The store's calls only note what happened: a tuple into a bounded queue, a few microseconds. One
thread numbers the pages, writes whole lines, and hands each batch to the system before it takes the
next, so that a process that is killed leaves a file that is good up to its last whole line.

Nothing of the content is written: keys are digests (with ``salted``, digests of digests under a
random key that is never stored, so that nobody who knows a prompt can look for it), and sessions are
always salted.

When the queue is full a record is dropped, loudly: it is counted, the owner is told at once, and the
file says where and how many. ``wait_s`` lets a call wait for room first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.errors import ConfigError
from kvtier.trace.native import MAGIC, VERSION
from kvtier.trace.trace import Hints
from kvtier.trace.writing import LineFile

#: Pages that records in the queue may name together.
PENDING_PAGES = 1 << 20
#: Keys that have a number; beyond that the numbering begins anew. About 200 bytes each.
TABLE_KEYS = 1 << 19
#: Pages that were looked up in vain and are expected to be stored.
AWAITED_KEYS = 1 << 17

Record = tuple[Any, ...]


class Recorder:
    """Writes one trace file. Thread-safe; calls must come in the order of time.

    Args:
        path: a file that does not exist yet.
        page_tokens, page_bytes: geometry of the pages.
        operations: whether ``operation`` is written.
        salted: whether keys are disguised.
        pending_pages: limit of the queue.
        wait_s: how long a call may wait for room in a full queue before its record is dropped.
        clock: seconds, never falling.
        trouble: told once, in words, that records were dropped or that the file cannot be written.

    Raises:
        ConfigError: the file exists, or cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        page_tokens: int,
        page_bytes: int,
        operations: bool = False,
        salted: bool = False,
        pending_pages: int = PENDING_PAGES,
        wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = Path(path)
        if self.path.suffix == ".gz":
            raise ConfigError(
                f"a trace is recorded as plain text, not to {self.path}; compress it afterwards with gzip"
            )
        if pending_pages < 1 or not 0 <= wait_s < float("inf"):
            raise ConfigError(
                f"pending_pages is {pending_pages} and wait_s {wait_s!r}; the first must be 1 or more, "
                "the second >= 0 seconds"
            )
        try:
            with open(self.path, "xb"):
                pass
        except FileExistsError:
            raise ConfigError(f"{self.path} exists; record to another file") from None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be created: {error.strerror}") from error
        self.operations = operations
        #: Entries and operations taken; those of them that were dropped.
        self.records = 0
        self.dropped = 0
        self._limit, self._wait_s, self._clock, self._trouble = (
            pending_pages,
            wait_s,
            clock,
            trouble,
        )
        self._began = clock()
        self._lock = threading.Condition()
        self._queue: deque[Record] = deque()
        self._pages = 0
        self._lost = 0
        self._told = False
        self._closing = False
        self._awaited: OrderedDict[bytes, None] = OrderedDict()
        self._encoder = _Encoder(os.urandom(16), salted)
        header = {
            MAGIC: VERSION,
            "page_tokens": page_tokens,
            "page_bytes": page_bytes,
            "keys": "salted" if salted else "plain",
            "operations": operations,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._file = LineFile(self.path)
        self._thread = threading.Thread(
            target=self._run, args=(header,), name="kvtier-trace", daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ what happens

    def request(
        self,
        keys: Sequence[bytes],
        found: int,
        *,
        tokens: int = 0,
        session: object = None,
        hints: Hints | None = None,
    ) -> None:
        """Somebody asked for ``keys``, root first, of which the first ``found`` were there."""
        with self._lock:
            for key in keys[found:]:
                self._awaited[key] = None
                self._awaited.move_to_end(key)
            while len(self._awaited) > AWAITED_KEYS:
                self._awaited.popitem(last=False)
            self._put(len(keys), "request", tuple(keys), tokens, session, hints)

    def stored(self, key: bytes, parent: bytes | None) -> None:
        """A page came into the store. If a request has asked for it, that goes without saying."""
        with self._lock:
            if key in self._awaited:
                del self._awaited[key]
            else:
                self._put(1, "add", (key,), parent)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Pages were dropped because somebody wanted that, not to make room."""
        if keys:
            with self._lock:
                self._put(len(keys), "remove", tuple(keys))

    def session_ended(self, keys: Sequence[bytes], session: object) -> None:
        """A session asks for these pages no more."""
        with self._lock:
            self._put(len(keys), "session_end", tuple(keys), 0, session, None)

    def operation(
        self, link: str, nbytes: int, queue_s: float, copy_s: float, *, failed: bool = False
    ) -> None:
        """A copy between tiers has ended; see ``kvtier.trace.native.Operation``."""
        if self.operations:
            with self._lock:
                self._put(1, "op", link, nbytes, queue_s, copy_s, failed)

    def close(self, timeout_s: float = 5.0) -> int:
        """Write what is in the queue and end the file, as far as time allows. Idempotent.

        Returns:
            Records that are not in the file.
        """
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(max(0.0, timeout_s))
        with self._lock:
            left = len(self._queue)
            self._queue.clear()
            self._pages = 0
            self.dropped += left
            if self._thread.is_alive():
                self._say(f"the trace {self.path} could not be finished within {timeout_s} s")
            elif left:
                self._say(f"{left} records of the trace {self.path} were not written")
            return self.dropped

    # ------------------------------------------------------------------ inside

    def _now(self) -> float:
        return self._clock() - self._began

    def _put(self, pages: int, kind: str, *rest: Any) -> None:
        if self._closing:
            return  # what happens after the end does not belong to it
        self.records += 1
        if self._wait_s:
            self._lock.wait_for(lambda: self._closing or not self._full(pages), self._wait_s)
        if self._closing or self._file.failed or self._full(pages):
            self.dropped += 1
            self._lost += 1
            why = self._file.failed or f"more than {self._limit} pages wait to be written"
            self._say(f"records of the trace {self.path} are dropped: {why}")
            return
        # The time is taken here, behind the wait: another thread may have come in meanwhile.
        self._queue.append((kind, self._now(), *rest))
        self._pages += pages
        self._lock.notify_all()

    def _full(self, pages: int) -> bool:
        # A single record that is larger than the queue is let in when nothing else waits.
        return bool(self._queue) and self._pages + pages > self._limit

    def _say(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._trouble(text)

    def _run(self, header: dict[str, Any]) -> None:
        asyncio.run(self._write(header))

    async def _write(self, header: dict[str, Any]) -> None:
        """The thread: takes what is queued, writes it, until it is told to end."""
        async with self._file as file:
            await file.write([header])
            while True:
                batch, lost, last = self._take()
                lines = list(self._encoder.lines(batch))
                if lost:
                    lines.append({"kind": "dropped", "t": self._time(batch), "records": lost})
                if last:
                    lines.append(
                        {"kind": "end", "t": round(self._now(), 6), "records": self.records}
                    )
                await file.write(lines)
                if file.failed:
                    with self._lock:
                        self._lost += len(batch)
                        self.dropped += len(batch)
                if last:
                    return

    def _take(self) -> tuple[list[Record], int, bool]:
        """All that waits, the records lost before, and whether that is the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self._lost or self._closing)
            batch = list(self._queue)
            self._queue.clear()
            self._pages = 0
            lost, self._lost = self._lost, 0
            self._lock.notify_all()
            return batch, lost, self._closing

    def _time(self, batch: list[Record]) -> float:
        return round(batch[-1][1] if batch else self._now(), 6)


class _Encoder:
    """Turns records into lines: numbers pages, disguises names."""

    def __init__(self, salt: bytes, salted: bool) -> None:
        self._salt, self._salted = salt, salted
        self._numbers: dict[bytes, int] = {}

    def lines(self, batch: Sequence[Record]) -> list[dict[str, Any]]:
        """The lines of a batch, in order."""
        lines: list[dict[str, Any]] = []
        adding: dict[str, Any] | None = None
        for kind, time_s, *rest in batch:
            if kind == "add" and adding is not None and self._joins(adding, *rest):
                continue
            adding = None
            if kind == "op":
                lines.append(self._operation(time_s, *rest))
                continue
            if len(self._numbers) + len(rest[0]) > TABLE_KEYS and self._numbers:
                self._numbers.clear()
                lines.append({"kind": "keys", "t": round(time_s, 6)})
            line = self._pages(kind, time_s, rest[0])
            if kind in ("request", "session_end"):
                self._describe(line, *rest[1:])
            elif kind == "add":
                after = None if rest[1] is None else self._numbers.get(rest[1])
                if after is not None:
                    line["after"] = after
                adding = line
            lines.append(line)
        return lines

    def _pages(self, kind: str, time_s: float, keys: Sequence[bytes]) -> dict[str, Any]:
        numbers = self._numbers
        at, new = len(numbers), []
        runs: list[list[int]] = []
        for key in keys:
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(numbers)
                new.append(self._name(key))
            if runs and runs[-1][0] + runs[-1][1] == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        line: dict[str, Any] = {"kind": kind, "t": round(time_s, 6), "pages": runs}
        if new:
            line |= {"at": at, "new": new}
        return line

    def _joins(self, line: dict[str, Any], keys: Sequence[bytes], parent: bytes | None) -> bool:
        """Add a page to the addition before it, if it is the next of the same sequence."""
        (key,) = keys
        first, length = line["pages"][-1]
        number = len(self._numbers)
        if key in self._numbers or parent is None or first + length != number:
            return False
        if self._numbers.get(parent) != number - 1 or "new" not in line:
            return False
        self._numbers[key] = number
        line["new"].append(self._name(key))
        line["pages"][-1][1] += 1
        return True

    def _describe(
        self, line: dict[str, Any], tokens: int, session: object, hints: Hints | None
    ) -> None:
        if tokens:
            line["tokens"] = tokens
        if session is not None:
            text = f"{type(session).__name__}:{session}".encode(errors="surrogatepass")
            line["session"] = hashlib.blake2b(text, digest_size=8, key=self._salt).hexdigest()
        if hints is not None:
            said = {name: value for name, value in hints._asdict().items() if value is not None}
            if said:
                line["hints"] = said

    @staticmethod
    def _operation(
        time_s: float, link: str, nbytes: int, queue_s: float, copy_s: float, failed: bool
    ) -> dict[str, Any]:
        line: dict[str, Any] = {
            "kind": "op", "t": round(time_s, 6), "link": link, "bytes": nbytes,
            "queue_s": round(max(0.0, queue_s), 9), "copy_s": round(max(0.0, copy_s), 9),
        }  # fmt: skip
        return line | {"failed": True} if failed else line

    def _name(self, key: bytes) -> str:
        if self._salted:
            return hashlib.blake2b(key, digest_size=16, key=self._salt).hexdigest()
        return key.hex()
