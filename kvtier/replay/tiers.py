"""Replay through VRAM, host RAM and disk at once, by the store's rules (``kvtier.replay.residence``).

For each request: the longest prefix that is anywhere is leased and brought up as far as there is
room; the rest is computed, page by page, each entering the first tier (or the one that ``born`` names)
behind its parent, victims moving down as they must; then the lease ends. A page in VRAM that came
from host RAM keeps its copy there, a page is written to disk when it is computed, and what leaves the
last tier is gone, children before parents.

A request larger than the first tier spills into those below. When all tiers together have no room
for it, its first pages stay and the rest is not stored: those pages are counted as refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policy import Order, Request, ResidencyPolicy
from kvtier.replay.clock import VirtualClock
from kvtier.replay.cost import Served, Times
from kvtier.replay.requests import request_maker
from kvtier.replay.residence import TIERS, Residence
from kvtier.replay.tier import STRIDE, Foresees, Progress, make_policy, plain
from kvtier.trace.trace import ADD, END, REMOVE, Trace

LINKS = ("vram->host", "host->vram", "host->disk", "disk->host")


@dataclass
class TierResult:
    """One tier. ``*_ratio`` are shares of all references, of their tokens and of their bytes."""

    pages: int
    capacity_bytes: int
    hits: int
    hit_tokens: int
    hit_bytes: int
    hit_ratio: float
    token_ratio: float
    inserted: int
    evicted: int
    removed: int
    resident: int


@dataclass
class TiersCell:
    """One policy over all tiers.

    Attributes:
        policy, order, pages, requests, block_refs, prompt_tokens, hit_tokens: as in ``Cell``; ``pages`` is
            the sum over the tiers.
        prefix_hits: pages found in any tier. raw_hits: the same and those behind a gap.
        tiers: by name.
        link_bytes: bytes moved over each link.
        refused: pages that were computed and found no room.
        times: predictions, if a card and a model were named.
    """

    policy: str
    order: str
    pages: int
    requests: int
    block_refs: int
    prefix_hits: int
    raw_hits: int
    prompt_tokens: int
    hit_tokens: int
    misses: int
    refused: int
    tiers: dict[str, TierResult]
    link_bytes: dict[str, int]
    seconds: float
    accesses_per_s: float
    times: Times | None = None
    served: Served = field(default_factory=Served, repr=False)

    @property
    def prefix_ratio(self) -> float:
        """Hits in any tier over references."""
        return self.prefix_hits / self.block_refs if self.block_refs else 0.0

    @property
    def token_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        tiers = {name: asdict(tier) for name, tier in self.tiers.items()}
        ratios = {"prefix_ratio": self.prefix_ratio, "token_ratio": self.token_ratio}
        return plain(self) | {"tiers": tiers} | ratios


def replay_tiers(
    trace: Trace,
    spec: str,
    sizes: Mapping[str, int],
    page_bytes: int,
    *,
    order: Order | None = None,
    born: str | None = None,
    host_write: str = "write_back",
    disk_write: str = "write_through",
    entries: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
    check: bool = False,
) -> TiersCell:
    """Replay a trace through one policy in several tiers.

    Args:
        spec: the policy of every tier.
        sizes: tier -> bytes; 0 or absent for none.
        page_bytes: bytes of a page.
        born: tier in which computed pages start (default: the fastest).
        host_write, disk_write: as the store's.
        check: recount all books at the end of every request (slow).

    Raises:
        ConfigError: a tier that holds no page, or a policy that is not one or has to know the future.
    """
    capacities: dict[str, int] = {}
    for tier in TIERS:
        size = sizes.get(tier, 0)
        if not size:
            continue
        capacities[tier] = size // page_bytes
        if not capacities[tier]:
            raise ConfigError(
                f"{tier} is {size} bytes, but one page of {trace.page_tokens} tokens takes {page_bytes} "
                "bytes; give at least that"
            )
    if not capacities:
        raise ConfigError("no tier has a size; give at least one of vram, host and disk")
    clock = VirtualClock()
    floor = list(capacities)[-1]
    policies: dict[str, ResidencyPolicy] = {
        tier: make_policy(spec, leaf_first=tier == floor, order=order, clock=clock)
        for tier in capacities
    }
    for policy in policies.values():
        if isinstance(policy, Foresees):
            raise ConfigError(
                f"policy {spec!r} is an optimum for one tier; replay it with --sizes or --pages"
            )
    residence = Residence(
        capacities, policies, trace.parents, trace.depths, page_bytes, host_write, disk_write
    )
    walk = _Walk(trace, residence, clock, born or next(iter(capacities)), check)
    began = time.perf_counter()
    walk.run(list(trace.entries()) if entries is None else entries, progress)
    seconds = time.perf_counter() - began
    if check:
        residence.check()
    return walk.result(spec, sizes, page_bytes, seconds)


class _Walk:
    def __init__(
        self, trace: Trace, residence: Residence, clock: VirtualClock, born: str, check: bool
    ) -> None:
        self.trace, self.residence, self.clock, self.born = trace, residence, clock, born
        self.check = check
        self.served = Served()
        self.refs = self.prefix_hits = self.raw_hits = self.refused = 0
        self.prompt_tokens = 0
        self.hit_tokens = dict.fromkeys(residence.tiers, 0)

    def run(self, entries: Sequence[Sequence[int]], progress: Progress | None) -> None:
        trace, residence = self.trace, self.residence
        request = request_maker(trace)
        for at, pages in enumerate(entries):
            self.clock.now = trace.times[at]
            kind = trace.kinds[at]
            if kind == REMOVE:
                residence.remove(pages)
            elif kind == END:
                for policy in residence.policies.values():
                    policy.session_ended(pages, trace.sessions[at])
            elif kind == ADD:
                self._store(pages, request(at))
            else:
                self._request(at, pages, request(at))
            if self.check:
                residence.check()
            if progress is not None and at % STRIDE == STRIDE - 1:
                progress(STRIDE)
        if progress is not None:
            progress(len(entries) % STRIDE)

    def _request(self, at: int, pages: Sequence[int], request: Request) -> None:
        residence = self.residence
        found = residence.found(pages)
        leased = list(dict.fromkeys(pages[:found]))
        copies = residence.copies
        self.raw_hits += found + sum(1 for page in pages[found:] if copies.get(page))
        places = residence.take(leased, request)
        self._store(pages[found:], request)
        cold = residence.give(leased)
        self.served.add(at, found, places.count("host"), places.count("disk"), cold)
        self.refs += len(pages)
        self.prefix_hits += found
        self._count_tokens(at, len(pages), places)

    def _count_tokens(self, at: int, pages: int, places: Sequence[str]) -> None:
        size = self.trace.page_tokens
        asked = self.trace.tokens[at] or pages * size
        self.prompt_tokens += asked
        left = asked
        for tier, tokens in self.hit_tokens.items():
            # Pages of a request are in a faster tier than those behind them, or nearly so; the last one
            # may be partial.
            got = min(left, places.count(tier) * size)
            self.hit_tokens[tier] = tokens + got
            left -= got

    def _store(self, pages: Sequence[int], request: Request) -> None:
        residence = self.residence
        for at, page in enumerate(pages):
            if residence.copies.get(page):
                residence.use([page], request)
            elif not residence.put(page, self.born, request):
                self.refused += len(pages) - at
                return

    def result(
        self, spec: str, sizes: Mapping[str, int], page_bytes: int, seconds: float
    ) -> TiersCell:
        residence, refs = self.residence, max(1, self.refs)
        tiers = {}
        for tier, flow in residence.flows.items():
            tokens = self.hit_tokens[tier]
            tiers[tier] = TierResult(
                pages=residence.capacities[tier],
                capacity_bytes=sizes[tier],
                hits=flow.hits,
                hit_tokens=tokens,
                hit_bytes=flow.hits * page_bytes,
                hit_ratio=flow.hits / refs,
                token_ratio=tokens / max(1, self.prompt_tokens),
                inserted=flow.inserted,
                evicted=flow.evicted,
                removed=flow.removed,
                resident=len(residence.policies[tier]),
            )
        return TiersCell(
            policy=spec,
            order=next(iter(residence.policies.values())).order,
            pages=sum(residence.capacities.values()),
            requests=self.trace.requests,
            block_refs=self.refs,
            prefix_hits=self.prefix_hits,
            raw_hits=self.raw_hits,
            prompt_tokens=self.prompt_tokens,
            hit_tokens=sum(self.hit_tokens.values()),
            misses=self.refs - self.prefix_hits,
            refused=self.refused,
            tiers=tiers,
            link_bytes={link: residence.moved[link] * page_bytes for link in LINKS},
            seconds=seconds,
            accesses_per_s=len(self.trace.pages) / max(seconds, 1e-9),
            served=self.served,
        )
