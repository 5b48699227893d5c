"""The words in which a store and a policy talk: keys, what is known of a page, and of a request."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from kvtier.errors import KvtierError

Key = Hashable
Order = Literal["tail", "head"]


class PageFacts(NamedTuple):
    """What a policy may know of a page.

    Attributes:
        key: the page's key; bytes in a store, anything hashable in a replay.
        parent: key of the page before it in its sequence; ``None`` for the first.
        depth: number of pages before it in its sequence.
        nbytes: bytes it takes in a tier.
        recompute_s: seconds to compute it again with its prefix at hand; ``None`` where nobody knows.
        reload_s: seconds to bring it back from the tier below; ``None`` where it would be lost or nobody
            knows.
    """

    key: Key
    parent: Key | None
    depth: int
    nbytes: int
    recompute_s: float | None = None
    reload_s: float | None = None


class Request(NamedTuple):
    """What is known of the request that uses pages. Every field is optional; a policy may ignore any.

    Attributes:
        id: the request.
        session: the conversation or agent run it belongs to.
        priority: pages of a higher one stay longer; ``None`` says nothing.
        ttl_s: seconds without use after which its pages are of no more use.
        next_use_at: when its pages are expected to be used again, in seconds on the policy's clock.
        at: when it came, on the policy's clock; ``None`` for now. A page that moves to another tier is
            reported there with the request that used it last.
    """

    id: Hashable = None
    session: Hashable = None
    priority: int | None = None
    ttl_s: float | None = None
    next_use_at: float | None = None
    at: float | None = None


#: A request of which nothing is known.
ANONYMOUS = Request()


class Access(NamedTuple):
    """What a whole request did to a tier.

    Attributes:
        hits: pages that were in the tier when the walk reached them.
        evicted: pages given up, in order. One may be of the same request and have come back since.
    """

    hits: int
    evicted: list[Key]


def show(key: Key) -> str:
    """A key as messages name it."""
    return key.hex()[:16] if isinstance(key, bytes) else repr(key)


def encode_key(key: Key) -> str | int | list[object]:
    """A key in JSON: bytes as hexadecimal text, integers as they are, text and tuples in a list."""
    if isinstance(key, bytes):
        return key.hex()
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str):
        return ["text", key]
    if isinstance(key, tuple):
        return ["tuple", *(encode_key(part) for part in key)]
    raise KvtierError(f"a key of type {type(key).__name__} cannot be saved; use bytes, int or str")


def decode_key(value: object) -> Key:
    """The key of ``encode_key``. Raises ValueError for anything else."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, list) and len(value) == 2 and value[0] == "text":
        return str(value[1])
    if isinstance(value, list) and value and value[0] == "tuple":
        return tuple(decode_key(part) for part in value[1:])
    raise ValueError(f"{value!r} is not a saved key")
