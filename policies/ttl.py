"""Time to live: pages that nobody used for some time go before all others.

Origin: the retention hints of serving systems (an agent that comes back within minutes or never). It wraps
another policy, which orders the pages that have not expired. Nothing is thrown away for its age alone: an
expired page is merely the first to go, and is as good as any other once it is used again.

* A page expires ``Request.ttl_s``, or else ``seconds``, after its last use; not before that long after
  ``Request.next_use_at``. Every use sets both anew.
* When a session ends, pages that it used last expire at once; those that another session used since do not.

Cost: O(log n) amortised on top of the inner policy. Memory: about 500 bytes a page on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

from kvtier.errors import ConfigError
from kvtier.policies.heap import RankedPages
from kvtier.policy import (
    Key,
    Order,
    ResidencyPolicy,
    decode_key,
    encode_key,
    load_policy,
)


class Lifetime(NamedTuple):
    """Until when a page counts, for how long after each use, and who used it last."""

    deadline: float
    seconds: float
    session: Hashable


class TTL(ResidencyPolicy):
    """Expired pages first, the longest expired first; then the inner policy's victims.

    Args:
        leaf_first: see ResidencyPolicy.
        inner: the policy for pages that have not expired, in parentheses if it has parameters.
        seconds: time to live of pages whose request gave none; > 0, ``inf`` for no limit.

    Raises:
        ConfigError: ``seconds`` is not > 0, or the inner policy is none.
    """

    name: ClassVar[str] = "ttl"

    def __init__(self, *, leaf_first: bool, inner: str = "lru", seconds: float = 300.0) -> None:
        super().__init__(leaf_first=leaf_first)
        if not seconds > 0.0:
            raise ConfigError(f"policy 'ttl': seconds={seconds!r}; give more than 0, or inf")
        self._seconds = seconds
        self._inner = load_policy(inner, leaf_first=leaf_first)
        self._inner.join(self)
        self._inner.pages = self.pages
        self._lives: dict[Key, Lifetime] = {}
        #: By (deadline, 0, order of use).
        self._deadlines = RankedPages(self)
        self._serial = 0

    @property
    def uses_facts(self) -> bool:  # type: ignore[override]
        return self._inner.uses_facts

    def set_up(self, *, order: Order, clock: Callable[[], float]) -> None:
        super().set_up(order=order, clock=clock)
        self._inner.set_up(order=order, clock=clock)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._live(key)
        self._inner.follow(self)
        self._inner.on_insert(key, beside)

    def on_use(self, key: Key) -> None:
        self._live(key)
        self._inner.follow(self)
        self._inner.on_use(key)

    def on_unpin(self, key: Key) -> None:
        life = self._lives[key]
        self._set(key, life._replace(deadline=max(life.deadline, self.clock() + life.seconds)))
        self._inner.follow(self)
        self._inner.on_unpin(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        del self._lives[key], self._deadlines[key]
        self._inner.follow(self)
        self._inner.on_remove(key, evicted)

    def on_release(self, key: Key) -> None:
        self._deadlines.release(key)
        self._inner.on_release(key)

    def on_resize(self) -> None:
        self._inner.resize(self.capacity)

    def on_session_end(self, keys: Sequence[Key], session: Hashable) -> None:
        now = self.clock()
        # The last page first, so that it is the longest expired.
        for key in reversed(keys):
            life = self._lives[key]
            if session is not None and life.session == session:
                self._set(key, life._replace(deadline=min(life.deadline, now)))
        self._inner.on_session_end(keys, session)

    def victim(self, incoming: Key | None = None) -> Key | None:
        first = self._deadlines.first()
        if first is not None and self._lives[first].deadline <= self.clock():
            return first
        self._inner.follow(self)
        return self._inner.victim(incoming)

    def own_state(self) -> dict[str, Any]:
        now = self.clock()
        keys = self.hottest(self._deadlines)
        return {
            "lives": [
                [encode_key(key), _finite(life.deadline - now), _finite(life.seconds)]
                for key in keys
                for life in (self._lives[key],)
            ],
            "inner": self._inner.state(self.limit),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        now = self.clock()
        for value, left, seconds in state["lives"]:
            key = decode_key(value)
            if key in self.pages:
                self._set(
                    key,
                    Lifetime(now + _infinite(left), _infinite(seconds), self._lives[key].session),
                )
        self._inner.follow(self)
        self._inner.load_state(state["inner"])

    def own_check(self) -> None:
        assert self._lives.keys() == self.pages.keys(), "lifetimes are kept of other pages"
        assert set(self._deadlines) == self.pages.keys(), "deadlines are kept of other pages"
        self._deadlines.check()
        self._inner.own_check()

    def _live(self, key: Key) -> None:
        request = self.request
        at = self.clock() if request.at is None else request.at
        seconds = self._seconds if request.ttl_s is None else request.ttl_s
        if request.next_use_at is not None:
            at = max(at, request.next_use_at)
        self._set(key, Lifetime(at + seconds, seconds, request.session))

    def _set(self, key: Key, life: Lifetime) -> None:
        self._serial += 1
        self._lives[key] = life
        self._deadlines[key] = (life.deadline, 0, self._serial)


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _infinite(seconds: float | None) -> float:
    return math.inf if seconds is None else float(seconds)
