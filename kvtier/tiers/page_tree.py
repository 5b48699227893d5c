"""What the parent links of stored pages imply: which are usable, in which order, which may go
first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvtier.tiers.record import DiskRecord

#: Sorts records, the ones to give up first in front.
Age = Callable[[DiskRecord], int]


def _put_order(record: DiskRecord) -> int:
    return record.sequence


def usable(records: Iterable[DiskRecord]) -> dict[bytes, DiskRecord]:
    """The records whose whole chain of parents is among them."""
    kept: dict[bytes, DiskRecord] = {}
    for record in sorted(records, key=lambda r: r.depth):
        if record.parent is None:
            kept[record.key] = record
            continue
        parent = kept.get(record.parent)
        if parent is not None and parent.depth < record.depth:
            kept[record.key] = record
    return kept


def oldest_first(
    records: Mapping[bytes, DiskRecord], age: Age = _put_order
) -> Iterator[DiskRecord]:
    """By ``age``, but every record after its parent."""
    done: set[bytes] = set()
    for record in sorted(records.values(), key=age):
        chain: list[DiskRecord] = []
        at: DiskRecord | None = record
        while at is not None and at.key not in done:
            done.add(at.key)
            chain.append(at)
            at = records.get(at.parent) if at.parent is not None else None
        yield from reversed(chain)


def victims(
    records: Mapping[bytes, DiskRecord], limit_bytes: int, age: Age = _put_order
) -> list[bytes]:
    """Keys to remove, oldest leaf first, until the rest is charged with ``limit_bytes`` at most."""
    live = sum(record.stored_bytes for record in records.values())
    children: dict[bytes, int] = {}
    for record in records.values():
        if record.parent is not None:
            children[record.parent] = children.get(record.parent, 0) + 1
    heap = [(age(r), r.key) for r in records.values() if not children.get(r.key)]
    heapq.heapify(heap)
    gone: list[bytes] = []
    while live > limit_bytes and heap:
        _, key = heapq.heappop(heap)
        record = records[key]
        gone.append(key)
        live -= record.stored_bytes
        if record.parent in children:
            children[record.parent] -= 1
            if not children[record.parent] and record.parent in records:
                heapq.heappush(heap, (age(records[record.parent]), record.parent))
    return gone


def with_followers(records: Mapping[bytes, DiskRecord], keys: Iterable[bytes]) -> list[bytes]:
    """``keys`` that are there and all records behind them, each after its parent's key; removing
    them in reverse leaves no record without its prefix.
    """
    children: dict[bytes, list[bytes]] = {}
    for record in records.values():
        if record.parent is not None:
            children.setdefault(record.parent, []).append(record.key)
    found: dict[bytes, None] = {}
    todo = [key for key in keys if key in records]
    while todo:
        key = todo.pop()
        if key not in found:
            found[key] = None
            todo += children.get(key, [])
    return sorted(found, key=lambda key: records[key].depth)
