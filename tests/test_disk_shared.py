"""Several processes over one folder of the disk tier, and several handles in one: who may do what,
and what happens when somebody dies."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from disk_child import CAPACITY, PAGE_BYTES, key_of, open_tier, page_of, put

from kvtier.errors import ClosedError, ConfigError, DiskError, TierFullError
from kvtier.tiers import slab as slab_module
from kvtier.tiers.aligned import aligned_buffer
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_reader import DiskReader
from kvtier.tiers.payload import Payload
from kvtier.tiers.slab import SlabPayloads
from kvtier.tiers.slab_file import SlabFiles

DEADLINE_S = 20

READER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from disk_child import PAGE_BYTES, key_of, page_of
from kvtier.tiers.disk_reader import DiskReader

reader = DiskReader(sys.argv[2])
snapshot = None
print("open", flush=True)
for line in sys.stdin:
    verb, _, rest = line.strip().partition(" ")
    if verb == "hold":
        snapshot = reader._file.reading()
        txn = snapshot.__enter__()
        print(json.dumps(txn.id()), flush=True)
    elif verb == "drop":
        snapshot.__exit__(None, None, None)
        print("null", flush=True)
    else:
        numbers = json.loads(rest)
        outs = [np.zeros(PAGE_BYTES, np.uint8) for _ in numbers]
        hits = reader.read_pages([key_of(n) for n in numbers], outs)
        right = [bool((out == page_of(n)).all()) for n, out in zip(numbers, outs)]
        print(json.dumps([hits, [not hit or good for hit, good in zip(hits, right)]]), flush=True)
"""


@pytest.fixture(params=["inline", "slab"])
def placement(request: pytest.FixtureRequest) -> Payload:
    return request.param  # type: ignore[no-any-return]


class OtherProcess:
    """A reader of the folder in another process."""

    def __init__(self, folder: Path) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", READER, str(Path(__file__).parent), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "open"

    def _line(self) -> str:
        out: IO[str] | None = self.child.stdout
        assert out is not None
        return out.readline().strip()

    def ask(self, verb: str, numbers: list[int] | None = None) -> Any:
        into: IO[str] | None = self.child.stdin
        assert into is not None
        into.write(f"{verb} {json.dumps(numbers)}\n")
        into.flush()
        return json.loads(self._line())

    def read(self, numbers: list[int]) -> list[bool]:
        hits, right = self.ask("read", numbers)
        assert all(right), "wrong bytes in another process"
        return hits  # type: ignore[no-any-return]

    def end(self) -> None:
        self.child.kill()
        self.child.wait(30)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def other_process(folder: Path) -> Iterator[OtherProcess]:
    other = OtherProcess(folder)
    try:
        yield other
    finally:
        other.end()


def fill(tier: DiskTier, numbers: range) -> None:
    futures = [put(tier, n, parent=None, depth=0) for n in numbers]
    for future in futures:
        future.result(DEADLINE_S)


def test_another_process_reads_what_is_committed(tmp_path: Path, placement: Payload) -> None:
    with open_tier(tmp_path, payload=placement) as tier:
        fill(tier, range(10))
        with other_process(tmp_path) as other:
            assert other.read(list(range(12))) == [True] * 10 + [False] * 2
            fill(tier, range(10, 12))
            tier.delete([key_of(0)]).result(DEADLINE_S)
            assert other.read(list(range(12))) == [False] + [True] * 11
            # The space of removed pages is used again under its eyes.
            for start in range(100, 900, 40):
                fill(tier, range(start, start + 40))
                tier.delete([key_of(n) for n in range(start, start + 40)])
                assert other.read(list(range(12))) == [False] + [True] * 11
        tier.check()
    with other_process(tmp_path) as other:  # the writer is gone
        assert other.read(list(range(12))) == [False] + [True] * 11


