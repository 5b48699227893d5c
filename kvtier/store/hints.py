"""What the tiers' policies are told and keep: the time of a request, and what they learnt in an earlier run."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvtier.errors import KvtierError
from kvtier.policy import PageFacts, Request, ResidencyPolicy, load_policy
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.record import DiskRecord

#: Most that a disk tier keeps of the policies, after compression.
STATE_BYTES = 1 << 20


def stamped(request: Request) -> Request:
    """The request with the time at which it came, on the clock of the store's policies."""
    return request if request.at is not None else request._replace(at=time.monotonic())


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
            policy.remove(key, evicted=True)
            gone.append(cast(bytes, key))
            live -= sizes[cast(bytes, key)]
        return gone

    return choose


def save_policies(policies: Mapping[str, ResidencyPolicy], disk: DiskTier) -> list[str]:
    """Save the state of each tier's policy. If all is too much, the coldest pages are left out.

    Returns:
        What could not be saved, in words.
    """
    most = min(STATE_BYTES, disk.note_bytes)
    limit = max((len(policy) for policy in policies.values()), default=0)
    try:
        blob = _pack(policies, None)
        while len(blob) > most and limit:
            limit = min(limit // 2, limit * most // len(blob))
            blob = _pack(policies, limit)
        if len(blob) > most:
            return [f"what the policies learnt takes {len(blob)} bytes, more than {most}"]
        disk.save_policy(blob)
    except (KvtierError, OSError) as error:
        return [f"what the policies learnt could not be saved: {error}"]
    return []


def _pack(policies: Mapping[str, ResidencyPolicy], limit: int | None) -> bytes:
    states = {tier: policy.state(limit) for tier, policy in policies.items()}
    return zlib.compress(json.dumps(states, separators=(",", ":")).encode(), 1)


def restore_policies(policies: Mapping[str, ResidencyPolicy], disk: DiskTier) -> list[str]:
    """Give each policy its saved state, after the pages of its tier were inserted.

    Returns:
        What could not be used, in words. A policy of another name than the saved one starts anew without
        a word: it was chosen so.
    """
    try:
        blob = disk.load_policy()
        states: dict[str, Any] = json.loads(zlib.decompress(blob)) if blob else {}
        items = [
            (policies[tier], dict(state)) for tier, state in states.items() if tier in policies
        ]
    except (KvtierError, OSError, zlib.error, ValueError, TypeError, AttributeError) as error:
        return [f"the saved state of the policies is damaged ({error}); they start anew"]
    unusable = []
    for policy, state in items:
        if state.get("policy") == policy.name:
            try:
                policy.load_state(state)
            except KvtierError as error:
                unusable.append(f"{error}; it starts anew")
    return unusable
