"""What tools and the store do with a folder besides storing and reading pages."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.tiers.disk_pages import IDENTITY_NOTE, DiskEntry, DiskPages
from kvtier.tiers.disk_stats import GcReport
from kvtier.tiers.page_tree import with_followers
from kvtier.tiers.record import DiskRecord

_POLICY_NOTE = b"policy"


class DiskTools(DiskPages):
    """Removal by choice, and the notes kept with the pages."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> Future[None]:
        """Queue pages for removal."""

    @abstractmethod
    def _note(self, name: bytes, text: bytes | None) -> Future[None]:
        """Queue a text to be kept, or removed."""

    @abstractmethod
    def _wait(self, done: Future[None], timeout_s: float | None) -> None:
        """Wait for a change, with the deadline of this call or the tier's."""

    def delete_where(
        self, chosen: Callable[[DiskEntry], bool], timeout_s: float | None = None
    ) -> list[bytes]:
        """Remove the pages that ``chosen`` accepts and all that follow them in their sequences.

        Returns:
            Keys of what is gone.

        Raises:
            DeadlineExceededError: it takes longer than ``timeout_s``; it goes on.
            DiskError: the folder cannot be written.
        """
        keys = [entry.key for entry in self.entries() if chosen(entry)]
        gone = with_followers(self._snapshot()[0], keys)
        self._wait(self.delete(gone[::-1]), timeout_s)
        return gone

    def gc(self, timeout_s: float | None = None) -> GcReport:
        """Remove what nobody can use: pages without their prefix, descriptions of identities
        without pages, and the marks of readers that died.

        Opening does the first; lowering the capacity compacts the files. Raises as
        ``delete_where``.
        """
        self._require_open()
        records, _ = self._snapshot()
        orphans = [key for key, r in records.items() if not _rooted(records, r)]
        self._wait(self.delete(orphans), timeout_s)
        used = {record.identity for record in records.values()}
        with self._file.reading() as txn:
            names = [bytes(n) for n in txn.cursor(db=self._file.notes).iternext(values=False)]
        unused = [
            name
            for name in names
            if name.startswith(IDENTITY_NOTE) and name[len(IDENTITY_NOTE) :] not in used
        ]
        for name in unused:
            self._wait(self._note(name, None), timeout_s)
        freed = sum(records[key].stored_bytes for key in orphans)
        return GcReport(len(orphans), len(unused), self._file.env.reader_check(), freed)

    def describe_identity(self, digest: bytes, description: Mapping[str, Any]) -> Future[None]:
        """Queue what the identity ``digest`` stands for, in readable form, to be kept with its
        pages.
        """
        self._require_open()
        text = json.dumps(description, sort_keys=True).encode()
        return self._note(IDENTITY_NOTE + digest, text)

    def save_policy(self, state: bytes) -> Future[None]:
        """Queue the residency policy's state to be kept with the pages, sealed by a checksum.

        The future fails with ConfigError if it is longer than a tier of this capacity keeps (1 MiB
        at most).
        """
        self._require_open()
        return self._note(_POLICY_NOTE, bytes(state))

    def load_policy(self) -> bytes | None:
        """The state that was saved last; ``None`` if there is none, or it is damaged."""
        self._require_open()
        return self._file.note(_POLICY_NOTE)


def _rooted(records: Mapping[bytes, DiskRecord], record: DiskRecord) -> bool:
    at: DiskRecord | None = record
    while at is not None and at.parent is not None:
        above = records.get(at.parent)
        at = above if above is not None and above.depth < at.depth else None
    return at is not None
