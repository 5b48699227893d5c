"""The store: pages by key in three tiers, behind leases."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.mover import write_host
from kvtier.policy import ANONYMOUS, Request
from kvtier.store.hints import stamped
from kvtier.store.lease import Lease
from kvtier.store.page import Copy, Page
from kvtier.store.sessions import SessionPages
from kvtier.tiers.codec import recode
from kvtier.tiers.record import KEY_MAX


class TieredStore(SessionPages):
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
        disk_payload: ``slab`` or ``inline``, where pages on disk are kept; see ``kvtier.tiers.disk``.
        host_codec, disk_codec: ``none``, or ``fp8``, ``int8`` or ``int4``: keep pages in that tier in fewer bits, and not
            bit for bit. What has once been in that tier, and only that, comes back changed (see ``docs/codecs.md``). The
            identities of such pages differ from those of exact ones.
        timeout_s: deadline of every call that does not get its own.
        check: recount all books after every operation (slow; for tests and debugging).
        expect: what the store will be used for. If its tiers make that slow, an OffloadWarning says so before
            anything is allocated (see ``foresee``).

    Raises:
        ConfigError: sizes that hold no page, a disk without a folder, unknown policy, mode or codec, a folder whose
            pages are of another layout or codec.
        DiskError: the folder cannot be opened.
    """

    def put(
        self,
        key: bytes,
        data: torch.Tensor,
        *,
        parent: bytes | None = None,
        identity: bytes = b"",
        request: Request = ANONYMOUS,
        timeout_s: float | None = None,
    ) -> bool:
        """Store a sealed page from host memory. It goes to host RAM (to VRAM where there is no host tier) and, with
        ``disk_write="write_through"``, on to disk.

        Args:
            key: the page's key (``kvtier.keys``).
            data: uint8 ``[page_bytes]``, contiguous, on the CPU; copied before this returns.
            parent: key of the page before it, which must be in the store; ``None`` for a first page.
            identity: digest of the model identity, kept with the page.
            request: hints for the policies, as in ``match``.

        Returns:
            False if the key was there already (it then counts as used).

        Raises:
            ConfigError: the parent is not in the store.
            TierFullError: there is no room, and nothing that may go.
        """
        size = self.layout.page_bytes
        if data.dtype != torch.uint8 or data.shape != (size,) or data.device.type != "cpu":
            raise LayoutError(
                f"data is {data.dtype} {tuple(data.shape)} on {data.device}; "
                f"a page is uint8 [{size}] on the CPU"
            )
        if not isinstance(key, bytes) or not 1 <= len(key) <= KEY_MAX or key == parent:
            raise ConfigError(
                f"key is {key!r}; it must be 1 to {KEY_MAX} bytes, and not its parent"
            )
        if len(identity) > KEY_MAX or (not identity and self._placement.disk is not None):
            raise ConfigError(
                f"identity is {identity!r}; the disk tier keeps it with the page, so give the "
                f"model identity's digest, 1 to {KEY_MAX} bytes"
            )
        with self._locked(timeout_s) as deadline:
            known = self._directory.get(key)
            if known is not None and known.copies:
                self._use([key], request=request)
                self._recording.stored(key, known.parent)
                return False
            above = self._directory.get(parent) if parent is not None else None
            if parent is not None and (above is None or not above.copies):
                raise ConfigError(
                    f"the parent page {parent.hex()[:16]} is not in the store; "
                    "put a sequence's pages from the first on"
                )
            with self._kept(above):
                copy = self._arrive(data, deadline)
                # Somebody may still own a page whose bytes were lost: it has them again.
                page = known
                if page is None:
                    page = Page(key, parent, 0 if above is None else above.depth + 1, identity)
                    self._directory.add(page)
                page.request = stamped(request)
                self._directory.attach(page, copy)
                self._recording.stored(key, parent)
                self._write_through(page, deadline)
            return True

    def _arrive(self, data: torch.Tensor, deadline: float) -> Copy:
        """The bytes of a new page in the tier where it starts."""
        tier = "host" if "host" in self._placement.slots else "vram"
        slot = self._placement.take(tier, deadline)
        try:
            if tier == "host":
                at = write_host(self.device, slot, deadline)
                recode(data, None, self.device.host(at, write=True), slot.codec)
            else:
                self._placement.upload(data, slot, deadline)
        except BaseException:
            self._placement.slots[tier].give(slot)
            raise
        return Copy(tier, slot)

    def match(
        self,
        keys: Sequence[bytes],
        *,
        promote: bool = True,
        request: Request = ANONYMOUS,
        timeout_s: float | None = None,
    ) -> Lease:
        """Lease the longest prefix of ``keys`` that is stored. Close the lease when done.

        Pages that are only on disk are read and checked now, so that what is leased is known to be good; with
        ``promote`` they, and pages in host RAM, are brought up as far as there is room (free room in VRAM; in
        host RAM also that of colder pages), the rest stays leased where it is. The first page that is missing or
        damaged ends the prefix.

        Args:
            request: hints for the policies: session, priority, time to live, when the next use is expected
                (in seconds of ``time.monotonic``).
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
            # Before pages come up: to the tiers above that is their first use, not a second one.
            self._use(lease.keys, request=request)
            try:
                good = self._bring_up(lease, promote, deadline)
                for copy in lease.copies[:good]:
                    self._directory.stats[copy.tier].hits += 1
                    if copy.tier == "host":
                        self._placement.host_guard.hit()
                self._shorten(lease, good)
                for index in range(good):
                    self._repoint(lease, index)
            except BaseException:
                self.end_lease(lease)
                raise
            self._stats.lookups += 1
            self._stats.lookup_pages += len(keys)
            self._stats.hit_pages += len(lease)
            self._recording.lookup(keys, len(lease), request)
            return lease

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        request: Request = ANONYMOUS,
        timeout_s: float | None = None,
    ) -> int:
        """Bring a stored prefix up the tiers and keep nothing pinned; the number of pages found. ``request``
        as in ``match``."""
        with self.match(keys, request=request, timeout_s=timeout_s) as lease:
            return len(lease)

    def raise_pages(
        self,
        pages: Sequence[Page],
        tier: str,
        *,
        keep: Sequence[Page] = (),
        timeout_s: float | None = None,
    ) -> int:
        """Bring pages that somebody owns up to ``vram`` or ``host``, colder ones making room, in the order given,
        until one finds none. Waits for the copies.

        Args:
            keep: pages that must not make room.

        Returns:
            The number of ``pages`` that are there now.
        """
        with self._locked(timeout_s) as deadline:
            self._park()
            held: list[tuple[Page, Copy]] = []
            try:
                for page in dict.fromkeys((*keep, *pages)):
                    copy = page.copies.get(tier)
                    if copy is not None:
                        self._directory.hold(page, copy)
                        held.append((page, copy))
                for page in pages:
                    source = page.readable()
                    if source is None or tier in page.copies:
                        continue
                    self._directory.hold(page, source)
                    try:
                        raised = self._placement.promote(page, tier, deadline, evict=True)
                        if raised:
                            self._directory.hold(page, page.copies[tier])
                            held.append((page, page.copies[tier]))
                    finally:
                        self._placement.unhold(page, source)
                    if not raised and page.readable() is not None:
                        break
                self._placement.drain(deadline)
            finally:
                for page, copy in held:
                    self._placement.unhold(page, copy)
            return sum(tier in page.copies for page in pages)

    def attended(
        self,
        keys: Sequence[bytes],
        mass: Sequence[float] | None = None,
        *,
        request: Request = ANONYMOUS,
    ) -> None:
        """A step read these pages, root first: tell the policies. Keys that are not stored are skipped.

        Args:
            mass: the share of attention (0..1) that each page received, where it was measured.
            request: as in ``match``.

        Raises:
            KvtierError: ``mass`` is not one finite share >= 0 a key.
        """
        with self._locked(None):
            self._use(keys, mass, request=request)

    def end_session(self, session: Hashable, keys: Sequence[bytes]) -> None:
        """The session that used these pages, root first, asks for nothing more. The pages stay; a policy that
        cares for sessions may give them up first."""
        with self._locked(None):
            self._directory.session_ended(keys, session)
            self._recording.session_ended(keys, session)

    def contains(self, key: bytes) -> bool:
        """Whether a page is stored. A question, not a promise; it does not count as use."""
        with self._locked(None):
            page = self._directory.get(key)
            return page is not None and page.readable() is not None

    def demote(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Move a page one tier down now. False if it is held, not there, already in the last tier,
        or could not be moved (no room below, or the copy failed)."""
        with self._locked(timeout_s) as deadline:
            self._placement.drain(deadline)  # what holds a copy may only be a transfer
            page = self._directory.get(key)
            copy = page.readable() if page is not None else None
            if page is None or copy is None or copy.holds or copy.tier == self._directory.floor:
                return False
            if self._placement.push_down(page, copy.tier, deadline):
                self._placement.drain(deadline)
            return page.copies.get(copy.tier) is not copy

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Drop pages and all that follow them, unless they are held.

        Returns:
            The number of ``keys`` that were there and are gone.
        """
        with self._locked(timeout_s) as deadline:
            self._placement.drain(deadline)
            gone = []
            for key in dict.fromkeys(keys):
                page = self._directory.get(key)
                if page is not None and (not page.copies or self._placement.drop_page(page)):
                    gone.append(key)
            self._recording.removed(gone)
            return len(gone)

    # ------------------------------------------------------------------ inside

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

    def _use(
        self,
        keys: Sequence[bytes],
        mass: Sequence[float] | None = None,
        *,
        request: Request,
    ) -> None:
        """A request used these pages, root first."""
        self._directory.use(keys, mass, stamped(request))
        if self._placement.disk is not None:
            self._placement.disk.touch(keys)

    def _bring_up(self, lease: Lease, promote: bool, deadline: float) -> int:
        """Read the lease's pages that are only on disk, and start to bring up what has room; the
        number of pages up to the first bad one."""
        index = 0
        while index < len(lease):
            if lease.copies[index].tier != "disk":
                if lease.copies[index].tier == "host" and promote:
                    self._placement.promote(lease.pages[index], "vram", deadline, evict=False)
                index += 1
                continue
            stop = index + 1
            most = min(len(lease), index + self._placement.reads_at_once)
            while stop < most and lease.copies[stop].tier == "disk":
                stop += 1
            good = self._placement.bring(lease.pages[index:stop], deadline, up=promote)
            # At once: what came up must not make room for what follows.
            for at in range(index, index + good):
                self._repoint(lease, at)
            index += good
            if index < stop:
                break
        if self._placement.mover.busy:
            self._placement.mover.drain(deadline)
        return index

    def _shorten(self, lease: Lease, length: int) -> None:
        for page, copy in zip(
            reversed(lease.pages[length:]), reversed(lease.copies[length:]), strict=True
        ):
            self._placement.unhold(page, copy)
        del lease.pages[length:], lease.copies[length:]

    def _repoint(self, lease: Lease, index: int) -> None:
        """Move a lease's pin to the fastest copy of the page that is in place by now."""
        page, old = lease.pages[index], lease.copies[index]
        new = page.readable()
        if new is not None and new is not old:
            self._directory.hold(page, new)
            lease.copies[index] = new
            self._placement.unhold(page, old)
