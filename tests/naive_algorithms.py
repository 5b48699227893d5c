"""Policies by the text of their papers, on plain lists: every step looks at everything.

Lists have the coldest page first. Where the papers have no word for it, the rules are those of
``kvtier.policy``: a page that may not go is passed over, and a page that comes alone stands behind the pages
that were used with its parent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from naive_policy import Entry, NaivePolicy

from kvtier.policy import ANONYMOUS, Access, PageFacts, Request


class NaiveLists(NaivePolicy):
    """A policy whose pages stand in lists; an entry's ``notes["list"]`` names its list."""

    def line(self, name: Any) -> list[Entry]:
        return sorted((e for e in self.pages if e.notes["list"] == name), key=lambda e: e.place)

    def first(self, name: Any) -> Entry | None:
        return next(filter(self.may_go, self.line(name)), None)

    def move(self, entry: Entry, name: Any) -> None:
        entry.notes["list"] = name
        self.renew(entry)

    def stand(self, entry: Entry, name: Any, parent: Entry | None) -> None:
        """Enter a list: behind the parent's request if that is in it, else at the hot end."""
        entry.notes["list"] = name
        if parent is None or parent.notes["list"] != name:
            self.renew(entry)

    @property
    def size(self) -> int:
        return self.capacity or len(self.pages)

    def choose(self, incoming: Hashable | None) -> Entry | None:
        raise NotImplementedError

    def victim(self, incoming: Hashable | None = None) -> Any:
        entry = self.choose(incoming)
        return None if entry is None else entry.page.key

    def access_bytes(
        self, pages: Sequence[PageFacts], capacity_bytes: int, *, request: Request = ANONYMOUS
    ) -> Access:
        self.begin()
        hits, evicted = 0, []
        for page in self.walk(pages):
            entry = self.find(page.key)
            if entry is not None:
                hits += 1
                self.use_one(entry, 1 / len(pages), request)
                continue
            if page.nbytes > capacity_bytes:
                continue
            while sum(e.page.nbytes for e in self.pages) + page.nbytes > capacity_bytes:
                gone = self.victim(page.key)
                if gone is None or gone == page.key:
                    break
                self.remove(gone, evicted=True)
                evicted.append(gone)
            else:
                self.enter(page, None, 1 / len(pages), request)
        return Access(hits, evicted)


