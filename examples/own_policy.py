#!/usr/bin/env python3
"""A residency policy of one's own: second chance (CLOCK), beside ``lru`` on a small trace.

    python examples/own_policy.py

In a store: ``TieredStore(..., policy="own_policy:SecondChance:chances=2")`` with this file on the path.
"""

from __future__ import annotations

from typing import ClassVar

from kvtier.policies.queue import PageQueue
from kvtier.policy import Key, ResidencyPolicy, load_policy


class SecondChance(ResidencyPolicy):
    """First in, first out; but a page that was used since it came, or was last passed over, is passed over.

    Args:
        leaf_first: see ResidencyPolicy.
        chances: uses that are remembered, each for one round.
    """

    name: ClassVar[str] = "second-chance"

    def __init__(self, *, leaf_first: bool, chances: int = 1) -> None:
        super().__init__(leaf_first=leaf_first)
        self._chances = chances
        self._queue = PageQueue(self)
        self._uses: dict[Key, int] = {}

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._queue.push(key, beside)

    def on_use(self, key: Key) -> None:
        self._uses[key] = min(self._uses.get(key, 0) + 1, self._chances)

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._queue.discard(key)
        self._uses.pop(key, None)

    def on_release(self, key: Key) -> None:
        self._queue.release(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        while (key := self._queue.first()) is not None and self._uses.get(key):
            self._uses[key] -= 1
            self._queue.renew(key)
        return key


def main() -> None:
    system = [f"system/{n}" for n in range(4)]
    turns = [
        [*system, *(f"{chat}/{n}" for n in range(4 + turn))] for turn in range(4) for chat in "abc"
    ]
    for spec in ("lru", "own_policy:SecondChance:chances=2"):
        policy = load_policy(spec, leaf_first=False)
        hits = 0
        for keys in turns:
            hits += policy.prefix(keys)
            policy.access(keys, 20)
        policy.check()
        print(f"{spec}: {hits} of {sum(map(len, turns))} pages were there")


if __name__ == "__main__":
    main()
