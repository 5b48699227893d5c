"""Where the bytes of pages are kept: what the writer and the readers ask of a placement.

Two exist: ``inline`` (in the database, in the transaction of the index entry) and ``slab`` (in
slots of files beside it). Both keep the same promise behind this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import lmdb

from kvtier.tiers.record import Bytes, DiskRecord, IndexEntry
from kvtier.tiers.writer import Put

Payload = Literal["slab", "inline"]

#: From this page size on slabs are the default (measured with ``bench/disk.py``).
SLAB_FROM_BYTES = 32 << 10

#: A page to load: its key, its index entry, and where its bytes go.
Wanted = tuple[bytes, IndexEntry, Bytes]


#: Up to so many puts that the next group will begin with; they stay queued.
Following = Callable[[int], list[Put]]


class Payloads(Protocol):
    """A placement. ``stage`` to ``failed`` are called by the writer, the rest by anybody."""

    @property
    def kind(self) -> Payload: ...

    @property
    def ready(self) -> int | None:
        """Pages that can be staged before something has to be committed; ``None`` for any number."""
        ...

    def stage(self, puts: Sequence[Put]) -> list[int | Exception | None]:
        """Write pages where the database does not hold them, before their transaction.

        Returns:
            For each the slot (``None`` where there are none), or why it cannot be stored.
        """
        ...

    def stage_ahead(self, following: Following) -> None:
        """Begin to write what the next group will store, while this one is committed."""
        ...

    def store(self, txn: lmdb.Transaction, put: Put, sequence: int) -> None:
        """The part of a page's payload that belongs in the transaction. ``sequence`` numbers the
        put.
        """
        ...

    def remove(self, txn: lmdb.Transaction, record: DiskRecord) -> None:
        """Remove that part of a page."""
        ...

    def committed(self, txn_id: int, freed: Sequence[int]) -> None:
        """A transaction holds, and no page is in the slots ``freed`` any more."""
        ...

    def failed(self, txn_id: int, slots: Sequence[int]) -> None:
        """Staged pages will not be stored; a transaction that may have named them has failed."""
        ...

    def sync(self) -> None:
        """Make staged payloads durable."""
        ...

    def load_page(self, txn: lmdb.Transaction, key: bytes, entry: IndexEntry, out: Bytes) -> None:
        """Read and verify a page. RecordError if it is not as it was stored."""
        ...

    def load_pages(
        self, txn: lmdb.Transaction, wanted: Sequence[Wanted]
    ) -> Iterable[Exception | None]:
        """Read and verify pages, neighbours together; for each ``None`` or what is wrong with it."""
        ...

    def load_planes(
        self, txn: lmdb.Transaction, plane: int, wanted: Sequence[Wanted]
    ) -> Iterable[Exception | None]:
        """Read and verify the same plane of pages, as ``load_pages``."""
        ...

    def check(self, txn: lmdb.Transaction, records: Mapping[bytes, DiskRecord]) -> None:
        """AssertionError if the books of this placement differ from what ``records`` implies."""
        ...

    def disk_bytes(self) -> int:
        """Bytes of the files besides the database."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Let go of files and threads, which nobody uses any more; whether all ended in time."""
        ...