class NaiveARC(NaiveLists):
    """Megiddo and Modha, FAST 2003, figure 4."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ghosts: list[tuple[Any, str]] = []
        self.target = 0.0
        self.moved_for: Any = None

    def past(self, name: str) -> list[Any]:
        return [key for key, was in self.ghosts if was == name]

    def adapt(self, key: Any) -> None:
        if self.moved_for == key:
            return
        self.moved_for = key
        b1, b2 = len(self.past("t1")), len(self.past("t2"))
        if key in self.past("t1"):
            self.target = min(float(self.size), self.target + max(1.0, b2 / b1))
        elif key in self.past("t2"):
            self.target = max(0.0, self.target - max(1.0, b1 / b2))

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        key = entry.page.key
        if any(key == ghost for ghost, _ in self.ghosts):
            self.adapt(key)
            self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != key]
            entry.notes["list"] = "t2"
            self.renew(entry)
        else:
            self.stand(entry, "t1", parent)
        self.moved_for = None
        while self.past("t1") and len(self.line("t1")) + len(self.past("t1")) > self.size:
            self.ghosts.remove((self.past("t1")[0], "t1"))
        while self.past("t2") and len(self.pages) + len(self.ghosts) > 2 * self.size:
            self.ghosts.remove((self.past("t2")[0], "t2"))

    def used(self, entry: Entry, share: float, request: Request) -> None:
        self.move(entry, "t2")

    def removed(self, entry: Entry, evicted: bool) -> None:
        if evicted:
            self.ghosts.append((entry.page.key, entry.notes["list"]))

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        if capacity:
            self.target = min(self.target, capacity)

    def choose(self, incoming: Hashable | None) -> Entry | None:
        if incoming is not None and any(incoming == ghost for ghost, _ in self.ghosts):
            self.adapt(incoming)
        t1 = len(self.line("t1"))
        again = incoming is not None and incoming in self.past("t2")
        names = ["t1", "t2"]
        if not (t1 > self.target or (again and t1 == self.target)):
            names.reverse()
        return self.first(names[0]) or self.first(names[1])


class NaiveMQ(NaiveLists):
    """Zhou, Philbin and Li, USENIX ATC 2001, figure 6, with the lifetime given."""

    def __init__(self, *, queues: int, lifetime: float, ghosts: float, **options: Any) -> None:
        super().__init__(**options)
        self.top, self.lifetimes, self.ghosts_per_page = queues - 1, lifetime, ghosts
        self.gone: list[tuple[Any, int]] = []
        self.time = 0
        self.resize(0)

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        size = capacity or max(len(self.pages), 64)
        self.lifetime, self.most_gone = self.lifetimes * size, int(self.ghosts_per_page * size)

    def adjust(self) -> None:
        self.time += 1
        for level in range(1, self.top + 1):
            coldest = self.first(level)
            if coldest is not None and coldest.notes["expires"] < self.time:
                self.move(coldest, level - 1)
                coldest.notes["expires"] = self.time + self.lifetime

    def level(self, uses: int) -> int:
        return min(uses.bit_length() - 1, self.top)

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        entry.notes["list"] = None
        self.adjust()
        uses = dict(self.gone).get(entry.page.key, 0) + 1
        self.gone = [ghost for ghost in self.gone if ghost[0] != entry.page.key]
        entry.notes.update(uses=uses, expires=self.time + self.lifetime)
        self.stand(entry, self.level(uses), parent)
        if parent is not None and parent.notes["list"] == entry.notes["list"]:
            entry.notes["expires"] = parent.notes["expires"]
            entry.place = (parent.place[0], entry.place[1])

    def used(self, entry: Entry, share: float, request: Request) -> None:
        self.adjust()
        entry.notes["uses"] += 1
        entry.notes["expires"] = self.time + self.lifetime
        self.move(entry, self.level(entry.notes["uses"]))

    def unpinned(self, entry: Entry) -> None:
        self.renew(entry)
        entry.notes["expires"] = self.time + self.lifetime

    def removed(self, entry: Entry, evicted: bool) -> None:
        if evicted:
            self.gone.append((entry.page.key, entry.notes["uses"]))
            self.gone = self.gone[len(self.gone) - min(len(self.gone), self.most_gone) :]

    def choose(self, incoming: Hashable | None) -> Entry | None:
        found = (self.first(level) for level in range(self.top + 1))
        return next((entry for entry in found if entry is not None), None)


class NaiveS3FIFO(NaiveLists):
    """Yang et al., SOSP 2023, algorithm 1."""

    def __init__(self, *, small: float, ghosts: float, promote_uses: int, **options: Any) -> None:
        super().__init__(**options)
        self.share, self.ghosts_per_page, self.promote = small, ghosts, promote_uses
        self.gone: list[Any] = []
        self.filled = False

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        entry.notes["uses"] = 0
        entry.notes["list"] = None
        overflows = not self.filled and len(self.line("small")) >= self.share * self.size
        name = "main" if entry.page.key in self.gone or overflows else "small"
        self.gone = [key for key in self.gone if key != entry.page.key]
        self.stand(entry, name, parent)

    def used(self, entry: Entry, share: float, request: Request) -> None:
        entry.notes["uses"] = min(3, entry.notes["uses"] + 1)

    def unpinned(self, entry: Entry) -> None:
        pass

    def removed(self, entry: Entry, evicted: bool) -> None:
        self.filled = self.filled or evicted
        if evicted and entry.notes["list"] == "small":
            self.gone.append(entry.page.key)
            most = int(self.ghosts_per_page * self.size)
            self.gone = self.gone[max(0, len(self.gone) - most) :]

    def choose(self, incoming: Hashable | None) -> Entry | None:
        while len(self.line("small")) >= self.share * self.size or not self.line("main"):
            entry = self.first("small")
            if entry is None:
                break
            if entry.notes["uses"] < self.promote:
                return entry
            entry.notes["uses"] = 0
            self.move(entry, "main")
        while (entry := self.first("main")) is not None:
            if not entry.notes["uses"]:
                return entry
            entry.notes["uses"] -= 1
            self.move(entry, "main")
        while (entry := self.first("small")) is not None:
            if entry.notes["uses"] < self.promote:
                return entry
            entry.notes["uses"] = 0
            self.move(entry, "main")
        return self.first("main")


class NaiveSieve(NaiveLists):
    """Zhang et al., NSDI 2024, with the list cut at the hand and pages that may not go passed over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ahead, self.behind = "one", "other"

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        entry.notes["visited"] = False
        self.stand(entry, self.ahead, parent)

    def used(self, entry: Entry, share: float, request: Request) -> None:
        entry.notes["visited"] = True

    def unpinned(self, entry: Entry) -> None:
        pass

    def removed(self, entry: Entry, evicted: bool) -> None:
        if evicted and not self.line(self.ahead):
            self.ahead, self.behind = self.behind, self.ahead

    def choose(self, incoming: Hashable | None) -> Entry | None:
        while True:
            while (entry := self.first(self.ahead)) is not None:
                if not entry.notes["visited"]:
                    return entry
                entry.notes["visited"] = False
                self.move(entry, self.behind)
            if self.first(self.behind) is None:
                return None
            self.ahead, self.behind = self.behind, self.ahead


