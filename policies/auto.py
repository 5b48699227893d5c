"""Auto: several policies watch the traffic, small shadow caches show which is best on it, that one is followed.

Origin: our own. Choosing by trial on samples is set duelling (M. K. Qureshi et al., "Adaptive insertion
policies for high performance caching", ISCA 2007); that a small cache with a random sample of the keys behaves
like the large one is from C. Waldspurger et al., "Cache modeling and optimization using miniature
simulations", USENIX ATC 2017; the bandit over experts is LeCaR's (HotStorage 2018), without its chance.

* Each policy keeps its books of all pages of the tier, so any of them can name the next victim at any moment.
  Changing from one to another moves nothing and forgets nothing.
* Each policy also runs a *shadow*: a cache of keys for a fixed sample of all keys, with the same share of the
  tier's pages, at least ``sample`` of them (all, if the tier has no more). A request's sampled pages are
  looked up there as a request, so only those before the first gap count as hits.
* Hits fade with the number of uses (``memory`` tiers' worth). The policy that is followed changes when another
  one's hits exceed its own by ``margin`` and by twice the standard deviation of what requests differ in, and
  not again before one tier's worth of uses has gone by: what one policy has kept, another may give up, and
  pages lost that way are the cost of a change.

The first policy named is followed until another has proved better. By default these are ``reuse``, which learns
from the traffic, and LRU, which assumes the least; no fixed policy is best everywhere (docs/policies.md).

Cost: the sum of its policies', twice for tiers of at most ``sample`` pages. Memory: the sum of its
policies', and ``sample`` pages' records for each shadow, whatever the size of the tier.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.plugins import split_list
from kvtier.policy import Key, Order, ResidencyPolicy, load_policy

#: Samples are by 32 bits of the key.
_RANGE = 1 << 32
#: Standard deviations by which another policy must be ahead.
SURE = 2.0
#: Fewest uses over which hits are compared, and sampled pages of one request that are kept at most.
SHORTEST, LONGEST = 4096, 65536


class Auto(ResidencyPolicy):
    """Follows the policy that does best on the live traffic.

    Args:
        leaf_first: see ResidencyPolicy.
        experts: policies to choose from, separated by commas, each in parentheses if it has parameters.
        sample: pages of a shadow cache, at least 64.
        memory: uses over which a hit loses weight, in multiples of the tier's pages.
        margin: by what part another policy must be better.

    Raises:
        ConfigError: a parameter is out of its range, or an expert is no policy or only replays.
    """

    name: ClassVar[str] = "auto"
    uses_facts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        leaf_first: bool,
        experts: str = "reuse,lru",
        sample: int = 4096,
        memory: float = 8.0,
        margin: float = 0.005,
    ) -> None:
        super().__init__(leaf_first=leaf_first)
        specs = [spec.strip() for spec in split_list(experts, f"auto:experts=({experts})")]
        specs = [spec[1:-1] if spec[:1] + spec[-1:] == "()" else spec for spec in specs]
        if len(specs) < 2 or len(set(specs)) < len(specs):
            raise ConfigError(f"policy 'auto': experts={experts!r}; name at least two, each once")
        if sample < 64:
            raise ConfigError(f"policy 'auto': sample={sample!r}; give at least 64")
        if not 0.0 < memory < math.inf:
            raise ConfigError(f"policy 'auto': memory={memory!r}; give a number above 0")
        if not 0.0 <= margin < math.inf:
            raise ConfigError(f"policy 'auto': margin={margin!r}; give a number of at least 0")
        self._specs, self._sample, self._memory, self._margin = specs, sample, memory, margin
        self._experts = [load_policy(spec, leaf_first=leaf_first) for spec in specs]
        self._shadows = [load_policy(spec, leaf_first=False) for spec in specs]
        #: Faded hits of each shadow, and faded squares of the differences in a request's, by pair.
        self._hits = [0.0] * len(specs)
        self._squares = [[0.0] * len(specs) for _ in specs]
        for spec, expert in zip(specs, self._experts, strict=True):
            if expert.replay_only or isinstance(expert, Auto):
                raise ConfigError(f"policy 'auto': {spec!r} cannot be one of its experts")
            expert.join(self)
            expert.pages = self.pages
        self._followed = 0
        #: How often it has changed its mind.
        self.changes = 0
        #: Sampled pages of the request under way: as a whole in walking order, and those that came alone.
        self._whole: list[Key] = []
        self._alone: list[Key] = []
        self._pending_request = -1
        self._synced = (-1, 1.0)
        self._uses = 0
        self._weighed_at = 0
        self._changed_at = 0
        self._shadow_pages = sample
        self._threshold = _RANGE

    @property
    def following(self) -> str:
        """The policy that names the victims now."""
        return self._specs[self._followed]

    def set_up(self, *, order: Order = "tail", clock: Callable[[], float]) -> None:
        super().set_up(order=order, clock=clock)
        for policy in (*self._experts, *self._shadows):
            policy.set_up(order=order, clock=clock)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._sync()
        self._watch(key, self._whole if beside is None else self._alone)
        for expert in self._experts:
            expert.on_insert(key, beside)

    def on_use(self, key: Key) -> None:
        self._sync()
        self._watch(key, self._whole)
        for expert in self._experts:
            expert.on_use(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        for expert in self._experts:
            expert.on_remove(key, evicted)

    def on_release(self, key: Key) -> None:
        for expert in self._experts:
            expert.on_release(key)

    def on_unpin(self, key: Key) -> None:
        self._sync()
        for expert in self._experts:
            expert.on_unpin(key)

    def on_resize(self) -> None:
        for expert in self._experts:
            expert.resize(self.capacity)
        share = min(1.0, self._sample / self.capacity)
        self._threshold = int(share * _RANGE)
        self._shadow_pages = max(1, round(share * self.capacity))

    def on_session_end(self, keys: Sequence[Key], session: Hashable) -> None:
        self._sync()
        for expert in self._experts:
            expert.on_session_end(keys, session)

    def victim(self, incoming: Key | None = None) -> Key | None:
        self._sync()
        return self._experts[self._followed].victim(incoming)

    def own_state(self) -> dict[str, Any]:
        return {
            "experts": self._specs,
            "followed": self._followed,
            "hits": self._hits,
            "squares": self._squares,
            "books": [expert.state(self.limit) for expert in self._experts],
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        if state["experts"] != self._specs:
            raise ValueError(f"it is of the experts {state['experts']}")
        self._sync()
        for expert, book in zip(self._experts, state["books"], strict=True):
            expert.load_state(book)
        self._followed = range(len(self._specs))[int(state["followed"])]
        for row, given in zip(
            (self._hits, *self._squares), (state["hits"], *state["squares"]), strict=True
        ):
            if len(row) != len(given):
                raise ValueError("it is of other experts")
            row[:] = [max(0.0, float(number)) for number in given]

    def own_check(self) -> None:
        for expert in self._experts:
            assert expert.pages is self.pages, f"{expert.name} has other pages than the tier"
            expert.own_check()
        for shadow in self._shadows:
            shadow.check()
            assert len(shadow) <= max(self._sample, LONGEST)

    def _sync(self) -> None:
        now = (self.tick, self.share)
        if now != self._synced:
            self._synced = now
            for expert in self._experts:
                expert.follow(self)

    def _watch(self, key: Key, pending: list[Key]) -> None:
        if self.requests != self._pending_request:
            self._weigh()
            self._pending_request = self.requests
        self._uses += 1
        if _sampled(key) < self._threshold and len(pending) < LONGEST:
            pending.append(key)

    def _weigh(self) -> None:
        """Show the last request to the shadows, and follow the one with the most hits."""
        keys = [*self.walk(self._whole), *self._alone]
        self._whole, self._alone = [], []
        if not keys:
            return
        size = self.capacity or len(self.pages)
        keep = math.exp((self._weighed_at - self._uses) / max(self._memory * size, SHORTEST))
        self._weighed_at = self._uses
        keys = list(dict.fromkeys(keys))
        gains = [shadow.prefix(keys) for shadow in self._shadows]
        for shadow in self._shadows:
            shadow.access(keys, self._shadow_pages, request=self.request)
        self._hits = [hits * keep + gain for hits, gain in zip(self._hits, gains, strict=True)]
        self._squares = [
            [square * keep + (mine - gain) ** 2 for square, gain in zip(row, gains, strict=True)]
            for row, mine in zip(self._squares, gains, strict=True)
        ]
        if self._uses - self._changed_at < size:
            return
        best = self._hits.index(max(self._hits))
        ours, spread = self._hits[self._followed], self._squares[self._followed][best]
        if self._hits[best] - ours > self._margin * ours + SURE * math.sqrt(spread):
            self._followed, self._changed_at = best, self._uses
            self.changes += 1


def _sampled(key: Key) -> int:
    """32 evenly distributed bits of a key, the same in every process."""
    if isinstance(key, bytes) and len(key) >= 16:
        return int.from_bytes(key[-4:], "big")
    if isinstance(key, int):
        return (key * 0x9E3779B97F4A7C15 >> 16) % _RANGE
    return zlib.crc32(repr(key).encode())
