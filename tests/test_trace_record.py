"""Recording: nothing of the content, bounded, loud about losses, good after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from store_model import IDENTITY, PAGE, Config, device, open_store

from kvtier.errors import ConfigError, OffloadWarning
from kvtier.policy import Request
from kvtier.session.session import Session
from kvtier.store.store import TieredStore
from kvtier.trace.lines import Source
from kvtier.trace.native import read_operations
from kvtier.trace.read import read_trace
from kvtier.trace.record import Recorder
from kvtier.trace.trace import ADD, END, REMOVE, REQUEST
from kvtier.trace.writing import LineFile

DATA = torch.zeros(PAGE, dtype=torch.uint8)
KEYS = [bytes([65 + n]) * 32 for n in range(8)]


def recorder(path: Path, **options: Any) -> Recorder:
    return Recorder(path, page_tokens=4, page_bytes=PAGE, **options)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def put(store: TieredStore, *numbers: int) -> None:
    for n in numbers:
        parent = KEYS[n - 1] if n else None
        store.put(KEYS[n], DATA, parent=parent, identity=IDENTITY.digest)


def test_a_store_records_lookups_additions_removals_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    request = Request(session="alice", priority=3, ttl_s=60.0, next_use_at=time.monotonic() + 30)
    with closing(device()) as card, open_store(Config(vram=8), card) as store:
        with store.record(path):
            store.match(KEYS[:3], request=request).close()
            put(store, 0, 1, 2, 3, 4)  # the first three were asked for
            store.match(KEYS[:5], request=Request(session="bob")).close()
            store.remove([KEYS[4]])
            store.end_session("alice", KEYS[:3])
        store.match(KEYS[:1]).close()  # not recorded any more
    trace = read_trace(path)
    assert (trace.page_tokens, trace.page_bytes) == (4, PAGE)
    assert list(trace.kinds) == [REQUEST, ADD, REQUEST, REMOVE, END]
    assert list(trace.entries()) == [[0, 1, 2], [3, 4], [0, 1, 2, 3, 4], [4], [0, 1, 2]]
    assert list(trace.parents) == [-1, 0, 1, 2, 3]
    assert list(trace.tokens)[:3] == [12, 0, 20]
    assert trace.sessions[0] == trace.sessions[4] != trace.sessions[2]
    assert trace.hints[0][:2] == (3, 60.0)
    assert trace.hints[0].next_use_s == pytest.approx(30, abs=20)
    assert records(path)[-1] == {"kind": "end", "t": records(path)[-1]["t"], "records": 6}


def test_only_the_first_return_of_a_page_goes_without_saying(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with closing(device()) as card, open_store(Config(vram=8), card) as store:
        store.record(path)
        store.match(KEYS[:2]).close()
        put(store, 0, 1)
        store.remove([KEYS[1]])
        put(store, 1)  # nobody has asked for it again
    assert list(read_trace(path).kinds) == [REQUEST, REMOVE, ADD]


def test_a_session_records_its_prompt_and_what_it_generates(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    tokens = torch.arange(17)
    with closing(device()) as card, open_store(Config(vram=16), card) as store:
        store.record(path)
        for _ in range(2):
            with closing(Session(store, IDENTITY)) as one:
                restored = one.restore(tokens)
                one.reserve(17 - restored)
                one.extend(17 - restored, tokens[restored:])
                one.reserve(1)
    trace = read_trace(path)
    assert [kind for kind in trace.kinds if kind == REQUEST] == [REQUEST] * 2
    assert trace.entry(0) == [0, 1, 2, 3]
    assert trace.sessions[0] != trace.sessions[1]


def test_no_name_no_token_and_with_salt_no_key_is_in_the_file(tmp_path: Path) -> None:
    plain, salted, again = (tmp_path / name for name in ("a", "b", "c"))
    for path, salt in ((plain, False), (salted, True), (again, True)):
        with recorder(path, salted=salt) as r:
            r.request(KEYS[:3], 0, tokens=12, session="a secret name")
    assert KEYS[0].hex() in plain.read_text()
    for path in (salted, again):
        text = path.read_text()
        assert not any(key.hex() in text for key in KEYS)
        assert "secret" not in text
    assert records(salted)[1]["new"] != records(again)[1]["new"], "the salt is the same each time"
    assert list(read_trace(salted).pages) == list(read_trace(plain).pages)


def test_operations_have_bytes_and_times(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with closing(device()) as card:
        store = open_store(Config(vram=2, host=2, disk=8), card, tmp_path / "store")
        store.record(path, operations=True)
        put(store, 0, 1, 2, 3)
        store.flush()
        for n in range(4):
            store.match(KEYS[: n + 1]).close()
        links = store.stats().links
        store.close()
    found = read_operations(Source(path))
    for link in ("host->disk", "disk->host", "vram->host", "host->vram"):
        moved = sum(op.nbytes for op in found if op.link == link and not op.failed)
        assert moved == links[link].bytes, link
    assert all(op.queue_s >= 0 and op.copy_s >= 0 and op.time_s >= 0 for op in found)
    assert read_trace(path).requests == 4


def test_operations_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    with recorder(tmp_path / "t") as r:
        r.request(KEYS[:1], 0)
        r.operation("host->vram", 5, 0.0, 0.0)
    assert read_operations(Source(tmp_path / "t")) == []


class Stuck:
    """Keeps a recorder's file from writing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        original = LineFile.write

        async def write(file: LineFile, lines: Any) -> None:
            self.began.set()
            self.go.wait(30)
            await original(file, lines)

        monkeypatch.setattr(LineFile, "write", write)


