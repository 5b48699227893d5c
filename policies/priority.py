"""Priorities: pages of a lower priority go before all pages of a higher one.

Origin: the retention priorities of serving systems (TensorRT-LLM, Dynamo: a number a request). It wraps
another policy, of which there is one a priority; so within a priority the order is that policy's.

* The last request that states a priority (``Request.priority``) sets that of its pages; one that states none
  leaves it, and a page that no request gave one has ``default``.
* A page whose priority changes enters the order of the new one as just inserted.
* With ``leaf_first`` a page of low priority stays as long as one of high priority follows it.

Cost: that of the inner policy, and one step a priority for a victim. At most ``levels`` priorities are told
apart, those beyond count as the nearest. Memory: about 150 bytes a page on top of the inner policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policy import Key, Order, ResidencyPolicy, decode_key, encode_key, load_policy


class Priority(ResidencyPolicy):
    """The lowest priority first, in the inner policy's order.

    Args:
        leaf_first: see ResidencyPolicy.
        inner: the policy within a priority, in parentheses if it has parameters.
        levels: priorities 0 to ``levels - 1`` are told apart; 1 to 100.
        default: priority of pages that no request gave one.

    Raises:
        ConfigError: levels or default out of range, or the inner policy is none.
    """

    name: ClassVar[str] = "priority"

    def __init__(
        self, *, leaf_first: bool, inner: str = "lru", levels: int = 10, default: int = 0
    ) -> None:
        super().__init__(leaf_first=leaf_first)
        if not 1 <= levels <= 100:
            raise ConfigError(f"policy 'priority': levels={levels!r}; give 1 to 100")
        if not 0 <= default < levels:
            raise ConfigError(f"policy 'priority': default={default!r}; give 0 to {levels - 1}")
        self._default = default
        self._inner = [load_policy(inner, leaf_first=leaf_first) for _ in range(levels)]
        for policy in self._inner:
            policy.join(self)
        #: Page -> its priority.
        self._levels: dict[Key, int] = {}

    @property
    def uses_facts(self) -> bool:  # type: ignore[override]
        return self._inner[0].uses_facts

    def set_up(self, *, order: Order, clock: Callable[[], float]) -> None:
        super().set_up(order=order, clock=clock)
        for policy in self._inner:
            policy.set_up(order=order, clock=clock)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        level = self._stated()
        level = self._default if level is None else level
        same = beside is not None and self._levels[beside] == level
        self._put(key, level, beside if same else None)

    def on_use(self, key: Key) -> None:
        level, now = self._stated(), self._levels[key]
        if level is None or level == now:
            self._at(now).on_use(key)
            return
        self._take(key, evicted=False)
        self._put(key, level, None)

    def on_unpin(self, key: Key) -> None:
        self._at(self._levels[key]).on_unpin(key)

    def on_release(self, key: Key) -> None:
        self._at(self._levels[key]).on_release(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        self._take(key, evicted)

    def on_resize(self) -> None:
        for policy in self._inner:
            policy.resize(self.capacity)

    def on_session_end(self, keys: Sequence[Key], session: Hashable) -> None:
        for level, policy in enumerate(self._inner):
            policy.on_session_end([key for key in keys if self._levels[key] == level], session)

    def victim(self, incoming: Key | None = None) -> Key | None:
        for policy in self._inner:
            if policy.pages:
                policy.follow(self)
                key = policy.victim(incoming)
                if key is not None:
                    return key
        return None

    def own_state(self) -> dict[str, Any]:
        return {
            "levels": [[encode_key(key), self._levels[key]] for key in self.hottest(self._levels)],
            "inner": [policy.state(self.limit) for policy in self._inner],
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        for value, level in state["levels"]:
            key, level = decode_key(value), min(int(level), len(self._inner) - 1)
            if key in self.pages and self._levels[key] != level:
                self._take(key, evicted=False)
                self._put(key, level, None)
        for policy, inner in zip(self._inner, state["inner"], strict=False):
            policy.follow(self)
            policy.load_state(inner)

    def own_check(self) -> None:
        assert self._levels.keys() == self.pages.keys(), "other pages have a priority than are here"
        for level, policy in enumerate(self._inner):
            pages = {key for key, at in self._levels.items() if at == level}
            assert policy.pages.keys() == pages, f"priority {level} has other pages than it should"
            policy.own_check()

    def _stated(self) -> int | None:
        priority = self.request.priority
        return None if priority is None else min(max(priority, 0), len(self._inner) - 1)

    def _at(self, level: int) -> ResidencyPolicy:
        policy = self._inner[level]
        policy.follow(self)
        return policy

    def _put(self, key: Key, level: int, beside: Key | None) -> None:
        self._levels[key] = level
        policy = self._at(level)
        policy.pages[key] = self.pages[key]
        policy.on_insert(key, beside)

    def _take(self, key: Key, evicted: bool) -> None:
        policy = self._at(self._levels.pop(key))
        del policy.pages[key]
        policy.on_remove(key, evicted)
