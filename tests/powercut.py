"""The disks that a power cut might leave: what a process wrote is recorded, then cut off anywhere.

``record`` runs a process under ``powercut_shim.c`` and gives its log. ``Machine`` replays the log up to a
moment and draws an image of the folder as it may be found afterwards:

* what was written to a file before a sync of it began, and the sync has ended, is there;
* of what was written since, an arbitrary subset of the blocks is (of 4 KiB, or of 512 bytes: a sector is
  what a drive writes whole), and an arbitrary subset of the changes of its size;
* names (created, renamed, removed) are as after some prefix of the changes since the last sync of the
  folder, as file systems with a journal leave them;
* ``lock.mdb`` is gone: LMDB makes it anew at the first open after a boot.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

SHIM = Path(__file__).with_name("powercut_shim.c")
_HEAD = struct.Struct("<IIQQQ")
(
    WRITE,
    SYNC_BEGIN,
    SYNC_END,
    SIZE,
    ZERO,
    CREATE,
    UNLINK,
    RENAME,
    MKDIR,
    FOLDER_SYNC_BEGIN,
    FOLDER_SYNC_END,
    MARK,
    UNSEEN,
) = range(1, 14)

#: Shares of the blocks since the last sync that reached the drive.
KEPT = (0.0, 0.02, 0.2, 0.5, 0.8, 0.98, 1.0)


class Event(NamedTuple):
    kind: int
    thread: int
    file: int
    offset: int
    data: bytes


def build_shim(folder: Path) -> Path:
    """The compiled shim; skips the test where there is no compiler."""
    library = folder / "powercut_shim.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no C compiler: the power-cut test records writes with a small C library")
    return library


def record(shim: Path, folder: Path, command: Sequence[str], *, lies: bool = False) -> list[Event]:
    """What ``python command...`` did to ``folder``, in order."""
    log = folder.with_suffix(".log")
    env = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "POWERCUT_LOG": str(log),
        "POWERCUT_FOLDER": str(folder.resolve()),
        **({"POWERCUT_LIES": "1"} if lies else {}),
    }
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    events = list(_read(log.read_bytes()))
    log.unlink()
    unseen = {event.data.decode() for event in events if event.kind == UNSEEN}
    assert not unseen, f"the recorder cannot see: {unseen}"
    return events


def _read(raw: bytes) -> Iterator[Event]:
    at = 0
    while at < len(raw):
        kind, thread, file, offset, nbytes = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        yield Event(kind, thread, file, offset, raw[at : at + nbytes])
        at += nbytes


@dataclass
class _Change:
    """A change of a file. ``safe``: written with O_DSYNC, there whatever else is."""

    event: Event
    safe: bool = False


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)  # what is certainly on the drive
    pending: list[_Change] = field(default_factory=list)
    syncing: dict[int, int] = field(default_factory=dict)  # thread -> pending changes it covers


@dataclass
class _Names:
    """The folder's entries: what is safe, and the changes since."""

    safe: dict[str, _File | None] = field(default_factory=dict)  # None: a folder
    pending: list[tuple[int, str, str, _File | None]] = field(default_factory=list)
    syncing: dict[int, int] = field(default_factory=dict)

    def after(self, changes: int) -> dict[str, _File | None]:
        names = dict(self.safe)
        for kind, path, target, file in self.pending[:changes]:
            if kind == UNLINK:
                names.pop(path, None)
            elif kind == RENAME:
                if path in names:
                    names[target] = names.pop(path)
            else:
                names[path] = file
        return names


class Machine:
    """A machine whose power may go at any event.

    Args:
        folder: what was recorded.
        events: the log, from before the folder had any file.
    """

    def __init__(self, folder: Path, events: Sequence[Event]) -> None:
        self._root = str(folder.resolve())
        self._events = deque(events)
        self._files: dict[int, _File] = {}
        self._names = _Names()
        #: The marks that were reached.
        self.marks: list[int] = []

    def step(self) -> None:
        """Let the next event happen."""
        event = self._events.popleft()
        kind = event.kind
        if kind == MARK:
            self.marks.append(event.offset)
        elif kind in (FOLDER_SYNC_BEGIN, FOLDER_SYNC_END):
            self._sync_names(event)
        elif kind in (CREATE, UNLINK, RENAME, MKDIR):
            self._rename(event)
        elif event.file in self._files:
            self._change(self._files[event.file], event)

    def _rename(self, event: Event) -> None:
        path, _, target = event.data.decode().partition("\n")
        file: _File | None = None
        if event.kind == CREATE:
            file = self._files[event.file] = _File()
        self._names.pending.append((event.kind, self._relative(path), self._relative(target), file))

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root) if path else ""

    def _sync_names(self, event: Event) -> None:
        names = self._names
        if event.kind == FOLDER_SYNC_BEGIN:
            names.syncing[event.thread] = len(names.pending)
            return
        covered = names.syncing.pop(event.thread)
        names.safe = names.after(covered)
        del names.pending[:covered]
        names.syncing = {thread: max(0, n - covered) for thread, n in names.syncing.items()}

    @staticmethod
    def _change(file: _File, event: Event) -> None:
        if event.kind == SYNC_BEGIN:
            file.syncing[event.thread] = len(file.pending)
        elif event.kind == SYNC_END and event.offset == 1:
            last = max(
                i for i, change in enumerate(file.pending) if change.event.thread == event.thread
            )
            file.pending[last].safe = True
        elif event.kind == SYNC_END:
            covered = file.syncing.pop(event.thread)
            for change in file.pending[:covered]:
                _apply(file.content, change.event)
            del file.pending[:covered]
            file.syncing = {thread: max(0, n - covered) for thread, n in file.syncing.items()}
        else:
            file.pending.append(_Change(event))

    def cut(self, folder: Path, rng: random.Random) -> None:
        """Write what may be found after the power went now into ``folder``, which is made."""
        kept, block = rng.choice(KEPT), rng.choice((512, 4096))
        names = self._names.after(rng.randint(0, len(self._names.pending)))
        folder.mkdir(mode=0o700)
        for path in sorted(names):
            target, file = folder / path, names[path]
            if path == ".":
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if file is None:
                target.mkdir(exist_ok=True)
                continue
            content = bytearray(file.content)
            for change in file.pending:
                if change.safe:
                    _apply(content, change.event)
                elif change.event.kind == WRITE:
                    _apply_some(content, change.event, block, kept, rng)
                elif rng.random() < kept:
                    _apply(content, change.event)
            target.write_bytes(content)
            target.chmod(0o600)


def _apply(content: bytearray, event: Event) -> None:
    if event.kind == WRITE:
        _store(content, event.offset, event.data)
    elif event.kind == ZERO:
        nbytes = int.from_bytes(event.data, "little")
        stop = min(len(content), event.offset + nbytes)
        content[event.offset : stop] = bytes(max(0, stop - event.offset))
    else:
        size, only_grows = event.offset, int.from_bytes(event.data, "little")
        if size > len(content):
            content.extend(bytes(size - len(content)))
        elif not only_grows:
            del content[size:]


def _apply_some(
    content: bytearray, event: Event, block: int, kept: float, rng: random.Random
) -> None:
    start, end = event.offset, event.offset + len(event.data)
    at = start
    while at < end:
        stop = min(end, (at // block + 1) * block)
        if rng.random() < kept:
            _store(content, at, event.data[at - start : stop - start])
        at = stop


def _store(content: bytearray, at: int, data: bytes) -> None:
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data
