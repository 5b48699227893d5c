"""Pages that were evicted of late, by key only: what ARC, S3-FIFO, MQ and others remember of the past."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvtier.policy import Key

Record = TypeVar("Record")


class Ghosts(Generic[Record]):
    """Keys with a record each, oldest first; the oldest is forgotten when there are too many.

    Attributes:
        order: keys, oldest first, with their records; to work on directly where calls would cost too much.

    Cost: O(1) for everything. Memory: about 120 bytes a key.
    """

    __slots__ = ("order",)

    def __init__(self) -> None:
        self.order: OrderedDict[Key, Record] = OrderedDict()

    def add(self, key: Key, record: Record) -> None:
        """Remember a key as the newest."""
        self.order[key] = record
        self.order.move_to_end(key)

    def pop(self, key: Key) -> Record | None:
        """Forget a key; its record, or ``None`` if it was not remembered."""
        return self.order.pop(key, None)

    def peek(self, key: Key) -> Record:
        """The record of a key that is remembered."""
        return self.order[key]

    def pop_oldest(self) -> Record:
        """Forget the oldest key; its record."""
        return self.order.popitem(last=False)[1]

    def values(self) -> Iterable[Record]:
        """All records, oldest first."""
        return self.order.values()

    def trim(self, limit: int) -> None:
        """Forget the oldest until at most ``limit`` are left."""
        while len(self.order) > limit:
            self.order.popitem(last=False)

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, key: object) -> bool:
        return key in self.order

    def __iter__(self) -> Iterator[Key]:
        return iter(self.order)