class PaperSieve:
    """Zhang et al., NSDI 2024, algorithm 1 as it is printed: one list, new pages in front, and a hand."""

    def __init__(self) -> None:
        self.list: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand: int | None = None

    def access(self, key: int, capacity: int) -> bool:
        if key in self.visited:
            self.visited[key] = True
            return True
        if len(self.list) >= capacity:
            at = len(self.list) - 1 if self.hand is None else self.list.index(self.hand)
            while self.visited[self.list[at]]:
                self.visited[self.list[at]] = False
                at = at - 1 if at else len(self.list) - 1
            self.hand = self.list[at - 1] if at else None
            del self.visited[self.list.pop(at)]
        self.list.insert(0, key)
        self.visited[key] = False
        return False


class NaiveLIRS(NaiveLists):
    """Jiang and Zhang, SIGMETRICS 2002, section 3.3. ``stack`` has the coldest key first."""

    def __init__(self, *, hir: float, ghosts: float, **options: Any) -> None:
        super().__init__(**options)
        self.share, self.ghosts_per_page = hir, ghosts
        self.stack: list[Any] = []
        self.gone: list[Any] = []

    @property
    def most_lir(self) -> int:
        return max(0, self.size - max(1, int(self.share * self.size)))

    def is_lir(self, key: Any) -> bool:
        entry = self.find(key)
        return entry is not None and entry.notes["list"] == "lir"

    def on_top(self, key: Any) -> None:
        self.stack = [*(k for k in self.stack if k != key), key]

    def demote(self) -> None:
        """The coldest LIR pages become HIR if there are too many."""
        while len(self.line("lir")) > self.most_lir and self.stack:
            key = self.stack.pop(0)
            if self.is_lir(key):
                self.move(self.get(key), "hir")

    def prune(self) -> None:
        """The coldest key of the stack must be of a LIR page."""
        while self.stack and not self.is_lir(self.stack[0]):
            del self.stack[0]
        self.gone = [key for key in self.gone if key in self.stack]

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        key = entry.page.key
        entry.notes["list"] = None
        known = key in self.gone
        self.gone = [ghost for ghost in self.gone if ghost != key]
        lir = known or len(self.line("lir")) < self.most_lir
        self.stand(entry, "lir" if lir else "hir", parent)
        self.on_top(key)
        if lir:
            self.demote()
        self.prune()

    def used(self, entry: Entry, share: float, request: Request) -> None:
        key = entry.page.key
        promoted = entry.notes["list"] == "hir" and key in self.stack
        lir = promoted or entry.notes["list"] == "lir"
        self.move(entry, "lir" if lir else "hir")
        self.on_top(key)
        if promoted:
            self.demote()
        self.prune()

    def unpinned(self, entry: Entry) -> None:
        self.renew(entry)
        if entry.notes["list"] == "lir":
            self.on_top(entry.page.key)
            self.prune()

    def removed(self, entry: Entry, evicted: bool) -> None:
        key = entry.page.key
        if key in self.stack:
            if entry.notes["list"] == "hir" and evicted:
                self.gone.append(key)
            else:
                self.stack.remove(key)
        self.prune()
        while len(self.gone) > int(self.ghosts_per_page * self.size):
            self.stack.remove(self.gone.pop(0))

    def choose(self, incoming: Hashable | None) -> Entry | None:
        return self.first("hir") or self.first("lir")


