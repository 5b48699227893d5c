"""The store: pages by key in three tiers, behind leases."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, cast

import numpy as np
import torch

from kvtier.devices import open_device
from kvtier.devices.base import Device, Event
from kvtier.errors import ClosedError, ConfigError, DeadlineExceededError, LayoutError, PageLostError
from kvtier.layout import PageLayout
from kvtier.mover import deadline_after, order_behind, write_host
from kvtier.policy import ResidencyPolicy, load_policy
from kvtier.store.directory import Directory
from kvtier.store.lease import Lease
from kvtier.store.page import TIERS, Copy, Page
from kvtier.store.placement import Placement
from kvtier.store.stats import StoreStats
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.memory import Slot, SlotTier
from kvtier.units import format_size, parse_size

WriteMode = Literal["write_back", "write_through"]

#: Host memory through which pages pass on their way between VRAM and disk.
BOUNCE_BYTES = 64 << 20


class TieredStore:
    """KV pages of one layout in VRAM, host RAM and on disk. Thread-safe; every call has a deadline.

    Args:
        layout: geometry of all pages.
        device: a ``Device`` or the text for ``kvtier.devices.open_device``. A device given as text is closed with
            the store.
        vram, host, disk: bytes of each tier, as integers or text ("2GiB"). 0 leaves a tier out. ``disk`` is
            the limit of the whole folder.
        path: folder of the disk tier; needed if ``disk`` > 0.
        policy: residency policy of each tier (see ``kvtier.policy.load_policy``).
        host_write: ``write_back`` copies a page to host RAM when it is evicted from VRAM, ``write_through`` when it
            is sealed, so that its eviction is free.
        disk_write: the same for the disk. ``write_through`` (the default) lets a page survive a crash as soon
            as its write is acknowledged; ``write_back`` writes it on eviction, ``flush`` or ``close``.
        durability: ``durable`` or ``relaxed``; see ``kvtier.tiers.disk``.
        timeout_s: deadline of every call that does not get its own.
        check: recount all books after every operation (slow; for tests and debugging).

    Raises:
        ConfigError: sizes that hold no page, a disk without a folder, unknown policy or mode.
        DiskError: the folder cannot be opened.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        device: Device | str = "auto",
        vram: int | str,
        host: int | str = 0,
        disk: int | str = 0,
        path: str | os.PathLike[str] | None = None,
        policy: str = "lru",
        host_write: WriteMode = "write_back",
        disk_write: WriteMode = "write_through",
        durability: Literal["durable", "relaxed"] = "durable",
        timeout_s: float = 30.0,
        check: bool = False,
    ) -> None:
        for name, mode in (("host_write", host_write), ("disk_write", disk_write)):
            if mode not in ("write_back", "write_through"):
                raise ConfigError(f"{name} is {mode!r}; use write_back or write_through")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s!r}; it must be > 0 seconds")
        sizes = {"vram": parse_size(vram, "vram"), "host": parse_size(host, "host"), "disk": parse_size(disk, "disk")}
        for tier in ("vram", "host"):
            if (sizes[tier] or tier == "vram") and sizes[tier] < layout.page_bytes:
                raise ConfigError(
                    f"{tier} is {sizes[tier]} bytes, but one page of {layout.page_tokens} tokens takes "
                    f"{layout.page_bytes} bytes ({format_size(layout.page_bytes)}); give at least that"
                )
        if sizes["disk"] and path is None:
            raise ConfigError(f"disk is {sizes['disk']} bytes, but no path is given; name the folder for the disk tier")
        self.layout = layout
        self.timeout_s = timeout_s
        self.sizes = sizes
        self._check = check
        self._lock = threading.RLock()
        self._depth = 0
        self._host_write, self._disk_write = host_write, disk_write
        self._owns_device = isinstance(device, str)
        policies = self._load_policies(policy, sizes)
        self.device: Device = open_device(device) if isinstance(device, str) else device
        self._directory = Directory(policies, layout.page_bytes)
        slots = {
            tier: SlotTier(tier, alloc=alloc, free=self.device.free, page_bytes=layout.page_bytes, capacity_bytes=sizes[tier])
            for tier, alloc in (("vram", self.device.alloc), ("host", self.device.alloc_host))
            if tier in policies
        }
        bounce = SlotTier(
            "bounce",
            alloc=self.device.alloc_host,
            free=self.device.free,
            page_bytes=layout.page_bytes,
            capacity_bytes=max(4, min(64, BOUNCE_BYTES // layout.page_bytes)) * layout.page_bytes,
        )
        disk_tier: DiskTier | None = None
        try:
            if "disk" in policies:
                assert path is not None
                disk_tier = DiskTier(
                    path,
                    layout_digest=layout.digest,
                    page_bytes=layout.page_bytes,
                    plane_ranges=[(p.offset, p.nbytes) for p in layout.planes if p is not None],
                    capacity_bytes=sizes["disk"],
                    durability=durability,
                    timeout_s=timeout_s,
                )
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        #: layer -> number of its plane, in page order.
        self.plane_numbers = {p.layer: n for n, p in enumerate(p for p in layout.planes if p is not None)}
        self._placement = Placement(self.device, self._directory, slots, disk_tier, bounce, self._park)
        self._idle: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._open_leases = 0
        self._tails: set[int] = set()
        self._stats = StoreStats()
        self._names = itertools.count(1)
        self._closed = False
        if disk_tier is not None:
            self._register_disk(disk_tier)

    @staticmethod
    def _load_policies(spec: str, sizes: dict[str, int]) -> dict[str, ResidencyPolicy]:
        tiers = [tier for tier in TIERS if sizes[tier]]
        return {tier: load_policy(spec, leaf_first=tier == tiers[-1]) for tier in tiers}

    def _register_disk(self, disk: DiskTier) -> None:
        for record in disk.records():
            page = Page(record.key, record.parent, record.depth, record.identity)
            self._directory.add(page)
            self._directory.attach(page, Copy("disk", None))
            self._placement._count_disk(record.stored_bytes)
        self._directory.stats["disk"].pages_in = 0

    @property
    def closed(self) -> bool:
        return self._closed

    # ------------------------------------------------------------------ pages

    def put(
        self,
        key: bytes,
        data: torch.Tensor,
        *,
        parent: bytes | None = None,
        identity: bytes = b"",
        timeout_s: float | None = None,
    ) -> bool:
        """Store a sealed page from host memory. It goes to host RAM (to VRAM where there is no host tier) and, with
        ``disk_write="write_through"``, on to disk.

        Args:
            key: the page's key (``kvtier.keys``).
            data: uint8 ``[page_bytes]``, contiguous, on the CPU; copied before this returns.
            parent: key of the page before it, which must be in the store; ``None`` for a first page.
            identity: digest of the model identity, kept with the page.

        Returns:
            False if the key was there already (it then counts as used).

        Raises:
            ConfigError: the parent is not in the store.
            TierFullError: there is no room, and nothing that may go.
        """
        size = self.layout.page_bytes
        if data.dtype != torch.uint8 or data.shape != (size,) or data.device.type != "cpu":
            raise LayoutError(f"data is {data.dtype} {tuple(data.shape)} on {data.device}; a page is uint8 [{size}] on the CPU")
        with self._locked(timeout_s) as deadline:
            known = self._directory.get(key)
            if known is not None and known.copies:
                self._directory.touch([key])
                return False
            above = self._directory.get(parent) if parent is not None else None
            if parent is not None and (above is None or not above.copies):
                raise ConfigError(f"the parent page {parent.hex()[:16]} is not in the store; put a sequence's pages from the first on")
            with self._kept(above):
                tier = "host" if "host" in self._placement.slots else "vram"
                slot = self._placement.take(tier, deadline)
                page = Page(key, parent, 0 if above is None else above.depth + 1, identity)
                if tier == "host":
                    self.device.host(write_host(self.device, slot, deadline), write=True).copy_(data)
                    copy = Copy(tier, slot)
                else:
                    copy = Copy(tier, slot, written=self._upload(data, slot, deadline))
                self._directory.add(page)
                self._directory.attach(page, copy)
                self._write_through(page, deadline)
            return True

    def match(self, keys: Sequence[bytes], *, promote: bool = True, timeout_s: float | None = None) -> Lease:
        """Lease the longest prefix of ``keys`` that is stored. Close the lease when done.

        Pages that are only on disk are read and checked now, so that what is leased is known to be good; with
        ``promote`` they are brought into VRAM and host RAM as far as there is room (free room in VRAM; in
        host RAM also that of colder pages), the rest stays leased on disk. The first page that is missing or
        damaged ends the prefix.
        """
        with self._locked(timeout_s) as deadline:
            pages: list[Page] = []
            for key in keys:
                page = self._directory.get(key)
                copy = page.readable() if page is not None else None
                if page is None or copy is None:
                    break
                pages.append(page)
            lease = self._hold(pages)
            try:
                good = self._check_disk_pages(lease, promote, deadline)
                for copy in lease.copies[:good]:
                    self._directory.stats[copy.tier].hits += 1
                self._shorten(lease, good)
                for index in range(good):
                    self._repoint(lease, index)
            except BaseException:
                self.end_lease(lease)
                raise
            self._stats.lookups += 1
            self._stats.lookup_pages += len(keys)
            self._stats.hit_pages += len(lease)
            self._directory.touch(lease.keys)
            return lease

    def prefetch(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Bring a stored prefix up the tiers and keep nothing pinned; the number of pages found."""
        with self.match(keys, timeout_s=timeout_s) as lease:
            return len(lease)

    def contains(self, key: bytes) -> bool:
        """Whether a page is stored. A question, not a promise; it does not count as use."""
        with self._locked(None):
            page = self._directory.get(key)
            return page is not None and page.readable() is not None

    def demote(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Move a page one tier down now. False if it is held, not there, or already in the last tier."""
        with self._locked(timeout_s) as deadline:
            page = self._directory.get(key)
            copy = page.readable() if page is not None else None
            if page is None or copy is None or copy.holds or copy.tier == self._directory.floor:
                return False
            if self._placement._evict(page, copy.tier, deadline, False):
                self._placement.drain(deadline)
            return copy.tier not in page.copies

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Drop pages and all that follow them, unless they are held; the number of keys that are gone."""
        with self._locked(timeout_s) as deadline:
            self._placement.drain(deadline)
            gone = 0
            for key in keys:
                page = self._directory.get(key)
                gone += page is not None and self._placement.drop_page(page)
            return gone

    # ------------------------------------------------------------------ leases

    def lease(self, pages: Sequence[Page], *, timeout_s: float | None = None) -> Lease:
        """Pin pages that the caller owns, each in its fastest tier.

        Raises:
            PageLostError: one of them has no readable copy any more.
        """
        with self._locked(timeout_s):
            for index, page in enumerate(pages):
                if page.readable() is None:
                    raise PageLostError(f"page {index} of the sequence was lost (failed copy or damaged record); compute it again")
            return self._hold(pages)

    def read_held(self, page: Page, copy: Copy, out: np.ndarray, *, timeout_s: float | None = None) -> bool:
        """The bytes of a leased copy into ``out``; see ``Lease.read``."""
        with self._locked(timeout_s) as deadline:
            return self._placement.read(page, copy, out, deadline)

    def read_disk_planes(self, pages: list[Page], layer: int, outs: list[np.ndarray]) -> None:
        """One layer's plane of leased pages on disk, checked, into ``outs`` (uint8 ``[plane bytes]`` each).

        Raises:
            PageLostError: a record turned out to be damaged.
        """
        with self._locked(None):
            good = self._placement.read_planes(pages, self.plane_numbers[layer], outs)
            if not all(good):
                raise PageLostError(f"{good.count(False)} page(s) on disk are damaged and were removed; compute the sequence again")

    def count_streamed(self, nbytes: int, copies: int) -> None:
        """Account planes that an attention step has gathered from host memory over the link."""
        self._placement.mover.links["host->vram"].add(nbytes, copies)

    def keep_idle(self, lease: Lease) -> None:
        """The lease is kept between steps: the store may close it when it needs the room."""
        with self._locked(None):
            lease.idle = True
            self._idle.add(lease)

    def use_again(self, lease: Lease) -> bool:
        """Take an idle lease back into use; False if the store has closed it."""
        with self._locked(None):
            if lease.closed:
                return False
            lease.idle = False
            self._idle.discard(lease)
            return True

    def end_lease(self, lease: Lease) -> None:
        """See ``Lease.close``."""
        with self._locked(None, even_closed=True):
            if lease.closed:
                return
            lease.closed = True
            self._idle.discard(lease)
            self._open_leases -= 1
            if not self._closed:
                for page, copy in zip(reversed(lease.pages), reversed(lease.copies), strict=True):
                    if lease.last_read is not None and copy.slot is not None:
                        copy.reads[lease.last_read[0]] = lease.last_read[1]
                    self._placement.release(page, copy)

    # ------------------------------------------------------------------ sessions

    def new_owner(self, name: str) -> str:
        """A unique name for somebody who owns pages."""
        return f"{name}#{next(self._names)}"

    def own(self, pages: Sequence[Page], owner: str) -> None:
        """Keep pages from being dropped, though not from moving, until ``disown``."""
        with self._locked(None):
            for page in pages:
                self._directory.own(page, owner)

    def disown(self, pages: Sequence[Page], owner: str) -> None:
        with self._locked(None, even_closed=True):
            if not self._closed:
                for page in reversed(pages):
                    self._placement.disown(page, owner)

    def take_tails(self, count: int, *, timeout_s: float | None = None) -> list[Slot]:
        """VRAM slots for pages that are about to be written, at once or not at all."""
        with self._locked(timeout_s) as deadline:
            self._placement.ensure("vram", count, deadline)
            slots = [self._placement.take("vram", deadline) for _ in range(count)]
            self._tails.update(slot.index for slot in slots)
            return slots

    def give_tails(self, slots: Sequence[Slot], after: Sequence[Event]) -> None:
        """Give unsealed slots back; ``after`` are events of the last work on them."""
        with self._locked(None, even_closed=True):
            if not self._closed:
                for slot in slots:
                    self._tails.remove(slot.index)
                    self._placement.slots["vram"].give(slot, after)

    def fill_tail(self, slot: Slot, page: Page, *, timeout_s: float | None = None) -> None:
        """Copy a page that the caller owns into an unsealed slot, ordered before later compute work.

        Raises:
            PageLostError: the page has no readable copy.
        """
        with self._locked(timeout_s) as deadline:
            with self._hold([page]) if page.readable() is not None else contextlib.nullcontext() as lease:
                if lease is None:
                    raise PageLostError("a page of the sequence was lost; compute it again")
                self._placement.fill(slot, page, lease.copies[0], deadline)

    def seal(
        self,
        slot: Slot,
        *,
        key: bytes | None,
        parent: Page | None,
        identity: bytes,
        written: Event,
        owner: str,
        timeout_s: float | None = None,
    ) -> tuple[Page, Page]:
        """Turn a full slot into a page and start its write-through.

        A page without a key (its tokens are unknown) is ephemeral. So is one whose key is stored already: its
        numbers may differ in rounding from the stored ones, and a sequence never changes numbers under way.

        Args:
            written: event of the last write into the slot.

        Returns:
            The page that holds these bytes, and the page that stands for the key (the same one, unless the key
            was stored already). ``owner`` owns both.
        """
        with self._locked(timeout_s) as deadline:
            known = self._directory.get(key) if key is not None else None
            private = key is None or known is not None
            self._tails.remove(slot.index)
            page = Page(
                os.urandom(32) if private else cast(bytes, key),
                parent.key if parent else None,
                parent.depth + 1 if parent else 0,
                identity,
                ephemeral=private,
            )
            self._directory.add(page)
            self._directory.own(page, owner)
            self._directory.attach(page, Copy("vram", slot, written=written))
            if known is not None:
                self._directory.own(known, owner)
            elif not private:
                self._write_through(page, deadline)
            return page, known or page

    def copy_tails(self, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Copy unsealed slots, ``(target, source)``, in the order of compute work."""
        if pairs:
            with self._locked(None):
                compute = self.device.compute_stream()
                for target, _ in pairs:
                    order_behind(compute, target)
                self.device.copy(compute, [(target.range(), source.range()) for target, source in pairs])

    # ------------------------------------------------------------------ whole store

    def poll(self) -> None:
        """Handle copies and writes that have ended; never waits for them."""
        with self._locked(None):
            self._placement.poll()

    def flush(self, timeout_s: float | None = None) -> int:
        """Write every shareable page that is not on disk yet, and wait until the disk has acknowledged all.

        Returns:
            Pages that could not be written for lack of room on disk (0 if all are safe).

        Raises:
            DeadlineExceededError: not all was written in time; what was not stays in its tier.
        """
        with self._locked(timeout_s) as deadline:
            self._placement.drain(deadline)
            missed = 0
            if self._placement.disk is not None:
                for page in sorted(self._directory.pages.values(), key=lambda p: p.depth):
                    if "disk" not in page.copies and not page.ephemeral and page.readable() is not None:
                        missed += not self._placement.write_to_disk(page, deadline)
                self._placement.drain(deadline)
            return missed

    def stats(self) -> StoreStats:
        """A snapshot of all counters."""
        with self._locked(None):
            self._placement.poll()
            disk = self._placement.disk
            tiers = {}
            for tier in TIERS:
                base = self._directory.stats[tier]
                slots = self._placement.slots.get(tier)
                used, peak = (slots.used_bytes, slots.peak_pages * slots.page_bytes) if slots else (0, 0)
                if tier == "disk" and disk is not None:
                    used, peak = self._placement.disk_bytes, self._placement.disk_peak_bytes
                tiers[tier] = replace(
                    base, capacity_bytes=self.sizes[tier], used_bytes=used, peak_bytes=peak, pages=self._directory.counts[tier]
                )
            owners = {owner for page in self._directory.pages.values() for owner in page.owners}
            return replace(
                self._stats,
                tiers=tiers,
                links={name: replace(link) for name, link in self._placement.mover.links.items()},
                leases=self._open_leases,
                owners=len(owners),
                damaged=self._placement.damaged,
                lost=self._placement.lost,
                warnings=list(self._placement.warnings),
            )

    def check(self) -> None:
        """Recount every book against the truth; AssertionError if one is wrong."""
        with self._locked(None, even_closed=True):
            if not self._closed:
                self._recount()

    def _recount(self) -> None:
        self._directory.check()
        for tier, slots in self._placement.slots.items():
            slots.check()
            tails = len(self._tails) if tier == "vram" else 0
            assert slots.used_pages == self._directory.counts[tier] + tails, f"{tier} slots and pages differ"
        self._placement.bounce.check()
        if self._placement.disk is not None and not self._placement.busy:
            assert self._placement.disk_bytes <= self._placement.disk.live_capacity_bytes

    def close(self, timeout_s: float | None = None) -> list[str]:
        """Write what is not on disk yet, as far as time allows, and release everything. Idempotent.

        Returns:
            What was not saved, in words; empty if nothing was lost.
        """
        with self._locked(timeout_s, even_closed=True) as deadline:
            if self._closed:
                return []
            dropped: list[str] = []
            try:
                missed = self.flush(max(0.001, deadline - _now()))
                if missed:
                    dropped.append(f"{missed} pages did not fit on disk")
            except (DeadlineExceededError, PageLostError) as error:
                dropped.append(str(error))
            self._closed = True
            with contextlib.suppress(DeadlineExceededError):
                self.device.synchronize(max(1.0, deadline - _now()))
            if self._placement.disk is not None:
                report = self._placement.disk.close(max(1.0, deadline - _now()))
                if report.dropped:
                    dropped.append(f"{len(report.dropped)} pages were not written to disk in time")
            for slots in (*self._placement.slots.values(), self._placement.bounce):
                slots.close()
            if self._owns_device:
                self.device.close()
            return dropped

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for text in self.close():
            warnings.warn(f"closing the store: {text}", RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------------ inside

    @contextlib.contextmanager
    def _locked(self, timeout_s: float | None, *, even_closed: bool = False) -> Iterator[float]:
        timeout = self.timeout_s if timeout_s is None else timeout_s
        deadline = deadline_after(timeout)
        if not self._lock.acquire(timeout=timeout):
            raise DeadlineExceededError(f"the store was busy for {timeout} s")
        try:
            self._depth += 1
            if self._closed and not even_closed:
                raise ClosedError("the store is closed; open a new one")
            yield deadline
            if self._check and self._depth == 1 and not self._closed:
                self._recount()
        finally:
            self._depth -= 1
            self._lock.release()

    @contextlib.contextmanager
    def _kept(self, page: Page | None) -> Iterator[None]:
        """Keep a page from being dropped for a moment."""
        if page is None:
            yield
            return
        self._directory.own(page, "put")
        try:
            yield
        finally:
            self._placement.disown(page, "put")

    def _hold(self, pages: Sequence[Page]) -> Lease:
        lease = Lease(self, pages)
        for page in pages:
            copy = cast(Copy, page.readable())
            self._directory.hold(page, copy)
            lease.copies.append(copy)
        self._open_leases += 1
        return lease

    def _check_disk_pages(self, lease: Lease, promote: bool, deadline: float) -> int:
        """Read the lease's pages that are only on disk; the number of pages up to the first bad one."""
        for index, (page, copy) in enumerate(zip(lease.pages, lease.copies, strict=True)):
            if copy.tier != "disk":
                continue
            done = promote and (
                self._placement.promote(page, "vram", deadline, evict=False)
                or self._placement.promote(page, "host", deadline, evict=True)
            )
            if not done and "disk" in page.copies:
                done = self._placement.verify(page, deadline)
            if not done:
                return index
            self._repoint(lease, index)
        if self._placement.mover.busy:
            self._placement.mover.drain(deadline)
        return len(lease)

    def _shorten(self, lease: Lease, length: int) -> None:
        for page, copy in zip(reversed(lease.pages[length:]), reversed(lease.copies[length:]), strict=True):
            self._placement.release(page, copy)
        del lease.pages[length:], lease.copies[length:]

    def _repoint(self, lease: Lease, index: int) -> None:
        """Move a lease's pin to the fastest copy of the page that is in place by now."""
        page, old = lease.pages[index], lease.copies[index]
        new = page.readable()
        if new is not None and new is not old:
            self._directory.hold(page, new)
            lease.copies[index] = new
            self._placement.release(page, old)

    def _write_through(self, page: Page, deadline: float) -> None:
        if self._disk_write == "write_through" and self._placement.disk is not None:
            self._placement.write_to_disk(page, deadline)
        if self._host_write == "write_through" and "vram" in page.copies:
            self._placement.demote(page, deadline)

    def _upload(self, data: torch.Tensor, slot: Slot, deadline: float) -> Event:
        bounce = self._placement._bounce_slot(deadline)
        self.device.host(write_host(self.device, bounce, deadline), write=True).copy_(data)
        stream = self._placement.mover.h2d
        for event in slot.after:
            stream.wait(event)
        slot.after.clear()
        self.device.copy(stream, [(slot.range(), bounce.range())])
        written = stream.record()
        self._placement.bounce.give(bounce, [written])
        return written

    def _park(self) -> bool:
        """Close the leases that idle sessions keep between steps; whether there were any."""
        idle = list(self._idle)
        for lease in idle:
            self.end_lease(lease)
        return bool(idle)


def _now() -> float:
    return deadline_after(0.0)
