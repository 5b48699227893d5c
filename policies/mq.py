"""MQ: several LRU queues by how often a page was used; what is not used in time sinks by one.

Origin: Y. Zhou, J. F. Philbin, K. Li, "The Multi-Queue replacement algorithm for second level buffer
caches", USENIX ATC 2001. A page used n times is in queue log2(n), the highest at most. The coldest page of
each queue but the lowest sinks to the next lower one when it was not used for ``lifetime``. Victims come from
the lowest queue that has one. The counts of evicted pages are remembered for a while, so a page that comes
back goes on where it was.

Time is counted in uses of pages. As in the paper, the lifetime is the peak of the distribution of distances
between two uses of a page, measured on line, unless ``lifetime`` sets it. Distances are counted by powers of two,
those below the number of pages in the tier not at all, since such pages stay anyway; old counts fade. Until
there are some, the lifetime is that number.

Sizes that differ: counted in pages, as in the paper.

Cost: O(queues) amortised, O(log n) for pages that were parked (see ``kvtier.policies.queue``). Memory: a queue
entry and a count a page, and a key and a count for each of ``ghosts`` times as many.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ghosts import Ghosts
from kvtier.policies.queue import PageQueue
from kvtier.policy import Access, Key, ResidencyPolicy, decode_key, encode_key


class MQ(ResidencyPolicy):
    """Multi-queue.

    Args:
        leaf_first: see ResidencyPolicy.
        queues: number of queues, 1 to 64.
        lifetime: uses of pages after which an unused page sinks, in multiples of the tier's pages; 0 to
            measure it.
        ghosts: evicted pages that are remembered, in multiples of the tier's pages.

    Raises:
        ConfigError: a parameter is out of its range.
    """

    name: ClassVar[str] = "mq"

    def __init__(
        self, *, leaf_first: bool, queues: int = 8, lifetime: float = 0.0, ghosts: float = 4.0
    ) -> None:
        super().__init__(leaf_first=leaf_first)
        if not 1 <= queues <= 64:
            raise ConfigError(f"policy 'mq': queues={queues!r}; give 1 to 64")
        if not 0.0 <= lifetime < math.inf:
            raise ConfigError(f"policy 'mq': lifetime={lifetime!r}; give a number of at least 0")
        if not 0.0 <= ghosts < math.inf:
            raise ConfigError(f"policy 'mq': ghosts={ghosts!r}; give a number of at least 0")
        self._top = queues - 1
        self._lifetimes, self._ghosts_per_page = lifetime, ghosts
        self._queues = [PageQueue(self) for _ in range(queues)]
        #: Each page's uses, queue and the time at which it sinks.
        self._nodes: dict[Key, _Node] = {}
        self._ghosts: Ghosts[_Node] = Ghosts()
        self._now = 0
        #: Distances between two uses, by number of bits; those up to ``_near`` do not count.
        self._distances = [0.0] * 64
        self._near = 0
        self._lifetime = 0.0
        self._next_look = 0
        #: Nothing sinks before.
        self._next_sink = math.inf
        self.on_resize()

    def plain_access(self, keys: Sequence[Key], capacity: int) -> Access:
        lines = [line for queue in self._queues if (line := queue.plain()) is not None]
        if len(lines) <= self._top:
            return super().plain_access(keys, capacity)
        pages, nodes, tick, top = self.pages, self._nodes, self.tick, self._top
        ghosts, distances, near = self._ghosts.order, self._distances, self._near
        hits, now, lifetime, next_sink = 0, self._now, self._lifetime, self._next_sink
        most_ghosts = self._most_ghosts
        evicted: list[Key] = []
        lowest = lines[0]
        for key in self.walk(keys):
            node = nodes.get(key)
            if node is None:
                while len(pages) >= capacity:
                    # The lowest queue is hardly ever empty.
                    gone, _ = (lowest or next(filter(None, lines))).popitem(last=False)
                    del pages[gone]
                    ghosts[gone] = nodes.pop(gone)
                    if len(ghosts) > most_ghosts:
                        ghosts.popitem(last=False)
                    evicted.append(gone)
            now += 1
            if now > next_sink:
                self._now = now
                self._sink(lines)
                distances, lifetime, next_sink = self._distances, self._lifetime, self._next_sink
            if node is not None:
                hits += 1
                del lines[node.level][key]
            else:
                pages[key] = None
                node = ghosts.pop(key, None)
                if node is None:
                    # New, so in the lowest queue, from which nothing sinks.
                    nodes[key] = _Node(1, 0, now, now + lifetime)
                    lowest[key] = tick
                    continue
                nodes[key] = node
            distance = now - node.last
            if distance > near:
                distances[distance.bit_length()] += 1.0
            node.last = now
            node.uses = uses = node.uses + 1
            level = uses.bit_length() - 1
            node.level = level = level if level < top else top
            node.expires = expires = now + lifetime
            lines[level][key] = tick
            if level and expires < next_sink:
                self._next_sink = next_sink = expires
        self._now = now
        return Access(hits, evicted)

    def on_insert(self, key: Key, beside: Key | None) -> None:
        self._now = now = self._now + 1
        if now > self._next_sink:
            self._sink()
        ghost = self._ghosts.pop(key)
        uses = 1
        if ghost is not None:
            uses = ghost.uses + 1
            if now - ghost.last > self._near:
                self._distances[(now - ghost.last).bit_length()] += 1.0
        level = min(uses.bit_length() - 1, self._top)
        expires = now + self._lifetime
        if beside is not None and (parent := self._nodes[beside]).level == level:
            expires = parent.expires
        self._nodes[key] = _Node(uses, level, now, expires)
        self._queues[level].push(key, beside)
        if level and expires < self._next_sink:
            self._next_sink = expires

    def on_use(self, key: Key) -> None:
        self._now = now = self._now + 1
        if now > self._next_sink:
            self._sink()
        node = self._nodes[key]
        node.uses = uses = node.uses + 1
        self._queues[node.level].discard(key)
        distance = now - node.last
        if distance > self._near:
            self._distances[distance.bit_length()] += 1.0
        node.last = now
        node.level = level = min(uses.bit_length() - 1, self._top)
        node.expires = expires = now + self._lifetime
        self._queues[level].push(key)
        if level and expires < self._next_sink:
            self._next_sink = expires

    def on_remove(self, key: Key, evicted: bool) -> None:
        node = self._nodes.pop(key)
        self._queues[node.level].discard(key)
        if evicted:
            self._ghosts.add(key, node)
            self._ghosts.trim(self._most_ghosts)

    def on_release(self, key: Key) -> None:
        node = self._nodes[key]
        self._queues[node.level].release(key)
        if node.level and node.expires < self._next_sink:
            self._next_sink = node.expires

    def on_unpin(self, key: Key) -> None:
        node = self._nodes[key]
        self._queues[node.level].renew(key)
        node.expires = self._now + self._lifetime

    def on_resize(self) -> None:
        size = self.capacity or max(len(self.pages), 64)
        self._near = size
        self._lifetime = self._lifetimes * size or max(self._lifetime, size)
        self._most_ghosts = int(self._ghosts_per_page * size)

    def victim(self, incoming: Key | None = None) -> Key | None:
        for queue in self._queues:
            key = queue.first()
            if key is not None:
                return key
        return None

    def own_state(self) -> dict[str, Any]:
        nodes = self._nodes
        return {
            "queues": [
                [[encode_key(key), nodes[key].uses] for key in self.hottest(queue)]
                for queue in self._queues
            ],
            "ghosts": [
                [encode_key(key), node.uses, self._now - node.last]
                for key in self.hottest(self._ghosts)
                for node in (self._ghosts.peek(key),)
            ],
            "distances": self._distances,
            "lifetime": self._lifetime,
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        distances = [max(0.0, float(count)) for count in state["distances"]]
        if len(distances) != len(self._distances):
            raise ValueError(f"{len(distances)} counts of distances")
        self._distances = distances
        if not self._lifetimes:
            self._lifetime = max(1.0, float(state["lifetime"]))
        for level, items in enumerate(state["queues"]):
            for name, uses in items:
                key = decode_key(name)
                node = self._nodes.get(key)
                if node is None:
                    continue
                self._queues[node.level].discard(key)
                node.uses, node.level = max(1, int(uses)), min(level, self._top)
                node.expires = self._now + self._lifetime
                self._queues[node.level].push(key)
                if node.level:
                    self._next_sink = min(self._next_sink, node.expires)
        for name, uses, age in state["ghosts"]:
            key = decode_key(name)
            if key not in self.pages:
                last = self._now - max(0, int(age))
                self._ghosts.add(key, _Node(max(1, int(uses)), 0, last, 0.0))
        self._ghosts.trim(self._most_ghosts)

    def own_check(self) -> None:
        assert self._nodes.keys() == self.pages.keys(), "there are counts of other pages"
        assert sum(map(len, self._queues)) == len(self.pages), "the queues have other pages"
        for level, queue in enumerate(self._queues):
            queue.check()
            assert all(self._nodes[key].level == level for key in queue), "a page is misplaced"
        assert not any(key in self.pages for key in self._ghosts), (
            "a page here is remembered as gone"
        )

    def _sink(self, lines: Sequence[OrderedDict[Key, int]] | None = None) -> None:
        """The coldest page of each queue sinks by one if its time is over. ``lines`` are the queues as plain
        orders, if they are that."""
        now, soonest = self._now, math.inf
        if now >= self._next_look and not self._lifetimes:
            self._measure()
        nodes, queues, expires = self._nodes, self._queues, now + self._lifetime
        for level in range(1, self._top + 1):
            if lines is not None:
                line, below = lines[level], lines[level - 1]
                if not line:
                    continue
                key = next(iter(line))
                if nodes[key].expires < now:
                    del line[key]
                    below[key] = self.tick
                    nodes[key].level, nodes[key].expires = level - 1, expires
                    if level > 1 and expires < soonest:
                        soonest = expires
                    if not line:
                        continue
                    key = next(iter(line))
                if nodes[key].expires < soonest:
                    soonest = nodes[key].expires
                continue
            first = queues[level].first()
            if first is not None and nodes[first].expires < now:
                queues[level].discard(first)
                queues[level - 1].push(first)
                nodes[first].level, nodes[first].expires = level - 1, expires
                if level > 1:
                    soonest = min(soonest, expires)
                first = queues[level].first()
            if first is not None:
                soonest = min(soonest, nodes[first].expires)
        self._next_sink = soonest

    def _measure(self) -> None:
        """Take the most frequent distance as lifetime."""
        distances = self._distances
        most = max(distances)
        if most:
            self._lifetime = float(1 << distances.index(most))
            self._distances = [0.5 * count for count in distances]
        self._next_look = self._now + 4 * self._near


class _Node:
    __slots__ = ("expires", "last", "level", "uses")

    def __init__(self, uses: int, level: int, last: int, expires: float) -> None:
        self.uses, self.level, self.last, self.expires = uses, level, last, expires
