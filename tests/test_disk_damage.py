"""Damage to the files: 0 wrong pages, 0 crashes, and the store goes on.

Every folder is opened in a process of its own, since damage that LMDB does not notice could end it. What
is damaged is found by its bytes, so the tests know little of the format.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from damage import Damage, compact, contents, tables
from disk_child import PLACEMENTS, key_of, open_tier, page_of, put
from disk_process import Process, memory_folder

#: A page so small that each of its bytes can be flipped.
NBYTES = 160
COUNT = 8
SMALL = {"page_bytes": NBYTES, "plane_ranges": [(0, NBYTES)], "capacity_bytes": 1 << 20}


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process() as process:
        yield process


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder / "tier"


class Store:
    """A folder with ``COUNT`` pages, and copies of it that are damaged."""

    def __init__(self, folder: Path, payload: str, process: Process) -> None:
        self.folder, self.payload, self._process = folder, payload, process
        with open_tier(folder, payload=payload, **SMALL) as tier:
            for number in range(COUNT):
                put(tier, number, data=page_of(number, NBYTES))
            tier.flush()
        compact(folder)
        self.files = contents(folder)

    def where(self, what: bytes) -> tuple[str, int]:
        """The file and offset where ``what`` is, which is there once."""
        places = [(name, raw.find(what)) for name, raw in self.files.items() if what in raw]
        assert len(places) == 1, f"{len(places)} files hold it"
        name, at = places[0]
        assert self.files[name].count(what) == 1
        return name, at

    def damaged(
        self, damages: Sequence[Damage], *, tree: bool = False, numbers: int = COUNT
    ) -> list[dict[str, Any]]:
        """What is found after each damage. Fails if a process dies, hands out a wrong byte, or the tier
        cannot be used afterwards; after damage to the database's ``tree`` it may say that the database is
        damaged and refuse.
        """
        check = {"payload": self.payload, **SMALL, "numbers": numbers, "books": not tree}
        copy = self.folder.with_name("copy")
        reports = self._process.damage(copy, self.folder, damages, check)
        for damage, report in zip(damages, reports, strict=True):
            what = f"{str(damage)[:200]}: {str(report)[:2000]}"
            assert "died" not in report, what
            refused = report.get("refused") or report["unusable"]
            assert not refused or (tree and "damaged" in refused), what
            assert not report.get("wrong"), what
        return reports

    def damaged_once(self, damage: Damage, **options: Any) -> dict[str, Any]:
        return self.damaged([damage], **options)[0]


@pytest.fixture(params=PLACEMENTS)
def store(request: pytest.FixtureRequest, folder: Path, process: Process) -> Store:
    return Store(folder, request.param, process)


def test_the_store_itself_is_good(store: Store) -> None:
    report = store.damaged_once({"truncate": ["writer.lock", 0]})
    assert sorted(report["found"]) == list(range(COUNT))
    assert not report["damaged"]


# ---------------------------------------------------------------- flips


def test_every_byte_of_a_payload_counts(store: Store) -> None:
    """A flip costs its page, and only that one; the read is a miss."""
    name, start = store.where(page_of(COUNT - 1, NBYTES).tobytes())
    rng = random.Random(1)
    flips = [{"flip": [name, at, 1 << rng.randrange(8)]} for at in range(start, start + NBYTES)]
    for report in store.damaged(flips):
        assert sorted(report["found"]) == list(range(COUNT - 1))
        assert report["damaged"] == 1


def test_every_byte_of_a_record_counts(store: Store) -> None:
    """Its place and its value, as LMDB has them."""
    flips = []
    for entries in tables(store.folder).values():
        for key, value in entries:
            if key_of(COUNT - 1) in value:
                at = store.files["data.mdb"].rindex(key + value)
                flips += [
                    {"flip": ["data.mdb", at + i, 0xFF if i % 2 else 0x10]}
                    for i in range(len(key + value))
                ]
    assert len(flips) > 100
    for report in store.damaged(flips):
        if not report["emptied"]:
            assert sorted(report["found"]) == list(range(COUNT - 1))


def places_in_use(store: Store) -> list[tuple[str, int]]:
    """Every byte of the folder's files that is in use."""
    return [
        (name, at)
        for name, raw in store.files.items()
        for at in range(len(raw.rstrip(b"\0")))
        if raw[at] or at % 16 == 0
    ]


