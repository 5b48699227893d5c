"""A process that runs sessions on a store with a disk, until it is killed.

    python session_child.py FOLDER SEED

It prints, line by line, the tokens of a sequence once ``flush`` has acknowledged its pages.
"""

from __future__ import annotations

import random
import sys

from session_steps import Sequence
from store_model import Config, device, open_store

CONFIG = Config(vram=4, host=3, disk=60)


def tokens_of(seed: int, number: int) -> list[int]:
    rng = random.Random(f"{seed} {number}")
    return [rng.randrange(2) for _ in range(rng.randrange(4, 12))]


def main(folder: str, seed: int) -> None:
    store = open_store(CONFIG, device(), folder, durability="durable", check=False)
    for number in range(1000000):
        tokens = tokens_of(seed, number)
        sequence = Sequence(store)
        done = sequence.restore(tokens)
        sequence.append(tokens[done:], 0)
        sequence.session.seal()
        if store.flush() == 0:
            print(number, flush=True)
        sequence.session.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
