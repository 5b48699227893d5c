"""Runs bodies in a process of its own: under a sanitizer, which has to be loaded before everything else, or bare,
for device code that may write anywhere.

    python sanitized.py KIND LOG    reads jobs from standard input as JSON, writes one line of JSON a job
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Rungs, by what they find: wrong values, a bad launch, unordered accesses, accesses out of bounds, misaligned ones.
VALUES, LAUNCH, RACE, BOUNDS, ALIGNMENT = "values", "launch", "race", "bounds", "alignment"

#: What a sanitizer calls them.
_REPORTS = {
    "data race": RACE,
    "AddressSanitizer: ": BOUNDS,
    "misaligned address": ALIGNMENT,
}
_TIMEOUT_S = 240.0
_NO_RANDOMISATION = 0x0040000


@dataclass(frozen=True)
class Job:
    """A body with a built library; ``tamper`` names an entry of ``mutants.TAMPERS``."""

    name: str
    library: str
    body: str
    tamper: str = ""


@dataclass(frozen=True)
class Outcome:
    """What was found: the first line of a message, by rung."""

    name: str
    found: dict[str, str]


def run_jobs(kind: str, jobs: list[Job], folder: Path) -> list[Outcome]:
    """Run all jobs in one process: ``"values"`` in three orders, or with ``"tsan"`` or ``"asan"``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind != "values":
        options = "halt_on_error=0:exitcode=0"
        environment |= {
            "LD_PRELOAD": _runtime(kind),
            "TSAN_OPTIONS": options,
            "ASAN_OPTIONS": f"{options}:detect_leaks=0",
            "UBSAN_OPTIONS": options,
        }
    log = folder / f"{kind}-{os.getpid()}.log"
    with log.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), kind, str(log)],
            input=json.dumps([asdict(job) for job in jobs]),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=environment,
            # ThreadSanitizer wants its addresses where they are without randomisation.
            preexec_fn=_fixed_addresses if kind == "tsan" else None,
        )
    told = log.read_text(errors="replace")
    log.unlink()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    outcomes = [Outcome(**line) for line in lines]
    missing = [job.name for job in jobs if job.name not in {o.name for o in outcomes}]
    assert not missing, f"{kind}: nothing came of {missing}: {told[-2000:]}"
    return outcomes


def _runtime(kind: str) -> str:
    command = ["g++", f"-print-file-name=lib{kind}.so"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    path = done.stdout.strip()
    assert os.path.isabs(path), f"g++ has no {path}; install its sanitizer runtimes"
    return path


def _fixed_addresses() -> None:
    ctypes.CDLL(None).personality(_NO_RANDOMISATION)


# ------------------------------------------------------------------------ in the process of its own


def _main(kind: str, log: str) -> None:
    import bodies  # noqa: F401  once, not in every fork
    import mutants  # noqa: F401
    import torch

    torch.set_num_threads(1)
    for job in (Job(**item) for item in json.load(sys.stdin)):
        if kind == "values":
            found = _in_a_fork(lambda job=job: _in_all_orders(job))  # type: ignore[misc]
        else:
            before = os.stat(log).st_size
            run = lambda job=job: _run(job, "random")  # noqa: E731
            # An address out of bounds may be reported and then followed. ThreadSanitizer bears no forks.
            done = _in_a_fork(run) if kind == "asan" else run()
            found = done | _reports(Path(log).read_bytes()[before:])
            # What a bug does to the values is for the rung of the values.
            found.pop(VALUES, None)
        print(json.dumps(asdict(Outcome(job.name, found))), flush=True)


def _in_all_orders(job: Job) -> dict[str, str]:
    import cpumod

    for order in cpumod.ORDERS:
        found = _run(job, order)
        if found:
            return found
    return {}


def _run(job: Job, order: Any) -> dict[str, str]:
    import bodies
    import cpumod
    import mutants
    import places
    import torch

    launcher: Any = cpumod.CpuLauncher(Path(job.library), order)
    if job.tamper:
        launcher = mutants.TamperedLauncher(launcher, mutants.TAMPERS[job.tamper])
    body = bodies.SMALL_BODIES[job.body]
    torch.manual_seed(0)
    try:
        body(places.Place(torch.device("cpu"), launcher))
    except cpumod.LaunchError as error:
        return {LAUNCH: _first_line(error)}
    except AssertionError as error:
        return {VALUES: _first_line(error)}
    return {}


def _reports(log: bytes) -> dict[str, str]:
    """What a sanitizer wrote, by rung."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", log.decode(errors="replace")).splitlines()
    found = {}
    for words, rung in _REPORTS.items():
        line = next((line for line in lines if words in line), None)
        if line is not None:
            found[rung] = line
    return found


def _in_a_fork(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Device code that writes out of bounds may take its process with it."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not text:  # a sanitizer ends a process that crashed without an error
        return {VALUES: f"crashed with {os.waitstatus_to_exitcode(status)}"}
    return json.loads(text)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


if __name__ == "__main__":
    _main(*sys.argv[1:])
