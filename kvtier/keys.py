"""Page keys: a chained hash of the identity and of all tokens up to the end of a page.

``key[i] = H(key[i-1], tokens of page i, extras of page i)`` and ``key[-1] = identity.digest``, with
H = BLAKE2b of 256 bits (RFC 7693) personalised ``kvtier.page``. Equal keys mean equal identity,
equal tokens from the first on and equal extra inputs, in every process on every machine.

What H reads: the parent key (32 bytes), the number of tokens, the tokens, the length of the extras,
the extras; each number as 8 bytes, little-endian.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from kvtier.errors import ConfigError
from kvtier.identity import ModelIdentity

PageKey: TypeAlias = bytes

#: Bytes of a key.
KEY_BYTES = 32

_TOKEN_BYTES = 8
_PERSON = b"kvtier.page"


class TokenArray(Protocol):
    """A one-dimensional integer array: ``numpy.ndarray``, ``torch.Tensor`` (on any device)."""

    def tolist(self) -> Any: ...


#: Token ids, integers from 0 to 2**63 - 1.
Tokens: TypeAlias = Sequence[int] | TokenArray


def root_key(identity: ModelIdentity | bytes) -> PageKey:
    """The parent of the first page's key: the digest of ``identity``, or that digest itself."""
    digest = identity.digest if isinstance(identity, ModelIdentity) else identity
    return _checked_key(digest, "identity")


def child_key(parent: PageKey, tokens: Tokens, extra: bytes = b"") -> PageKey:
    """The key of the page that holds ``tokens`` behind the page ``parent``.

    Args:
        parent: key of the page before, or ``root_key(identity)``.
        tokens: the page's tokens, at least one.
        extra: other inputs of the page, as ``encode_extras`` gives them.

    Raises:
        ConfigError: no token, a token that is no integer in [0, 2**63), or a parent that is no key.
    """
    data = token_bytes(tokens)
    if not data:
        raise ConfigError("a page needs at least one token to have a key")
    return _hash(_checked_key(parent, "parent"), data, extra)


def encode_extras(extras: Mapping[int, bytes], start: int, stop: int) -> bytes:
    """Inputs other than tokens at ``start <= position < stop`` as one byte string, empty for none.

    Each is encoded as its distance from ``start``, its length and its bytes, whole; so a content
    hash of an image keeps all its bits, and two inputs cannot run into one another.
    """
    at = sorted(position for position in extras if start <= position < stop)
    return b"".join(
        _u64(position - start) + _u64(len(extras[position])) + extras[position] for position in at
    )


