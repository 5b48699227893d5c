"""What of a folder's index stays when it is opened."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tiers.disk_wish import OpenReport, Wish
from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.page_tree import oldest_first, usable, victims
from kvtier.tiers.record import DiskRecord, IndexEntry, RecordError
from kvtier.tiers.slab_file import SlabFiles
from kvtier.tiers.usage import UsageBook, Use


def usage_of(found: dict[bytes, bytes], raw: dict[bytes, bytes]) -> UsageBook:
    """The uses of the pages in an index, as stored."""
    uses = {key: Use.decode(key, text) for key, text in raw.items() if key in found}
    return UsageBook({key: use for key, use in uses.items() if use is not None})


def choose(
    found: dict[bytes, bytes], room: Room, usage: UsageBook, wish: Wish, slabs: SlabFiles | None
) -> tuple[dict[bytes, DiskRecord], OpenReport, list[bytes]]:
    """What to keep and what to remove of the index that was found."""
    damaged = ephemeral = sequence = 0
    good: list[DiskRecord] = []
    shared: dict[bytes, bytes] = {}
    taken: set[int] = set()
    for key, raw in found.items():
        try:
            entry = IndexEntry.decode(key, raw)
            sequence = max(sequence, entry.sequence)
            _require_fit(entry, taken, wish, slabs)
        except RecordError:
            damaged += 1
            continue
        if entry.ephemeral:
            ephemeral += 1
        else:
            record = entry.record(key, room.page_stored_bytes)
            identity = shared.setdefault(record.identity, record.identity)
            good.append(record._replace(identity=identity, layout=wish.layout))
    usage.start_behind(sequence)
    kept = usable(good)
    orphans = len(good) - len(kept)
    evicted = _evict(kept, room.live_capacity_bytes, usage, wish)
    for key in evicted:
        kept.pop(key, None)
    report = OpenReport(len(kept), damaged, ephemeral, orphans, len(evicted))
    return kept, report, [key for key in found if key not in kept]


def _require_fit(entry: IndexEntry, taken: set[int], wish: Wish, slabs: SlabFiles | None) -> None:
    """RecordError unless the entry can be one of this folder."""
    shape = wish.shape
    if (
        entry.layout != wish.layout
        or entry.nbytes != shape.page_bytes
        or len(entry.sums) != shape.sums
    ):
        raise RecordError("index entry is of another layout")
    if (entry.slot is None) != (slabs is None):
        raise RecordError("index entry is of another placement")
    if entry.slot is not None:
        assert slabs is not None
        if entry.slot in taken or not slabs.present(entry.slot):
            raise RecordError("the slot is another page's, or is not there")
        taken.add(entry.slot)


def _evict(
    kept: dict[bytes, DiskRecord], limit: int, usage: UsageBook, wish: Wish
) -> Sequence[bytes]:
    if sum(record.stored_bytes for record in kept.values()) <= limit:
        return []
    gone: list[bytes] = []
    if wish.evict is not None:
        order = list(oldest_first(kept, usage.order))
        gone = [key for key in wish.evict(order, limit) if key in kept]
    rest = {key: record for key, record in kept.items() if key not in set(gone)}
    # Whatever the policy named: no page stays without its prefix, and the limit is kept.
    whole = usable(rest.values())
    gone += [key for key in rest if key not in whole]
    return [*gone, *victims(whole, limit, usage.order)]


def remove(file: LmdbFile, keys: list[bytes], at_once: int) -> None:
    """Remove pages, and make what they took free to use."""
    for start in range(0, len(keys), at_once):
        with file.writing() as txn:
            for key in keys[start : start + at_once]:
                file.remove(txn, key)
    if keys:
        file.tick()
        file.sync()


def remove_strays(file: LmdbFile, records: dict[bytes, DiskRecord], room: Room) -> None:
    """Remove pieces without an index entry. Only a damaged entry leaves any, so the usual case
    is one count.
    """
    pieces = 0 if room.slots else len(room.shape.pieces)
    with file.reading() as txn:
        if txn.stat(file.pages)["entries"] == len(records) * pieces:
            return
        keys = [bytes(key) for key in txn.cursor(db=file.pages).iternext(keys=True, values=False)]
    strays = [key for key in keys if key[:-2] not in records or room.slots]
    for start in range(0, len(strays), room.batch_deletes):
        with file.writing() as txn:
            for key in strays[start : start + room.batch_deletes]:
                txn.delete(key, db=file.pages)
