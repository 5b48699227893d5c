"""A process that forks one child for each thing to do with a disk tier; see ``disk_child.fork``."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import disk_child
from damage import Damage

DEADLINE_S = 60.0


@contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty folder, in memory where that is possible: for tests that open hundreds of stores and do not
    care what the drive does.
    """
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as name:
        yield Path(name).resolve()


class Process:
    """Use as a context manager. Children may die in any way; the next one is not affected.

    Args:
        env: environment variables on top of this process's.
    """

    def __init__(self, **env: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, disk_child.__file__, "fork"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    def _begin(self, command: str, folder: Path, options: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\t{folder}\t{json.dumps(options)}\n")
        self._process.stdin.flush()

    def _next(self) -> str:
        return self._lines.get(timeout=DEADLINE_S)

    def check(self, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """``disk_child.check`` in a child.

        Returns:
            What it found, page numbers as integers; ``{"died": status}`` if it did not survive.
        """
        (report,), status = self._reports("check", folder, options, 1)
        return report or {"died": status}

    def errors(self, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """``disk_child.errors`` in a child; ``{"died": status}`` if it did not survive."""
        (report,), status = self._reports("errors", folder, options, 1)
        return report or {"died": status}

    def damage(
        self, folder: Path, origin: Path, damages: Sequence[Damage], check: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """``damage.run``: what ``check`` finds after each; ``{"died": status}`` where it did not survive."""
        found: list[dict[str, Any]] = []
        while len(found) < len(damages):
            rest = list(damages[len(found) : len(found) + 500])
            options = {"origin": str(origin), "damages": rest, "check": check}
            reports, status = self._reports("damage", folder, options, len(rest))
            alive = [report for report in reports if report]
            found += alive
            if len(alive) < len(rest):
                found.append({"died": status})
        return found

    def _reports(
        self, command: str, folder: Path, options: dict[str, Any], count: int
    ) -> tuple[list[dict[str, Any]], int]:
        """``count`` reports, empty where there is none, and how the child ended."""
        self._begin(command, folder, options)
        reports: list[dict[str, Any]] = []
        while not (line := self._next()).startswith("ended"):
            report = json.loads(line)
            if "found" in report:
                report["found"] = {int(n): version for n, version in report["found"].items()}
            reports.append(report)
        return reports + [{}] * (count - len(reports)), int(line.split()[1])

    def run_and_kill(
        self, command: str, folder: Path, options: dict[str, Any], after: int, more_s: float
    ) -> list[str]:
        """Let a child do ``command``, and kill it ``more_s`` after its ``after``-th line.

        Returns:
            Its lines; of a last one that was cut off nobody has read anything.
        """
        self._begin(command, folder, options)
        first = self._next().split()
        assert first[0] == "pid", f"the child did not start: {first}"
        lines: list[str] = []
        end = time.monotonic() + DEADLINE_S
        while len(lines) < after:
            line = self._next()
            assert not line.startswith("ended"), "the child ended by itself"
            assert time.monotonic() < end, "the child does not get on"
            lines.append(line.strip())
        time.sleep(more_s)
        os.kill(int(first[1]), signal.SIGKILL)
        while "ended" not in (line := self._next()):
            lines.append(line.strip())
        assert line.split()[-1] == str(-signal.SIGKILL), f"the child ended by itself: {line}"
        return lines
