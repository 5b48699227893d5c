"""The same demand at a hosted API with a prompt cache (``kvtier.cost.prompt_cache``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier.cost.demand import Demand
from kvtier.cost.prompt_cache import SOURCE, PromptCache

#: Requests are sent to machines by a hash of about so many first tokens.
ROUTED_TOKENS = 256


@dataclass(frozen=True)
class Hosted:
    """Means over the requests of a session.

    Attributes:
        cache: the terms.
        best_cached: tokens of the last prompt that are cached if all goes well.
        machines: that requests with the same beginning are spread over.
        location_misses: share of the requests after a session's first that reach a machine which has
            not seen the session, though its content is cached.
        idle: turns of a session, or requests on a prefix, are further apart than a machine remembers.
        hit_share: share of the prompt tokens that are read from a cache.
        cost_ratio: price of the input against no cache.
    """

    cache: PromptCache
    best_cached: int
    machines: int
    location_misses: float
    idle: bool
    hit_share: float
    cost_ratio: float

    def to_json(self) -> dict[str, Any]:
        return {
            "terms": dict(vars(self.cache)) | {"source": SOURCE},
            "best_cached_tokens": self.best_cached,
            "machines": self.machines,
            "location_miss_share": self.location_misses,
            "idle": self.idle,
            "hit_share": self.hit_share,
            "cost_ratio": self.cost_ratio,
            "break_even_rereads": self.cache.break_even_rereads,
        }


def hosted(demand: Demand, cache: PromptCache | None = None) -> Hosted:
    """What the demand finds and costs there.

    Sessions that share their first tokens go to the same machines, and where these are several, a
    session's next turn reaches the one that has it in one of as many cases.
    """
    cache = cache or PromptCache()
    together = demand.shared >= ROUTED_TOKENS
    prefixes = 1 if together else demand.sessions
    machines = cache.machines(demand.requests / prefixes)
    idle = demand.sessions / demand.requests > cache.idle_minutes
    same = 0.0 if idle else 1 / machines
    hits = cost = whole = 0.0
    turns = demand.sample(retrieval=False)
    for turn in turns:
        prompt = round(turn.prompt)
        for weight, known in ((same, max(turn.before, turn.shared)), (1 - same, turn.shared)):
            at = cache.outlook(prompt, min(prompt, round(known)), demand.requests, prefixes)
            hits += weight * at.hit_share * prompt
            cost += weight * at.cost_ratio * prompt
        whole += prompt
    return Hosted(
        cache=cache,
        best_cached=cache.cached(round(max(turns[-1].before, turns[-1].shared))),
        machines=machines,
        location_misses=1 - 1 / machines,
        idle=idle,
        hit_share=hits / whole,
        cost_ratio=cost / whole,
    )
