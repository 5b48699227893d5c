"""How much an LMDB map of a given size holds, and how much one transaction may change in it.

LMDB copies on write and reuses a page that transaction ``t`` freed from transaction ``t + 2`` on,
so a map that is full to the brim cannot even be deleted from. The tier therefore fills a map only
so far that the changes of three transactions always fit beside what is live.

Source of the page arithmetic: LMDB 0.9 ``mdb.c`` (PAGEHDRSZ 16, NODESIZE 8, MDB_MINKEYS 2,
OVPAGES).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.tiers.page_shape import PageShape
from kvtier.tiers.record import PIECE_PLACE_BYTES, PLACE_BYTES, entry_bytes
from kvtier.tiers.usage import USE_BYTES
from kvtier.units import format_size

_PAGE_HEADER = 16
_NODE_HEADER = 8
#: A leaf of a table that is packed is counted as half full; of one that is not, as a fifth: LMDB
#: merges leaves only when they are less than a quarter full, and takes entries from a neighbour.
_HALF = 2
_FIFTH = 5
#: Share of the map that live pages may take where batches are small beside it (measured: pages of
#: one size churn at 0.97 of the map without a failed allocation).
_LIVE_SHARE = 0.95
#: Map pages that are never a page's: two meta pages, roots, and the lists of free pages.
_FIXED_PAGES = 32
#: Map pages a transaction rewrites beside leaves: branches, roots, the list of free pages.
_COMMIT_PAGES = 16
#: Share of the folder for the notes, and their longest.
_NOTES_SHARE = 128
NOTE_MAX_BYTES = 1 << 20
#: Leaves that are packed in one transaction at most.
_MOST_PACKED = 64
#: Pages freed in one transaction are searched one by one at the next allocation.
_MAX_FREED_BYTES = 256 << 20


def map_bytes_of(capacity_bytes: int) -> int:
    """Size of the map whose folder stays within ``capacity_bytes``.

    Beside the map the folder holds its own directory block, the lock table, the writer's lock and,
    on file systems that count them, the extent blocks of the data file (12 bytes for each
    contiguous run).
    """
    overhead = (64 << 10) + (capacity_bytes >> 14)
    granule = max(mmap.PAGESIZE, 4096)
    return max(0, (capacity_bytes - overhead) // granule * granule)


@dataclass(frozen=True)
class Room:
    """The room in one map for pages of one shape.

    Attributes:
        map_bytes: size of the map.
        page_stored_bytes: what one page is charged with.
        live_capacity_bytes: what the charges of all pages may add up to.
        batch_puts, batch_deletes, batch_uses: pages that one transaction may store and remove, and
            whose last use it may save.
        note_bytes: the longest note that may be stored.
        leaves: of each table that is packed (see ``lmdb_packing``) the bytes of an entry and its
            node, and the leaves there is room for.
        pack_leaves: leaves that one transaction may pack.
        slots, slot_bytes: of the slab files; 0 where payloads are in the map.
    """

    map_bytes: int
    psize: int
    shape: PageShape
    page_stored_bytes: int
    live_capacity_bytes: int
    batch_puts: int
    batch_deletes: int
    batch_uses: int
    note_bytes: int
    leaves: dict[str, tuple[int, int]]
    pack_leaves: int
    slots: int = 0
    slot_bytes: int = 0

    @classmethod
    def plan(cls, *, capacity_bytes: int, batch_bytes: int, psize: int, shape: PageShape) -> Room:
        """The room that ``capacity_bytes`` of folder give.

        Raises:
            ConfigError: not even one page fits.
        """
        map_bytes = map_bytes_of(capacity_bytes)
        map_pages = map_bytes // psize
        stored = _stored(psize, shape)
        # A put that replaces a page rewrites, at worst, the leaves of the old entry, of its use and
        # of its pieces, and one or two at the tables' ends, besides the payload's pages.
        per_put = _value_pages(psize, shape) + 3 + len(shape.pieces)
        notes, note_pages = note_room(capacity_bytes, psize)
        puts = max(
            1, min(batch_bytes // shape.page_bytes, (map_pages // 24 - _COMMIT_PAGES) // per_put)
        )
        headroom = (3 * (puts * per_put + _COMMIT_PAGES) + _FIXED_PAGES + note_pages) * psize
        live = min(int(map_bytes * _LIVE_SHARE), map_bytes - headroom)
        live = live // stored * stored
        if live < stored:
            need = ((3 * (per_put + _COMMIT_PAGES) + _FIXED_PAGES) * psize + stored) * 1.1 + (
                160 << 10
            )
            raise too_small(capacity_bytes, shape, round(need))
        deletes = max(8, puts * per_put // (2 * (2 + len(shape.pieces))))
        deletes = max(1, min(deletes, _MAX_FREED_BYTES // stored))
        return cls(
            map_bytes,
            psize,
            shape,
            stored,
            live,
            puts,
            deletes,
            deletes,
            notes,
            packed_leaves(psize, shape, live // stored, inline=True),
            pack_leaves(puts * per_put + _COMMIT_PAGES),
        )

    def stored_bytes_of(self, nbytes: int) -> int:
        """What a payload of ``nbytes`` is charged with: its map pages and its share of the
        index.
        """
        if nbytes == self.shape.page_bytes:
            return self.page_stored_bytes
        if self.slot_bytes:
            return -(-nbytes // self.slot_bytes) * self.slot_bytes
        return value_bytes(self.psize, nbytes, PIECE_PLACE_BYTES) + index_share(
            self.psize, self.shape
        )


def overflow_pages(psize: int, nbytes: int, key_bytes: int) -> int:
    """Map pages of its own that a value takes; 0 if it lies in a leaf."""
    node_max = ((psize - _PAGE_HEADER) // 2 & ~1) - 2
    if _NODE_HEADER + key_bytes + nbytes <= node_max:
        return 0
    return -(-(_PAGE_HEADER + nbytes) // psize)


def value_bytes(psize: int, nbytes: int, key_bytes: int, *, packed: bool = True) -> int:
    """Map bytes of one value and its node in a table that is packed, or not."""
    own = overflow_pages(psize, nbytes, key_bytes)
    in_leaf = _in_leaf(psize, nbytes, key_bytes)
    if own or not packed:
        return own * psize + min(psize, _FIFTH * in_leaf)
    # Two that fill a leaf are not packed: one alone is more than a quarter of it.
    return psize if _lies_alone(psize, in_leaf) else _HALF * in_leaf


def _in_leaf(psize: int, nbytes: int, key_bytes: int) -> int:
    own = overflow_pages(psize, nbytes, key_bytes)
    return _NODE_HEADER + key_bytes + (8 if own else nbytes)


def _lies_alone(psize: int, in_leaf: int) -> bool:
    return 3 * in_leaf > psize - _PAGE_HEADER


def index_share(psize: int, shape: PageShape) -> int:
    """Map bytes of a page's index entry and of its last use."""
    return value_bytes(psize, entry_bytes(shape.sums), PLACE_BYTES) + value_bytes(
        psize, USE_BYTES, PLACE_BYTES
    )


