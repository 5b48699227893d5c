"""What policies share that order pages by a rank which only ever rises.

``victim()`` is the page of the lowest rank among the unpinned ones; with ``leaf_first`` among those
of them without a child in the tier. A rank is ``(score, stamp, -depth, order of insertion)``: the
score is the policy's, the stamp is the time of the last use. A page that enters below an unpinned
parent takes the parent's stamp, and all pages of one touch share a stamp; so along a sequence the
deeper page is the colder one and a sequence is given up from its tail, even where ``leaf_first``
does not demand it.

The candidates wait in a binary heap, each at most once. An entry is corrected when it reaches the
top: a page that rose meanwhile sinks back with its new rank, one that may not go falls out and
returns when its last child is removed or it is unpinned. Since ranks never fall, the corrected top
is the true minimum. Each correction is paid for by the operation that made it necessary. So a touch
costs O(1) a page, all else O(log n) amortised, whatever is pinned.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Sequence

from kvtier.errors import KvtierError
from kvtier.policy import PageFacts, ResidencyPolicy

Rank = tuple[float, int, int, int]


class Node:
    """A page in the tier."""

    __slots__ = ("order", "page", "pinned", "queued", "score", "stamp")

    def __init__(self, page: PageFacts, order: int, stamp: int, score: float) -> None:
        self.page = page
        self.order = order
        self.stamp = stamp
        self.score = score
        self.pinned = False
        self.queued = False

    @property
    def rank(self) -> Rank:
        return (self.score, self.stamp, -self.page.depth, self.order)


class RankedPolicy(ResidencyPolicy):
    """The lowest rank goes first. A policy defines the score by ``first_score`` and ``used``."""

    def __init__(self, *, leaf_first: bool) -> None:
        super().__init__(leaf_first=leaf_first)
        self._nodes: dict[bytes, Node] = {}
        # By the parent's key, whether or not the parent is in the tier: it may arrive after its
        # children.
        self._children: dict[bytes, int] = {}
        self._heap: list[tuple[Rank, Node]] = []
        self._clock = 0
        self._inserted = 0

    @abstractmethod
    def first_score(self, page: PageFacts) -> float:
        """The score of a page that has just become resident."""

    @abstractmethod
    def used(self, nodes: Sequence[tuple[Node, float]]) -> None:
        """Raise the scores of pages that one request used, each with its share of attention."""

    def insert(self, page: PageFacts) -> None:
        if page.key in self._nodes:
            raise KvtierError(
                f"{self.name}: page {page.key.hex()[:16]} is in the tier already; remove it first"
            )
        parent = None if page.parent is None else self._nodes.get(page.parent)
        stamp = self._tick() if parent is None or parent.pinned else parent.stamp
        self._inserted += 1
        node = Node(page, self._inserted, stamp, self.first_score(page))
        self._nodes[page.key] = node
        if page.parent is not None:
            self._children[page.parent] = self._children.get(page.parent, 0) + 1
        self._offer(node)

    def touch(self, keys: Sequence[bytes], mass: Sequence[float] | None = None) -> None:
        if mass is not None and len(mass) != len(keys):
            raise KvtierError(
                f"{self.name}: {len(keys)} pages touched with {len(mass)} masses; give one each"
            )
        if mass is not None and not all(0.0 <= value < float("inf") for value in mass):
            bad = next(value for value in mass if not 0.0 <= value < float("inf"))
            raise KvtierError(f"{self.name}: a mass is {bad!r}; it must be finite and >= 0")
        share = 1.0 / len(keys) if keys else 0.0
        stamp = self._tick()
        nodes: list[tuple[Node, float]] = []
        for index, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is not None:
                node.stamp = stamp
                nodes.append((node, share if mass is None else mass[index]))
        self.used(nodes)

    def pin(self, key: bytes) -> None:
        node = self._node(key)
        if node.pinned:
            raise KvtierError(
                f"{self.name}: page {key.hex()[:16]} is pinned already; the store counts pins"
            )
        node.pinned = True

    def unpin(self, key: bytes) -> None:
        node = self._node(key)
        if not node.pinned:
            raise KvtierError(f"{self.name}: page {key.hex()[:16]} is not pinned")
        node.pinned = False
        node.stamp = self._tick()
        self._offer(node)

    def remove(self, key: bytes) -> None:
        node = self._node(key)
        del self._nodes[key]
        parent = node.page.parent
        if parent is not None:
            left = self._children.pop(parent) - 1
            if left:
                self._children[parent] = left
            elif parent in self._nodes:
                self._offer(self._nodes[parent])
        if len(self._heap) > self._limit:
            self._compact()

    def victim(self) -> bytes | None:
        heap = self._heap
        while heap:
            rank, node = heap[0]
            if not self._may_go(node):
                heapq.heappop(heap)
                node.queued = False
            elif node.rank != rank:
                heapq.heapreplace(heap, (node.rank, node))
            else:
                return node.page.key
        return None

    def __len__(self) -> int:
        return len(self._nodes)

    def check(self) -> None:
        children: dict[bytes, int] = {}
        for key, node in self._nodes.items():
            assert key == node.page.key, f"page {node.page.key.hex()} is filed under {key.hex()}"
            parent = node.page.parent
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        assert children == self._children, "the numbers of children are wrong"
        queued = [node for _, node in self._heap]
        assert len(queued) == len({id(node) for node in queued}), "a page waits twice"
        assert all(node.queued for node in queued), "a waiting page is not marked as such"
        waiting = {id(node) for node in queued}
        for node in self._nodes.values():
            assert node.queued == (id(node) in waiting), (
                "a page is marked as waiting and does not wait"
            )
            assert node.queued or not self._may_go(node), (
                f"page {node.page.key.hex()} may go and does not wait"
            )
        assert all(rank <= node.rank for rank, node in self._heap), "a rank has fallen"
        assert len(self._heap) <= self._limit, "the heap keeps too many pages that are gone"

    @property
    def _limit(self) -> int:
        return 2 * len(self._nodes) + 64

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _node(self, key: bytes) -> Node:
        node = self._nodes.get(key)
        if node is None:
            raise KvtierError(f"{self.name}: page {key.hex()[:16]} is not in the tier")
        return node

    def _may_go(self, node: Node) -> bool:
        if node.pinned or self._nodes.get(node.page.key) is not node:
            return False
        return not (self.leaf_first and node.page.key in self._children)

    def _offer(self, node: Node) -> None:
        if node.queued or not self._may_go(node):
            return
        node.queued = True
        heapq.heappush(self._heap, (node.rank, node))

    def _compact(self) -> None:
        """Drop entries of pages that may not go. Most are of removed pages, whose removal pays."""
        for _, node in self._heap:
            node.queued = False
        kept = [node for _, node in self._heap if self._may_go(node)]
        for node in kept:
            node.queued = True
        self._heap = [(node.rank, node) for node in kept]
        heapq.heapify(self._heap)
