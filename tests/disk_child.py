"""Pages with known content, and processes that put them into a disk tier until something happens.

    python disk_child.py load FOLDER OPTIONS     a mixed load, until killed or for OPTIONS["rounds"]
    python disk_child.py open FOLDER             open the folder, print the error if any
    python disk_child.py fork                    for each line "COMMAND FOLDER OPTIONS" (tabs) on stdin one
                                                 forked process that does it; its last line is "ended N".
                                                 COMMAND: load, check, errors, damage, or evict (a store under pressure)

OPTIONS is JSON: ``first`` (number of the first page), ``rounds``, ``marks`` (write marks into the log of
``powercut_shim.c`` instead of lines on stdout), ``sizes`` (capacities, changed over the rounds), ``there``
(version of each page that is there), ``wrong`` (a mistake to make, see ``Mistake``) and what ``open_tier``
takes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from kvtier.errors import DiskError
from kvtier.tiers.disk import DiskTier

#: Three planes with gaps of 16 bytes between them and of 84 bytes at the end.
PLANES = [(0, 2000), (2016, 2000), (4032, 1900)]
PAGE_BYTES = 6016
CAPACITY = 2 << 20
CHAIN = 4
LIVE = 60

PLACEMENTS = ("inline", "slab")

#: ``early``: a put is called acknowledged when it is queued. ``unsynced``: the index is committed before the
#: payloads are on the drive. ``reuse``: the slots of pages are written again before their removal is
#: committed. ``unchecked``: what is read is not verified.
Mistake = Literal["", "early", "unsynced", "reuse", "unchecked"]


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"key %d" % number, digest_size=32).digest()


def page_of(number: int, nbytes: int = PAGE_BYTES, version: int = 0) -> npt.NDArray[np.uint8]:
    seed = number if version == 0 else (number, version)
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def parent_of(number: int) -> tuple[bytes | None, int]:
    """Pages come in sequences of ``CHAIN``."""
    depth = number % CHAIN
    return (key_of(number - 1) if depth else None), depth


def open_tier(folder: Path | str, **options: Any) -> DiskTier:
    options = {
        "layout_digest": b"layout",
        "page_bytes": PAGE_BYTES,
        "plane_ranges": PLANES,
        "capacity_bytes": CAPACITY,
        **options,
    }
    return DiskTier(folder, **options)


def put(tier: DiskTier, number: int, *, version: int = 0, **options: Any) -> Any:
    parent, depth = parent_of(number)
    options = {
        "parent": parent,
        "depth": depth,
        "data": page_of(number, version=version),
        **options,
    }
    return tier.put(key_of(number), identity=b"identity", **options)


# ---------------------------------------------------------------- what the load says


Verb = Literal["putting", "put", "deleting", "deleted", "flushed", "reopening", "found", "turn"]
VERBS: tuple[Verb, ...] = get_args(Verb)
State = int | None  # the version that is stored, or None

#: A relaxed tier may lose its last 32 commits; each turn of the load is one at least.
RELAXED_TURNS = 33


class Note(NamedTuple):
    """What a load has begun (``putting``, ``deleting``), or has been told is done; ``turn``: everything begun
    so far is done.
    """

    verb: Verb
    number: int = 0
    version: int = 0

    def pack(self) -> int:
        return VERBS.index(self.verb) | self.version << 3 | self.number << 16

    @classmethod
    def unpack(cls, value: int) -> Note:
        return cls(VERBS[value & 7], value >> 16, value >> 3 & 0x1FFF)


class Promise:
    """What may be found of each page after a crash, as the notes of a load say.

    Args:
        strict: what was acknowledged counts at once; else what was flushed, or acknowledged
            ``RELAXED_TURNS`` ago.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._now: dict[int, State] = {}
        self._possible: dict[int, set[State]] = {}
        # Of each turn since the last flush: what was there at its end, and what was begun in it.
        self._turns: deque[tuple[dict[int, State], list[tuple[int, State]]]] = deque()
        self._begun: list[tuple[int, State]] = []

    def note(self, note: Note) -> None:
        number = note.number
        if note.verb == "flushed":
            self._settle(self._now)
        elif note.verb == "reopening":  # pages that do not fit may go
            for number in self._possible:
                self._may_be(number, None)
            self._now = dict.fromkeys(self._now)
        elif note.verb == "turn":
            self._turn()
        else:
            state = note.version if note.verb in ("putting", "put", "found") else None
            if note.verb in ("put", "deleted", "found"):
                self._now[number] = state
            if note.verb in ("put", "deleted") and self._strict:
                self._possible[number] = {state}
            else:
                self._may_be(number, state)
            if note.verb == "putting" and not self._strict:
                # The old bytes may be gone, and the new ones not be safe yet.
                self._may_be(number, None)

    def _may_be(self, number: int, state: State) -> None:
        self._possible.setdefault(number, {None}).add(state)
        self._begun.append((number, state))

    def _turn(self) -> None:
        self._turns.append((dict(self._now), self._begun))
        self._begun = []
        if not self._strict and len(self._turns) > RELAXED_TURNS:
            safe, _ = self._turns.popleft()
            self._possible = {number: {state} for number, state in safe.items()}
            for _, begun in self._turns:
                for number, state in begun:
                    self._possible.setdefault(number, {None}).add(state)

    def _settle(self, state: dict[int, State]) -> None:
        self._now = dict(state)
        self._possible = {number: {version} for number, version in state.items()}
        self._turns.clear()
        self._begun = []

    def settle(self, found: dict[int, int]) -> None:
        """``found`` was found, and nothing has changed since."""
        self._settle({n: found.get(n) for n in self._possible.keys() | found.keys()})

    def acknowledged(self) -> int:
        """Pages that must be there."""
        return sum(None not in states for states in self._possible.values())

    def broken(self, found: dict[int, int]) -> list[str]:
        """How ``found``, the version of each page that is there, breaks it."""
        wrong = []
        for number in self._possible.keys() | found.keys():
            state, possible = found.get(number), self._possible.get(number, {None})
            if state not in possible:
                what = "lost" if state is None else f"there in version {state}"
                wrong.append(f"page {number} is {what}, possible were {possible}")
        return wrong


