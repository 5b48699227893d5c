"""What of a folder's index stays when it is opened."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tiers.disk_wish import OpenReport, Wish
from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.lmdb_room import Room
from kvtier.tiers.page_tree import oldest_first, usable, victims
from kvtier.tiers.record import PLACE_BYTES, DiskRecord, IndexEntry, RecordError
from kvtier.tiers.slab_file import SlabFiles
from kvtier.tiers.usage import UsageBook, Use


def choose(
    found: dict[bytes, bytes],
    uses: dict[bytes, bytes],
    room: Room,
    wish: Wish,
    *,
    slabs: SlabFiles | None,
    last_put: int,
) -> tuple[dict[bytes, DiskRecord], UsageBook, OpenReport, list[bytes]]:
    """What to keep and what to remove of the index that was found.

    Args:
        found, uses: the tables ``index`` and ``use``, in their order.
        last_put: number of the last put, as noted in the folder.

    Returns:
        What stays, its uses, the report, and the places of what is to be removed.
    """
    damaged = ephemeral = 0
    good: list[DiskRecord] = []
    shared: dict[bytes, bytes] = {}
    taken: set[int] = set()
    keys: set[bytes] = set()
    # The newest first: of two entries for one page or one slot, which only damage leaves, it stays.
    for place, raw in reversed(found.items()):
        try:
            entry = IndexEntry.decode(place, raw)
            last_put = max(last_put, entry.sequence)
            if entry.key in keys:
                raise RecordError("the page was stored again since")
            _require_fit(entry, taken, wish, slabs)
        except RecordError:
            damaged += 1
            continue
        keys.add(entry.key)
        if entry.ephemeral:
            ephemeral += 1
        else:
            record = entry.record(room.page_stored_bytes)
            identity = shared.setdefault(record.identity, record.identity)
            good.append(record._replace(identity=identity, layout=wish.layout))
    usage = _usage_of(good, uses)
    usage.start_behind(last_put)
    kept = usable(good)
    orphans = len(good) - len(kept)
    evicted = _evict(kept, room.live_capacity_bytes, usage, wish)
    for key in evicted:
        kept.pop(key, None)
    report = OpenReport(len(kept), damaged, ephemeral, orphans, len(evicted))
    places = {record.place for record in kept.values()}
    drop = [place for place in {**found, **uses} if place not in places]
    return kept, usage, report, drop


def _usage_of(records: Sequence[DiskRecord], uses: dict[bytes, bytes]) -> UsageBook:
    """The uses of pages, as stored."""
    found: dict[bytes, Use] = {}
    for record in records:
        raw = uses.get(record.place)
        use = None if raw is None else Use.decode(record.place, raw)
        if use is not None:
            found[record.key] = use
    return UsageBook(found)


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


def remove(file: LmdbFile, places: Sequence[bytes], at_once: int) -> None:
    """Remove pages, and make what they took free to use."""
    for start in range(0, len(places), at_once):
        with file.writing() as txn:
            for place in places[start : start + at_once]:
                file.remove(txn, place)
    if places:
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
    places = {record.place for record in records.values()}
    strays = [key for key in keys if key[:PLACE_BYTES] not in places or room.slots]
    for start in range(0, len(strays), room.batch_deletes):
        with file.writing() as txn:
            for key in strays[start : start + room.batch_deletes]:
                txn.delete(key, db=file.pages)
