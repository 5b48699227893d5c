"""How a folder's bytes are shared between slots and the index that owns them."""

from __future__ import annotations

import mmap

from kvtier.tiers.aligned import round_up
from kvtier.tiers.lmdb_room import (
    Room,
    index_share,
    map_bytes_of,
    note_room,
    overflow_pages,
    pack_leaves,
    packed_leaves,
    too_small,
)
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.record import PLACE_BYTES, entry_bytes

#: Map pages that are never a page's, and what a transaction rewrites besides leaves (as in
#: ``lmdb_room``).
_FIXED_PAGES = 24
_COMMIT_PAGES = 16
#: A transaction that lets go of this many map pages writes one more to list them.
_FREED_A_PAGE = 256
#: Transactions whose changes must fit beside what is live; and how many do where that takes less
#: than ``_CHANGES_SHARE`` of the folder: a reader keeps the old pages of the index as long as it
#: reads.
_LEAST_HISTORY = 3
_HISTORY = 12
_CHANGES_SHARE = 16
#: In small folders as much as this is worth more pages in a transaction.
_SMALL_CHANGES_BYTES = 1 << 20
_SMALL_CHANGES_SHARE = 8
#: Batches that are written while the slots of those before are not free yet, and the share of the
#: slots that is kept free for them at most.
_SPARE_BATCHES = 3
_SPARE_SHARE = 10
#: Every transaction may store and remove this many pages (fewer where the slots are fewer).
_LEAST_PUTS = 8
_LEAST_DELETES = 8
_MANY_USES = 4096


def plan_slab(*, capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape) -> Room:
    """The room that ``capacity_bytes`` of folder give to pages in slots.

    More bytes never give fewer pages, nor a smaller share to pages (but for two slots: the one that
    does not fit any more, and one that is kept free). In folders of 64 MiB and 32 pages and more,
    pages of 16 KiB and more get at least 75 %; pages of 4 KiB and 8 KiB, with up to 8 planes, get
    at least 70 %, and 75 % from 1 GiB on.

    Raises:
        ConfigError: not even one page fits.
    """
    room = _Split(capacity_bytes, batch_bytes, psize, shape).room(0)
    if room is None:
        raise too_small(capacity_bytes, shape, _least(capacity_bytes, batch_bytes, psize, shape))
    return room


def plan_slab_beside(
    index_bytes: int, *, capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape
) -> Room | None:
    """The same beside a database file of ``index_bytes`` that is kept; ``None`` if no page fits then."""
    return _Split(capacity_bytes, batch_bytes, psize, shape).room(index_bytes)


def _least(capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape) -> int:
    """The least capacity that holds a page, rounded up to the digits that are shown."""

    def fits(capacity: int) -> bool:
        return _Split(capacity, batch_bytes, psize, shape).room(0) is not None

    low, high = capacity_bytes, max(capacity_bytes, 1 << 20)
    while not fits(high):
        high *= 2
    while high - low > 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high + high // 50


class _Split:
    """The split of one capacity. What the index takes for a number of slots never falls with that
    number, and as a share of the capacity never grows with the capacity.
    """

    def __init__(self, capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape) -> None:
        self._usable = map_bytes_of(capacity_bytes)
        self._psize = psize
        self._shape = shape
        self._slot = round_up(shape.page_bytes)
        self._batch = max(1, batch_bytes // self._slot)
        self._note_bytes, self._note_pages = note_room(capacity_bytes, psize)
        # A put that replaces a page rewrites the leaves of the old entry and of its use; so does a
        # delete.
        self._per_put = 2 + overflow_pages(psize, entry_bytes(shape.sums), PLACE_BYTES)

    def room(self, index_bytes: int) -> Room | None:
        """``None`` if not even one page fits."""
        slots = self._most_slots(index_bytes)
        spare = max(_SPARE_BATCHES, min(_SPARE_BATCHES * self._batch, slots // _SPARE_SHARE))
        if slots <= spare:
            return None
        pages = self._changes(slots) // _LEAST_HISTORY
        puts, deletes, uses = self._batches(slots, spare, pages)
        return Room(
            map_bytes=max(index_bytes, self._index_bytes(slots)),
            psize=self._psize,
            shape=self._shape,
            page_stored_bytes=self._slot,
            live_capacity_bytes=(slots - spare) * self._slot,
            batch_puts=puts,
            batch_deletes=deletes,
            batch_uses=uses,
            note_bytes=self._note_bytes,
            leaves=packed_leaves(self._psize, self._shape, slots, inline=False),
            pack_leaves=pack_leaves(pages),
            slots=slots,
            slot_bytes=self._slot,
        )

    def _most_slots(self, index_bytes: int) -> int:
        low, high = 0, self._usable // self._slot
        while low < high:
            slots = (low + high + 1) // 2
            index = max(index_bytes, self._index_bytes(slots))
            if index + slots * self._slot <= self._usable:
                low = slots
            else:
                high = slots - 1
        return low

    def _index_bytes(self, slots: int) -> int:
        pages = _FIXED_PAGES + self._note_pages + self._live(slots) + self._changes(slots)
        granule = max(mmap.PAGESIZE, 4096)
        return -(-pages * self._psize // granule) * granule

    def _live(self, slots: int) -> int:
        """Map pages of the entries and uses of that many pages."""
        return -(-slots * index_share(self._psize, self._shape) // self._psize)

    def _changes(self, slots: int) -> int:
        """Map pages for what transactions change beside what is live."""
        least = _LEAST_HISTORY * self._commit(slots, _LEAST_PUTS, _LEAST_DELETES)
        # Where there is room for so many, new leaves come in the place of old ones.
        most = _HISTORY * self._rewritten(slots, self._batch, max(_LEAST_DELETES, self._batch))
        share = max(
            self._usable // _CHANGES_SHARE,
            min(self._usable // _SMALL_CHANGES_SHARE, _SMALL_CHANGES_BYTES),
        )
        return max(least, min(most, share // self._psize))

    def _commit(self, slots: int, puts: int, deletes: int) -> int:
        """Map pages that a transaction of so many puts and deletes takes at most."""
        # New entries go to the end of the index, into leaves of their own.
        return self._rewritten(slots, puts, deletes) + self._live(puts)

    def _rewritten(self, slots: int, puts: int, deletes: int) -> int:
        """Those of them that take the place of others."""
        leaves = min(self._live(slots), puts * self._per_put + 2 * deletes)
        return _COMMIT_PAGES + leaves + leaves // _FREED_A_PAGE

    def _batches(self, slots: int, spare: int, pages: int) -> tuple[int, int, int]:
        """Pages that a transaction of ``pages`` map pages may store and remove, and whose last use
        it may save.
        """
        # While the store fills up there are more free slots than the spare ones.
        low, high = 1, max(1, min(self._batch, slots // 4))
        while low < high:
            puts = (low + high + 1) // 2
            if self._commit(slots, puts, max(_LEAST_DELETES, min(puts, spare))) <= pages:
                low = puts
            else:
                high = puts - 1
        deletes = max(_LEAST_DELETES, min(low, spare))
        if self._commit(slots, 0, _MANY_USES) <= pages:
            return low, deletes, _MANY_USES
        uses = (pages - _COMMIT_PAGES) * _FREED_A_PAGE // (_FREED_A_PAGE + 1)
        return low, deletes, max(_LEAST_DELETES, min(_MANY_USES, uses))
