"""Many replays of one trace, in one process or several."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from kvtier.errors import ConfigError, KvtierError
from kvtier.policy import Order
from kvtier.processors import processors
from kvtier.replay.find_size import SizeFound, find_size
from kvtier.replay.machines import MachinesCell, replay_machines
from kvtier.replay.tier import Cell, Progress, replay_tier
from kvtier.replay.tiers import TiersCell, replay_tiers
from kvtier.trace.trace import Trace

#: References of all jobs together below which further processes cost more than they save.
SMALL = 2_000_000
_POLL_S = 0.2


class Job(Protocol):
    """One replay. Sent to another process, so it holds plain values only."""

    @property
    def weight(self) -> float:
        """How long it takes, in plain replays."""

    def run(
        self, trace: Trace, entries: Sequence[Sequence[int]], progress: Progress | None
    ) -> Any: ...


@dataclass(frozen=True)
class TierJob:
    """One policy at one size; see ``replay_tier``."""

    spec: str
    pages: int
    order: Order | None = None
    leaf_first: bool = False
    capacity_bytes: int | None = None

    @property
    def weight(self) -> float:
        return 4.0 if self.spec == "opt" else 1.0

    def run(
        self, trace: Trace, entries: Sequence[Sequence[int]], progress: Progress | None
    ) -> Cell:
        return replay_tier(
            trace, self.spec, self.pages, order=self.order, leaf_first=self.leaf_first,
            capacity_bytes=self.capacity_bytes, entries=entries, progress=progress,
        )  # fmt: skip


@dataclass(frozen=True)
class TiersJob:
    """One policy over several tiers; see ``replay_tiers``."""

    spec: str
    sizes: tuple[tuple[str, int], ...]
    page_bytes: int
    order: Order | None = None
    host_write: str = "write_back"
    disk_write: str = "write_through"
    weight: float = 20.0

    def run(
        self, trace: Trace, entries: Sequence[Sequence[int]], progress: Progress | None
    ) -> TiersCell:
        return replay_tiers(
            trace, self.spec, dict(self.sizes), self.page_bytes, order=self.order,
            host_write=self.host_write, disk_write=self.disk_write, entries=entries,
            progress=progress,
        )  # fmt: skip


@dataclass(frozen=True)
class MachinesJob:
    """One policy on several machines; see ``replay_machines``."""

    spec: str
    pages: int
    machines: int
    router: str
    overflow_per_min: float | None = None
    shared_pages: int = 0
    order: Order | None = None
    weight: float = 2.0

    def run(
        self, trace: Trace, entries: Sequence[Sequence[int]], progress: Progress | None
    ) -> MachinesCell:
        return replay_machines(
            trace, self.spec, self.pages, machines=self.machines, router=self.router,
            overflow_per_min=self.overflow_per_min, shared_pages=self.shared_pages,
            order=self.order, entries=entries, progress=progress,
        )  # fmt: skip


@dataclass(frozen=True)
class FindJob:
    """The smallest tier that reaches a hit ratio; see ``find_size``."""

    spec: str
    target: float
    order: Order | None = None
    leaf_first: bool = False
    weight: float = 18.0

    def run(
        self, trace: Trace, entries: Sequence[Sequence[int]], progress: Progress | None
    ) -> SizeFound:
        return find_size(
            trace, self.spec, self.target, order=self.order, leaf_first=self.leaf_first,
            entries=entries, progress=progress,
        )  # fmt: skip


def run_jobs(
    trace: Trace,
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[Any]:
    """The results of all jobs, in their order.

    Args:
        workers: processes; by default as many as there are cores if the work is worth it, else this one.
        progress: called now and then with the share of the work that is done, 0..1.

    Raises:
        ConfigError: as the jobs do.
        KvtierError: a process ended before its job.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}; give at least 1")
    work = sum(job.weight for job in jobs)
    if workers is None:
        workers = processors() if len(trace.pages) * work > SMALL else 1
    workers = min(workers, len(jobs))
    report = _Report(len(trace) * len(jobs), progress)
    if workers <= 1:
        entries = list(trace.entries())
        return [job.run(trace, entries, report.add) for job in jobs]
    with _Workers(trace, workers) as pool:
        return pool.run(jobs, report)


class _Report:
    """Sums up entries that were done."""

    def __init__(self, total: int, progress: Callable[[float], None] | None) -> None:
        self._total, self._progress, self._done = max(1, total), progress, 0

    def add(self, entries: int) -> None:
        self.set(self._done + entries)

    def set(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(min(1.0, done / self._total))


class _Workers:
    """Processes that run jobs. Started anew rather than forked: the caller may have threads."""

    def __init__(self, trace: Trace, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._done = context.Value("q", 0)
        self._processes: dict[Connection, Any] = {}
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, trace, self._done), name="kvtier-replay", daemon=True
            )
            process.start()
            there.close()
            self._processes[here] = process

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
        for process in self._processes.values():
            process.join(5.0)

    def run(self, jobs: Sequence[Job], report: _Report) -> list[Any]:
        """See ``run_jobs``."""
        waiting = sorted(range(len(jobs)), key=lambda at: jobs[at].weight)
        results: list[Any] = [None] * len(jobs)
        busy: dict[Connection, int] = {}
        idle = list(self._processes)
        while waiting or busy:
            while waiting and idle:
                connection = idle.pop()
                busy[connection] = waiting.pop()
                with contextlib.suppress(OSError):  # then the read below says what happened
                    connection.send(jobs[busy[connection]])
            for ready in wait(list(busy), _POLL_S):
                assert isinstance(ready, Connection)
                results[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)
            report.set(self._done.value)
        return results

    def _receive(self, connection: Connection) -> Any:
        try:
            result = connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join(1.0)
            raise KvtierError(
                f"a replay process ended with exit code {process.exitcode} before its job (killed for memory?); "
                "use fewer --workers"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return result


def _work(connection: Connection, trace: Trace, done: Any) -> None:
    """A worker: runs jobs until the other end closes."""
    entries = list(trace.entries())

    def progress(count: int) -> None:
        with done.get_lock():
            done.value += count

    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            result = job.run(trace, entries, progress)
        except KeyboardInterrupt:
            return
        except Exception as error:
            result = error
        connection.send(result)
