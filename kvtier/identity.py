"""What the numbers in a page depend on besides its tokens.

Two pages may be exchanged only if their identities are equal, so the rule is: what cannot be
determined is refused, never guessed. The digest is a hash over a canonical encoding in which each
value is preceded by its field's name, its type and its length; no value can slide from one field
into another.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvtier.errors import IdentityError
from kvtier.layout import LAYOUT_VERSION

#: A content digest shorter than this is not accepted: two contents might collide.
MIN_CONTENT_DIGEST = 16

#: What the digest of a tenant's salt begins with.
TENANT_DIGEST = "blake2b:"


@dataclass(frozen=True)
class AdapterIdentity:
    """One active adapter.

    Attributes:
        digest: hash of the adapter's content (weights, where they apply), 16 bytes or more. Never
            its name.
        scale: the factor its contribution is multiplied with. 0 is the same as no adapter.

    Raises:
        IdentityError: the digest is missing or too short, or the scale is not finite.
    """

    digest: bytes
    scale: float

    def __post_init__(self) -> None:
        _content("adapter digest", self.digest)
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float):
            raise _refusal("adapter scale", self.scale, "give a number")
        try:
            scale = float(self.scale)
        except OverflowError:
            scale = math.inf
        if not math.isfinite(scale):
            raise _refusal("adapter scale", self.scale, "give a finite number")
        object.__setattr__(self, "scale", scale)


@dataclass(frozen=True)
class ModelIdentity:
    """Everything a page's numbers depend on besides its tokens.

    Equality of two identities and equality of their digests are the same thing. Adapters are a
    multiset: their order does not matter, an adapter of scale 0 is left out, and one adapter loaded
    twice counts twice (two halves are not one whole: the sums are rounded differently).

    Attributes:
        model: architecture or name. Must not be empty; it does not stand in for ``weights_digest``.
        revision: version of the model if it has one, else empty.
        weights_digest: hash of the weights' content, 16 bytes or more.
        weights_quantisation: method and parameters of the weights' quantisation, empty for none.
        kv_dtype: dtype of the keys and values as computed, by torch's name (``"bfloat16"``).
        kv_quantisation: how stored KV is quantised, empty for none.
        rope: type and parameters of the position encoding, as text. Empty for a model without one.
        attention: kind of attention, windows and scaling, as text.
        layout_digest: ``PageLayout.digest``.
        page_tokens: tokens in a page.
        adapters: active adapters.
        tensor_parallel_rank, tensor_parallel_size: which slice of the heads the pages hold.
        layout_version: version of the page format.
        tenant: salt; pages of different tenants are never exchanged.

    Raises:
        IdentityError: a field is missing or impossible; the message names it.
    """

    model: str
    revision: str
    weights_digest: bytes
    weights_quantisation: str
    kv_dtype: str
    kv_quantisation: str
    rope: str
    attention: str
    layout_digest: bytes
    page_tokens: int
    adapters: tuple[AdapterIdentity, ...] = ()
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    layout_version: int = LAYOUT_VERSION
    tenant: str = ""

    def __post_init__(self) -> None:
        for name in _TEXT:
            if not isinstance(getattr(self, name), str):
                raise _refusal(name, getattr(self, name), "give text, empty if there is none")
        for name in ("model", "kv_dtype", "attention"):
            if not getattr(self, name):
                raise _refusal(name, "", "determine it from the model")
        _content("weights_digest", self.weights_digest)
        _content("layout_digest", self.layout_digest)
        for name, least in (
            ("page_tokens", 1),
            ("tensor_parallel_rank", 0),
            ("tensor_parallel_size", 1),
            ("layout_version", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise _refusal(name, value, f"give an integer >= {least}")
        if self.tensor_parallel_rank >= self.tensor_parallel_size:
            raise _refusal(
                "tensor_parallel_rank",
                self.tensor_parallel_rank,
                f"it must be below tensor_parallel_size = {self.tensor_parallel_size}",
            )
        for adapter in self.adapters:
            if not isinstance(adapter, AdapterIdentity):
                raise _refusal("adapters", adapter, "give AdapterIdentity objects")
        # The canonical order makes == agree with the digest.
        active = sorted(
            (a for a in self.adapters if a.scale != 0.0), key=lambda a: (a.digest, a.scale)
        )
        object.__setattr__(self, "adapters", tuple(active))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, the same in every process; different for any two identities that differ."""
        parts: list[bytes] = []
        for field in fields(self):
            _encode(parts, field.name.encode())
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                parts.append(b"t" + len(value).to_bytes(8, "little"))
                for adapter in value:
                    _encode(parts, adapter.digest)
                    _encode(parts, adapter.scale)
            else:
                _encode(parts, value)
        return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"kvtier.identity").digest()

    def describe(self) -> dict[str, object]:
        """All fields by name, for people and JSON; bytes as hexadecimal text. Last the digest."""
        out: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            out[field.name] = value.hex() if isinstance(value, bytes) else value
        out["adapters"] = [{"digest": a.digest.hex(), "scale": a.scale} for a in self.adapters]
        out["digest"] = self.digest.hex()
        return out

    def describe_openly(self) -> dict[str, object]:
        """As ``describe``, but of the tenant's salt only a digest: for places that others may read."""
        out = self.describe()
        out["tenant"] = tenant_digest(self.tenant)
        return out

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> ModelIdentity:
        """The identity that ``describe`` gave.

        Raises:
            IdentityError: it is not a description, was altered, or is of another version.
        """
        values = dict(description)
        try:
            digest = values.pop("digest")
            for name in ("weights_digest", "layout_digest"):
                values[name] = bytes.fromhex(values[name])
            values["adapters"] = tuple(
                AdapterIdentity(bytes.fromhex(adapter["digest"]), adapter["scale"])
                for adapter in values["adapters"]
            )
            identity = cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise IdentityError(
                f"the description of the model identity is incomplete or of another version ({error})"
            ) from error
        if identity.digest.hex() != digest:
            raise IdentityError(
                "the description of the model identity does not give the digest it names; "
                "it was altered, or made by another version of kvtier"
            )
        return identity


def tenant_digest(tenant: str) -> str:
    """What stands for a tenant's salt where others may read; empty for none."""
    if not tenant:
        return ""
    salt = tenant.encode("utf-8", "surrogatepass")
    return TENANT_DIGEST + hashlib.blake2b(salt, digest_size=16).hexdigest()


_TEXT = (
    "model",
    "revision",
    "weights_quantisation",
    "kv_dtype",
    "kv_quantisation",
    "rope",
    "attention",
    "tenant",
)


def _encode(parts: list[bytes], value: str | bytes | int | float) -> None:
    if isinstance(value, str):
        # surrogatepass: a tenant salt may be any text that Python can hold.
        kind, data = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, data = b"b", value
    elif isinstance(value, int):
        kind, data = b"i", value.to_bytes(8, "little", signed=True)
    else:
        kind, data = b"f", struct.pack("<d", value)
    parts += (kind, len(data).to_bytes(8, "little"), data)


def _content(name: str, value: object) -> None:
    if not isinstance(value, bytes):
        raise _refusal(name, value, "give the bytes of a content hash")
    if len(value) < MIN_CONTENT_DIGEST:
        raise _refusal(
            name,
            value,
            f"hash the content to {MIN_CONTENT_DIGEST} bytes or more; a name is no substitute",
        )


def _refusal(name: str, value: object, remedy: str) -> IdentityError:
    state = "missing" if value in ("", b"", None) else f"{value!r}"
    return IdentityError(
        f"identity field {name} is {state}: {remedy}. Without it pages are not shared."
    )