class NaiveWTinyLFU(NaiveLists):
    """Einziger, Friedman and Manes, ACM TOS 2017, section 4, with a count for each key."""

    def __init__(self, *, window: float, protected: float, **options: Any) -> None:
        super().__init__(**options)
        self.window, self.protected = window, protected
        self.counts: dict[Any, int] = {}
        self.counted = 0

    @property
    def most_window(self) -> int:
        return max(1, int(self.window * self.size))

    def count(self, key: Any) -> None:
        self.counts[key] = min(15, self.counts.get(key, 0) + 1)
        self.counted += 1
        if self.counted >= 10 * max(self.size, 64):
            self.counted = 0
            self.counts = {key: n // 2 for key, n in self.counts.items()}

    def inserted(self, entry: Entry, parent: Entry | None, request: Request) -> None:
        entry.notes["list"] = None
        self.count(entry.page.key)
        self.stand(entry, "window", parent)
        if len(self.line("window")) > self.most_window and (coldest := self.first("window")):
            self.move(coldest, "probation")

    def used(self, entry: Entry, share: float, request: Request) -> None:
        self.count(entry.page.key)
        if entry.notes["list"] != "probation":
            self.renew(entry)
            return
        self.move(entry, "protected")
        most = self.protected * (self.size - self.most_window)
        if len(self.line("protected")) > most and (coldest := self.first("protected")):
            self.move(coldest, "probation")

    def removed(self, entry: Entry, evicted: bool) -> None:
        if not evicted:
            self.counts.pop(entry.page.key, None)

    def choose(self, incoming: Hashable | None) -> Entry | None:
        coldest = self.first("probation") or self.first("protected")
        candidate = self.first("window")
        full = len(self.line("window")) >= self.most_window
        if candidate is None or (coldest is not None and not full):
            return coldest
        if coldest is None:
            return candidate
        count = self.counts.get
        if count(candidate.page.key, 0) <= count(coldest.page.key, 0):
            return candidate
        self.move(candidate, "probation")
        return coldest


class Watcher(NaivePolicy):
    """The books of a policy whose choice is its own, and what any choice has to obey: ``real`` is asked, and
    what it evicts is compared with what may go."""

    real: Any
    #: Pages that the last request evicted, yet to be looked at.
    evicted: list[Any]

    def victim(self) -> Any:
        if not self.candidates():
            return None
        assert self.evicted, "a page was turned away while another could have gone"
        return self.approve(self.evicted.pop(0))

    def victims(self) -> set[Any]:
        key = self.real.victim()
        if key is None:
            assert not self.candidates(), "nothing may go, it says"
            return {None}
        return {self.approve(key)}

    def approve(self, key: Any) -> Any:
        assert self.may_go(self.get(key)), "a page that may not go was named"
        parents = {entry.page.parent for entry in self.pages}
        if key in parents and self.real.name == "reuse":
            leaves = [entry for entry in self.pages if entry.page.key not in parents]
            assert all(leaf.pinned for leaf in leaves), "a page was named before its child"
        return key


class NaiveOpt:
    """Belady: of the pages here and the one that wants in, the one whose next use is farthest goes."""

    def __init__(self, requests: Sequence[Sequence[int]], *, bypass: bool) -> None:
        self.stream = [key for keys in requests for key in keys]
        self.bypass = bypass
        self.here: list[int] = []
        self.at = -1

    def next_use(self, key: int) -> float:
        later = self.stream[self.at + 1 :]
        return later.index(key) if key in later else float("inf")

    def access(self, keys: Sequence[int], capacity: int) -> tuple[int, int]:
        """Prefix hits and hits of the next request."""
        prefix = next((i for i, key in enumerate(keys) if key not in self.here), len(keys))
        hits = 0
        for key in keys:
            self.at += 1
            if key in self.here:
                hits += 1
                continue
            if len(self.here) >= capacity:
                farthest = max(self.here, key=self.next_use)
                if self.bypass and self.next_use(key) > self.next_use(farthest):
                    continue
                self.here.remove(farthest)
            self.here.append(key)
        return prefix, hits