def flips_anywhere(store: Store, places: list[tuple[str, int]]) -> None:
    rng = random.Random(3)
    store.damaged([{"flip": [name, at, 1 << rng.randrange(8)]} for name, at in places], tree=True)


def test_flips_anywhere(store: Store) -> None:
    flips_anywhere(store, random.Random(2).sample(places_in_use(store), 200))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_flips_everywhere(store: Store) -> None:
    flips_anywhere(store, places_in_use(store))


# ---------------------------------------------------------------- truncation, deletion, swaps


def truncations(store: Store, step: int) -> None:
    """Cut each file to lengths around the ends of database pages, and to every ``step``-th."""
    damages = []
    for name, raw in store.files.items():
        used = len(raw.rstrip(b"\0"))
        edges = {at + d for at in range(0, used + 8192, 4096) for d in (-1, 0, 1)}
        chosen = edges | set(range(0, used, step)) | {len(raw) - 1, len(raw) // 2}
        damages += [{"truncate": [name, n]} for n in sorted(chosen) if 0 <= n < len(raw)]
    store.damaged(damages, tree=True)


def test_a_file_cut_off_anywhere(store: Store) -> None:
    truncations(store, 997)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_file_cut_off_at_every_length(store: Store) -> None:
    truncations(store, 1)


def test_a_deleted_file(store: Store) -> None:
    store.damaged([{"unlink": [name]} for name in store.files])


def test_payloads_swapped(store: Store) -> None:
    """The bytes of two pages change places, in the slots or in the database."""
    places = [store.where(page_of(number, NBYTES).tobytes()) for number in range(COUNT)]
    pairs = [(a, b) for a in range(COUNT) for b in range(a)]
    swaps = [{"swap": [places[a][0], places[a][1], places[b][1], NBYTES]} for a, b in pairs]
    for (a, b), report in zip(pairs, store.damaged(swaps), strict=True):
        assert not {a, b} & report["found"].keys()
        assert report["damaged"] >= 1


def test_a_file_of_another_store(store: Store, tmp_path: Path) -> None:
    """Of the same layout, so that only the contents do not fit together."""
    with open_tier(tmp_path / "other", payload=store.payload, **SMALL) as tier:
        for number in range(20, 20 + COUNT):
            put(tier, number, data=page_of(number, NBYTES))
    others = contents(tmp_path / "other")
    damages = [{"copy": [str(tmp_path / "other" / name), name]} for name in others]
    store.damaged(damages, numbers=20 + COUNT)


# ---------------------------------------------------------------- records

Entries = list[tuple[bytes, bytes]]
Changes = dict[bytes, bytes | None]


def cut(entries: Entries, index: int) -> Changes:
    key, value = entries[index]
    return {key: value[:-1]}


def empty(entries: Entries, index: int) -> Changes:
    return {entries[index][0]: b""}


def extend(entries: Entries, index: int) -> Changes:
    key, value = entries[index]
    return {key: value + b"\0"}


def lose(entries: Entries, index: int) -> Changes:
    return {entries[index][0]: None}


def swap(entries: Entries, index: int) -> Changes:
    (key, value), (other, theirs) = entries[index], entries[(index + 1) % len(entries)]
    return {key: theirs, other: value}


def alias(entries: Entries, index: int) -> Changes:
    """Two keys with one value: both cannot be right."""
    return {entries[index][0]: entries[(index + 1) % len(entries)][1]}


def nonsense(entries: Entries, index: int) -> Changes:
    key, value = entries[index]
    return {key: hashlib.shake_128(key).digest(max(1, len(value)))}


def stranger(entries: Entries, index: int) -> Changes:
    """A value under a key of its own."""
    key, value = entries[index]
    return {hashlib.shake_128(key).digest(len(key)): value}


@pytest.mark.parametrize("change", [cut, empty, extend, lose, swap, alias, nonsense, stranger])
def test_a_changed_entry(store: Store, change: Callable[[Entries, int], Changes]) -> None:
    """Every entry of every table, one at a time."""
    damages: list[Damage] = []
    for table, entries in tables(store.folder).items():
        for index in range(len(entries)):
            changes = change(entries, index).items()
            text = [[key.hex(), None if value is None else value.hex()] for key, value in changes]
            damages.append({"entries": [table, text]})
    assert len(damages) > COUNT
    store.damaged(damages, tree=True)
