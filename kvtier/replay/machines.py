"""Replay over several machines, each with a tier of its own: how many misses are for content that is
nowhere, and how many for content that is on the wrong machine.

A router sends each request to one machine:

* ``hash``: by the conversation (``kvtier.replay.affinity``);
* ``round-robin``: in turn;
* ``least-loaded``: to the machine that was given the fewest prompt tokens in the last minute.

With an overflow limit, a machine that was given that many requests in the last minute passes the
next one to the least loaded machine.

The pages of a request are told apart: *local hits* are in the machine's own tier, *shared hits* come
from the shared tier, if there is one, behind them. Of the rest, those that some other machine could
have continued the prefix with are *location misses*, all others *content misses*. Every request is
then written to the machine's tier and to the shared one.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policy import Order
from kvtier.replay.affinity import conversations
from kvtier.replay.clock import VirtualClock
from kvtier.replay.cost import Served, Times
from kvtier.replay.requests import request_maker
from kvtier.replay.tier import STRIDE, Foresees, Progress, make_policy, plain
from kvtier.trace.trace import END, REMOVE, REQUEST, Trace

ROUTERS = ("hash", "least-loaded", "round-robin")
#: Seconds over which load and overflow are counted.
WINDOW_S = 60.0


@dataclass
class MachinesCell:
    """One policy on several machines.

    Attributes:
        pages: of each machine. shared_pages: of the shared tier, 0 for none.
        prefix_hits: local and shared hits. raw_hits: pages that were in the machine's tier when its walk
            reached them.
        overflowed: requests that went to another machine than the router's choice.
        by_machine: requests that each machine was given.
    """

    policy: str
    order: str
    pages: int
    shared_pages: int
    machines: int
    router: str
    overflow_per_min: float | None
    requests: int
    block_refs: int
    prefix_hits: int
    raw_hits: int
    local_hits: int
    shared_hits: int
    location_misses: int
    content_misses: int
    prompt_tokens: int
    hit_tokens: int
    overflowed: int
    by_machine: list[int]
    seconds: float
    times: Times | None = None
    served: Served = field(default_factory=Served, repr=False)

    @property
    def prefix_ratio(self) -> float:
        """Hits over references."""
        return self.prefix_hits / self.block_refs if self.block_refs else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain(self) | {"prefix_ratio": self.prefix_ratio}


class Router:
    """Chooses a machine for each request.

    Args:
        kind: one of ``ROUTERS``.
        machines: how many there are.
        overflow_per_min: requests a minute after which a machine passes the next one on.
    """

    def __init__(self, kind: str, machines: int, overflow_per_min: float | None = None) -> None:
        if kind not in ROUTERS:
            raise ConfigError(f"the router {kind!r} is unknown; known are {', '.join(ROUTERS)}")
        if machines < 1:
            raise ConfigError(f"{machines} machines; give at least 1")
        if overflow_per_min is not None and not 0 < overflow_per_min < float("inf"):
            raise ConfigError(f"overflow is {overflow_per_min!r} requests/min; it must be above 0")
        self._kind, self._limit = kind, overflow_per_min
        self._turn = -1
        self._recent: list[deque[tuple[float, int]]] = [deque() for _ in range(machines)]
        self._tokens = [0] * machines
        self.overflowed = 0

    def choose(self, time_s: float, affinity: int, tokens: int) -> int:
        """The machine for a request that comes now; ``affinity`` is what it is hashed by."""
        for machine, recent in enumerate(self._recent):
            while recent and recent[0][0] <= time_s - WINDOW_S:
                self._tokens[machine] -= recent.popleft()[1]
        chosen = self._first_choice(affinity)
        if self._limit is not None and len(self._recent[chosen]) >= self._limit:
            other = self._least_loaded()
            self.overflowed += other != chosen
            chosen = other
        self._recent[chosen].append((time_s, tokens))
        self._tokens[chosen] += tokens
        return chosen

    def _first_choice(self, affinity: int) -> int:
        machines = len(self._recent)
        if self._kind == "hash":
            return zlib.crc32(affinity.to_bytes(8, "little", signed=True)) % machines
        if self._kind == "round-robin":
            self._turn = (self._turn + 1) % machines
            return self._turn
        return self._least_loaded()

    def _least_loaded(self) -> int:
        return min(range(len(self._tokens)), key=lambda m: (self._tokens[m], len(self._recent[m])))


def replay_machines(
    trace: Trace,
    spec: str,
    pages: int,
    *,
    machines: int,
    router: str = "hash",
    overflow_per_min: float | None = None,
    shared_pages: int = 0,
    order: Order | None = None,
    entries: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> MachinesCell:
    """Replay a trace over several machines.

    Args:
        spec: the policy of every tier.
        pages: pages that each machine holds. shared_pages: that the shared tier holds, 0 for none.
        machines, router, overflow_per_min: see the module.

    Raises:
        ConfigError: a size or number out of range, or a policy that has to know the future.
    """
    if pages < 1 or shared_pages < 0:
        raise ConfigError(
            f"tiers of {pages} and {shared_pages} shared pages; give at least 1 and 0"
        )
    route = Router(router, machines, overflow_per_min)
    clock = VirtualClock()

    def tier() -> Any:
        policy = make_policy(spec, leaf_first=False, order=order, clock=clock)
        if isinstance(policy, Foresees):
            raise ConfigError(
                f"policy {spec!r} knows the future of one tier, not of several machines"
            )
        return policy

    tiers = [tier() for _ in range(machines)]
    shared = tier() if shared_pages else None
    everywhere = [*tiers, shared] if shared is not None else tiers
    request = request_maker(trace)
    cell = MachinesCell(
        policy=spec, order=tiers[0].order, pages=pages, shared_pages=shared_pages,
        machines=machines, router=router, overflow_per_min=overflow_per_min,
        requests=trace.requests, block_refs=0, prefix_hits=0, raw_hits=0, local_hits=0,
        shared_hits=0, location_misses=0, content_misses=0, prompt_tokens=0, hit_tokens=0,
        overflowed=0, by_machine=[0] * machines, seconds=0.0,
    )  # fmt: skip
    began = time.perf_counter()
    talks = conversations(trace)
    at_home: dict[int, int] = {}
    chains = list(trace.entries()) if entries is None else entries
    for at, keys in enumerate(chains):
        clock.now = trace.times[at]
        kind, session = trace.kinds[at], trace.sessions[at]
        if kind == REMOVE:
            for key in trace.with_followers(keys):
                for policy in everywhere:
                    if key in policy:
                        policy.remove(key)
        elif kind == END:
            for policy in everywhere:
                policy.session_ended(keys, session)
        elif kind == REQUEST:
            machine = route.choose(clock.now, talks[at], trace.tokens[at])
            at_home[talks[at]] = machine
            cell.by_machine[machine] += 1
            local = tiers[machine].prefix(keys)
            best = max(policy.prefix(keys) for policy in tiers)
            there = max(local, shared.prefix(keys)) if shared is not None else local
            cell.block_refs += len(keys)
            cell.local_hits += local
            cell.shared_hits += there - local
            cell.location_misses += max(0, best - there)
            cell.content_misses += len(keys) - max(best, there)
            asked = trace.tokens[at] or len(keys) * trace.page_tokens
            cell.prompt_tokens += asked
            cell.hit_tokens += min(asked, there * trace.page_tokens)
            cell.served.add(at, there, host=there - local)
            cell.raw_hits += tiers[machine].access(keys, pages, request=request(at)).hits
            if shared is not None:
                shared.access(keys, shared_pages, request=request(at))
        else:
            machine = at_home.get(talks[at], 0)
            tiers[machine].access(keys, pages, request=request(at))
            if shared is not None:
                shared.access(keys, shared_pages, request=request(at))
        if progress is not None and at % STRIDE == STRIDE - 1:
            progress(STRIDE)
    if progress is not None:
        progress(len(chains) % STRIDE)
    cell.prefix_hits = cell.local_hits + cell.shared_hits
    cell.overflowed = route.overflowed
    cell.seconds = time.perf_counter() - began
    return cell
