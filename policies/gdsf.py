"""Greedy dual size frequency: the page whose loss costs least goes first.

Origin: L. Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy",
HP Labs HPL-98-69, 1998. A page's value is ``clock + uses * cost / bytes``; the clock is the value of the
last page evicted, so that what is not used ages. For prefixes: RAGCache (Jin et al., arXiv 2404.12457).

* Cost: seconds to compute the page again, less the seconds to reload it if it only moves down a tier, if both
  are known (``PageFacts``). Where nobody knows, ``1 + depth / depth_scale``: a page's attention reads all
  pages before it, so at ``depth_scale`` pages that costs as much as all the rest.
* Bytes count relative to those of the first page seen, so that values are of the size of uses.
* A prefix is worth no less than its suffix, which is of no use without it: pages of a request come
  tail first, and none gets less than the one before it.

Cost: O(1) a used page, O(log n) amortised for everything else (see ``kvtier.policies.ranked``).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ranked import RankedPolicy
from kvtier.policy import Key, decode_key


class GDSF(RankedPolicy):
    """Least ``uses * cost / bytes`` first, with ageing.

    Args:
        leaf_first: see ResidencyPolicy.
        depth_scale: pages before a page at which its attention costs as much as all else in it; > 0, ``inf``
            for equal costs. Used where costs are not known.

    Raises:
        ConfigError: ``depth_scale`` is not > 0.
    """

    name: ClassVar[str] = "gdsf"
    uses_facts: ClassVar[bool] = True

    def __init__(self, *, leaf_first: bool, depth_scale: float = 1024.0) -> None:
        super().__init__(leaf_first=leaf_first)
        if not depth_scale > 0.0:
            raise ConfigError(f"policy 'gdsf': depth_scale={depth_scale!r}; give more than 0")
        self._depth_scale = depth_scale
        self._clock = 0.0
        self._uses: dict[Key, int] = {}
        self._unit_bytes = 0
        #: Highest value in the current walk, and its tick.
        self._walked = (-1, 0.0)

    def first_score(self, key: Key, beside: float | None) -> float:
        self._uses[key] = 1
        score = self._value(key)
        if beside is not None:
            return min(score, beside)
        return self._at_least_its_suffix(score)

    def next_score(self, key: Key, score: float) -> float:
        self._uses[key] += 1
        return self._at_least_its_suffix(max(score, self._value(key)))

    def on_remove(self, key: Key, evicted: bool) -> None:
        if evicted:
            self._clock = max(self._clock, self._ranks[key][0])
        del self._uses[key]
        super().on_remove(key, evicted)

    def score_clock(self) -> float:
        return self._clock

    def set_score_clock(self, clock: float) -> None:
        self._clock = max(self._clock, clock)

    def _value(self, key: Key) -> float:
        page = self.pages[key]
        assert page is not None
        if not self._unit_bytes:
            self._unit_bytes = max(1, page.nbytes)
        if page.recompute_s is None:
            cost = 1.0 + page.depth / self._depth_scale
        else:
            cost = max(0.0, page.recompute_s - (page.reload_s or 0.0))
        return self._clock + self._uses[key] * cost * self._unit_bytes / max(1, page.nbytes)

    def _at_least_its_suffix(self, score: float) -> float:
        if self.order == "tail":
            tick, highest = self._walked
            if tick == self.tick:
                score = max(score, highest)
            self._walked = (self.tick, score)
        return score

    def own_state(self) -> dict[str, Any]:
        state = super().own_state()
        state["uses"] = [self._uses[decode_key(key)] for key, _ in state["pages"]]
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        super().load_own_state(state)
        for (value, _), uses in zip(state["pages"], state["uses"], strict=True):
            key = decode_key(value)
            if key in self.pages:
                self._uses[key] = max(int(uses), self._uses[key])

    def own_check(self) -> None:
        super().own_check()
        assert self._uses.keys() == self.pages.keys(), (
            "uses are counted of other pages than are here"
        )
