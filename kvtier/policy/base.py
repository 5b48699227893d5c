"""The residency policy: which pages stay in a tier. It never changes a result, only what it costs.

One policy object serves one tier, the live store's and the replay's alike. It knows pages by key and by
the facts below, never their bytes. The store tells it what happens to single pages (``insert``, ``use``,
``pin``, ``unpin``, ``remove``) and asks for victims when the tier needs room; the replay hands over whole
requests (``access``), which is the same told in one call. Contract, checked by ``check()`` in tests and
debug mode:

* ``victim()`` never names a pinned page, and with ``leaf_first`` never a page whose child is in the tier;
* every operation takes time independent of the number of pages (amortised, a logarithm is allowed);
* ``victim()`` may tidy up but asked twice names the same page: the store pins it while it moves and
  removes it when it is gone.

A policy is a subclass of ``ResidencyPolicy`` that implements ``on_insert``, ``on_use``, ``on_remove`` and
``victim``. The base class keeps the books that all share: which pages are here, pinned, and whose parents.
``kvtier.policies.queue.PageQueue`` is an order of pages that skips those which may not go.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat, takewhile
from typing import Any, ClassVar, TypeVar

from kvtier.errors import ConfigError, KvtierError
from kvtier.policy.facts import ANONYMOUS, Access, Key, Order, PageFacts, Request, encode_key, show

T = TypeVar("T")

#: Version of ``ResidencyPolicy.state``.
STATE_VERSION = 1


class ResidencyPolicy(ABC):
    """Chooses victims in one tier.

    Attributes that ``set_up`` sets:
        order: in which order the pages of one request count as used. ``tail`` (the default): the last page
            first, so that of pages used together the deepest is the coldest and a sequence is given up from its
            end. ``head``: the first page first, as in most simulators.
        clock: seconds, never falling; virtual in a replay.

    Attributes for subclasses, read only:
        pages: every page of the tier -> its facts, or ``None`` (see ``uses_facts``).
        pinned: pages that may not go.
        children: with ``leaf_first``, key of a page, here or not -> pages in the tier whose parent it is.
        capacity: pages the tier holds; 0 if nobody said.
        used_bytes: of all pages with facts.
        tick: number of the current use. All pages of a request share one.
        requests: calls of ``use``, ``access`` and ``access_bytes`` so far.
        request: the request whose pages are being reported.
        share: the share of attention (0..1) of the page being reported; 1/n of n pages if not measured.

    Args:
        leaf_first: whether eviction from this tier loses the page. Then no page may go before its children,
            since a suffix without its prefix cannot be used by anybody.
    """

    #: Name in messages and statistics.
    name: ClassVar[str]
    #: Whether ``pages`` must have the facts of every page. Without, and without ``leaf_first``, a replay
    #: does not build them.
    uses_facts: ClassVar[bool] = False
    #: Whether it has to know the future; a live store refuses it.
    replay_only: ClassVar[bool] = False

    def __init__(self, *, leaf_first: bool) -> None:
        self.leaf_first = leaf_first
        self.order: Order = "tail"
        self.clock: Callable[[], float] = time.monotonic
        self.pages: dict[Key, PageFacts | None] = {}
        self.pinned: set[Key] = set()
        self.children: dict[Key, int] = {}
        self.capacity = 0
        self.used_bytes = 0
        self.tick = 0
        self.requests = 0
        self.request = ANONYMOUS
        self.share = 1.0
        self._unpinning = False
        #: Pages of a list that ``own_state`` may give, from ``state``.
        self.limit: int | None = None

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def on_insert(self, key: Key, beside: Key | None) -> None:
        """A page has become resident (it is in ``pages``), unpinned.

        ``beside`` is its parent if that is here and the page came alone: then it counts as used when its
        parent was, and as the colder of the two. ``None``: it counts as used now.
        """

    @abstractmethod
    def on_use(self, key: Key) -> None:
        """A page of the tier was used, pinned or not. Pages of one request come in ``order``."""

    @abstractmethod
    def on_remove(self, key: Key, evicted: bool) -> None:
        """A page has left the tier (and ``pages``). ``evicted``: to make room, so it may be wanted again."""

    @abstractmethod
    def victim(self, incoming: Key | None = None) -> Key | None:
        """The page to give up next, or ``None`` if none may go.

        ``incoming`` is the page that needs the room, where that is known; naming it means that it should
        not come in at all.
        """

    def on_release(self, key: Key) -> None:  # noqa: B027 - nothing to do is a valid answer
        """A page that was pinned, or had children in the tier, may go again (if not both held it)."""

    def on_unpin(self, key: Key) -> None:  # noqa: B027
        """A page was in use until now (after ``on_release``): refresh its recency, not its count of uses."""

    def on_resize(self) -> None:  # noqa: B027
        """``capacity`` has changed."""

    def on_session_end(self, keys: Sequence[Key], session: Hashable) -> None:  # noqa: B027
        """See ``session_ended``; pages that are not in the tier have been left out."""

    def own_state(self) -> dict[str, Any]:
        """What ``load_own_state`` needs, JSON-able; keys through ``saved`` or ``encode_key``."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take over what ``own_state`` gave. Pages named there may be gone, others may have come."""

    def own_check(self) -> None:  # noqa: B027
        """Recount what the subclass keeps; AssertionError if it is wrong."""

    def set_up(self, *, order: Order, clock: Callable[[], float]) -> None:
        """Set ``order`` and ``clock``, before the first use. A policy that has others in it passes it on."""
        self.order, self.clock = order, clock

    # ------------------------------------------------------------------ a policy in another

    def join(self, outer: ResidencyPolicy) -> None:
        """This policy is a part of ``outer``, which calls its hooks: share what is pinned and who has
        children. Before the first use. The outer one keeps ``pages`` of this one."""
        self.pinned, self.children = outer.pinned, outer.children

    def follow(self, outer: ResidencyPolicy) -> None:
        """Take over what is current in the policy that this one is a part of, before a hook is called."""
        self.tick, self.requests = outer.tick, outer.requests
        self.request, self.share = outer.request, outer.share

    # ------------------------------------------------------------------ single pages

    def insert(self, page: PageFacts, request: Request = ANONYMOUS) -> None:
        """A page has become resident, unpinned. Its parent is already here, or never will be."""
        key, parent = page.key, page.parent
        if key in self.pages:
            raise KvtierError(
                f"{self.name}: page {show(key)} is in the tier already; remove it first"
            )
        beside = parent if parent in self.pages else None
        self.request, self.share = request, 1.0 / (page.depth + 1)
        if beside is None:
            self.tick += 1
            self._unpinning = False
        self._enter(page)
        self.on_insert(key, beside)

    def use(
        self,
        keys: Sequence[Key],
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> None:
        """A request used these pages, given from the root of the sequence on; unknown keys are skipped.

        ``mass`` has one number a key, the share of attention it received (0..1), where it was measured.
        """
        shares = self._begin(keys, mass, request)
        pages, on_use = self.pages, self.on_use
        if shares is None:
            for key in self.walk(keys):
                if key in pages:
                    on_use(key)
            return
        for key, share in zip(self.walk(keys), self.walk(shares), strict=True):
            if key in pages:
                self.share = share
                on_use(key)

    def pin(self, key: Key) -> None:
        """The page must not be a victim until ``unpin``. The store counts; this is called once."""
        self._known(key)
        if key in self.pinned:
            raise KvtierError(
                f"{self.name}: page {show(key)} is pinned already; the store counts pins"
            )
        self.pinned.add(key)

    def unpin(self, key: Key, *, used: bool = True) -> None:
        """The page may be a victim again. ``used``: it was in use until now, and is the hottest; of one
        request, unpin the last page first. Otherwise (it was only moved) it is where it was in the order.
        """
        self._known(key)
        if key not in self.pinned:
            raise KvtierError(f"{self.name}: page {show(key)} is not pinned")
        self.pinned.remove(key)
        self.on_release(key)
        if used:
            if not self._unpinning:
                self._unpinning = True
                self.tick += 1
            self.on_unpin(key)

    def remove(self, key: Key, *, evicted: bool = False) -> None:
        """The page has left the tier, pinned or not; ``evicted`` if it had to make room."""
        self._known(key)
        self._leave(key, evicted)

    def session_ended(self, keys: Sequence[Key], session: Hashable = None) -> None:
        """The session that used these pages is over, or asks for nothing more."""
        self.on_session_end([key for key in keys if key in self.pages], session)

    # ------------------------------------------------------------------ victims

    def victims(self, nbytes: int) -> Iterator[Key]:
        """Pages to give up, coldest first, until together they have ``nbytes`` or none may go.

        The caller pins or removes each before it takes the next. A page without facts counts as one byte.
        """
        freed = 0
        while freed < nbytes:
            key = self.victim()
            if key is None:
                return
            page = self.pages[key]
            freed += 1 if page is None else page.nbytes
            yield key

    # ------------------------------------------------------------------ whole requests

    def prefix(self, keys: Sequence[Key]) -> int:
        """How many leading pages of ``keys`` are in the tier."""
        return sum(1 for _ in takewhile(self.pages.__contains__, keys))

    def access(
        self,
        keys: Sequence[Key],
        capacity: int,
        *,
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> Access:
        """One request over a chain of pages of equal size in a tier of ``capacity`` pages.

        Walks ``keys`` (root first, none twice) in ``order``: a page that is here is used, another is
        inserted, after a victim has gone if the tier is full. Pages evicted on the way are gone when the
        walk reaches them. A request longer than the tier so keeps the pages that it reaches last: its first
        ones with ``tail``. A page for which nothing may go, or that the policy turns away, stays out.
        """
        if capacity != self.capacity:
            self.resize(capacity)
        shares = self._begin(keys, mass, request)
        if self.leaf_first or self.uses_facts or shares is not None:
            return self._access_pages(chained(keys), shares, lambda _: len(self.pages) >= capacity)
        return self.plain_access(keys, capacity)

    def plain_access(self, keys: Sequence[Key], capacity: int) -> Access:
        """The part of ``access`` where neither facts nor shares matter. To override where a whole request can
        be done faster, with the same outcome."""
        pages, on_use, on_insert, victim = self.pages, self.on_use, self.on_insert, self.victim
        on_remove, pinned = self.on_remove, self.pinned
        hits = 0
        evicted: list[Key] = []
        for key in self.walk(keys):
            if key in pages:
                hits += 1
                on_use(key)
                continue
            while len(pages) >= capacity:
                gone = victim(key)
                if gone is None or gone == key:
                    break
                del pages[gone]
                pinned.discard(gone)
                on_remove(gone, True)
                evicted.append(gone)
            else:
                pages[key] = None
                on_insert(key, None)
        return Access(hits, evicted)

    def access_bytes(
        self,
        pages: Sequence[PageFacts],
        capacity_bytes: int,
        *,
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> Access:
        """``access`` for pages of any size with all their facts, in a tier of ``capacity_bytes``.

        All pages of the tier must have come this way or by ``insert``. A page larger than the tier stays
        out, and nothing goes for it. ``capacity`` follows the mean size of the pages, in steps of an eighth.
        """
        if pages:
            size = pages[0].nbytes if not self.pages else self.used_bytes / len(self.pages)
            self._resize_about(max(1, int(capacity_bytes // max(size, 1))))
        shares = self._begin([page.key for page in pages], mass, request)
        return self._access_pages(
            pages,
            shares,
            lambda page: self.used_bytes + page.nbytes > capacity_bytes,
            lambda page: page.nbytes <= capacity_bytes,
        )

    def resize(self, capacity: int) -> None:
        """The tier holds this many pages; evicts nothing."""
        if capacity < 1:
            raise ConfigError(f"policy {self.name!r}: a tier of {capacity} pages holds nothing")
        self.capacity = capacity
        self.on_resize()

    # ------------------------------------------------------------------ books

    def __len__(self) -> int:
        """Pages in the tier, pinned ones included."""
        return len(self.pages)

    def __contains__(self, key: object) -> bool:
        return key in self.pages

    def may_go(self, key: Key) -> bool:
        """Whether a page of the tier may be a victim now."""
        return key not in self.pinned and key not in self.children

    def check(self) -> None:
        """Recount everything from scratch; AssertionError if the books are wrong."""
        assert all(key in self.pages for key in self.pinned), "a page that is not here is pinned"
        children: dict[Key, int] = {}
        if self.leaf_first:
            for key, page in self.pages.items():
                assert page is not None, f"page {show(key)} has no facts"
                assert page.key == key, f"page {show(key)} has the facts of another"
                if page.parent is not None:
                    children[page.parent] = children.get(page.parent, 0) + 1
        assert children == self.children, "the numbers of children are wrong"
        self.own_check()

    def state(self, limit: int | None = None) -> dict[str, Any]:
        """All that the policy has learnt, JSON-able: order, counts, ghosts; not pins, which end with
        the process. Times are kept as seconds from now, so the time until ``load_state`` does not count.

        ``limit`` leaves out the coldest of each list of pages that is longer.
        """
        self.limit = limit
        return {"version": STATE_VERSION, "policy": self.name, "own": self.own_state()}

    def saved(self, keys: Iterable[Key]) -> list[object]:
        """Keys, coldest first, for ``own_state``; as many as the caller of ``state`` allows."""
        return [encode_key(key) for key in self.hottest(keys)]

    def hottest(self, keys: Iterable[Key]) -> list[Key]:
        """Of keys, coldest first, as many as the caller of ``state`` allows."""
        return list(keys) if self.limit is None else list(deque(keys, self.limit))

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the state of a policy of the same name, after the pages that are here have been
        inserted. Pages that it names and that are gone are skipped; pages that it does not name are colder
        than those it does.

        Raises:
            KvtierError: the state is of another policy or version, or damaged; nothing or a part of it was
                taken over, and the policy works on.
        """
        if state.get("version") != STATE_VERSION or state.get("policy") != self.name:
            raise KvtierError(
                f"{self.name}: the saved state is of policy {state.get('policy')!r}, version "
                f"{state.get('version')!r}; it is of use only to the same policy, version {STATE_VERSION}"
            )
        self.tick += 1
        self._unpinning = False
        try:
            self.load_own_state(state["own"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise KvtierError(f"{self.name}: the saved state is damaged: {error!r}") from error

    def walk(self, items: Sequence[T]) -> Iterable[T]:
        """A request's pages, given root first, in ``order``."""
        return reversed(items) if self.order == "tail" else items

    # ------------------------------------------------------------------ inside

    def _begin(
        self, keys: Sequence[Key], mass: Sequence[float] | None, request: Request
    ) -> Sequence[float] | None:
        if mass is not None:
            if len(mass) != len(keys):
                raise KvtierError(
                    f"{self.name}: {len(keys)} pages used with {len(mass)} masses; give one each"
                )
            bad = next((value for value in mass if not 0.0 <= value < float("inf")), None)
            if bad is not None:
                raise KvtierError(f"{self.name}: a mass is {bad!r}; it must be finite and >= 0")
        self.tick += 1
        self.requests += 1
        self._unpinning = False
        self.request = request
        self.share = 1.0 / len(keys) if keys else 0.0
        return mass

    def _access_pages(
        self,
        facts: Sequence[PageFacts],
        shares: Sequence[float] | None,
        full: Callable[[PageFacts], bool],
        fits: Callable[[PageFacts], bool] = lambda _: True,
    ) -> Access:
        """``access`` where each page has its facts. What does not fit into the empty tier stays out; it may have
        been here when the tier was larger, and gone since the request began."""
        hits = 0
        evicted: list[Key] = []
        weights = repeat(self.share) if shares is None else self.walk(shares)
        for page, share in zip(self.walk(facts), weights, strict=False):
            key = page.key
            self.share = share
            if key in self.pages:
                hits += 1
                self.on_use(key)
                continue
            if not fits(page):
                continue
            while full(page):
                gone = self.victim(key)
                if gone is None or gone == key:
                    break
                self._leave(gone, True)
                evicted.append(gone)
            else:
                self._enter(page)
                self.on_insert(key, None)
        return Access(hits, evicted)

    def _resize_about(self, capacity: int) -> None:
        if abs(capacity - self.capacity) * 8 > self.capacity:
            self.resize(capacity)

    def _enter(self, page: PageFacts) -> None:
        self.pages[page.key] = page
        self.used_bytes += page.nbytes
        if self.leaf_first and page.parent is not None:
            self.children[page.parent] = self.children.get(page.parent, 0) + 1

    def _leave(self, key: Key, evicted: bool) -> None:
        page = self.pages.pop(key)
        self.pinned.discard(key)
        self.on_remove(key, evicted)
        if page is None:
            return
        self.used_bytes -= page.nbytes
        parent = page.parent
        if not self.leaf_first or parent is None:
            return
        left = self.children[parent] - 1
        if left:
            self.children[parent] = left
            return
        del self.children[parent]
        if parent in self.pages:
            self.on_release(parent)

    def _known(self, key: Key) -> None:
        if key not in self.pages:
            raise KvtierError(f"{self.name}: page {show(key)} is not in the tier")


def chained(keys: Sequence[Key], nbytes: int = 1) -> list[PageFacts]:
    """Facts of a sequence's pages, root first, of which nothing but the keys is known."""
    parents = chain((None,), keys)
    return [
        PageFacts(key, parent, depth, nbytes)
        for depth, (key, parent) in enumerate(zip(keys, parents, strict=False))
    ]
