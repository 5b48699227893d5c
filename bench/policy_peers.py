#!/usr/bin/env python3
"""The policies beside other people's implementations: the same hits, or how far apart.

    python bench/policy_peers.py                 # needs: pip install libcachesim
    python bench/policy_peers.py --write FILE    # also record the peers' hits (tests/data/policy_peers.json)

libcachesim (GPL-3.0) is an external tool, asked for its numbers only, and no dependency. It counts each block by
itself, in the order of the trace, so it is compared with raw hits in ``order=head``.

FIFO, LRU, Belady without bypass (``min``), ARC and SIEVE agree exactly, S3-FIFO within two hits. The others differ by
what their papers leave open: MQ has a fixed lifetime there and a measured one here; LIRS bounds what it remembers
otherwise; W-TinyLFU counts in a sketch there and exactly here; SLRU has four segments there and two here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvtier.policy import load_policy
from kvtier.trace.read import read_trace

TRACES = Path(__file__).parent.parent / "tests" / "data" / "traces"
NAMES = ("mooncake_conv_head1000", "mooncake_synth_head800")
SHARES = (0.01, 0.05, 0.10, 0.25)
#: How libcachesim is told that a block is not used again.
NEVER = (1 << 63) - 1
#: Ours -> libcachesim's class.
CLASSES = {
    "fifo": "FIFO",
    "lru": "LRU",
    "min": "Belady",
    "arc": "ARC",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "mq": "MQ",
    "lirs": "LIRS",
    "slru": "SLRU",
    "wtinylfu": "WTinyLFU",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="record the peers' hits in this file")
    options = parser.parse_args()
    rows = []
    for name in NAMES:
        requests = [list(entry) for entry in read_trace(TRACES / f"{name}.jsonl.gz").entries()]
        unique = len({key for keys in requests for key in keys})
        for share in SHARES:
            pages = max(1, round(share * unique))
            for policy, theirs in libcachesim(requests, pages).items():
                rows.append(
                    {
                        "trace": name,
                        "pages": pages,
                        "policy": policy,
                        "peer": "libcachesim 0.3.5",
                        "hits": theirs,
                    }
                )
                ours = raw_hits(policy, requests, pages)
                refs = sum(map(len, requests))
                print(
                    f"{name} {pages:6} {policy:9} ours {ours:6} theirs {theirs:6} "
                    f"{100 * (ours - theirs) / refs:+.2f} points"
                )
    if not rows:
        print("libcachesim is not installed; nothing to compare with")
    if options.write:
        options.write.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def raw_hits(spec: str, requests: list[list[int]], pages: int) -> int:
    """Hits of single blocks, each request's from its first one on."""
    policy = load_policy(f"{spec}:order=head", leaf_first=False)
    if policy.replay_only:
        policy.foresee(requests)  # type: ignore[attr-defined]
    return sum(policy.access(keys, pages).hits for keys in requests)


def libcachesim(requests: list[list[int]], pages: int) -> dict[str, int]:
    """libcachesim's hits, by our name of the policy; empty if it is not installed."""
    try:
        import libcachesim as peer
    except ImportError:
        return {}
    stream = [key for keys in requests for key in keys]
    following: dict[int, int] = {}
    after = [NEVER] * len(stream)
    for at in range(len(stream) - 1, -1, -1):
        after[at] = following.get(stream[at], NEVER)
        following[stream[at]] = at
    found = {}
    for ours, theirs in CLASSES.items():
        cache: Any = getattr(peer, theirs)(cache_size=pages)
        hits = 0
        for at, key in enumerate(stream):
            request = peer.Request()
            request.obj_id, request.obj_size = key, 1
            request.clock_time = at
            request.next_access_vtime = after[at]
            hits += bool(cache.get(request))
        found[ours] = hits
    return found


if __name__ == "__main__":
    raise SystemExit(main())
