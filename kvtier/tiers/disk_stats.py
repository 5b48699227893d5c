"""What a disk tier tells of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers.commit import Committer
from kvtier.tiers.disk_reads import ReadCounts
from kvtier.tiers.disk_wish import OpenReport
from kvtier.tiers.writer import Writer


@dataclass(frozen=True)
class DiskStats:
    """Counts since open; sizes in bytes.

    Attributes:
        entries, live_bytes, live_capacity_bytes: pages stored now, what they are charged with, and
            its limit.
        puts, deletes, bytes_written: committed changes; ``bytes_written`` counts payload.
        reads, hits, misses, bytes_read: page and plane reads; a damaged page counts as a miss.
        damaged: pages that failed verification at a read.
        commits, commit_errors: transactions committed, groups of changes that failed.
        map_full: groups that did not fit the map in one transaction.
        queue_bytes, queue_peak_bytes: payload that waits for its commit now, and at most.
        file_bytes: size of the database file and the slab files.
        opened: what opening the folder found.
    """

    entries: int
    live_bytes: int
    live_capacity_bytes: int
    puts: int
    deletes: int
    bytes_written: int
    reads: int
    hits: int
    misses: int
    bytes_read: int
    damaged: int
    commits: int
    commit_errors: int
    map_full: int
    queue_bytes: int
    queue_peak_bytes: int
    file_bytes: int
    opened: OpenReport


@dataclass(frozen=True)
class GcReport:
    """What was removed.

    Attributes:
        orphans: pages without their prefix.
        identities: descriptions of identities that have no pages.
        stale_readers: marks of readers whose process has died.
        freed_bytes: what the pages were charged with.
    """

    orphans: int
    identities: int
    stale_readers: int
    freed_bytes: int


def count(
    commits: Committer,
    reads: ReadCounts,
    writer: Writer,
    *,
    live_capacity_bytes: int,
    data_path: Path,
    slab_bytes: int,
    opened: OpenReport,
) -> DiskStats:
    """A snapshot of all counts."""
    counts = commits.counts
    try:
        file_bytes = os.stat(data_path).st_size
    except OSError:
        file_bytes = 0
    return DiskStats(
        entries=len(commits.records),
        live_bytes=commits.live_bytes,
        live_capacity_bytes=live_capacity_bytes,
        puts=counts.puts,
        deletes=counts.deletes,
        bytes_written=counts.bytes_written,
        reads=reads.reads,
        hits=reads.hits,
        misses=reads.reads - reads.hits,
        bytes_read=reads.bytes_read,
        damaged=reads.damaged,
        commits=counts.commits,
        commit_errors=counts.commit_errors,
        map_full=counts.map_full,
        queue_bytes=writer.queued_bytes,
        queue_peak_bytes=writer.peak_bytes,
        file_bytes=file_bytes + slab_bytes,
        opened=opened,
    )
