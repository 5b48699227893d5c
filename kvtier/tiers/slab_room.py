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
    too_small,
    value_bytes,
)
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.record import KEY_MAX, entry_bytes
from kvtier.tiers.usage import USE_BYTES

#: Map pages that are never a page's, and what a transaction rewrites besides leaves (as in
#: ``lmdb_room``).
_FIXED_PAGES = 24
_COMMIT_PAGES = 8
#: Transactions whose changes fit beside what is live, where the index is small beside the slots: a
#: reader keeps the old pages of the index as long as it reads.
_HISTORY = 12
_LEAST_HISTORY = 3
#: Slots of batches that are written while those of the batches before are not free yet.
_SPARE_BATCHES = 3
_SMALLEST_SHARE = 24
_MANY_USES = 4096


def plan_slab(
    *, capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape, index_bytes: int = 0
) -> Room:
    """The room that ``capacity_bytes`` of folder give to pages in slots.

    Args:
        index_bytes: size of a database file that is there already and is to be kept.

    Raises:
        ConfigError: not even one page fits.
    """
    room = _plan(capacity_bytes, batch_bytes, psize, shape, index_bytes)
    if room is None:
        low, high = capacity_bytes, max(capacity_bytes, 1 << 20)
        while _plan(high, batch_bytes, psize, shape, index_bytes) is None:
            high *= 2
        while high - low > 4096:
            middle = (low + high) // 2
            fits = _plan(middle, batch_bytes, psize, shape, index_bytes) is not None
            low, high = (low, middle) if fits else (middle, high)
        # Rounded to the digits that are shown.
        raise too_small(capacity_bytes, shape, high + high // 50)
    return room


def index_needed(capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape) -> int:
    """Bytes of the database file that a new folder of this capacity gets."""
    return plan_slab(
        capacity_bytes=capacity_bytes, batch_bytes=batch_bytes, psize=psize, shape=shape
    ).map_bytes


def _plan(
    capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape, index_bytes: int
) -> Room | None:
    usable = map_bytes_of(capacity_bytes)
    slot = round_up(shape.page_bytes)
    share = index_share(psize, shape)
    slots = usable // (slot + share)
    while slots > 0:
        history = max(_LEAST_HISTORY, min(_HISTORY, usable // (64 << 20)))
        need = max(
            index_bytes, _index_bytes(capacity_bytes, batch_bytes, psize, shape, slots, history)
        )
        over = need + slots * slot - usable
        if over <= 0:
            break
        slots -= max(1, over // (slot + share))
    batch = _spare(batch_bytes, slot, slots)
    live = (slots - _SPARE_BATCHES * batch) * slot
    if slots < 1 or live < slot:
        return None
    notes, _ = note_room(capacity_bytes, psize)
    return Room(
        map_bytes=need,
        psize=psize,
        shape=shape,
        page_stored_bytes=slot,
        live_capacity_bytes=live,
        batch_puts=_batch(batch_bytes, slot, slots),
        batch_deletes=max(8, batch),
        batch_uses=_batch_uses(slots, batch),
        note_bytes=notes,
        slots=slots,
        slot_bytes=slot,
    )


def _spare(batch_bytes: int, slot: int, slots: int) -> int:
    return max(1, min(batch_bytes // slot, slots // _SMALLEST_SHARE))


def _batch(batch_bytes: int, slot: int, slots: int) -> int:
    """Pages of one group; in a full store the free slots are the limit."""
    return max(1, min(batch_bytes // slot, slots // 4))


def _batch_uses(slots: int, batch: int) -> int:
    """Last uses that one transaction may save."""
    return max(8, batch, min(_MANY_USES, slots // 16))


def _index_bytes(
    capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape, slots: int, history: int
) -> int:
    batch = _batch(batch_bytes, round_up(shape.page_bytes), slots)
    own = overflow_pages(psize, entry_bytes(shape.sums), KEY_MAX)
    # A put rewrites a leaf of the index and one of the uses; so does a delete.
    live = -(-slots * index_share(psize, shape) // psize)
    commit = _COMMIT_PAGES + min(live, batch * (2 + own) + 2 * max(8, batch))
    uses = min(
        _batch_uses(slots, batch), -(-slots * value_bytes(psize, USE_BYTES, KEY_MAX) // psize)
    )
    _, note_pages = note_room(capacity_bytes, psize)
    granule = max(mmap.PAGESIZE, 4096)
    total = (_FIXED_PAGES + note_pages + live + history * commit + _LEAST_HISTORY * uses) * psize
    return -(-total // granule) * granule