def test_a_reader_outlives_its_writer_and_follows_the_next(
    tmp_path: Path, placement: Payload
) -> None:
    open_tier(tmp_path, payload=placement).close()
    with other_process(tmp_path) as other:
        assert other.read([1]) == [False]
        for size in (CAPACITY, 2 * CAPACITY, CAPACITY // 2):
            with open_tier(tmp_path, payload=placement, capacity_bytes=size) as tier:
                fill(tier, range(20))
                assert all(other.read(list(range(20))))
                tier.check()
            assert all(other.read(list(range(20))))


def test_a_snapshot_in_another_process_keeps_what_it_names(
    tmp_path: Path, placement: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "READER_PATIENCE_S", 0.05)
    with open_tier(tmp_path, payload=placement) as tier:
        full = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
        fill(tier, range(full))
        with other_process(tmp_path) as other:
            other.ask("hold")
            refused: BaseException | None = None
            stored = list(range(full))
            for number in range(full, 3 * full):
                tier.delete([key_of(stored.pop(0))]).result(DEADLINE_S)
                refused = put(tier, number, parent=None, depth=0).exception(DEADLINE_S)
                if refused is not None:
                    break
                stored.append(number)
            assert isinstance(refused, TierFullError)
            assert "end that reader" in str(refused)
            if placement == "slab":
                assert str(other.child.pid) in str(refused)
            out = np.zeros(PAGE_BYTES, np.uint8)
            assert all(tier.read(key_of(n), out) for n in stored)
            other.ask("drop")
            fill(tier, range(5 * full, 5 * full + 1))
            other.ask("hold")
            os.kill(other.child.pid, signal.SIGKILL)
            other.child.wait(30)
            # The mark of a reader that died does not hold anything for long.
            for number in range(6 * full, 8 * full):
                tier.delete([key_of(stored.pop(0))]).result(DEADLINE_S)
                put(tier, number, parent=None, depth=0).result(DEADLINE_S)
                stored.append(number)
        tier.check()


def test_a_reader_changes_nothing_and_says_what_it_cannot(
    tmp_path: Path, placement: Payload
) -> None:
    with open_tier(tmp_path, payload=placement) as tier:
        fill(tier, range(4))
        with pytest.raises(DiskError, match="in this process"):
            DiskReader(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".mdb"}
    with DiskReader(tmp_path) as reader:
        assert len(reader) == 4
        assert key_of(1) in reader
        assert key_of(9) not in reader
        assert [record.key for record in reader.records()] == [key_of(n) for n in range(4)]
        assert reader.verify().damaged == []
        out = np.zeros(PAGE_BYTES, np.uint8)
        assert reader.read(key_of(2), out)
        assert np.array_equal(out, page_of(2))
    with pytest.raises(ClosedError):
        reader.read(key_of(2), out)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".mdb"}
    assert before == after
    for nothing in (tmp_path / "none", tmp_path):
        if nothing == tmp_path:
            for path in tmp_path.iterdir():
                path.unlink()
        for opened in (DiskReader, DiskTier.open_existing):
            with pytest.raises(DiskError, match="holds no store"):
                opened(nothing)
        assert not (nothing / "data.mdb").exists()


def test_a_folder_opens_by_what_it_says_itself(tmp_path: Path, placement: Payload) -> None:
    info = {"layers": 3}
    with open_tier(tmp_path, payload=placement, layout_info=info) as tier:
        fill(tier, range(4))
        tier.describe_identity(b"identity", {"model": "toy"}).result(DEADLINE_S)
        tier.save_policy(b'{"order": []}').result(DEADLINE_S)
        stored = tier.info
    with DiskTier.open_existing(tmp_path) as tier:
        assert tier.info == stored
        assert tier.info.layout_info == info
        assert tier.info.payload == placement
        assert tier.identities() == {b"identity": {"model": "toy"}}
        assert tier.load_policy() == b'{"order": []}'
        entries = list(tier.entries())
        assert [entry.key for entry in entries] == [key_of(n) for n in range(4)]
        assert {(entry.payload, entry.slot >= 0) for entry in entries} == {
            (placement, placement == "slab")
        }
        assert tier.delete_where(lambda entry: entry.key == key_of(1)) == [key_of(1)]
        report = tier.gc()
        assert (report.orphans, report.identities) == (0, 0)
        tier.delete_where(lambda entry: True)
        assert tier.gc().identities == 1
        assert tier.identities() == {}
        with pytest.raises(ConfigError, match="bytes"):
            tier.save_policy(bytes(2 << 20)).result(DEADLINE_S)


