"""What every part of the store stands on: the tiers, and the store as a whole."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import warnings
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from kvtier.cost.tier_load import Expected, TierLoad
from kvtier.devices import open_device
from kvtier.devices.base import Device
from kvtier.errors import (
    ConfigError,
    DeadlineExceededError,
    KvtierError,
    TierFullError,
)
from kvtier.identity import ModelIdentity
from kvtier.layout import CodecName, PageLayout
from kvtier.mover import deadline_after
from kvtier.policy import ResidencyPolicy, load_policy
from kvtier.store.codecs import StoreCodecs
from kvtier.store.directory import Directory
from kvtier.store.foresight import Foresight
from kvtier.store.hints import evict_by, restore_policies, save_policies
from kvtier.store.leases import LeasedPages
from kvtier.store.page import TIERS, Page
from kvtier.store.placement import Placement
from kvtier.store.recording import Recording
from kvtier.store.stats import StoreStats
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.memory import SlotTier
from kvtier.trace.record import Recorder
from kvtier.units import format_size, parse_size

WriteMode = Literal["write_back", "write_through"]

#: Host memory through which pages pass on their way between VRAM and disk.
BOUNCE_BYTES = 64 << 20


class StoreBase(LeasedPages):
    """The common part of ``TieredStore``; see there for the arguments."""

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
        disk_payload: Literal["slab", "inline"] | None = None,
        host_codec: CodecName = "none",
        disk_codec: CodecName = "none",
        timeout_s: float = 30.0,
        check: bool = False,
        expect: Expected | None = None,
    ) -> None:
        for name, mode in (("host_write", host_write), ("disk_write", disk_write)):
            if mode not in ("write_back", "write_through"):
                raise ConfigError(f"{name} is {mode!r}; use write_back or write_through")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s is {timeout_s!r}; it must be > 0 seconds and finite")
        sizes = {
            "vram": parse_size(vram, "vram"),
            "host": parse_size(host, "host"),
            "disk": parse_size(disk, "disk"),
        }
        codecs = StoreCodecs(layout, {"host": host_codec, "disk": disk_codec}, sizes)
        for tier in ("vram", "host"):
            page_bytes = codecs.page_bytes(tier)
            if (sizes[tier] or tier == "vram") and sizes[tier] < page_bytes:
                raise ConfigError(
                    f"{tier} is {sizes[tier]} bytes, but one page of {layout.page_tokens} tokens takes "
                    f"{page_bytes} bytes ({format_size(page_bytes)}); give at least that"
                )
        if sizes["disk"] and path is None:
            raise ConfigError(
                f"disk is {sizes['disk']} bytes, but no path is given; name the folder for the disk tier"
            )
        super().__init__(timeout_s, check)
        self.layout = layout
        self.sizes = sizes
        self._host_write, self._disk_write = host_write, disk_write
        self._owns_device = isinstance(device, str)
        policies = self._load_policies(policy, sizes)
        self.device: Device = open_device(device) if isinstance(device, str) else device
        if codecs and self.device.torch_device.type == "meta":
            raise ConfigError("a codec needs a device that has bytes; this one only counts them")
        self._foresight = Foresight(
            layout, self.device, sizes, {"host": host_codec, "disk": disk_codec}
        )
        if expect is not None:
            # Nothing is allocated yet: a warning that is an error leaves nothing behind.
            try:
                self.foresee(expect)
            except BaseException:
                if self._owns_device:
                    self.device.close()
                raise
        self._directory = Directory(policies, layout.page_bytes)
        slots = {
            tier: SlotTier(
                tier,
                alloc=alloc,
                free=self.device.free,
                page_bytes=codecs.page_bytes(tier),
                capacity_bytes=sizes[tier],
                codec=codecs.of(tier),
            )
            for tier, alloc in (("vram", self.device.alloc), ("host", self.device.alloc_host))
            if tier in policies
        }
        bounce_bytes = max(layout.page_bytes, codecs.page_bytes("disk"))
        bounce = SlotTier(
            "bounce",
            alloc=self.device.alloc_host,
            free=self.device.free,
            page_bytes=bounce_bytes,
            capacity_bytes=max(4, min(256, BOUNCE_BYTES // bounce_bytes)) * bounce_bytes,
        )
        self._codecs = codecs
        #: layer -> number of its plane, in page order.
        self.plane_numbers = {
            p.layer: n for n, p in enumerate(p for p in layout.planes if p is not None)
        }
        self._stats = StoreStats()
        self._names = itertools.count(1)
        self._described: set[bytes] = set()
        disk_tier: DiskTier | None = None
        placement: Placement | None = None
        try:
            if "disk" in policies:
                assert path is not None
                disk_tier = DiskTier(
                    path,
                    **codecs.folder(),
                    capacity_bytes=sizes["disk"],
                    payload=disk_payload,
                    durability=durability,
                    timeout_s=timeout_s,
                    evict=evict_by(policy),
                )
            placement = Placement(
                self.device,
                self._directory,
                slots,
                disk_tier,
                bounce,
                codecs.of("disk"),
                self._park,
            )
            self._placement = placement
            placement.mover.prepare(codecs.all())
            if disk_tier is not None:
                self._register_disk(disk_tier)
            self._set_up_policies(disk_tier)
            self._recording = Recording(layout, self._placement.warn)
            self._placement.mover.copied = self._recording.copied
            self._recording.start_from_environment()
        except BaseException:
            if disk_tier is not None:
                disk_tier.close()
            if placement is not None:
                placement.mover.close()
            if self._owns_device:
                self.device.close()
            raise

    @property
    def kv_quantisation(self) -> str:
        """What ``ModelIdentity.kv_quantisation`` must be for pages of this store: empty if all tiers keep them as they
        are, else how each one that does not codes them."""
        return self._codecs.text

    @staticmethod
    def _load_policies(spec: str, sizes: dict[str, int]) -> dict[str, ResidencyPolicy]:
        tiers = [tier for tier in TIERS if sizes[tier]]
        policies = {tier: load_policy(spec, leaf_first=tier == tiers[-1]) for tier in tiers}
        if any(policy.replay_only for policy in policies.values()):
            raise ConfigError(
                f"policy {spec!r} has to know the future, so it only replays traces (kvtier replay); "
                "choose another for a store, such as auto"
            )
        return policies

    def describe_identity(self, identity: ModelIdentity) -> None:
        """Keep what an identity stands for with its pages on disk, for ``kvtier store ls``; once."""
        with self._locked(None):
            disk = self._placement.disk
            if disk is None or identity.digest in self._described:
                return
            self._described.add(identity.digest)
            disk.describe_identity(identity.digest, identity.describe_openly())

    def _register_disk(self, disk: DiskTier) -> None:
        for record in disk.records():
            page = Page(record.key, record.parent, record.depth, record.identity)
            self._directory.add(page)
            self._placement.attach_disk(page, arriving=False)
        self._directory.stats["disk"].pages_in = 0

    def _set_up_policies(self, disk: DiskTier | None) -> None:
        """Tell each policy the size of its tier, and give it back what it had learnt."""
        policies = self._directory.policies
        for tier, slots in self._placement.slots.items():
            policies[tier].resize(slots.capacity_pages)
        if disk is not None:
            policies["disk"].resize(
                max(1, disk.live_capacity_bytes // self._placement.stored_bytes)
            )
            for text in restore_policies(policies, disk):
                self._placement.warn(text)

    # ------------------------------------------------------------------ whole store

    def foresee(self, expected: Expected, *, stacklevel: int = 1) -> TierLoad | None:
        """Say at once if a load will need the slow path: an OffloadWarning with the rate that is
        predicted, why, and what would be better. What was said is said again only if it gets a level
        worse.

        Returns:
            The load with its estimate; None on a card that the table does not have.
        """
        return self._foresight.tell(expected, stacklevel=stacklevel + 1)

    def record(
        self,
        path: str | os.PathLike[str],
        *,
        operations: bool = False,
        salted: bool = False,
        wait_s: float = 0.0,
    ) -> Recorder:
        """Record the traffic to a new file, until the recorder or the store is closed, for ``kvtier replay``.
        See ``docs/trace-format.md``.

        Args:
            operations: also the copies between tiers, with their bytes and times.
            salted: disguise the keys, so that nobody who knows a prompt can look for it in the file.
            wait_s: how long a call may wait for a disk that is too slow, before its record is dropped and counted.

        Raises:
            ConfigError: the file exists or cannot be created, or the store is recorded already.
        """
        with self._locked(None):
            return self._recording.start(path, operations=operations, salted=salted, wait_s=wait_s)

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
            disk = self._placement.disk
            if disk is None:
                self._placement.drain(deadline)
                return 0
            self._placement.drain(deadline)
            for page in self._shareable():
                if "disk" not in page.copies:
                    self._placement.write_to_disk(page, deadline)
            self._placement.drain(deadline)
            for text in save_policies(self._directory.policies, disk):
                self._placement.warn(text)
            disk.flush(max(0.001, deadline - _now()))
            # Counted at the end: a write may fail, and the room for one page may be another's.
            safe: set[bytes | None] = {None}
            missed = 0
            for page in self._shareable():
                if "disk" in page.copies and page.parent in safe:
                    safe.add(page.key)
                else:
                    missed += 1
            return missed

    def _shareable(self) -> list[Page]:
        """All pages that somebody could find, prefixes first."""
        pages = (p for p in self._directory.pages.values() if p.copies and not p.ephemeral)
        return sorted(pages, key=lambda p: p.depth)

    def stats(self) -> StoreStats:
        """A snapshot of all counters."""
        with self._locked(None):
            self._placement.poll()
            disk = self._placement.disk
            tiers = {}
            for tier in TIERS:
                base = self._directory.stats[tier]
                slots = self._placement.slots.get(tier)
                used, peak = (
                    (slots.used_bytes, slots.peak_pages * slots.page_bytes) if slots else (0, 0)
                )
                if tier == "disk" and disk is not None:
                    used, peak = self._placement.disk_bytes, self._placement.disk_peak_bytes
                tiers[tier] = replace(
                    base,
                    capacity_bytes=self.sizes[tier],
                    used_bytes=used,
                    peak_bytes=peak,
                    pages=self._directory.counts[tier],
                    **self._codecs.stats(tier),
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
            tails = len(self._placement.tails) if tier == "vram" else 0
            assert slots.used_pages == self._directory.counts[tier] + tails, (
                f"{tier} slots and pages differ"
            )
        self._placement.bounce.check()
        if self._placement.disk is not None:
            stored = self._directory.counts["disk"] * self._placement.stored_bytes
            assert self._placement.disk_bytes == stored, "bytes on disk are miscounted"
            assert stored <= self._placement.disk.live_capacity_bytes, "the disk's limit is passed"
        if not self._placement.busy:
            assert not self._placement.bounce.used_pages, "a bounce slot was not given back"

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
                    dropped.append(f"{missed} pages could not be written to disk")
            except KvtierError as error:
                dropped.append(str(error))
            self._closed = True
            dropped += self._recording.close(max(1.0, deadline - _now()))
            try:
                self.device.synchronize(max(1.0, deadline - _now()))
                ended = True
            except DeadlineExceededError as error:
                dropped.append(f"copies are still under way, their memory is not freed: {error}")
                ended = False
            except KvtierError:
                ended = True  # work that failed has ended, and was reported
            if self._placement.disk is not None:
                dropped += self._close_disk(self._placement.disk, deadline)
            if ended:
                for slots in (*self._placement.slots.values(), self._placement.bounce):
                    slots.close()
                self._placement.mover.close()
            if self._owns_device:
                self.device.close()
        self._placement.speak()
        return dropped

    @staticmethod
    def _close_disk(disk: DiskTier, deadline: float) -> list[str]:
        try:
            report = disk.close(max(1.0, deadline - _now()))
        except (KvtierError, OSError) as error:
            return [f"the disk tier could not be closed: {error}"]
        texts = []
        if report.dropped:
            texts.append(f"{len(report.dropped)} pages were not written to disk in time")
        if not report.clean:
            texts.append("the disk hangs; its folder stays locked until this process ends")
        return texts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for text in self.close():
            warnings.warn(f"closing the store: {text}", RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------------ inside

    def _write_through(self, page: Page, deadline: float) -> None:
        """Begin the copies down that are due now. A page that they cannot take now goes down later,
        when it is evicted or flushed."""
        with contextlib.suppress(DeadlineExceededError, TierFullError):
            if self._disk_write == "write_through" and self._placement.disk is not None:
                self._placement.write_to_disk(page, deadline)
            if self._host_write == "write_through" and "host" not in page.copies:
                self._placement.demote(page, deadline)


def _now() -> float:
    return deadline_after(0.0)
