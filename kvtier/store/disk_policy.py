"""The residency policy of the disk tier over restarts: what it gives up when the limit was lowered, and
what it has learnt."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.errors import KvtierError
from kvtier.policy import PageFacts, ResidencyPolicy, load_policy
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.record import DiskRecord

#: Bytes that a page takes in a policy's state, as JSON, at most.
_STATE_BYTES_A_PAGE = 128


def evict_by(spec: str) -> Callable[[Sequence[DiskRecord], int], list[bytes]]:
    """What a policy gives up of pages on disk, inserted from the one used longest ago on."""

    def choose(records: Sequence[DiskRecord], limit_bytes: int) -> list[bytes]:
        policy = load_policy(spec, leaf_first=True)
        sizes = {record.key: record.stored_bytes for record in records}
        for record in records:
            policy.insert(PageFacts(record.key, record.parent, record.depth, record.nbytes))
        live, gone = sum(sizes.values()), []
        while live > limit_bytes:
            key = policy.victim()
            if key is None:
                break
            policy.remove(key)
            gone.append(key)
            live -= sizes[key]
        return gone

    return choose


def save_state(disk: DiskTier, policy: ResidencyPolicy) -> None:
    """Keep what the policy has learnt with its pages, where it has a state."""
    state: Callable[..., dict[str, Any]] | None = getattr(policy, "state", None)
    if state is None:
        return
    text = json.dumps(state(limit=disk.note_bytes // _STATE_BYTES_A_PAGE)).encode()
    if len(text) <= disk.note_bytes:
        disk.save_policy(text)


def load_state(disk: DiskTier, policy: ResidencyPolicy) -> None:
    """Give the policy what was saved; its pages must be in it."""
    load: Callable[[dict[str, Any]], None] | None = getattr(policy, "load_state", None)
    text = disk.load_policy()
    if load is None or text is None:
        return
    try:
        load(json.loads(text))
    except (KvtierError, ValueError) as error:
        warnings.warn(
            f"the residency policy of {disk.path} starts without what it had learnt: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