def test_pages_of_one_placement_are_not_opened_as_the_other(
    tmp_path: Path, placement: Payload
) -> None:
    other: Payload = "slab" if placement == "inline" else "inline"
    with open_tier(tmp_path, payload=placement) as tier:
        fill(tier, range(2))
    with pytest.raises(ConfigError, match=f"payload='{placement}'"):
        open_tier(tmp_path, payload=other)
    with open_tier(tmp_path, payload=None) as tier:
        assert tier.info.payload == placement
        tier.delete_where(lambda entry: True)
    with open_tier(tmp_path, payload=other) as tier:  # an empty folder may change
        fill(tier, range(2))
        tier.check()


def test_when_pages_were_used_survives_a_restart(tmp_path: Path, placement: Payload) -> None:
    out = np.zeros(PAGE_BYTES, np.uint8)
    with open_tier(tmp_path, payload=placement) as tier:
        fill(tier, range(6))
        assert all(tier.read(key_of(n), out) for n in (0, 1, 0))
        tier.touch([key_of(3)])
        order = [r.key for r in tier.records()]
        assert order == [key_of(n) for n in (2, 4, 5, 1, 0, 3)]
    with open_tier(tmp_path, payload=placement) as tier:
        assert [r.key for r in tier.records()] == order
        hits = {entry.key: entry.hits for entry in tier.entries()}
        assert [hits[key_of(n)] for n in range(6)] == [2, 1, 0, 0, 0, 0]
        used = {entry.key: entry.used_ns - entry.created_ns for entry in tier.entries()}
        assert [used[key_of(n)] > 0 for n in range(6)] == [True, True, False, True, False, False]
        fill(tier, range(0, 1))  # stored again: a new page
        assert [entry.hits for entry in tier.entries() if entry.key == key_of(0)] == [0]
        tier.check()


def test_a_lowered_limit_asks_the_policy(tmp_path: Path, placement: Payload) -> None:
    """The hook sees the pages in the order of their use, and what it names goes."""
    with open_tier(tmp_path, payload=placement) as tier:
        fill(tier, range(60))
    seen: list[bytes] = []

    def newest(records: Any, limit_bytes: int) -> list[bytes]:
        seen.extend(record.key for record in records)
        live = sum(record.stored_bytes for record in records)
        gone: list[bytes] = []
        for record in reversed(records):
            if live <= limit_bytes:
                break
            gone.append(record.key)
            live -= record.stored_bytes
        return gone

    with open_tier(tmp_path, payload=placement, capacity_bytes=768 << 10, evict=newest) as tier:
        assert seen == [key_of(n) for n in range(60)]
        assert 0 < len(tier) < 60
        assert {r.key for r in tier.records()} == {key_of(n) for n in range(len(tier))}
        tier.check()


def test_relaxed_commits_are_synced_within_a_second(tmp_path: Path, placement: Payload) -> None:
    with open_tier(tmp_path, payload=placement, durability="relaxed") as tier:
        fill(tier, range(2))
        end = time.monotonic() + DEADLINE_S
        while tier._file.synced_txn < tier._file.last_txn and time.monotonic() < end:
            time.sleep(0.05)
        assert tier._file.synced_txn == tier._file.last_txn


def test_a_segment_that_is_gone_costs_its_pages_only(tmp_path: Path) -> None:
    options: dict[str, Any] = {"payload": "slab", "segment_bytes": 256 << 10}
    with open_tier(tmp_path, **options) as tier:
        fill(tier, range(100))
        lost = {entry.key for entry in tier.entries() if entry.segment == 1}
        assert 0 < len(lost) < 100
    (tmp_path / "pages-00001.slab").unlink()
    with open_tier(tmp_path, **options) as tier:
        assert tier.stats().opened.damaged == len(lost)
        out = np.zeros(PAGE_BYTES, np.uint8)
        for number in range(100):
            assert tier.read(key_of(number), out) == (key_of(number) not in lost)
        fill(tier, range(100))
        (tmp_path / "pages-00000.slab").unlink()
        # More puts than there are slots, so that some go to that file.
        again = [*range(100), *range(100)]
        errors = [put(tier, n, parent=None, depth=0).exception(DEADLINE_S) for n in again]
        assert any(isinstance(error, DiskError) for error in errors)
        assert all(tier.read(key_of(n), out) for n in range(100))  # the old pages are still held


