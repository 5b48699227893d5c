"""LIRS: pages whose last two uses were close together stay, however long ago the last one is.

Origin: S. Jiang, X. Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to
improve buffer cache performance", SIGMETRICS 2002. Most of the tier is for pages of low inter-reference
recency (LIR). The others (HIR) have a small queue, from which victims come. The stack has all pages by
recency down to the coldest LIR page, evicted ones included: a HIR page used while it is in the stack becomes
LIR, and the coldest LIR page becomes HIR in exchange.

``ghosts`` bounds the evicted pages in the stack, which the paper leaves open. Where no HIR page may go, the
least recently used LIR page goes that may.

Sizes that differ: counted in pages.

Cost: O(1) amortised, O(log n) for pages that were parked (see ``kvtier.policies.queue``). Memory: a queue entry
and a stack entry a page, and a stack entry for each of ``ghosts`` times as many.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ghosts import Ghosts
from kvtier.policies.queue import PageQueue
from kvtier.policy import Key, ResidencyPolicy, decode_key


class LIRS(ResidencyPolicy):
    """Low inter-reference recency set.

    Args:
        leaf_first: see ResidencyPolicy.
        hir: share of the tier for pages of high inter-reference recency, between 0 and 1; at least one page.
        ghosts: evicted pages that are remembered, in multiples of the tier's pages.

    Raises:
        ConfigError: a parameter is out of its range.
    """

    name: ClassVar[str] = "lirs"

    def __init__(self, *, leaf_first: bool, hir: float = 0.01, ghosts: float = 2.0) -> None:
        super().__init__(leaf_first=leaf_first)
        if not 0.0 < hir < 1.0:
            raise ConfigError(f"policy 'lirs': hir={hir!r}; give a share between 0 and 1")
        if not 0.0 <= ghosts < math.inf:
            raise ConfigError(f"policy 'lirs': ghosts={ghosts!r}; give a number of at least 0")
        self._hir_share, self._ghosts_per_page = hir, ghosts
        self._lir, self._hir = PageQueue(self), PageQueue(self)
        #: LIR pages, and others used since the coldest LIR page was; the coldest first.
        self._stack: OrderedDict[Key, None] = OrderedDict()
        #: Evicted pages in the stack.
        self._ghosts: Ghosts[bool] = Ghosts()

    def on_insert(self, key: Key, beside: Key | None) -> None:
        known = self._ghosts.pop(key) is not None
        if known or len(self._lir) < self._most_lir:
            self._lir.push(key, beside)
            self._to_top(key)
            self._exchange()
        else:
            self._hir.push(key, beside)
            self._to_top(key)
            self._prune()

    def on_use(self, key: Key) -> None:
        if key in self._lir:
            self._lir.renew(key)
            self._to_top(key)
            self._prune()
        elif key in self._stack:
            self._hir.discard(key)
            self._lir.push(key)
            self._to_top(key)
            self._exchange()
        else:
            self._hir.renew(key)
            self._to_top(key)
            self._prune()

    def on_remove(self, key: Key, evicted: bool) -> None:
        if key in self._lir:
            self._lir.discard(key)
            del self._stack[key]
        else:
            self._hir.discard(key)
            if key in self._stack:
                if evicted:
                    self._ghosts.add(key, True)
                else:
                    del self._stack[key]
        self._prune()
        self._forget()

    def on_release(self, key: Key) -> None:
        (self._lir if key in self._lir else self._hir).release(key)

    def on_unpin(self, key: Key) -> None:
        if key in self._lir:
            self._lir.renew(key)
            self._to_top(key)
            self._prune()
        else:
            self._hir.renew(key)

    def victim(self, incoming: Key | None = None) -> Key | None:
        key = self._hir.first()
        return self._lir.first() if key is None else key

    def own_state(self) -> dict[str, Any]:
        return {
            "lir": self.saved(self._lir),
            "hir": self.saved(self._hir),
            "stack": self.saved(self._stack),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        for name, queue in (("lir", self._lir), ("hir", self._hir)):
            for key in map(decode_key, state[name]):
                if key in self.pages:
                    (self._lir if key in self._lir else self._hir).discard(key)
                    queue.push(key)
        for key in map(decode_key, state["stack"]):
            if key not in self.pages:
                self._ghosts.add(key, True)
            self._to_top(key)
        for key in self._lir:
            if key not in self._stack:
                self._to_top(key)
        self._exchange()
        self._prune()
        self._forget()

    def own_check(self) -> None:
        lir, hir = set(self._lir), set(self._hir)
        stack, ghosts = set(self._stack), set(self._ghosts)
        assert not lir & hir, "a page is of both kinds"
        assert lir | hir == self.pages.keys(), "the queues have other pages than the tier"
        assert lir <= stack, "a LIR page is not in the stack"
        assert stack - lir - hir == ghosts, "the stack has pages that nobody knows"
        assert not self._stack or next(iter(self._stack)) in self._lir, "the stack was not pruned"
        self._lir.check()
        self._hir.check()

    @property
    def _most_lir(self) -> int:
        size = self.capacity or len(self.pages)
        return max(0, size - max(1, int(self._hir_share * size)))

    def _to_top(self, key: Key) -> None:
        self._stack[key] = None
        self._stack.move_to_end(key)

    def _exchange(self) -> None:
        """The coldest LIR pages become HIR if there are too many of them."""
        while len(self._lir) > self._most_lir and self._stack:
            key, _ = self._stack.popitem(last=False)
            if key in self._lir:
                self._lir.discard(key)
                self._hir.push(key)
            else:
                self._ghosts.pop(key)
        self._prune()

    def _prune(self) -> None:
        """The coldest page of the stack must be LIR."""
        stack, lir = self._stack, self._lir
        while stack:
            key = next(iter(stack))
            if key in lir:
                return
            del stack[key]
            self._ghosts.pop(key)

    def _forget(self) -> None:
        most = int(self._ghosts_per_page * (self.capacity or len(self.pages)))
        while len(self._ghosts) > most:
            key = next(iter(self._ghosts))
            self._ghosts.pop(key)
            del self._stack[key]
