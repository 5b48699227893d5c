"""Payloads in slab files: a page is written into a free slot, then the index entry names the slot.

Order of a put: write the slot, sync it (``durable``), commit the entry, acknowledge. Order of a
removal: commit; the slot is free once no snapshot that still names it can be read or come back
(see ``slab_slots``). A reader keeps its snapshot until it has verified what it read, so what it
reads is not written meanwhile, and if it were, the checksums would not match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

import lmdb

from kvtier.errors import TierFullError
from kvtier.processors import processors
from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.lmdb_file import LmdbFile
from kvtier.tiers.page_shape import PageCheck, PageShape
from kvtier.tiers.payload import Following, Payload, Wanted
from kvtier.tiers.record import Bytes, DiskRecord, IndexEntry, RecordError
from kvtier.tiers.slab_file import SlabFiles
from kvtier.tiers.slab_slots import SlotAllocator
from kvtier.tiers.writer import Put

#: How long a put waits for readers of old snapshots before it is refused.
READER_PATIENCE_S = 2.0
#: A run of this much that is in the page cache is read by the thread that asks: handing it to another
#: costs more (measured).
_SMALL_RUN_BYTES = 256 << 10


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
        #: Puts that are being written before their group, and their slots.
        self._ahead: list[tuple[Put, int]] = []
        self._wait_ahead: Callable[[], list[Exception | None]] = list
        self._reads = reads
        self._writes = writes
        #: Processors for other threads than the one that asks.
        self._beside = processors() - 1

    # ------------------------------------------------------------------ writing

    @property
    def slots(self) -> SlotAllocator:
        assert self._slots is not None
        return self._slots

    @property
    def ready(self) -> int | None:
        return self.slots.free + self.slots.pending + len(self._ahead)

    def stage(self, puts: Sequence[Put]) -> list[int | Exception | None]:
        done = self._end_ahead(puts)
        rest = [put for put in puts if id(put) not in done]
        if rest:
            taken = self.take(len(rest), READER_PATIENCE_S)
            written = (
                self.files.write(taken, [put.data for put in rest[: len(taken)]]) if taken else []
            )
            for put, slot, error in zip(rest, taken, written, strict=False):
                done[id(put)] = self._written(slot, error)
        return [done[id(put)] if id(put) in done else self._no_slot() for put in puts]

    def stage_ahead(self, following: Following) -> None:
        # Only slots that are free by now: those that this group lets go of are not.
        puts = following(self.slots.free) if self.slots.free else []
        if self._ahead or not puts:
            return
        slots = self.slots.take(len(puts))
        self._ahead = list(zip(puts, slots, strict=False))
        self._wait_ahead = self.files.begin(slots, [put.data for put, _ in self._ahead])

    def _end_ahead(self, puts: Sequence[Put]) -> dict[int, int | Exception | None]:
        """The outcomes of those of ``puts`` that were written ahead. Others, which were cancelled
        or refused since, give their slots back.
        """
        if not self._ahead:
            return {}
        ahead, self._ahead = self._ahead, []
        wanted = {id(put) for put in puts}
        done: dict[int, int | Exception | None] = {}
        for (put, slot), error in zip(ahead, self._wait_ahead(), strict=True):
            if id(put) in wanted:
                done[id(put)] = self._written(slot, error)
            else:
                self.slots.give([slot])
        return done

    def _written(self, slot: int, error: Exception | None) -> int | Exception:
        if error is None:
            return slot
        # Nothing names the slot, whatever it holds now.
        self.slots.give([slot])
        return error

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

    def store(self, txn: lmdb.Transaction, put: Put, sequence: int) -> None:
        pass

    def remove(self, txn: lmdb.Transaction, record: DiskRecord) -> None:
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
        try:
            if self.files.warm(slot):
                self.files.read_warm(slot, out)
                self._shape.verify(key, entry.sums, out)
                return
            check = PageCheck(self._shape, key, entry.sums, out)
            with closing(self.files.read_page(slot, out)) as reached:
                for stop in reached:
                    check.reach(stop)
            check.finish()
        except RecordError:
            # What the page cache holds may be wrong where the disk is right.
            self.files.read_cold(slot, out)
            self._shape.verify(key, entry.sums, out)

    def load_pages(
        self, txn: lmdb.Transaction, wanted: Sequence[Wanted]
    ) -> Sequence[Exception | None]:
        runs = self._runs(wanted) if len(wanted) > 1 else []
        if len(runs) < 2:
            return [_outcome(partial(self.load_page, txn, *want)) for want in wanted]
        outcomes: list[Exception | None] = [None] * len(wanted)
        failed: list[int] = []
        small: list[range] = []
        warm: list[range] = []
        cold: list[range] = []
        for run in runs:
            if not self._in_memory(wanted, run):
                cold.append(run)
            elif len(run) * self._shape.page_bytes <= _SMALL_RUN_BYTES:
                small.append(run)
            else:
                warm.append(run)
        # The device is asked for much at once; what is in memory is work for processors alone, and
        # threads that wait for each other's would only pass the interpreter's lock around.
        self._reads.run(
            [partial(self._load_run, wanted, run, failed) for run in (*cold, *warm)],
            threads=None if cold else self._beside,
        )
        for run in small:
            self._load_run(wanted, run, failed)
        for at in failed:
            outcomes[at] = _outcome(partial(self.load_page, txn, *wanted[at]))
        return outcomes

    def _runs(self, wanted: Sequence[Wanted]) -> list[range]:
        """Neighbours that one read can bring."""
        runs: list[range] = []
        slots: list[int] = []
        for at, (_, entry, _) in enumerate(wanted):
            slot = entry.slot
            if runs and slot is not None and slots and self.files.one_run([*slots, slot]):
                runs[-1] = range(runs[-1].start, at + 1)
                slots.append(slot)
            else:
                runs.append(range(at, at + 1))
                slots = [] if slot is None else [slot]
        return runs

    def _in_memory(self, wanted: Sequence[Wanted], run: range) -> bool:
        """Whether reading a run is no work for the device."""
        slot = wanted[run.start][1].slot
        return slot is not None and self.files.cached(slot, len(run))

    def _load_run(self, wanted: Sequence[Wanted], run: range, failed: list[int]) -> None:
        """Read and verify neighbours; those that are not right go to ``failed``."""
        part = wanted[run.start : run.stop]
        try:
            self.files.read_run(self._slot(part[0][1]), [out for _, _, out in part])
        except RecordError:
            failed.extend(run)
            return
        for at, (key, entry, out) in zip(run, part, strict=True):
            if _outcome(partial(self._shape.verify, key, entry.sums, out)) is not None:
                failed.append(at)

    def load_planes(
        self, txn: lmdb.Transaction, plane: int, wanted: Sequence[Wanted]
    ) -> Sequence[Exception | None]:
        outcomes: list[Exception | None] = [None] * len(wanted)

        def load(at: int) -> None:
            outcomes[at] = _outcome(partial(self._load_plane, plane, *wanted[at]))

        self._reads.run([partial(load, at) for at in range(len(wanted))])
        return outcomes

    def _load_plane(self, plane: int, key: bytes, entry: IndexEntry, out: Bytes) -> None:
        self.files.read_range(self._slot(entry), self._shape.planes[plane][0], out)
        self._shape.verify_plane(key, entry.sums, plane, out)

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
