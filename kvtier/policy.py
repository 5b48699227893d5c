"""The residency policy: which pages stay in a tier. It never changes a result, only what it costs.

One policy object serves one tier. It knows pages by key and by the facts below, never their bytes. The
store tells it what happens (insert, touch, pin, unpin, remove) and asks it for a victim when the tier
needs room. Contract, checked by ``check()`` in tests and debug mode:

* ``victim()`` never names a pinned page, and with ``leaf_first`` never a page whose child is in the tier;
* every operation takes time independent of the number of pages (amortised, a logarithm is allowed);
* ``victim()`` changes nothing: the store pins the page while it moves and removes it when it is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from kvtier.plugins import Plugins

_PLUGINS = Plugins("kvtier.policies", "policy")


class PageFacts(NamedTuple):
    """What a policy may know of a page.

    Attributes:
        key: the page's key.
        parent: key of the page before it in its sequence; ``None`` for the first.
        depth: number of pages before it in its sequence.
        nbytes: bytes it takes in a tier.
    """

    key: bytes
    parent: bytes | None
    depth: int
    nbytes: int


class ResidencyPolicy(ABC):
    """Chooses victims in one tier.

    Args:
        leaf_first: whether eviction from this tier loses the page. Then no page may go before its children,
            since a suffix without its prefix cannot be used by anybody.
    """

    #: Name in messages and statistics.
    name: ClassVar[str]

    def __init__(self, *, leaf_first: bool) -> None:
        self.leaf_first = leaf_first

    @abstractmethod
    def insert(self, page: PageFacts) -> None:
        """A page has become resident, unpinned. Its parent is already here, or never will be."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes], mass: Sequence[float] | None = None) -> None:
        """A request used these pages, given from the root of the sequence on; unknown keys are skipped.

        ``mass`` has one number a key, the share of attention it received (0..1), where it was measured.
        """

    @abstractmethod
    def pin(self, key: bytes) -> None:
        """The page must not be a victim until ``unpin``. The store counts; this is called once."""

    @abstractmethod
    def unpin(self, key: bytes) -> None:
        """The page may be a victim again; it counts as just used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """The page has left the tier, pinned or not."""

    @abstractmethod
    def victim(self) -> bytes | None:
        """The page to give up next, or ``None`` if none may go."""

    @abstractmethod
    def __len__(self) -> int:
        """Pages in the tier, pinned ones included."""

    @abstractmethod
    def check(self) -> None:
        """Recount everything from scratch; AssertionError if the books are wrong."""


def load_policy(spec: str, *, leaf_first: bool) -> ResidencyPolicy:
    """A policy from ``NAME``, ``NAME:key=value,...``, ``module:Class`` or ``module:Class:key=value,...``.

    Names are the entry points of the group ``kvtier.policies``. Values are read as int, float, true/false
    or text, by the type of the parameter's default.

    Raises:
        ConfigError: unknown name, class or parameter, or a value that is not of the parameter's type.
    """
    cls, values = _PLUGINS.load(spec, ResidencyPolicy, hidden=("leaf_first",))  # type: ignore[type-abstract]
    return cls(leaf_first=leaf_first, **values)
