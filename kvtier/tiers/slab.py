"""Payloads in slab files: a page is written into a free slot, then the index entry names the slot.

Order of a put: write the slot, sync it (``durable``), commit the entry, acknowledge. Order of a
removal: commit; the slot is free once no snapshot that still names it can be read or come back
(see ``slab_slots``). A reader keeps its snapshot until it has verified what it read, so what it
reads is not written meanwhile, and if it were, the checksums would not match.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial

import lmdb

from kvtier.errors import TierFullError
from kvtier.tiers.io_pool import IoPool, run_here
from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.page_shape import PageCheck, PageShape, PlaneSeeds
from kvtier.tiers.payload import Payload, Wanted
from kvtier.tiers.record import Bytes, DiskRecord, IndexEntry, RecordError
from kvtier.tiers.slab_file import WARM_BYTES, SlabFiles
from kvtier.tiers.slab_slots import SlotAllocator
from kvtier.tiers.writer import Put

#: How long a put waits for readers of old snapshots before it is refused.
READER_PATIENCE_S = 2.0
#: Planes that are read ahead of the one that is verified.
_WINDOW = 4
#: Smaller pages are copied and verified sooner than a second thread has begun.
_HALVES_FROM_BYTES = 1 << 20


class SlabPayloads:
    """See ``kvtier.tiers.payload.Payloads``.

    Args:
        slots: the books of the slots; ``None`` where nothing is written.
        reads, writes: threads for either; closed with this.
    """

    kind: Payload = "slab"

    def __init__(
        self,
        file: LmdbFile,
        shape: PageShape,
        files: SlabFiles,
        slots: SlotAllocator | None,
        *,
        reads: IoPool,
        writes: IoPool | None,
    ) -> None:
        self._file = file
        self._shape = shape
        self.files = files
        self._slots = slots
        self._middle = shape.middle if shape.page_bytes >= _HALVES_FROM_BYTES else 0
        self._reads = reads
        self._writes = writes

    # ------------------------------------------------------------------ writing

    @property
    def slots(self) -> SlotAllocator:
        assert self._slots is not None
        return self._slots

    @property
    def ready(self) -> int | None:
        return self.slots.free + self.slots.pending

    def stage(self, puts: Sequence[Put]) -> list[int | Exception | None]:
        if not puts:
            return []
        taken = self.take(len(puts), READER_PATIENCE_S)
        written = self.files.write(taken, [put.data for put in puts[: len(taken)]])
        outcomes: list[int | Exception | None] = []
        for slot, error in zip(taken, written, strict=True):
            if error is not None:
                # Nothing names the slot, whatever it holds now.
                self.slots.give([slot])
            outcomes.append(slot if error is None else error)
        outcomes += [self._no_slot() for _ in puts[len(taken) :]]
        return outcomes

    def take(self, count: int, patience_s: float, below: int | None = None) -> list[int]:
        """Up to ``count`` slots that may be written; waits for readers of old snapshots."""
        deadline = time.monotonic() + patience_s
        taken: list[int] = []
        settled = False
        while True:
            self._reclaim()
            taken += self.slots.take(count - len(taken), below)
            if len(taken) == count or not self.slots.pending:
                return taken
            if not settled:
                # What keeps slots back may be a commit that a power cut could undo (relaxed), one
                # that failed, or the reader of a process that died.
                self._file.tick()
                self._file.sync()
                self._file.env.reader_check()
                settled = True
                continue
            if time.monotonic() >= deadline:
                return taken
            time.sleep(0.002)

    def _reclaim(self) -> None:
        oldest = self._file.oldest_reader()
        synced = self._file.synced_txn
        self.slots.reclaim(synced if oldest is None else min(synced, oldest))

    def _no_slot(self) -> TierFullError:
        readers = self._file.old_readers()
        who = f"by process {', '.join(map(str, readers))} " if readers else ""
        return TierFullError(
            f"no slot for a page of {self._shape.page_bytes} bytes at {self._file.folder} may be "
            f"written: {self.slots.pending} are held {who}by a snapshot that is still read; end "
            "that reader",
            tier="disk",
            needed_bytes=self.files.slot_bytes,
            holders={},
        )

    def store(self, txn: lmdb.Transaction, put: Put) -> None:
        pass

    def remove(self, txn: lmdb.Transaction, key: bytes) -> None:
        pass

    def committed(self, txn_id: int, freed: Sequence[int]) -> None:
        self.slots.freed(txn_id, freed)

    def failed(self, txn_id: int, slots: Sequence[int]) -> None:
        self.slots.freed(txn_id, slots)

    def sync(self) -> None:
        self.files.sync()

    # ------------------------------------------------------------------ reading

    def _slot(self, entry: IndexEntry) -> int:
        if entry.slot is None:
            raise RecordError("index entry names no slot in a store with slabs")
        return entry.slot

    def load_page(self, txn: lmdb.Transaction, key: bytes, entry: IndexEntry, out: Bytes) -> None:
        slot = self._slot(entry)
        check = PageCheck(self._shape, key, entry.sums, out)
        try:
            if self._middle and self.files.cached(slot):
                self._load_halves(slot, key, entry, out)
                return
            with closing(self.files.read_page(slot, out)) as reached:
                for stop in reached:
                    check.reach(stop)
            check.finish()
        except RecordError:
            # What the page cache holds may be wrong where the disk is right.
            self.files.read_cold(slot, out)
            self._shape.verify(key, entry.sums, out)

    def _load_halves(self, slot: int, key: bytes, entry: IndexEntry, out: Bytes) -> None:
        """Copy and verify a page in two threads: out of memory a checksum takes as long as a copy."""
        middle = self._middle
        half = partial(self._load_part, slot, key, entry, out)
        second = self._reads.submit(partial(half, middle, len(self._shape.planes)))
        try:
            half(0, middle)
        finally:
            second.exception()
        second.result()
        self._shape.verify_gaps(PlaneSeeds(key), entry.sums, out)

    def _load_part(
        self, slot: int, key: bytes, entry: IndexEntry, out: Bytes, first: int, last: int
    ) -> None:
        planes = self._shape.planes
        check = PageCheck(self._shape, key, entry.sums, out, first)
        start = planes[first][0] if first else 0
        end = planes[last][0] if last < len(planes) else self._shape.page_bytes
        for at in range(start, end, WARM_BYTES):
            stop = min(end, at + WARM_BYTES)
            self.files.read_cached(slot, at, out[at:stop])
            check.reach(stop)

    def load_pages(
        self, txn: lmdb.Transaction, wanted: Sequence[Wanted]
    ) -> Iterator[Exception | None]:
        runs = self._runs(wanted)
        if len(runs) < 2:
            for want in wanted:
                yield _outcome(partial(self.load_page, txn, *want))
            return
        jobs = [partial(self._read_run, run) for run in runs]
        for run, read in zip(runs, self._in_order(jobs), strict=True):
            whole = _outcome(read.result) is None
            for key, entry, out in run:
                if whole and _outcome(partial(self._shape.verify, key, entry.sums, out)) is None:
                    yield None
                else:
                    yield _outcome(partial(self.load_page, txn, key, entry, out))

    def _runs(self, wanted: Sequence[Wanted]) -> list[list[Wanted]]:
        """Neighbours that one read can bring."""
        runs: list[list[Wanted]] = []
        slots: list[int] = []
        for want in wanted:
            slot = want[1].slot
            if runs and slot is not None and slots and self.files.one_run([*slots, slot]):
                runs[-1].append(want)
                slots.append(slot)
            else:
                runs.append([want])
                slots = [] if slot is None else [slot]
        return runs

    def _read_run(self, run: list[Wanted]) -> None:
        self.files.read_run(self._slot(run[0][1]), [out for _, _, out in run])

    def load_planes(
        self, txn: lmdb.Transaction, plane: int, wanted: Sequence[Wanted]
    ) -> Iterator[Exception | None]:
        def verify(read: Future[None], key: bytes, entry: IndexEntry, out: Bytes) -> None:
            read.result()
            self._shape.verify_plane(key, entry.sums, plane, out)

        jobs = [partial(self._read_plane, plane, want) for want in wanted]
        for want, read in zip(wanted, self._in_order(jobs), strict=True):
            yield _outcome(partial(verify, read, *want))

    def _read_plane(self, plane: int, want: Wanted) -> None:
        self.files.read_range(self._slot(want[1]), self._shape.planes[plane][0], want[2])

    def _in_order(self, jobs: Sequence[Callable[[], None]]) -> Iterator[Future[None]]:
        """The jobs' outcomes in order, while a few that follow are under way."""
        if len(jobs) == 1:
            yield run_here(jobs[0])
            return
        ahead: deque[Future[None]] = deque()
        try:
            for job in jobs:
                ahead.append(self._reads.submit(job))
                if len(ahead) > _WINDOW:
                    yield ahead.popleft()
            while ahead:
                yield ahead.popleft()
        finally:
            # They write into the caller's memory: they must end before this does.
            for future in ahead:
                if not future.cancel():
                    future.exception()

    # ------------------------------------------------------------------ the rest

    def check(self, txn: lmdb.Transaction, records: Mapping[bytes, DiskRecord]) -> None:
        used = [record.slot for record in records.values()]
        assert None not in used, "a page has no slot"
        self.slots.check([slot for slot in used if slot is not None])
        assert self.files.slots == self.slots.slots
        assert not txn.stat(self._file.pages)["entries"], "pieces in a store with slabs"

    def disk_bytes(self) -> int:
        return self.files.disk_bytes()

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        ended = True
        for pool in (self._reads, self._writes):
            if pool is not None:
                ended &= pool.close(max(0.0, deadline - time.monotonic()))
        if ended:
            self.files.close()
        return ended


def _outcome(call: Callable[[], object]) -> Exception | None:
    """What is wrong with a record; what the system refuses goes up."""
    try:
        call()
    except RecordError as error:
        return error
    return None
