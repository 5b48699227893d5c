"""The operating system refuses: every write, sync and allocation fails once, and from then on.

The calls are counted and made to fail below the tier, in the C library (``powercut_shim.c``), so LMDB's own
writes are among them. What was there stays, a put that failed can be repeated, and what was acknowledged is
there, also after a restart.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_child import PLACEMENTS
from disk_process import Process, memory_folder
from powercut import build_shim

#: -1: half of the write is done, as the system may at any time.
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "half": -1}
MANY = 1 << 30


@pytest.fixture(scope="module")
def where() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def process(where: Path) -> Iterator[Process]:
    shim = build_shim(where)
    with Process(LD_PRELOAD=str(shim), POWERCUT_FOLDER=str(where / "tier")) as process:
        yield process


def fail_each(
    process: Process, folder: Path, options: dict[str, Any], *, times: int, step: int
) -> None:
    """Every ``step``-th call fails in a run of its own, with the ``times - 1`` after it."""
    seen = 0
    for at in range(0, MANY, step):
        case = {**options, "from": at, "until": min(MANY, at + times)}
        report = process.errors(folder, case)
        shutil.rmtree(folder)
        assert "died" not in report, (case, report)
        assert not report["wrong"], (case, report)
        if report["calls"] <= at:
            break
        seen += bool(report["failed"])
    assert at >= step or options["error"] < 0, "hardly a call was counted"
    assert seen or options["error"] < 0, "no failure was noticed"


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("payload", PLACEMENTS)
def test_a_call_that_fails_once(process: Process, where: Path, payload: str, kind: str) -> None:
    options = {"payload": payload, "error": ERRORS[kind], "open": True}
    fail_each(process, where / "tier", options, times=1, step=7)


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_a_disk_that_fails_from_some_call_on(process: Process, where: Path, payload: str) -> None:
    options = {"payload": payload, "error": errno.EIO, "open": True}
    fail_each(process, where / "tier", options, times=MANY, step=11)


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_a_call_that_fails_while_opening(process: Process, where: Path, payload: str) -> None:
    options = {"payload": payload, "error": errno.EIO, "open": False}
    fail_each(process, where / "tier", options, times=1, step=1)


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["durable", "relaxed"])
@pytest.mark.parametrize("times", [1, 2, 5, MANY])
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("payload", PLACEMENTS)
def test_every_call_fails(
    process: Process, where: Path, payload: str, kind: str, times: int, durability: str
) -> None:
    options = {"payload": payload, "error": ERRORS[kind], "durability": durability}
    for opened in (True, False):
        fail_each(process, where / "tier", {**options, "open": opened}, times=times, step=1)
