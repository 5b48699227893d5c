"""A file of JSON lines, written through aiofiles; every ``write`` ends at the end of a line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class LineFile:
    """Appends lines. Errors are kept, not raised: whoever records must not fail with its disk.

    Attributes:
        failed: why nothing is written any more; empty while all is well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = _Thread()
        self._file: Any = None
        self.failed = ""

    async def __aenter__(self) -> Self:
        import aiofiles

        try:
            self._file = await aiofiles.open(self._path, "ab", buffering=0, executor=self._thread)
        except OSError as error:
            self._fail(error)
        return self

    async def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Append one line a record, in one piece, and hand them to the system."""
        data = b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records)
        left = memoryview(data)
        try:
            while left and not self.failed:
                left = left[await self._file.write(left) :]
        except OSError as error:
            self._fail(error)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            try:
                await self._file.close()
            except OSError as failure:
                self._fail(failure)
        self._thread.shutdown(wait=False)

    def _fail(self, error: OSError) -> None:
        self.failed = f"{self._path} cannot be written: {error.strerror or error}"


class _Thread(Executor):
    """Runs one call after another in a daemon thread, so that a disk that hangs cannot keep the
    process from ending (the threads of a ``ThreadPoolExecutor`` are joined at exit)."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=self._run, name="kvtier-trace-io", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, fn, args, kwargs = job
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
