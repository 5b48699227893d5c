"""The format of a session file: a stored sequence as a safetensors file that others can read.

The file is an ordinary safetensors file (https://github.com/huggingface/safetensors). Its tensors::

    layers.N.k   [tokens, k_heads, k_dim]   the K part of layer N, in the dtype of the layout
    layers.N.v   [tokens, v_heads, v_dim]   the V part (latent layers: the shared rope key)
    extra.N      [pages, bytes]  uint8      what a page holds behind its layers, if anything

``int4`` parts, for which there is no safetensors dtype, are uint8 ``[pages, bytes]``, two elements a byte as in
the page. Its metadata, all text:

    format       "kvtier-session/1"
    layout       JSON of ``PageLayout.describe``
    identity     JSON of ``ModelIdentity.describe_openly``; only ``digest`` if no more is known
    keys         JSON list of the pages' keys in hexadecimal, first page first
    checksums    JSON list of XXH3-128 in hexadecimal: a page's key and its parts in the order of the file
    tokens       JSON list of the token ids, if they are known
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, IdentityError, LayoutError
from kvtier.identity import TENANT_DIGEST, ModelIdentity
from kvtier.keys import page_keys
from kvtier.layout import PageLayout, Part

FORMAT = "kvtier-session/1"

#: torch's names and those of safetensors.
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
}
#: The first bytes of a safetensors file: how long its header is.
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SessionFile:
    """What the header of a session file says.

    Attributes:
        layout, identity: of the pages; ``identity`` as it was described, at least with its ``digest``.
        keys: of the pages, first page first.
        checksums: of the pages.
        tokens: token ids, or ``None``.
    """

    layout: PageLayout
    identity: dict[str, Any]
    keys: tuple[bytes, ...]
    checksums: tuple[str, ...]
    tokens: tuple[int, ...] | None

    @property
    def identity_digest(self) -> bytes:
        return bytes.fromhex(self.identity["digest"])

    def metadata(self) -> dict[str, str]:
        """As stored."""
        texts = {
            "format": FORMAT,
            "layout": json.dumps(self.layout.describe()),
            "identity": json.dumps(self.identity),
            "keys": json.dumps([key.hex() for key in self.keys]),
            "checksums": json.dumps(self.checksums),
        }
        if self.tokens is not None:
            texts["tokens"] = json.dumps(self.tokens)
        return texts

    @classmethod
    def parse(cls, metadata: Mapping[str, str], path: Path) -> SessionFile:
        """From the metadata of a file.

        Raises:
            ConfigError: it is no session file, or its layout, identity, keys and tokens do not belong together.
        """
        if metadata.get("format") != FORMAT:
            raise ConfigError(
                f"{path} has format {metadata.get('format')!r}; import reads {FORMAT!r}, "
                "which 'kvtier store export' writes"
            )
        try:
            layout = PageLayout.from_description(json.loads(metadata["layout"]))
            identity = json.loads(metadata["identity"])
            digest = bytes.fromhex(identity["digest"])
            keys = tuple(bytes.fromhex(key) for key in json.loads(metadata["keys"]))
            sums = tuple(json.loads(metadata["checksums"]))
            tokens = json.loads(metadata.get("tokens", "null"))
            known = None if tokens is None else tuple(int(token) for token in tokens)
        except LayoutError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: its metadata cannot be read ({error})") from error
        if len(identity) > 1:
            if not str(identity.get("tenant", "")).startswith(TENANT_DIGEST):
                try:
                    ModelIdentity.from_description(identity)
                except IdentityError as error:
                    raise ConfigError(f"{path}: {error}") from error
            if identity.get("layout_digest") != layout.digest.hex():
                raise ConfigError(f"{path}: its identity is of another page layout than its pages")
        if not keys or len(sums) != len(keys) or len(set(keys)) != len(keys):
            raise ConfigError(
                f"{path}: {len(keys)} keys and {len(sums)} checksums; one each a page"
            )
        file = cls(layout, identity, keys, sums, known)
        if known is not None and page_keys(digest, known, layout.page_tokens) != list(keys):
            raise ConfigError(f"{path}: its keys are not those of its tokens and identity")
        return file


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file and where its bytes are in a page: ``nbytes`` from ``offset`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def tensors_of(
    layout: PageLayout, pages: int, page_bytes: int, ranges: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """The tensors of a file with ``pages`` pages.

    Args:
        page_bytes, ranges: the geometry of the store: bytes of a page, ``(offset, nbytes)`` of its planes.
    """
    found: list[Tensor] = []
    for plane in layout.planes:
        if plane is None:
            continue
        for letter, part in (("k", plane.k), ("v", plane.v)):
            if part.nbytes:
                found.append(_tensor(f"layers.{plane.layer}.{letter}", part, layout, pages))
    end = max(tensor.offset + tensor.nbytes for tensor in found)
    extra = [(offset, nbytes) for offset, nbytes in ranges if offset >= end]
    for number, (offset, nbytes) in enumerate(extra):
        found.append(Tensor(f"extra.{number}", "U8", (pages, nbytes), offset, nbytes))
    if any(tensor.offset + tensor.nbytes > page_bytes for tensor in found):
        raise LayoutError(f"the layout's pages are larger than {page_bytes} bytes, the store's")
    return found


def _tensor(name: str, part: Part, layout: PageLayout, pages: int) -> Tensor:
    dtype = _DTYPES.get(part.dtype)
    if dtype is None:
        return Tensor(name, "U8", (pages, part.nbytes), part.offset, part.nbytes)
    shape = (pages * layout.page_tokens, part.heads, part.dim)
    return Tensor(name, dtype, shape, part.offset, part.nbytes)


def header(session: SessionFile, tensors: Sequence[Tensor]) -> bytes:
    """The file up to its data. Its length does not depend on the checksums' values."""
    entries: dict[str, Any] = {"__metadata__": session.metadata()}
    at = 0
    for tensor in tensors:
        nbytes = tensor.nbytes * len(session.keys)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + text


def data_at(path: Path, entry: Any, tensor: Tensor, pages: int) -> int:
    """Where the data of a tensor begins, behind the header. ConfigError if it is another tensor."""
    nbytes = tensor.nbytes * pages
    try:
        at, stop = entry["data_offsets"]
        good = entry["dtype"] == tensor.dtype and tuple(entry["shape"]) == tensor.shape
        if good and isinstance(at, int) and at >= 0 and stop == at + nbytes:
            return at
    except (TypeError, KeyError, ValueError):
        pass
    raise ConfigError(
        f"{path}: tensor {tensor.name} is {entry!r}; it must be {tensor.dtype} {list(tensor.shape)}"
    )
