"""Which slots are free, and when a slot that was freed may be written again.

A slot that transaction ``t`` freed is still named by every older snapshot: those that readers hold,
in this process or another, and, until the transaction is known to be on the disk, the one that a
power cut would bring back. It is written again only after both are gone. The database's own index
is the list of what is used; this is derived from it at open and never stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class SlotAllocator:
    """Free slots of a store, as a map of one byte a slot.

    Args:
        slots: number of slots.
        used: those that hold a page.
        freed_by: the transaction that all others are taken as freed by.
    """

    def __init__(self, slots: int, used: Iterable[int], freed_by: int) -> None:
        self._map = bytearray(slots)
        self._next = 0
        self._free = 0
        taken = set(used)
        idle = [slot for slot in range(slots) if slot not in taken]
        self._pending: deque[tuple[int, Sequence[int]]] = deque([(freed_by, idle)] if idle else [])
        self._waiting = len(idle)

    @property
    def slots(self) -> int:
        return len(self._map)

    @property
    def free(self) -> int:
        """Slots that may be written now."""
        return self._free

    @property
    def pending(self) -> int:
        """Slots that hold no page and may not be written yet."""
        return self._waiting

    def freed(self, txn: int, slots: Sequence[int]) -> None:
        """Transaction ``txn`` committed, and no entry names ``slots`` any more; or it failed, and
        nobody knows what of it is on the disk. ``txn`` never falls.
        """
        if slots:
            self._pending.append((txn, slots))
            self._waiting += len(slots)

    def reclaim(self, txn: int) -> None:
        """Every snapshot that can still be read, or come back, is of ``txn`` or later."""
        while self._pending and self._pending[0][0] <= txn:
            slots = self._pending.popleft()[1]
            for slot in slots:
                self._map[slot] = 1
            self._free += len(slots)
            self._waiting -= len(slots)

    def take(self, count: int, below: int | None = None) -> list[int]:
        """Up to ``count`` free slots, neighbours as far as there are any, ascending in each run.

        Args:
            below: take only slots under this number.
        """
        stop = len(self._map) if below is None else below
        got: list[int] = []
        run = count
        while len(got) < count and self._free:
            run = min(run, count - len(got))
            pattern = b"\1" * run
            at = self._map.find(pattern, self._next, stop)
            if at < 0:
                at = self._map.find(pattern, 0, min(stop, self._next + run))
            if at < 0:
                if run == 1:
                    break
                run //= 2
                continue
            self._map[at : at + run] = bytes(run)
            self._free -= run
            self._next = at + run
            got.extend(range(at, at + run))
        return got

    def give(self, slots: Iterable[int]) -> None:
        """Slots that were taken and that no transaction ever named."""
        for slot in slots:
            assert not self._map[slot]
            self._map[slot] = 1
            self._free += 1

    def check(self, used: Iterable[int]) -> None:
        """AssertionError unless each slot is exactly one of used, free and pending."""
        taken = list(used)
        waiting = [slot for _, slots in self._pending for slot in slots]
        assert self._waiting == len(waiting)
        free = [slot for slot, state in enumerate(self._map) if state]
        assert self._free == len(free), f"{len(free)} slots are free, the books say {self._free}"
        assert sorted(taken + waiting + free) == list(range(self.slots)), (
            "a slot is lost, or has two states"
        )
