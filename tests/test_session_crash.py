"""kill -9 in the middle of sessions: what ``flush`` has acknowledged is there, byte for byte."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import session_child
from session_steps import TOKENS, of_page, token_bytes
from store_model import IDENTITY, close_clean, device, open_store

from kvtier.keys import page_keys


def run_and_kill(folder: Path, seed: int, after: int) -> list[int]:
    """Numbers of the sequences that a child acknowledged before it was killed."""
    out = folder.with_suffix(f".{seed}")
    with open(out, "w") as file:
        child = subprocess.Popen(
            [sys.executable, session_child.__file__, str(folder), str(seed)], stdout=file
        )
    end = time.monotonic() + 60
    try:
        while out.read_bytes().count(b"\n") < after:
            assert child.poll() is None, f"the child ended by itself with {child.returncode}"
            assert time.monotonic() < end, "the child does not get on"
            time.sleep(0.001)
    finally:
        child.kill()
        child.wait(30)
    text = out.read_text()
    return [int(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def check(folder: Path, seed: int, acknowledged: list[int]) -> None:
    store = open_store(session_child.CONFIG, device(), folder)
    # The disk may have had to make room since: the newest sequences are the ones it keeps.
    for number in acknowledged[-3:]:
        tokens = session_child.tokens_of(seed, number)
        keys = page_keys(IDENTITY, tokens, TOKENS)
        with store.match(keys) as lease:
            assert len(lease) == len(keys), f"sequence {number} was acknowledged and is lost"
            for index in range(len(lease)):
                page = lease.read(index).numpy().tobytes()
                for token in range(TOKENS):
                    prefix = tokens[: index * TOKENS + token + 1]
                    assert of_page(page, token) == token_bytes(prefix, 0)
    stats = store.stats()
    assert stats.damaged == 0
    close_clean(store)


def rounds(folder: Path, count: int) -> None:
    for seed in range(count):
        check(folder, seed, run_and_kill(folder, seed, 2 + seed * 5))


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rounds(tmp_path / "store", 2)


@pytest.mark.nightly
def test_kill_9_many_times(tmp_path: Path) -> None:
    rounds(tmp_path / "store", 30)
