"""Power cuts: a run's writes are recorded, and what may be left of them at any moment is opened.

``powercut.py`` says what may be left. The recorded load puts, replaces and deletes pages and lowers and
raises the limit; its acknowledgements stand in the same log as its writes.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import disk_child
import pytest
from disk_child import PLACEMENTS, Note, Promise
from disk_process import Process, memory_folder
from powercut import MARK, Event, Machine, build_shim, record

SIZES = [1 << 20, 768 << 10, 1 << 20]
ROUNDS = 80
Log = list[Event]


class Recordings:
    """The logs of loads, each recorded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shim = build_shim(folder)
        self._logs: dict[str, Log] = {}

    def log(self, options: dict[str, Any], *, lies: bool = False, wrong: str = "") -> Log:
        """The log of a load on a tier in ``self.tier``."""
        # A tier whose slots are wrong cannot shrink.
        sizes = SIZES[:1] if wrong == "reuse" else SIZES
        load = {**options, "marks": True, "rounds": ROUNDS, "sizes": sizes, "wrong": wrong}
        name = json.dumps([load, lies])
        if name not in self._logs:
            command = [disk_child.__file__, "load", str(self.tier), json.dumps(load)]
            try:
                self._logs[name] = record(self._shim, self.tier, command, lies=lies)
            finally:
                shutil.rmtree(self.tier)
            assert sum(event.kind == MARK for event in self._logs[name]) > ROUNDS
        return self._logs[name]

    @property
    def tier(self) -> Path:
        return self._folder / "tier"


@pytest.fixture(scope="module")
def recordings() -> Iterator[Recordings]:
    with memory_folder() as folder:
        yield Recordings(folder)


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process() as process:
        yield process


def outcomes(
    process: Process,
    folder: Path,
    log: Log,
    options: dict[str, Any],
    images: int,
    *,
    until: str = "",
    **check: Any,
) -> Counter[str]:
    """How ``images`` power cuts end, by kind; none after one of kind ``until``. Warns of all that are not
    good.
    """
    rng = random.Random(images)
    machine = Machine(folder, log)
    promise = Promise(strict=options["durability"] == "durable")
    result: Counter[str] = Counter()
    notes = [Note.unpack(event.offset) for event in log if event.kind == MARK]
    check = {
        **options,
        "capacity_bytes": max(SIZES),
        "numbers": max(note.number for note in notes) + 1,
        "versions": max(note.version for note in notes) + 1,
        **check,
    }
    marks = done = 0
    for moment in sorted(rng.randrange(len(log)) for _ in range(images)):
        if result[until]:
            break
        while done < moment:
            machine.step()
            done += 1
        for value in machine.marks[marks:]:
            promise.note(Note.unpack(value))
        marks = len(machine.marks)
        image = folder.with_name("image")
        machine.cut(image, rng)
        kind, what = judge(process.check(image, check), promise)
        shutil.rmtree(image)
        result[kind] += 1
        result["acknowledged"] += promise.acknowledged()
        if kind != "good":
            warnings.warn(f"{kind} at event {moment}: {what}", UserWarning, stacklevel=2)
    return result


def judge(report: dict[str, Any], promise: Promise) -> tuple[str, str]:
    """The kind of an outcome, and why."""
    if "died" in report:
        return "died", f"status {report['died']}"
    if "refused" in report:
        return "refused", report["refused"]
    if report["wrong"]:
        return "wrong page", str(report["wrong"])
    if report["unusable"]:
        return "unusable", report["unusable"]
    broken = promise.broken(report["found"])
    return ("broken promise", f"{len(broken)}: {broken[:3]}") if broken else ("good", "")


CASES = [
    {"payload": payload, "durability": durability}
    for payload in PLACEMENTS
    for durability in ("durable", "relaxed")
]
IDS = ["-".join(case.values()) for case in CASES]


def survives(
    recordings: Recordings, process: Process, options: dict[str, Any], images: int
) -> None:
    result = outcomes(process, recordings.tier, recordings.log(options), options, images)
    assert result["good"] == images, result
    assert result["acknowledged"] > images, "hardly a page was at stake"


@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_a_power_cut_loses_nothing_that_was_acknowledged(
    recordings: Recordings, process: Process, options: dict[str, Any]
) -> None:
    survives(recordings, process, options, 15)


@pytest.mark.nightly
@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_many_power_cuts(recordings: Recordings, process: Process, options: dict[str, Any]) -> None:
    survives(recordings, process, options, 250)


# ---------------------------------------------------------------- the test can fail


def finds(
    recordings: Recordings,
    process: Process,
    payload: str,
    kind: str,
    *,
    unchecked: bool = False,
    **load: Any,
) -> bool:
    """Whether some power cut ends in ``kind``."""
    options = {"payload": payload, "durability": "durable"}
    check = {"wrong": "unchecked"} if unchecked else {}
    log = recordings.log(options, **load)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = outcomes(process, recordings.tier, log, options, 300, until=kind, **check)
    return bool(result[kind])


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_an_acknowledgement_before_the_commit_is_found(
    recordings: Recordings, process: Process, payload: str
) -> None:
    assert finds(recordings, process, payload, "broken promise", wrong="early")


def test_an_index_that_is_committed_before_the_payloads_is_found(
    recordings: Recordings, process: Process
) -> None:
    assert finds(recordings, process, "slab", "broken promise", wrong="unsynced")


@pytest.mark.parametrize("payload", PLACEMENTS)
def test_a_drive_that_lies_about_syncs_is_found(
    recordings: Recordings, process: Process, payload: str
) -> None:
    assert finds(recordings, process, payload, "broken promise", lies=True)


def test_a_slot_that_is_reused_before_its_removal_is_committed_is_found(
    recordings: Recordings, process: Process
) -> None:
    """By wrong pages, if nobody verifies them; with the right order there are none even then."""
    assert finds(recordings, process, "slab", "wrong page", wrong="reuse", unchecked=True)
    options = {"payload": "slab", "durability": "durable"}
    log = recordings.log(options)
    result = outcomes(process, recordings.tier, log, options, 15, wrong="unchecked")
    assert result["good"] == 15


def test_a_wrong_page_is_found_if_checksums_are_not_checked(
    recordings: Recordings, process: Process
) -> None:
    # In slabs: a payload in the database can hardly be wrong while the whole tree is right.
    assert finds(recordings, process, "slab", "wrong page", lies=True, unchecked=True)