# ---------------------------------------------------------------- the load


def load(folder: str, options: dict[str, Any]) -> None:
    """Sequences of pages are put, older ones replaced and deleted, some of it at once."""
    options = dict(options)
    rounds, first = options.pop("rounds", 1 << 30), options.pop("first", 0)
    sizes, mistake = options.pop("sizes", [CAPACITY]), options.pop("wrong", "")
    say = _marks() if options.pop("marks", False) else _lines
    versions = {int(number): version for number, version in options.pop("there", {}).items()}
    live = sorted(versions)
    if mistake == "unsynced":
        _unsynced()
    rng = np.random.default_rng(first)
    tier: DiskTier | None = None
    size = 0
    for turn in range(rounds):
        wanted = sizes[turn * len(sizes) // rounds]
        if tier is None or wanted != size:
            if tier is not None:
                tier.close()
                say(Note("flushed"))
                say(Note("reopening"))
            size = wanted
            tier = open_tier(folder, capacity_bytes=size, **options)
            there = {record.key for record in tier.records()}
            live = [number for number in live if key_of(number) in there]
            for number in live:
                say(Note("found", number, versions[number]))
        room = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
        fresh = list(range(first, first + CHAIN))
        first += CHAIN
        waiting: list[tuple[Note, Any]] = []
        while len(live) + CHAIN > min(LIVE, room):
            # Whole sequences, suffix first, of any age.
            start = int(rng.choice(live)) // CHAIN * CHAIN
            old = [number for number in live if start <= number < start + CHAIN][::-1]
            for number in old:
                say(Note("deleting", number))
            if mistake == "reuse":
                _give_back(tier, {key_of(number) for number in old})
            future = tier.delete([key_of(number) for number in old])
            waiting += [(Note("deleted", number), future) for number in old]
            live = [number for number in live if number not in old]
        again = [int(rng.choice(live))] if live and turn % 3 == 0 else []
        for number in [*again, *fresh]:
            versions[number] = versions.get(number, -1) + 1
            say(Note("putting", number, versions[number]))
            done = Note("put", number, versions[number])
            if mistake == "early":
                say(done)
            waiting.append((done, put(tier, number, version=versions[number])))
        live += fresh
        for note, future in waiting:
            future.result(30)
            say(note)
        say(Note("turn"))
        if turn % 40 == 6:
            tier.flush()
            say(Note("flushed"))
    assert tier is not None
    tier.close()


def _lines(note: Note) -> None:
    print(note.pack(), flush=True)


def _marks() -> Callable[[Note], None]:
    mark = ctypes.CDLL(None).powercut_mark
    mark.argtypes = [ctypes.c_uint64]
    return lambda note: mark(note.pack())


# ---------------------------------------------------------------- what a crash left


def check(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Open a folder, read every page; with ``use`` change it, with ``books`` recount it.

    Returns:
        ``found`` (version by page number), ``wrong`` (pages that were never put), ``damaged`` (pages that
        read as misses though they were listed), ``emptied``, ``unusable`` (why it cannot be written to);
        or ``refused`` (why it cannot be opened or read) alone.
    """
    options = dict(options)
    if options.pop("wrong", "") == "unchecked":
        _unchecked()
    use, books = options.pop("use", True), options.pop("books", True)
    numbers = {key_of(number): number for number in range(options.pop("numbers"))}
    versions = options.pop("versions", 1)
    try:
        with open_tier(folder, **options) as tier:
            report = _look(tier, numbers, versions)
            if use:
                fresh = len(numbers) // CHAIN * CHAIN + CHAIN
                nbytes = options.get("page_bytes", PAGE_BYTES)
                report["unusable"] = _unusable(tier, fresh, nbytes)
            if books:
                tier.check()
    except DiskError as error:
        return {"refused": str(error)}
    return report


def _look(tier: DiskTier, numbers: dict[bytes, int], versions: int) -> dict[str, Any]:
    found: dict[int, int] = {}
    wrong: list[str] = []
    damaged = 0
    for record in list(tier.records()):
        number = numbers.get(record.key)
        if number is None:
            wrong.append(f"a key that was never put: {record.key.hex()}")
            continue
        version = _version(tier, number, record.nbytes, versions)
        if version is None:
            damaged += 1
        elif version < 0 or (record.parent, record.depth) != parent_of(number):
            wrong.append(str(number))
        else:
            found[number] = version
    return {
        "found": found,
        "wrong": wrong,
        "damaged": damaged,
        "emptied": tier.stats().opened.emptied,
        "unusable": "",
    }


def _version(tier: DiskTier, number: int, nbytes: int, versions: int) -> int | None:
    """What reading a page, and each of its planes, gives: its version, ``None`` for a miss, -1 if one byte
    that was handed out is not its.
    """
    key = key_of(number)
    ranges = [(0, nbytes), *(PLANES if nbytes == PAGE_BYTES else [(0, nbytes)])]
    read: list[tuple[int, npt.NDArray[np.uint8]]] = []
    for index, (at, size) in enumerate(ranges):
        out = np.zeros(size, np.uint8)
        good = tier.read_plane(key, index - 1, out) if index else tier.read(key, out)
        if good:
            read.append((at, out))
    if not read:
        return None
    for version in range(versions):
        page = page_of(number, nbytes, version)
        if all(np.array_equal(out, page[at : at + out.size]) for at, out in read):
            return version if len(read) == len(ranges) else None
    return -1


def _unusable(tier: DiskTier, number: int, nbytes: int) -> str:
    """Why page ``number`` cannot be stored, after some others have gone; empty if it can."""
    out = np.zeros(nbytes, np.uint8)
    try:
        tier.delete([record.key for record in tier.records()][:-9:-1]).result(30)
        put(tier, number, data=page_of(number, nbytes)).result(30)
        tier.flush()
        if not tier.read(key_of(number), out) or not np.array_equal(out, page_of(number, nbytes)):
            return "a page put now does not come back"
    except Exception:
        return traceback.format_exc()
    return ""


def _give_back(tier: DiskTier, keys: set[bytes]) -> None:
    tier.flush()
    payloads: Any = tier._payloads
    slots = [
        entry.segment * payloads.files.per_segment + entry.slot
        for entry in tier.entries()
        if entry.key in keys
    ]
    allocator, early = payloads.slots, set(slots)
    freed = type(allocator).freed
    allocator.give(slots)
    allocator._next = min(slots)
    allocator.freed = lambda txn, gone: freed(allocator, txn, [s for s in gone if s not in early])


def _unsynced() -> None:
    from kvtier.tiers.slab_file import SlabFiles

    SlabFiles.sync = lambda *_: None  # type: ignore[method-assign]


def _unchecked() -> None:
    from kvtier.tiers.page_shape import PageShape

    PageShape.verify = lambda *_: None  # type: ignore[method-assign]
    PageShape.verify_plane = lambda *_: None  # type: ignore[method-assign]


# ---------------------------------------------------------------- calls that fail


def errors(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Let calls ``from`` to ``until`` on the folder's files fail with ``error``, while it is opened or, with
    ``open``, while pages are put and deleted; then see whether all is as the tier said, and goes on.

    Returns:
        ``calls`` made while they could fail; ``failed``, what raised; ``wrong``, what is not as it was said.
    """
    options = dict(options)
    first, until, error = (options.pop(name) for name in ("from", "until", "error"))
    while_open = options.pop("open")
    fail = ctypes.CDLL(None).powercut_fail
    fail.argtypes, fail.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_int], ctypes.c_long
    failed: list[str] = []
    with open_tier(folder, **options) as tier:
        for number in range(8):
            put(tier, number)
        tier.flush()
    if not while_open:
        fail(first, until, error)
        try:
            open_tier(folder, **options).close()
        except DiskError as refusal:
            failed.append(str(refusal))
        calls = fail(-1, -1, 0)
        there = set(range(8))
        tier = open_tier(folder, **options)
    else:
        tier = open_tier(folder, **options)
        fail(first, until, error)
        changes = [(n, put(tier, n)) for n in range(8, 16)]
        changes += [(n, tier.delete([key_of(n)])) for n in (3, 2)]
        changes += [(n, put(tier, n, version=1)) for n in (0, 4)]
        there = set(range(8))
        for number, future in changes:
            try:
                future.result(30)
            except DiskError as refusal:
                failed.append(str(refusal))
            else:
                there ^= set() if number in (0, 4) else {number}
        calls = fail(-1, -1, 0)
    wrong = _differs(tier, there)
    for number in range(16):
        put(tier, number).result(30)
    wrong += [f"after the repetition: {text}" for text in _differs(tier, set(range(16)))]
    tier.check()
    tier.close()
    with open_tier(folder, **options) as tier:
        wrong += [f"after the restart: {text}" for text in _differs(tier, set(range(16)))]
        tier.check()
    return {"calls": calls, "failed": failed, "wrong": wrong}


def _differs(tier: DiskTier, there: set[int]) -> list[str]:
    """Pages that are not as they should be; one that was put twice may be in either version."""
    wrong = []
    for number in range(16):
        version = _version(tier, number, PAGE_BYTES, 2)
        if (version is not None) != (number in there) or version == -1:
            wrong.append(f"page {number} is {version}, and should be {number in there}")
    return wrong


# ---------------------------------------------------------------- processes


def fork() -> None:
    """Children share what importing costs. None of them had a tier open before it was forked."""
    for line in sys.stdin:
        command, folder, text = line.rstrip("\n").split("\t")
        if command == "evict":
            import store_child  # not before it is needed: it imports torch
        pid = os.fork()
        if pid == 0:
            status = 0
            try:
                sys.stdin.close()
                options = json.loads(text)
                if command == "check":
                    print(json.dumps(check(folder, options)), flush=True)
                elif command == "errors":
                    print(json.dumps(errors(folder, options)), flush=True)
                elif command == "damage":
                    import damage

                    damage.run(folder, **options)
                else:
                    print("pid", os.getpid(), flush=True)
                    load(folder, options) if command == "load" else store_child.run(
                        folder, **options
                    )
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
        _, ended = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(ended), flush=True)


def main() -> None:
    command = sys.argv[1]
    if command == "fork":
        fork()
    elif command == "load":
        load(sys.argv[2], json.loads(sys.argv[3]))
    else:
        try:
            open_tier(sys.argv[2]).close()
        except DiskError as error:
            print(error)


if __name__ == "__main__":
    main()
