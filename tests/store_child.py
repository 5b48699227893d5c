"""A store whose disk is too small for what goes through it, until it is killed."""

from __future__ import annotations

import hashlib
import random

import torch
from store_model import IDENTITY, PAGE, Config, device, open_store

CONFIG = Config(vram=4, host=3, disk=60)
CHAIN = 4


def key_of(sequence: int, depth: int) -> bytes:
    return hashlib.blake2b(b"%d %d" % (sequence, depth), digest_size=32).digest()


def page_of(sequence: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sequence * CHAIN + depth)
    return torch.randint(0, 256, (PAGE,), dtype=torch.uint8, generator=generator)


def run(folder: str, first: int) -> None:
    """Use one sequence of ``CHAIN`` pages after the other, a new one or one of the last 12, until killed.

    Prints ``using S`` before a sequence is touched or stored, and ``used S`` after all its pages were
    acknowledged.
    """
    torch.set_num_threads(1)
    store = open_store(CONFIG, device(), folder, durability="durable", check=False)
    rng = random.Random(first)
    known: list[int] = []
    sequence = first - 1
    while True:
        if known and rng.random() < 0.3:
            at = rng.choice(known[-12:])
        else:
            sequence += 1
            known.append(sequence)
            at = sequence
        print("using", at, flush=True)
        parent = None
        for depth in range(CHAIN):
            key = key_of(at, depth)
            store.put(key, page_of(at, depth), parent=parent, identity=IDENTITY.digest)
            parent = key
        if store.flush() == 0:
            print("used", at, flush=True)