def page_keys(
    identity: ModelIdentity | bytes,
    tokens: Tokens,
    page_tokens: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[PageKey]:
    """The keys of all full pages of ``tokens``, first page first.

    Args:
        identity: what the pages belong to, or its digest.
        tokens: the sequence from its first token on.
        page_tokens: tokens in a page.
        extras: position of a token -> other input that enters there (the content hash of an image
            at its first placeholder). Positions behind the last full page are without effect.

    Raises:
        ConfigError: a token that is no integer in [0, 2**63), ``page_tokens`` < 1, or an extra that
            is no bytes at a position >= 0.
    """
    return KeyChain(identity, page_tokens).append(tokens, extras)


class KeyChain:
    """The keys of a growing sequence.

    Holds the tokens (8 bytes each), so that cropping into the middle of a page and going on gives
    the right keys.

    Args:
        identity: what the pages belong to, or its digest.
        page_tokens: tokens in a page; must be the identity's.
    """

    def __init__(self, identity: ModelIdentity | bytes, page_tokens: int) -> None:
        if isinstance(page_tokens, bool) or not isinstance(page_tokens, int) or page_tokens < 1:
            raise ConfigError(f"page_tokens is {page_tokens!r}; it must be an integer >= 1")
        if isinstance(identity, ModelIdentity) and identity.page_tokens != page_tokens:
            raise ConfigError(
                f"page_tokens is {page_tokens}, but the identity's pages have "
                f"{identity.page_tokens} tokens; use that"
            )
        self.root = root_key(identity)
        self.page_tokens = page_tokens
        self._keys: list[PageKey] = []
        self._data = bytearray()
        self._extras: dict[int, bytes] = {}

    @property
    def keys(self) -> tuple[PageKey, ...]:
        """Keys of all full pages."""
        return tuple(self._keys)

    def __len__(self) -> int:
        """Number of tokens, those of the last unfilled page included."""
        return len(self._data) // _TOKEN_BYTES

    def tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """The tokens ``[start, stop)``."""
        return _decode(
            memoryview(self._data)[
                start * _TOKEN_BYTES : None if stop is None else stop * _TOKEN_BYTES
            ]
        )

    def append(self, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> list[PageKey]:
        """Add ``tokens``; the keys of the pages that became full by it.

        ``extras`` has positions in the whole sequence, none of them before ``len(self)``. Those
        behind the new tokens are remembered until their tokens come. When this raises, nothing was
        added.

        Raises:
            ConfigError: as ``page_keys``, or an extra for a token that is already there.
        """
        data = token_bytes(tokens)
        fresh = _checked_extras(extras, len(self))
        self._data += data
        self._extras.update(fresh)
        size = self.page_tokens * _TOKEN_BYTES
        first = len(self._keys)
        key = self._keys[-1] if self._keys else self.root
        # Pages without extras, nearly all of them, must not pay for a search.
        marked = {position // self.page_tokens for position in self._extras}
        with memoryview(self._data) as view:
            for page in range(first, len(self._data) // size):
                start = page * self.page_tokens
                extra = (
                    encode_extras(self._extras, start, start + self.page_tokens)
                    if page in marked
                    else b""
                )
                key = _hash(key, view[page * size : (page + 1) * size], extra)
                self._keys.append(key)
        return self._keys[first:]

    def truncate(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; keys and extras of what is gone are forgotten.

        Raises:
            ConfigError: negative, or more than there are.
        """
        if not 0 <= tokens <= len(self):
            raise ConfigError(f"cannot truncate to {tokens} tokens; the chain has {len(self)}")
        del self._data[tokens * _TOKEN_BYTES :]
        del self._keys[tokens // self.page_tokens :]
        self._extras = {
            position: extra for position, extra in self._extras.items() if position < tokens
        }

    def fork(self) -> KeyChain:
        """An independent copy."""
        other = KeyChain(self.root, self.page_tokens)
        other._keys = list(self._keys)
        other._data = bytearray(self._data)
        other._extras = dict(self._extras)
        return other

    def common_prefix(self, tokens: Tokens) -> int:
        """How many first tokens the chain and ``tokens`` have in common; extras do not count."""
        data = token_bytes(tokens)
        low, high = 0, min(len(data), len(self._data)) // _TOKEN_BYTES
        # Halving keeps the comparison in memcmp.
        while low < high:
            middle = (low + high + 1) // 2
            same = (
                data[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]
                == self._data[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]
            )
            if same:
                low = middle
            else:
                high = middle - 1
        return low


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as 8 little-endian bytes each.

    Raises:
        ConfigError: a token that is no integer in [0, 2**63), or not a one-dimensional sequence of
            tokens.
    """
    if isinstance(tokens, str | bytes | bytearray | memoryview):
        raise ConfigError(
            f"tokens are of type {type(tokens).__name__}; give a sequence of integers"
        )
    if "bool" in str(getattr(tokens, "dtype", "")):
        raise ConfigError("tokens are an array of bool; give a sequence of integers")
    values: Any = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        packed = array("q", values)
    except (TypeError, OverflowError, ValueError):
        raise ConfigError(_bad_token(values)) from None
    if packed and min(packed) < 0:
        raise ConfigError(_bad_token(packed))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _bad_token(values: Any) -> str:
    if not isinstance(values, Iterable):
        return f"tokens are {values!r}; give a sequence of integers"
    for index, value in enumerate(values):
        if not hasattr(value, "__index__") or not 0 <= value.__index__() < 2**63:
            return f"token {index} is {value!r}; a token is an integer from 0 to 2**63 - 1"
    return "tokens cannot be read twice; give a list or an array"


def _decode(data: memoryview) -> list[int]:
    packed = array("q", bytes(data))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _hash(parent: PageKey, data: bytes | memoryview, extra: bytes) -> PageKey:
    h = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=_PERSON)
    h.update(_u64(len(data) // _TOKEN_BYTES))
    h.update(data)
    h.update(_u64(len(extra)))
    h.update(extra)
    return h.digest()


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _checked_key(key: bytes, what: str) -> bytes:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ConfigError(f"{what} is {key!r}; give the {KEY_BYTES} bytes of a key or digest")
    return key


def _checked_extras(extras: Mapping[int, bytes] | None, length: int) -> dict[int, bytes]:
    fresh: dict[int, bytes] = {}
    for position, extra in (extras or {}).items():
        if not isinstance(position, int) or position < 0 or not isinstance(extra, bytes):
            raise ConfigError(
                f"extra input {extra!r} at position {position!r}; give bytes, at a position >= 0"
            )
        if position < length:
            raise ConfigError(
                f"extra input at position {position}, but the chain already has {length} tokens"
            )
        fresh[position] = extra
    return fresh