@pytest.mark.parametrize("fails", [False, True])
def test_a_put_that_is_written_while_the_group_before_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Cancelled or failed then, it gives its slot back; the one behind it is stored."""
    syncing, queued, committing, go_on = (threading.Event() for _ in range(4))
    with open_tier(tmp_path, payload="slab") as tier:
        fill(tier, range(10))
        payloads = tier._payloads
        assert isinstance(payloads, SlabPayloads)
        sync, begin = payloads.sync, tier._file.begin_write

        def slow_sync() -> None:
            syncing.set()
            assert queued.wait(DEADLINE_S)
            sync()

        def slow_begin() -> Any:
            committing.set()
            assert go_on.wait(DEADLINE_S)
            return begin()

        with monkeypatch.context() as patch:
            patch.setattr(payloads, "sync", slow_sync)
            patch.setattr(tier._file, "begin_write", slow_begin)
            if fails:
                patch.setattr(payloads.files, "_write_slots", failing_once(payloads.files, 2))
            first = put(tier, 20)
            assert syncing.wait(DEADLINE_S)
            second, third = put(tier, 21), put(tier, 40, parent=None, depth=0)
            queued.set()
            assert committing.wait(DEADLINE_S)
            assert len(payloads._ahead) == 2
            assert fails or second.cancel()
            go_on.set()
            first.result(DEADLINE_S)
            if fails:
                assert isinstance(second.exception(DEADLINE_S), DiskError)
                assert isinstance(third.exception(DEADLINE_S), DiskError)  # one call wrote both
            else:
                third.result(DEADLINE_S)
        tier.check()
        out = np.zeros(PAGE_BYTES, np.uint8)
        for number, there in ((20, True), (21, False), (40, not fails)):
            assert tier.read(key_of(number), out) == there
            assert not there or np.array_equal(out, page_of(number))
        full = tier.live_capacity_bytes // tier.stored_bytes_of(PAGE_BYTES)
        fill(tier, range(100, 100 + full - len(tier)))
        tier.check()


def failing_once(files: SlabFiles, at: int) -> Any:
    """``_write_slots`` whose call number ``at`` fails."""
    write, calls = files._write_slots, itertools.count(1)

    def call(*args: Any) -> None:
        if next(calls) == at:
            raise OSError(errno.EIO, "injected")
        write(*args)

    return call


def test_without_direct_io_everything_works_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    nbytes, planes = 262_144, [(i * 65_536, 65_536) for i in range(4)]
    with open_tier(
        tmp_path, page_bytes=nbytes, plane_ranges=planes, capacity_bytes=16 << 20
    ) as tier:
        assert tier.info.payload == "slab"  # by its size
        for number in range(8):
            put(tier, number, parent=None, depth=0, data=page_of(number, nbytes))
        tier.flush()
        outs = [np.zeros(nbytes, np.uint8) for _ in range(8)]
        assert all(tier.read_pages([key_of(n) for n in range(8)], outs))
        assert all(np.array_equal(out, page_of(n, nbytes)) for n, out in enumerate(outs))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20])
def test_large_pages_warm_and_cold(tmp_path: Path, aligned: bool, nbytes: int) -> None:
    def memory() -> Any:
        return aligned_buffer(nbytes) if aligned else np.zeros(nbytes + 1, np.uint8)[1:]

    sixth = nbytes // 6 // 16 * 16
    planes = [(number * sixth, sixth - 16 * (number % 2)) for number in range(6)]
    with open_tier(
        tmp_path, page_bytes=nbytes, plane_ranges=planes, capacity_bytes=48 << 20
    ) as tier:
        for number in range(3):
            data = memory()
            data[:] = page_of(number, nbytes)
            put(tier, number, parent=None, depth=0, data=data).result(DEADLINE_S)
        for _ in range(4):  # from the device, into the page cache, out of it
            for number in (0, 2, 1):
                out = memory()
                assert tier.read(key_of(number), out)
                assert np.array_equal(out, page_of(number, nbytes))
        for plane, (at, size) in enumerate(planes):
            part = np.zeros(size, np.uint8)
            assert tier.read_plane(key_of(1), plane, part)
            assert np.array_equal(part, page_of(1, nbytes)[at : at + size])
        entry = next(entry for entry in tier.entries() if entry.key == key_of(2))
        for at in (5, *(start + size - 1 for start, size in planes), sixth * 2 - 5, nbytes - 5):
            with open(tmp_path / "pages-00000.slab", "r+b") as file:
                where = entry.slot * tier.info.slot_bytes + at
                (byte,) = os.pread(file.fileno(), 1, where)
                os.pwrite(file.fileno(), bytes([byte ^ 1]), where)
            assert not tier.read(key_of(2), memory())
            put(tier, 2, parent=None, depth=0, data=page_of(2, nbytes)).result(DEADLINE_S)
            entry = next(entry for entry in tier.entries() if entry.key == key_of(2))
        tier.check()


def test_the_database_of_a_reader_is_not_believed_after_it_was_replaced(tmp_path: Path) -> None:
    """A lock table that an old reader keeps in use would tell LMDB of transactions of another file."""
    with open_tier(tmp_path, payload="inline") as tier:
        fill(tier, range(150))
    with other_process(tmp_path) as other:
        assert all(other.read(list(range(4))))
        inode = (tmp_path / "data.mdb").stat().st_ino
        # The database is moved into a smaller file.
        with open_tier(tmp_path, payload="inline", capacity_bytes=768 << 10) as tier:
            kept = [n for n in range(150) if key_of(n) in tier]
            fill(tier, range(kept[-1], kept[-1] + 1))
            tier.check()
            assert all(other.read(kept))
        assert (tmp_path / "data.mdb").stat().st_ino != inode
        with open_tier(tmp_path, payload="inline", capacity_bytes=768 << 10) as tier:
            tier.check()
            assert all(other.read(kept))


def drop_page_cache(folder: Path) -> None:
    for path in folder.glob("*.slab"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("nbytes", [1 << 19, (1 << 19) - 512])
def test_many_pages_in_the_page_cache_are_not_read_from_the_device(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [0, 1, 4, 3, 6, 7, 2, 5]  # neighbours, and pages that are not
    keys = [key_of(number) for number in numbers]
    outs = [aligned_buffer(nbytes) for _ in keys]
    with open_tier(
        tmp_path, page_bytes=nbytes, plane_ranges=[(0, nbytes)], capacity_bytes=32 << 20
    ) as tier:
        fill_pages(tier, nbytes)
        for _ in range(2):  # from the device; into the page cache
            assert all(tier.read_pages(keys, outs))
        asked: list[int] = []
        monkeypatch.setattr(
            SlabFiles, "_read_uncached", lambda *a, **k: iter(asked.append(1) or ())
        )
        for out in outs:
            out[:] = 0
        assert all(tier.read_pages(keys, outs))
        assert not asked
        assert all(
            np.array_equal(out, page_of(n, nbytes)) for n, out in zip(numbers, outs, strict=True)
        )


def test_what_the_device_has_to_bring_is_asked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were read before but have left the page cache: one processor is no reason to wait for each."""
    monkeypatch.setattr(slab_module, "processors", lambda: 1)
    nbytes = 1 << 19
    keys = [key_of(number) for number in range(0, 8, 2)]  # no neighbours
    outs = [aligned_buffer(nbytes) for _ in keys]
    with open_tier(
        tmp_path, page_bytes=nbytes, plane_ranges=[(0, nbytes)], capacity_bytes=32 << 20
    ) as tier:
        fill_pages(tier, nbytes)
        assert all(tier.read_pages(keys, outs))
        drop_page_cache(tmp_path)
        together = threading.Barrier(2, timeout=DEADLINE_S)
        read_run = SlabFiles.read_run

        def meet(*args: Any) -> None:
            together.wait()
            read_run(*args)

        monkeypatch.setattr(SlabFiles, "read_run", meet)
        assert all(tier.read_pages(keys, outs))


def fill_pages(tier: DiskTier, nbytes: int) -> None:
    for number in range(8):
        put(tier, number, parent=None, depth=0, data=page_of(number, nbytes)).result(DEADLINE_S)
