"""The directory: the one table that says which page is where. It does no I/O and moves nothing.

Everything a policy must know happens here, so that the policies' books and the directory's cannot differ:
a copy that becomes resident is inserted, a copy that is held is pinned, a copy that goes is removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import cast

from kvtier.policy import ANONYMOUS, Request, ResidencyPolicy
from kvtier.store.page import TIERS, Copy, Page
from kvtier.store.stats import TierStats


class Directory:
    """Pages by key, their copies by tier, and one policy a tier.

    Args:
        policies: tier name -> policy, for the tiers that exist.
        page_bytes: bytes of a page.
    """

    def __init__(self, policies: dict[str, ResidencyPolicy], page_bytes: int) -> None:
        self.policies = policies
        self.page_bytes = page_bytes
        self.tiers = [tier for tier in TIERS if tier in policies]
        #: The last tier: what leaves it is gone.
        self.floor = self.tiers[-1]
        self.pages: dict[bytes, Page] = {}
        #: Key of a page, known or not -> pages of the directory whose parent it is.
        self._children: Counter[bytes] = Counter()
        self.counts: Counter[str] = Counter()
        self.stats = {tier: TierStats() for tier in TIERS}

    def __len__(self) -> int:
        return len(self.pages)

    def get(self, key: bytes) -> Page | None:
        return self.pages.get(key)

    def lower(self, tier: str) -> str | None:
        """The next tier down, ``None`` for the last."""
        at = self.tiers.index(tier) + 1
        return self.tiers[at] if at < len(self.tiers) else None

    def add(self, page: Page) -> None:
        """Enter a page that has no copies yet."""
        assert page.key not in self.pages
        self.pages[page.key] = page
        # Of a page that was lost, a suffix may still be held, on disk too.
        page.torn = page.key in self._children
        if page.parent is not None:
            self._children[page.parent] += 1

    def attach(self, page: Page, copy: Copy) -> None:
        """A copy is in place, or on its way if ``copy.arriving``."""
        assert copy.tier not in page.copies
        page.copies[copy.tier] = copy
        self.counts[copy.tier] += 1
        if copy.tier == self.floor and page.owners:
            copy.holds += 1
        if not copy.arriving:
            self._resident(page, copy)

    def arrived(self, page: Page, copy: Copy) -> None:
        """A copy that was on its way is in place."""
        copy.arriving = False
        self._resident(page, copy)

    def detach(self, page: Page, copy: Copy, *, evicted: bool = False) -> None:
        """A copy is gone, ``evicted`` to make room. Forgets the page with its last copy, unless somebody
        owns it and has to be told."""
        del page.copies[copy.tier]
        self.counts[copy.tier] -= 1
        if not copy.arriving:
            self.policies[copy.tier].remove(page.key, evicted=evicted)
            self.stats[copy.tier].pages_out += 1
        self._forget(page)

    def _forget(self, page: Page) -> None:
        if page.copies or page.owners:
            return
        del self.pages[page.key]
        if page.parent is not None:
            self._children[page.parent] -= 1
            if not self._children[page.parent]:
                del self._children[page.parent]

    def hold(self, page: Page, copy: Copy) -> None:
        """One more reason not to evict this copy."""
        copy.holds += 1
        if copy.holds == 1 and not copy.arriving:
            self.policies[copy.tier].pin(page.key)

    def unhold(self, page: Page, copy: Copy, *, used: bool = False) -> None:
        """One reason less; ``used`` if it was somebody's use of the page, not only a move."""
        copy.holds -= 1
        assert copy.holds >= 0
        if copy.holds == 0 and not copy.arriving and page.copies.get(copy.tier) is copy:
            self.policies[copy.tier].unpin(page.key, used=used)

    def own(self, page: Page, owner: str) -> None:
        """``owner`` needs the page; it may move from now on but not be dropped."""
        if not page.owners and self.floor in page.copies:
            self.hold(page, page.copies[self.floor])
        page.owners[owner] += 1

    def disown(self, page: Page, owner: str) -> None:
        page.owners[owner] -= 1
        assert page.owners[owner] >= 0
        if page.owners[owner] == 0:
            del page.owners[owner]
        if not page.owners and self.floor in page.copies:
            self.unhold(page, page.copies[self.floor])
        self._forget(page)

    def use(
        self,
        keys: Sequence[bytes],
        mass: Sequence[float] | None = None,
        request: Request = ANONYMOUS,
    ) -> None:
        """A request used these pages, root first; see ``ResidencyPolicy.use``."""
        for policy in self.policies.values():
            policy.use(keys, mass, request)
        for key in keys:
            page = self.pages.get(key)
            if page is not None:
                page.request = request

    def session_ended(self, keys: Sequence[bytes], session: Hashable) -> None:
        """A session needs these pages, root first, no more."""
        for policy in self.policies.values():
            policy.session_ended(keys, session)

    def victim(self, tier: str) -> Page | None:
        """The page that the policy of a tier gives up next, ``None`` if none may go."""
        key = self.policies[tier].victim()
        return None if key is None else self.pages[cast(bytes, key)]

    def holders(self, tier: str) -> dict[str, int]:
        """Who keeps pages of a tier: owner -> pages. Walks the directory; for error messages."""
        counts: Counter[str] = Counter()
        for page in self.pages.values():
            copy = page.copies.get(tier)
            if copy is None or not copy.holds:
                continue
            if page.owners:
                counts.update(page.owners.keys())
            else:
                counts["leases and transfers"] += 1
        return dict(counts)

    def orphan(self, page: Page) -> bool:
        """Whether the prefix of a page is nowhere, so that no lookup can reach it."""
        if page.parent is None:
            return False
        above = self.pages.get(page.parent)
        return above is None or not above.copies

    def descendants(self, page: Page) -> list[Page]:
        """All pages below ``page``, deepest first. Walks the directory if there are any; only for the rare
        cascade."""
        if page.key not in self._children:
            return []
        below: dict[bytes, list[Page]] = {}
        for other in self.pages.values():
            if other.parent is not None:
                below.setdefault(other.parent, []).append(other)
        order, queue = [], list(below.get(page.key, ()))
        while queue:
            current = queue.pop()
            order.append(current)
            queue.extend(below.get(current.key, ()))
        return sorted(order, key=lambda p: -p.depth)

    def _resident(self, page: Page, copy: Copy) -> None:
        self.policies[copy.tier].insert(page.facts(self.page_bytes), page.request)
        self.stats[copy.tier].pages_in += 1
        if copy.holds:
            self.policies[copy.tier].pin(page.key)

    def _kept(self) -> set[bytes]:
        """Keys of pages that may not go now: they, or pages below them, are owned or held."""
        kept: set[bytes] = set()
        for page in self.pages.values():
            at: Page | None = page if page.kept else None
            while at is not None and at.key not in kept:
                kept.add(at.key)
                at = self.pages.get(at.parent) if at.parent is not None else None
        return kept

    def check(self) -> None:
        """Recount everything; AssertionError if a book is wrong."""
        counts: Counter[str] = Counter()
        resident: Counter[str] = Counter()
        children: Counter[bytes] = Counter()
        kept = self._kept()
        for key, page in self.pages.items():
            assert key == page.key
            assert page.copies or page.owners, (
                "a page without a copy or an owner is in the directory"
            )
            if page.parent is not None:
                children[page.parent] += 1
                assert key in kept or not self.orphan(page), (
                    "a page's prefix is gone: an unusable suffix takes room"
                )
            for tier, copy in page.copies.items():
                assert copy.tier == tier
                assert (copy.slot is None) == (tier == "disk")
                counts[tier] += 1
                resident[tier] += not copy.arriving
                if copy.arriving:
                    continue
                if tier == self.floor and page.owners:
                    assert copy.holds > 0, "an owned page may be dropped"
                parent = self.pages.get(page.parent) if page.parent is not None else None
                if tier == "disk" and parent is not None and parent.copies:
                    assert "disk" in parent.copies or parent.torn, (
                        "a page is on disk and its prefix is not"
                    )
        assert children == self._children, "children are miscounted"
        for tier in self.tiers:
            assert counts[tier] == self.counts[tier], (
                f"{tier} has {counts[tier]} pages, the books say {self.counts[tier]}"
            )
            assert resident[tier] == len(self.policies[tier]), (
                f"the policy of {tier} has other pages than the directory"
            )
            self.policies[tier].check()