def test_a_full_queue_drops_loudly_and_marks_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, said = Stuck(monkeypatch), []
    r = recorder(tmp_path / "t", pending_pages=4, trouble=said.append)
    assert stuck.began.wait(30)
    for n in range(6):
        r.request(KEYS[n : n + 2], 0)
    assert r.dropped == 4
    assert len(said) == 1
    assert "more than 4 pages wait" in said[0]
    stuck.go.set()
    assert r.close() == 4
    lines = records(tmp_path / "t")
    assert [line.get("kind") for line in lines[1:]] == ["request", "request", "dropped", "end"]
    assert lines[3]["records"] == 4
    assert any("4 records were dropped" in note for note in read_trace(tmp_path / "t").notes)


def test_a_call_may_wait_for_room_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    r = recorder(tmp_path / "t", pending_pages=2, wait_s=30.0)
    assert stuck.began.wait(30)
    r.request(KEYS[:2], 0)
    threading.Timer(0.1, stuck.go.set).start()
    r.request(KEYS[:2], 0)
    assert r.close() == 0
    assert read_trace(tmp_path / "t").requests == 2


def test_close_is_bounded_when_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, said = Stuck(monkeypatch), []
    r = recorder(tmp_path / "t", trouble=said.append)
    assert stuck.began.wait(30)
    r.request(KEYS[:2], 0)
    assert r.close(0.05) == 1
    assert "could not be finished within" in said[0]
    assert r.close(0.05) == 1, "closing twice counts twice"
    stuck.go.set()


def test_a_disk_that_is_full_is_told_and_does_not_hurt_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(file: LineFile, lines: Any) -> None:
        file._fail(OSError(28, "No space left on device"))

    monkeypatch.setattr(LineFile, "write", write)
    with closing(device()) as card:
        store = open_store(Config(vram=4), card)
        r = store.record(tmp_path / "t")
        deadline = time.monotonic() + 30
        while not r._file.failed and time.monotonic() < deadline:
            time.sleep(0.001)
        put(store, 0)
        with pytest.warns(OffloadWarning, match="No space left on device"):
            store.poll()
        with store.match(KEYS[:1]) as lease:
            assert len(lease) == 1
        assert any("not in the trace" in text for text in store.close())


def test_the_key_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.trace.record.TABLE_KEYS", 4)
    with recorder(tmp_path / "t") as r:
        for n in range(5):
            r.request(KEYS[n : n + 3], 0)
            r.request(KEYS[:2], 0)
    assert sum(line.get("kind") == "keys" for line in records(tmp_path / "t")) >= 2
    trace = read_trace(tmp_path / "t")
    assert list(trace.entries())[1::2] == [[0, 1]] * 5
    assert trace.unique_pages == 7


def test_refused_paths(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    for name, reason in (("old", "exists"), ("no/folder", "cannot be created"), ("t.gz", "plain")):
        with pytest.raises(ConfigError, match=reason):
            recorder(tmp_path / name)
    assert (tmp_path / "old").read_text() == "kept"
    with closing(device()) as card, open_store(Config(vram=2), card) as store:
        store.record(tmp_path / "new")
        with pytest.raises(ConfigError, match=r"recorded to .* already"):
            store.record(tmp_path / "other")


def test_the_environment_records_every_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_TRACE", str(tmp_path / "t.jsonl"))
    for _ in range(2):
        monkeypatch.setenv("KVTIER_TRACE_SALTED", "1")
        with closing(device()) as card, open_store(Config(vram=2), card) as store:
            store.match(KEYS[:1]).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.1.jsonl", "t.jsonl"]
    assert all(read_trace(p).requests == 1 for p in tmp_path.iterdir())
    assert records(tmp_path / "t.jsonl")[0]["keys"] == "salted"
    monkeypatch.setenv("KVTIER_TRACE", str(tmp_path / "no" / "t.jsonl"))
    with closing(device()) as card, pytest.raises(ConfigError, match="cannot be created"):
        open_store(Config(vram=2), card)


CHILD = """
import sys
from kvtier.trace.record import Recorder
r = Recorder(sys.argv[1], page_tokens=4, page_bytes=64)
n = 0
while True:
    r.request([n.to_bytes(8, "big"), (n + 1).to_bytes(8, "big")], 0, tokens=8)
    n += 1
    if n == 2000:
        print("going", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_a_file_that_is_good_to_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"going\n"
    deadline = time.monotonic() + 30
    while path.stat().st_size < 4096 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    trace = read_trace(path)
    assert trace.requests > 10
    assert list(trace.entries())[:3] == [[0, 1], [1, 2], [2, 3]]


def test_threads_never_make_time_go_back(tmp_path: Path) -> None:
    with recorder(tmp_path / "t", pending_pages=50, wait_s=10.0) as r:

        def work() -> None:
            for n in range(200):
                r.request([n.to_bytes(8, "big")], 0)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert read_trace(tmp_path / "t").requests == 800
