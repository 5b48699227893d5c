"""Reuse: learns how soon pages of each kind are used again, and keeps those that are worth their room.

Origin: our own, from two known parts: life tables of the times between uses and the Gittins index of a
page (see ``kvtier.policies.hazard``). Pages are classed by how often they were used, 1, 2, ... up to
``classes`` and more; evicted ones are remembered with class and age, so the policy also learns about uses
that come later than the tier can wait. Then it does what the traffic asks for: it is near LRU where recent use
foretells the next one; it prefers pages used again where most are used once; and where the next use comes
later than a page can stay, it gives up the newest pages and keeps some of the old ones until they are used.

Pages wait in a queue for each class and interval of age, least recently used first, and move on as they
age. Victims come from the queue of the lowest worth. Worth is computed anew every tier's worth of
uses. Until the first time the policy is LRU.

Sizes that differ: worth is per page.

Cost: O(1) amortised for fixed numbers of classes and intervals, O(log n) for pages that were parked (see
``kvtier.policies.queue``). Memory: a queue entry and a record a page, and a record for each of ``history``
times as many evicted ones.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ghosts import Ghosts
from kvtier.policies.hazard import INTERVALS, STARTS, LifeTable, interval
from kvtier.policies.queue import PageQueue
from kvtier.policy import Key, ResidencyPolicy, decode_key, encode_key

#: Requests' worth of pages as which prior knowledge counts (see LifeTable.worth).
DOUBT = 32.0
#: Counts fade over this many tiers' worth of uses, or requests' worth, whichever is longer.
TIERS, REQUESTS = 10, 256
#: Fewest uses between two looks at the table, and most evicted pages that are looked at then.
SHORTEST, SAMPLED = 1000, 4096


class _Node:
    __slots__ = ("parent", "queue", "stamp", "uses")

    def __init__(self, uses: int, stamp: int, parent: Key | None) -> None:
        self.uses, self.stamp, self.queue, self.parent = uses, stamp, 0, parent


class _Leaves:
    """What a queue asks of a policy, for a tier that does not demand that leaves go first."""

    def __init__(self, policy: ResidencyPolicy) -> None:
        self._policy = policy
        self.children: dict[Key, int] = {}

    @property
    def pinned(self) -> set[Key]:
        return self._policy.pinned

    @property
    def tick(self) -> int:
        return self._policy.tick

    def may_go(self, key: Key) -> bool:
        return key not in self.pinned and key not in self.children


class Reuse(ResidencyPolicy):
    """Least expected reuse per time first.

    Args:
        leaf_first: see ResidencyPolicy.
        classes: pages are classed by their number of uses, up to this; 1 to 16.
        history: evicted pages that are remembered, in multiples of the tier's pages.

    Raises:
        ConfigError: a parameter is out of its range.
    """

    name: ClassVar[str] = "reuse"
    uses_facts: ClassVar[bool] = True

    def __init__(self, *, leaf_first: bool, classes: int = 4, history: float = 3.0) -> None:
        super().__init__(leaf_first=leaf_first)
        if not 1 <= classes <= 16:
            raise ConfigError(f"policy 'reuse': classes={classes!r}; give 1 to 16")
        if not 0.0 < history < math.inf:
            raise ConfigError(f"policy 'reuse': history={history!r}; give a number above 0")
        self._classes, self._history = classes, history
        self._table = LifeTable(classes)
        self._nodes: dict[Key, _Node] = {}
        #: Key -> (uses, stamp).
        self._ghosts: Ghosts[tuple[int, int]] = Ghosts()
        #: Pages without a child in the tier go first, asked for or not: else worth could order a parent
        #: before its child, and what is left of the sequence would be of no use.
        self._leaves: ResidencyPolicy | _Leaves = self if leaf_first else _Leaves(self)
        #: By class, then interval of age.
        self._queues = [PageQueue(self._leaves) for _ in range(classes * INTERVALS)]
        #: All pages by last use, for when all leaves are pinned; not with ``leaf_first``.
        self._all = PageQueue(self)
        #: Queues by worth, lowest first; the place of each there; none before ``_at`` has a page.
        self._by_worth: list[int] = []
        self._places: list[int] = []
        self._at = 0
        self._learnt = False
        self._now = 0
        self._stamp = 0
        self._stamp_tick = -1
        #: Requests so far.
        self._ticks = 1
        self._moved = 0
        self._next_look = 0
        self._rank([[-float(at) for at in range(INTERVALS)]] * classes)
        self.on_resize()

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._tick()
        ghost = self._ghosts.pop(key)
        uses = 1
        if ghost is not None:
            uses = ghost[0] + 1
            self._saw(ghost[0], ghost[1])
        stamp = self._stamp if beside is None else self._nodes[beside].stamp
        page = self.pages[key]
        parent = None if page is None else page.parent
        node = self._nodes[key] = _Node(uses, stamp, parent)
        if not self.leaf_first:
            self._all.push(key, beside)
            if parent is not None:
                children = self._leaves.children
                children[parent] = children.get(parent, 0) + 1
        self._push(key, node, beside)

    def on_use(self, key: Key) -> None:
        self._tick()
        node = self._nodes[key]
        self._saw(node.uses, node.stamp)
        self._queues[node.queue].discard(key)
        node.uses += 1
        node.stamp = self._stamp
        self._push(key, node)
        if not self.leaf_first:
            self._all.renew(key)

    def on_remove(self, key: Key, evicted: bool) -> None:
        node = self._nodes.pop(key)
        self._queues[node.queue].discard(key)
        if not self.leaf_first:
            self._all.discard(key)
            if node.parent is not None:
                self._left(node.parent)
        if evicted:
            self._ghosts.add(key, (node.uses, node.stamp))
            while len(self._ghosts) > self._most_ghosts:
                uses, stamp = self._ghosts.pop_oldest()
                self._table.forgotten[self._class(uses)][interval(self._now - stamp)] += 1.0

    def on_release(self, key: Key) -> None:
        if not self.leaf_first:
            self._all.release(key)
        node = self._nodes[key]
        if not self._leaves.may_go(key):
            return
        if interval(self._now - node.stamp) == node.queue % INTERVALS:
            self._queues[node.queue].release(key)
            self._at = min(self._at, self._places[node.queue])
        else:
            # It could not move on while it was held.
            self._queues[node.queue].discard(key)
            self._push(key, node)

    def on_unpin(self, key: Key) -> None:
        node = self._nodes[key]
        self._queues[node.queue].discard(key)
        node.stamp = self._now
        self._push(key, node)
        if not self.leaf_first:
            self._all.renew(key)

    def on_resize(self) -> None:
        size = self.capacity or len(self.pages)
        self._most_ghosts = int(self._history * max(size, 64))
        self._step = size // 32
        if not self._next_look:
            self._next_look = self._now + max(size, SHORTEST)

    def victim(self, incoming: Key | None = None) -> Key | None:
        if self._now - self._moved > self._step:
            self._age()
        queues, order = self._queues, self._by_worth
        while self._at < len(order):
            key = queues[order[self._at]].first()
            if key is not None:
                return key
            self._at += 1
        return None if self.leaf_first else self._all.first()

    def own_state(self) -> dict[str, Any]:
        def saved(keys: Any, record: Any) -> list[list[object]]:
            return [
                [encode_key(key), uses, self._now - stamp]
                for key in self.hottest(keys)
                for uses, stamp in (record(key),)
            ]

        nodes = self._nodes
        return {
            "used": self._table.used,
            "forgotten": self._table.forgotten,
            "learnt": self._learnt,
            "pages": saved(
                sorted(nodes, key=lambda key: nodes[key].stamp),
                lambda key: (nodes[key].uses, nodes[key].stamp),
            ),
            "ghosts": saved(self._ghosts, self._ghosts.peek),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        for name, rows in (("used", self._table.used), ("forgotten", self._table.forgotten)):
            given = state[name]
            if len(given) != self._classes or any(len(row) != INTERVALS for row in given):
                raise ValueError(f"{name} is of other classes")
            rows[:] = [[max(0.0, float(count)) for count in row] for row in given]
        oldest = max([0, *(int(age) for _, _, age in (*state["pages"], *state["ghosts"]))])
        self._now += oldest
        for value, uses, age in state["pages"]:
            key = decode_key(value)
            node = self._nodes.get(key)
            if node is not None:
                self._queues[node.queue].discard(key)
                node.uses, node.stamp = max(1, int(uses)), self._now - max(0, int(age))
                self._push(key, node)
        for value, uses, age in state["ghosts"]:
            key = decode_key(value)
            if key not in self.pages:
                self._ghosts.add(key, (max(1, int(uses)), self._now - max(0, int(age))))
        self._ghosts.trim(self._most_ghosts)
        if state["learnt"]:
            self._look()

    def own_check(self) -> None:
        assert self._nodes.keys() == self.pages.keys(), "there are records of other pages"
        assert sum(map(len, self._queues)) == len(self.pages), "the queues have other pages"
        assert sorted(self._by_worth) == list(range(len(self._queues))), "a queue has no rank"
        for number, queue in enumerate(self._queues):
            queue.check()
            for key in queue:
                node = self._nodes[key]
                assert node.queue == number, "a page is in another queue than its record says"
                assert self._class(node.uses) == number // INTERVALS, "a page is in a wrong class"
                assert interval(self._now - node.stamp) >= number % INTERVALS, "a page is too young"
        for place in range(self._at):
            queue = self._queues[self._by_worth[place]]
            assert not any(map(self._leaves.may_go, queue)), "a page was passed"
        if not self.leaf_first:
            assert set(self._all) == self.pages.keys(), "the order of all has other pages"
            self._all.check()
        assert not any(key in self.pages for key in self._ghosts), (
            "a page here is remembered as gone"
        )

    def _left(self, parent: Key) -> None:
        """A child of this page has left the tier."""
        children = self._leaves.children
        children[parent] -= 1
        if not children[parent]:
            del children[parent]
            if parent in self._nodes:
                self.on_release(parent)

    def _class(self, uses: int) -> int:
        return min(uses, self._classes) - 1

    def _tick(self) -> None:
        """A page is used. All pages of a request have the same stamp."""
        self._now = now = self._now + 1
        if self.tick != self._stamp_tick:
            self._stamp_tick, self._stamp = self.tick, now
            self._ticks += 1
            if now >= self._next_look:
                self._look()

    def _saw(self, uses: int, stamp: int) -> None:
        """A page of so many uses was used again."""
        self._table.used[self._class(uses)][interval(self._now - stamp)] += 1.0

    def _push(self, key: Key, node: _Node, beside: Key | None = None) -> None:
        at = interval(self._now - node.stamp)
        node.queue = number = (min(node.uses, self._classes) - 1) * INTERVALS + at
        self._queues[number].push(key, beside)
        place = self._places[number]
        if place < self._at:
            self._at = place

    def _age(self) -> None:
        """Move pages on that have become too old for their queue."""
        now = self._moved = self._now
        for number, queue in enumerate(self._queues):
            if not queue or number % INTERVALS == INTERVALS - 1:
                continue
            newest = now - STARTS[number % INTERVALS + 1]
            while (key := queue.first()) is not None:
                node = self._nodes[key]
                if node.stamp > newest:
                    break
                queue.discard(key)
                self._push(key, node)

    def _look(self) -> None:
        """Compute anew what pages are worth."""
        request = self._now / self._ticks
        self._age()
        waiting = [
            [float(len(queue)) for queue in self._queues[start : start + INTERVALS]]
            for start in range(0, len(self._queues), INTERVALS)
        ]
        stride = 1 + len(self._ghosts) // SAMPLED
        for uses, stamp in islice(self._ghosts.values(), None, None, stride):
            waiting[self._class(uses)][interval(self._now - stamp)] += stride
        self._rank(self._table.worth(waiting, DOUBT * request))
        step = max(self.capacity or len(self.pages), SHORTEST)
        self._table.fade(math.exp(-step / max(TIERS * step, REQUESTS * request)))
        self._learnt = True
        self._next_look = self._now + step

    def _rank(self, worth: list[list[float]]) -> None:
        """Order the queues. With equal worth the fewer uses and the higher age go first."""
        self._by_worth = sorted(
            range(len(self._queues)),
            key=lambda number: (
                worth[number // INTERVALS][number % INTERVALS],
                number // INTERVALS,
                -(number % INTERVALS),
            ),
        )
        self._places = [0] * len(self._queues)
        for place, number in enumerate(self._by_worth):
            self._places[number] = place
        self._at = 0
