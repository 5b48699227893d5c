"""A ``match`` that is interrupted (Ctrl-C) while a thread of the pool still reads into a host slot."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from store_model import Config, chain, device, noise, open_store, put_chain

CONFIG = Config(vram=1, host=8, disk=60, payload="slab")
PAGES = 6


def run(folder: str) -> int:
    """Number of pages that are wrong afterwards; 100 and more if the test itself went wrong."""
    first, second, other = chain(PAGES), chain(PAGES, 1), chain(PAGES, 2)
    with open_store(CONFIG, device(), folder) as store:
        for depth in range(PAGES):  # by turns, so that no two pages of one sequence are neighbours
            for keys in (first, second):
                put_chain(store, keys[: depth + 1])
                store.flush()
    store = open_store(CONFIG, device(), folder)
    disk: Any = store._placement.disk
    read_run = disk._payloads.files.read_run
    entered, ended = threading.Event(), threading.Event()

    def slow(at: int, outs: Sequence[Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            entered.wait(20.0)
            read_run(at, outs)
            return
        entered.set()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(1.0)
        read_run(at, outs)
        ended.set()

    disk._payloads.files.read_run = slow
    try:
        store.match(first)
    except KeyboardInterrupt:
        if not ended.is_set():
            return 100
    else:
        return 101
    disk._payloads.files.read_run = read_run
    put_chain(store, other)
    store.check()
    with store.match(other) as lease:
        wrong = [
            lease.read(at).numpy().tobytes() != noise(key) for at, key in enumerate(lease.keys)
        ]
    if len(wrong) != PAGES:
        return 102
    store.close()
    return sum(wrong)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
