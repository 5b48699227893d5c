"""How the pages in a store directory were computed: ``runs.json`` beside the database.

The last bits of a float depend on how many tokens went through the model at once. A restored page
therefore equals the page that was saved, and not necessarily one that is computed again in other
chunks. To compare a restored run with a computation from scratch, bit by bit, the computation has
to make the same forward calls as the runs that made the pages. This file remembers them: for each
prompt the tokens and the calls ``[start, stop)``, where a call that starts before the end of the
cache means that the cache was cut back to ``start`` first. It also keeps the time that the first
run needed, to say what a restore saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Call = tuple[int, int]

FILE = "runs.json"
KEPT_RUNS = 16


@dataclass
class Run:
    """One prompt's record.

    Attributes:
        identity: digest of the model, hex.
        numerics: what changes rounding but not meaning: versions, threads, attention
            implementation.
        tokens: prompt, and once ``finished`` what was generated and fed.
        prompt_tokens: length of the prompt.
        calls: forward calls that filled the cache, in order.
        cold_ttft_s: time to first token of the run that restored nothing.
        finished: the run came to its end.
    """

    identity: str
    numerics: str
    tokens: list[int]
    prompt_tokens: int
    calls: list[Call] = field(default_factory=list)
    cold_ttft_s: float | None = None
    finished: bool = False

    @property
    def prompt_key(self) -> str:
        prompt = json.dumps(self.tokens[: self.prompt_tokens])
        return hashlib.sha256(f"{self.identity} {prompt}".encode()).hexdigest()

    def filled(self, restored: int) -> list[Call]:
        """The calls that made the first ``restored`` tokens."""
        return [(start, stop) for start, stop in self.calls if start < restored]


@dataclass(frozen=True)
class Source:
    """Where restored tokens came from: calls to repeat on ``tokens``. ``exact`` is False if that is
    unknown."""

    tokens: list[int]
    calls: list[Call]
    exact: bool


class History:
    """The runs recorded in a store directory, the newest last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._runs = self._read()

    def begin(self, run: Run, restored: int, restorable: int) -> Source:
        """Record ``run``, about to make ``run.calls`` after ``restored`` of at most ``restorable``
        tokens came from the store.

        It is on disk when this returns, before any page of the run can be. A run that found
        everything adds no page, so the record of the run that did stays. Returns what made the
        restored tokens.
        """
        source = self._source(run, restored)
        before = next((old for old in self._runs if old.prompt_key == run.prompt_key), None)
        if before is not None:
            run.cold_ttft_s = before.cold_ttft_s
            if before.finished and before.numerics == run.numerics and restored == restorable > 0:
                return source
        run.calls = [*source.calls, *run.calls]
        self._runs = [old for old in self._runs if old.prompt_key != run.prompt_key][
            -(KEPT_RUNS - 1) :
        ]
        self._runs.append(run)
        self._write()
        return source

    def finish(self, run: Run, generated: Sequence[int], ttft_s: float, restored: int) -> None:
        """The run has ended: all of ``generated`` but the last token were fed one by one."""
        if restored == 0:
            run.cold_ttft_s = ttft_s
        if run in self._runs:
            fed = list(generated[:-1])
            run.calls = [
                *run.calls,
                *((run.prompt_tokens + i, run.prompt_tokens + i + 1) for i in range(len(fed))),
            ]
            run.tokens = [*run.tokens, *fed]
            run.finished = True
            self._write()

    def _source(self, run: Run, restored: int) -> Source:
        if restored == 0:
            return Source([], [], True)
        for old in reversed(self._runs):
            same = old.identity == run.identity and old.numerics == run.numerics
            calls = old.filled(restored)
            if same and old.tokens[:restored] == run.tokens[:restored] and _covers(calls, restored):
                return Source(old.tokens[: max(stop for _, stop in calls)], calls, True)
        return Source(run.tokens[:restored], [(0, restored)], False)

    def _read(self) -> list[Run]:
        # A damaged or foreign file only costs the exactness of a later comparison: start anew.
        try:
            rows = json.loads(self._path.read_text(encoding="utf-8"))["runs"]
            runs = [Run(**row) for row in rows]
            for run in runs:
                run.calls = [(int(start), int(stop)) for start, stop in run.calls]
        except (OSError, ValueError, TypeError, KeyError):
            return []
        return runs

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": 1, "runs": [asdict(run) for run in self._runs]})
        fresh = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()


def _covers(calls: Iterable[Call], tokens: int) -> bool:
    end = 0
    for start, stop in calls:
        if start > end:
            return False
        end = stop
    return end >= tokens
