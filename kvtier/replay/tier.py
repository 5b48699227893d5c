"""Replay through one tier: which pages would have been there.

For each request: the pages that are there without a gap from the first on are its *prefix hits*, looked
up before anything changes; then the policy walks the request (``ResidencyPolicy.access``), using what is
there and inserting what is not, a victim going first whenever the tier is full. Pages that were there when
the walk reached them are *raw hits*, which is what simulators that know no prefixes count. Pages that
are additions are inserted or used like that too, but nobody asked for them: they are neither references
nor hits. Removals take pages out.

A request that is longer than the tier goes through the same walk: its pages push each other out, and
the tier ends up with those reached last, the first ones of the request with the order ``tail``. (A
live store refuses or spills there; see ``kvtier.replay.tiers``.)
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvtier.errors import ConfigError
from kvtier.policy import Access, Order, PageFacts, Request, ResidencyPolicy, load_policy
from kvtier.replay.clock import VirtualClock
from kvtier.replay.cost import Served, Times
from kvtier.replay.requests import request_maker
from kvtier.trace.trace import ADD, END, REMOVE, REQUEST, Trace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Called now and then with the number of entries done since the last call.
Progress = Callable[[int], None]
#: Entries between two calls.
STRIDE = 256


@runtime_checkable
class Foresees(Protocol):
    """A policy that has to know the future (``opt``)."""

    def foresee(self, requests: Sequence[Sequence[int]]) -> None:
        """The pages of every entry with which ``access`` will be called, in that order."""


@dataclass
class Cell:
    """One policy at one size.

    Attributes:
        policy: as it was asked for. order: in which the pages of a request are touched.
        pages: pages that the tier holds. capacity_bytes: its limit, where that is in bytes.
        requests, block_refs: requests of the trace and the pages they asked for.
        prefix_hits, raw_hits: see the module.
        prompt_tokens, hit_tokens: tokens asked for, and those in prefix hits.
        hit_bytes, ref_bytes: the same in bytes; 0 if no page size is known.
        inserted, evicted: pages that came into the tier, and that had to go to make room.
        seconds: that the replay took. accesses_per_s: pages of all entries over that.
        times: predictions, if a card and a model were named, with the tier as VRAM.
        served: what each request found.
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
    ref_bytes: int
    hit_bytes: int
    inserted: int
    evicted: int
    seconds: float
    accesses_per_s: float
    capacity_bytes: int | None = None
    times: Times | None = None
    served: Served = field(default_factory=Served, repr=False)

    @property
    def prefix_ratio(self) -> float:
        """Prefix hits over references."""
        return self.prefix_hits / self.block_refs if self.block_refs else 0.0

    @property
    def raw_ratio(self) -> float:
        return self.raw_hits / self.block_refs if self.block_refs else 0.0

    @property
    def token_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the ratios."""
        ratios = {
            "prefix_ratio": self.prefix_ratio,
            "raw_ratio": self.raw_ratio,
            "token_ratio": self.token_ratio,
        }
        return plain(self) | ratios


def plain(cell: DataclassInstance) -> dict[str, Any]:
    """The fields of a cell, without what each request found."""
    values = {f.name: getattr(cell, f.name) for f in fields(cell) if f.name != "served"}
    if values["times"] is not None:
        values["times"] = asdict(values["times"])
    return values


def make_policy(
    spec: str, *, leaf_first: bool, order: Order | None, clock: Callable[[], float]
) -> ResidencyPolicy:
    """A policy for a replay. ``order`` counts where ``spec`` does not name one itself.

    Raises:
        ConfigError: as ``load_policy``.
    """
    policy = load_policy(spec, leaf_first=leaf_first, clock=clock)
    if order is not None and "order=" not in spec:
        policy.set_up(order=order, clock=clock)
    return policy


def replay_tier(
    trace: Trace,
    spec: str,
    pages: int,
    *,
    order: Order | None = None,
    leaf_first: bool = False,
    capacity_bytes: int | None = None,
    entries: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> Cell:
    """Replay a trace through one policy in one tier.

    Args:
        spec: the policy, see ``kvtier.policy.load_policy``.
        pages: pages the tier holds.
        order: in which order a request's pages count as used, unless ``spec`` says so (default: tail).
        leaf_first: never evict a page whose child is in the tier, as a store's last tier does.
        capacity_bytes: the tier's limit in bytes instead, for pages whose sizes differ.
        entries: ``list(trace.entries())``, if the caller has it already.

    Raises:
        ConfigError: no room for a page, or not a policy.
    """
    if pages < 1:
        raise ConfigError(f"a tier of {pages} pages holds nothing; give at least 1")
    clock = VirtualClock()
    policy = make_policy(spec, leaf_first=leaf_first, order=order, clock=clock)
    chains = list(trace.entries()) if entries is None else entries
    began = time.perf_counter()
    walk = _Walk(trace, policy, clock, pages, capacity_bytes)
    walk.run(chains, progress)
    seconds = time.perf_counter() - began
    return Cell(
        policy=spec,
        order=policy.order,
        pages=pages,
        requests=trace.requests,
        block_refs=walk.refs,
        prefix_hits=walk.prefix_hits,
        raw_hits=walk.raw_hits,
        prompt_tokens=walk.prompt_tokens,
        hit_tokens=walk.hit_tokens,
        ref_bytes=walk.ref_bytes,
        hit_bytes=walk.hit_bytes,
        inserted=walk.evicted + walk.removed + len(policy),
        evicted=walk.evicted,
        seconds=seconds,
        accesses_per_s=len(trace.pages) / max(seconds, 1e-9),
        capacity_bytes=capacity_bytes,
        served=walk.served,
    )


class _Walk:
    """One replay under way."""

    def __init__(
        self,
        trace: Trace,
        policy: ResidencyPolicy,
        clock: VirtualClock,
        pages: int,
        capacity_bytes: int | None,
    ) -> None:
        self.trace, self.policy, self.clock = trace, policy, clock
        self.refs = self.prefix_hits = self.raw_hits = 0
        self.prompt_tokens = self.hit_tokens = 0
        self.ref_bytes = self.hit_bytes = 0
        self.evicted = self.removed = 0
        self.served = Served()
        self._pages, self._capacity_bytes = pages, capacity_bytes
        self._sizes = trace.sizes

    def run(self, chains: Sequence[Sequence[int]], progress: Progress | None) -> None:
        trace, policy, clock = self.trace, self.policy, self.clock
        if isinstance(policy, Foresees):
            kinds = trace.kinds
            policy.foresee(
                [c for c, kind in zip(chains, kinds, strict=True) if kind in (REQUEST, ADD)]
            )
        access = self._access if self._capacity_bytes is None else self._access_bytes
        prefix, request = policy.prefix, request_maker(trace)
        kinds, times, tokens = trace.kinds, trace.times, trace.tokens
        size = trace.page_tokens
        known = any(tokens)
        served = self.served
        for at, keys in enumerate(chains):
            clock.now = times[at]
            kind = kinds[at]
            if kind == REQUEST:
                hits = prefix(keys)
                done = access(keys, request(at))
                self.prefix_hits += hits
                self.raw_hits += done.hits
                served.add(at, hits)
                self.refs += len(keys)
                asked = tokens[at] if known else len(keys) * size
                self.prompt_tokens += asked
                self.hit_tokens += min(hits * size, asked)
                if self._sizes is not None:
                    self._count_bytes(keys, hits)
                self.evicted += len(done.evicted)
            elif kind == REMOVE:
                self._remove(keys)
            elif kind == END:
                policy.session_ended(keys, trace.sessions[at])
            else:
                self.evicted += len(access(keys, request(at)).evicted)
            if progress is not None and at % STRIDE == STRIDE - 1:
                progress(STRIDE)
        if progress is not None:
            progress(len(chains) % STRIDE)
        if self._sizes is None and trace.page_bytes:
            self.ref_bytes = self.refs * trace.page_bytes
            self.hit_bytes = self.prefix_hits * trace.page_bytes

    def _access(self, keys: Sequence[int], request: Request) -> Access:
        return self.policy.access(keys, self._pages, request=request)

    def _access_bytes(self, keys: Sequence[int], request: Request) -> Access:
        assert self._capacity_bytes is not None
        trace = self.trace
        sizes: array[int] | None = trace.sizes
        facts = [
            PageFacts(
                key,
                None if trace.parents[key] < 0 else trace.parents[key],
                trace.depths[key],
                (trace.page_bytes or 1) if sizes is None else max(1, sizes[key]),
            )
            for key in keys
        ]
        return self.policy.access_bytes(facts, self._capacity_bytes, request=request)

    def _count_bytes(self, keys: Sequence[int], hits: int) -> None:
        assert self._sizes is not None
        nbytes = [self._sizes[key] for key in keys]
        self.ref_bytes += sum(nbytes)
        self.hit_bytes += sum(nbytes[:hits])

    def _remove(self, keys: Sequence[int]) -> None:
        policy = self.policy
        for key in self.trace.with_followers(keys):
            if key in policy:
                policy.remove(key)
                self.removed += 1