def packed_leaves(
    psize: int, shape: PageShape, pages: int, *, inline: bool
) -> dict[str, tuple[int, int]]:
    """``Room.leaves`` for a number of pages."""
    tables = {
        "index": [(entry_bytes(shape.sums), PLACE_BYTES)],
        "use": [(USE_BYTES, PLACE_BYTES)],
        "pages": [(piece.nbytes, PIECE_PLACE_BYTES) for piece in shape.pieces if inline],
    }
    found = {}
    for table, values in tables.items():
        sizes = [_in_leaf(psize, nbytes, key) for nbytes, key in values]
        if sizes and all(_is_packed(psize, nbytes, key) for nbytes, key in values):
            share = pages * _HALF * sum(sizes)
            found[table] = max(sizes), -(-share // psize)
    return found


def _is_packed(psize: int, nbytes: int, key_bytes: int) -> bool:
    return not overflow_pages(psize, nbytes, key_bytes) and not _lies_alone(
        psize, _in_leaf(psize, nbytes, key_bytes)
    )


def pack_leaves(pages: int) -> int:
    """Leaves that a transaction for which there are ``pages`` map pages may pack: as sparse as they
    may be, they are a few times as many.
    """
    return max(2, min(_MOST_PACKED, pages // 6))


def note_room(capacity_bytes: int, psize: int) -> tuple[int, int]:
    """The longest note in bytes, and the map pages that all notes take with their rewriting."""
    notes = max(4096, min(NOTE_MAX_BYTES, capacity_bytes // _NOTES_SHARE // 4))
    # Of one more page of the map only one share may become larger, or a slot would be lost by it;
    # other shares grow at multiples of 8 pages.
    pages = (map_bytes_of(capacity_bytes) // psize + 4) // _NOTES_SHARE
    return notes, min(pages, 4 * NOTE_MAX_BYTES // psize) + 4


def too_small(capacity_bytes: int, shape: PageShape, need_bytes: int) -> ConfigError:
    """The error for a capacity that holds no page."""
    return ConfigError(
        f"a disk tier of {format_size(capacity_bytes)} cannot hold one page of "
        f"{format_size(shape.page_bytes)}; give it at least {format_size(need_bytes)}"
    )


def _value_pages(psize: int, shape: PageShape) -> int:
    pieces = sum(overflow_pages(psize, piece.nbytes, PIECE_PLACE_BYTES) for piece in shape.pieces)
    return pieces + overflow_pages(psize, entry_bytes(shape.sums), PLACE_BYTES)


def _stored(psize: int, shape: PageShape) -> int:
    packed = all(_is_packed(psize, piece.nbytes, PIECE_PLACE_BYTES) for piece in shape.pieces)
    pieces = sum(
        value_bytes(psize, piece.nbytes, PIECE_PLACE_BYTES, packed=packed) for piece in shape.pieces
    )
    return pieces + index_share(psize, shape)
