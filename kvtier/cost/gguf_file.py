"""The header of a GGUF file: metadata and tensor sizes, without the tensors.

The format is ggml's (docs/gguf.md in ggml-org/ggml), versions 2 and 3. Vocabularies, hundreds of
thousands of strings, are counted and not kept, so a header takes a fraction of a second. The
``gguf`` package builds an object for each and takes seconds, which a plan has not.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kvtier.errors import ConfigError

#: ggml type -> name, values in a block, bytes of a block (ggml.c, type_traits).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 20: ("IQ4_NL", 32, 18), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    41: ("Q1_0", 128, 18),
}  # fmt: skip

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

#: Arrays of numbers up to this length are kept: one entry a layer, not one a word.
_KEEP = 4096
_MAX_DEPTH = 4


@dataclass(frozen=True)
class Skipped:
    """An array that was counted and not kept."""

    length: int


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor: ``shape`` with the fastest dimension first, as the file has it."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int

    @property
    def values(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a file, or of all files of a split model.

    Attributes:
        metadata: key -> number, text, list of numbers, or ``Skipped``.
        file_bytes: of all files together. header_bytes: of that, what is not tensors.
    """

    path: Path
    metadata: dict[str, object]
    tensors: tuple[GGUFTensor, ...]
    file_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, block scales included."""
        return sum(tensor.nbytes for tensor in self.tensors)


def read_gguf(path: Path) -> GGUFFile:
    """The header of a file; of a split model (``-00001-of-00003.gguf``) those of all its files.

    Raises:
        ConfigError: not a GGUF file, of an unknown version, or cut short.
    """
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not isinstance(count, int) or count <= 1 or match is None:
        return first
    metadata: dict[str, object] = {}
    tensors: list[GGUFTensor] = []
    size = 0
    for number in range(1, count + 1):
        part = path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        if not part.exists():
            raise ConfigError(
                f"{str(path)!r} is one of {count} files of a model, and {part.name} is not beside it; "
                "download all of them"
            )
        one = _read_one(part)
        # The first file has the metadata; the others repeat a little of it.
        metadata = {**one.metadata, **metadata}
        tensors += one.tensors
        size += one.file_bytes
    return GGUFFile(path, metadata, tuple(tensors), size)


def _read_one(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ConfigError(f"{str(path)!r} has {size} bytes; a GGUF header has at least 24")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).file()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None


class _Reader:
    """A cursor over a header."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.at = 0

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{str(self.path)!r} is no GGUF file that can be read: {what}")

    def take(self, count: int) -> int:
        """Start of the next ``count`` bytes; moves past them."""
        start = self.at
        if count > self.size - start:
            raise self.wrong(
                f"its header wants {count:,} bytes at {start:,}, but the file has {self.size:,}; "
                "the download is incomplete or the file damaged"
            )
        self.at = start + count
        return start

    def number(self, code: str) -> int:
        size = struct.calcsize(f"<{code}")
        return int(struct.unpack_from(f"<{code}", self.data, self.take(size))[0])

    def text(self) -> str:
        length = self.number("Q")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def file(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise self.wrong(f"it begins with {self.data[:4]!r} and not with b'GGUF'")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            hint = "it is big-endian" if swapped else f"its version is {version}"
            raise self.wrong(f"{hint}; versions 2 and 3 in little-endian order are known")
        tensors, keys = self.number("Q"), self.number("Q")
        # Each takes at least this much: a damaged count must not keep the loop busy.
        if tensors > self.size // 24 or keys > self.size // 13:
            raise self.wrong(
                f"it claims {tensors:,} tensors and {keys:,} keys in {self.size:,} bytes, so it is damaged"
            )
        metadata: dict[str, object] = {}
        for _ in range(keys):
            key = self.text()
            metadata[key] = self.value(self.number("I"), 0)
        infos = [self.tensor() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise self.wrong(f"general.alignment is {align!r}")
        begin = -(-self.at // align) * align
        end = max((begin + offset + tensor.nbytes for tensor, offset in infos), default=self.at)
        if end > self.size:
            raise self.wrong(
                f"its tensors end at byte {end:,}, but the file has {self.size:,}; the download is "
                "incomplete"
            )
        return GGUFFile(self.path, metadata, tuple(one for one, _ in infos), self.size)

    def value(self, kind: int, depth: int) -> object:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            size = struct.calcsize(f"<{code}")
            return struct.unpack_from(f"<{code}", self.data, self.take(size))[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self.wrong(f"a value of type {kind} at byte {self.at:,}, which is not known")
        inner, length = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            start = self.take(length * struct.calcsize(f"<{code}"))
            if length > _KEEP:
                return Skipped(length)
            return list(struct.unpack_from(f"<{length}{code}", self.data, start))
        if inner == _STRING:
            self.skip_texts(length)
            return Skipped(length)
        for _ in range(length):
            self.value(inner, depth + 1)
        return Skipped(length)

    def skip_texts(self, count: int) -> None:
        data, at, size = self.data, self.at, self.size
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + unpack(data, at)[0]
        self.at = at
        if at > size or count > size // 8:
            self.at = min(at, size)
            self.take(size)

    def tensor(self) -> tuple[GGUFTensor, int]:
        name = self.text()
        dims = self.number("I")
        if not 0 <= dims <= 8:
            raise self.wrong(f"tensor {name[:60]!r} has {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))
        kind, offset = self.number("I"), self.number("Q")
        if kind not in GGML_TYPES:
            raise self.wrong(f"tensor {name[:60]!r} has the unknown type {kind}")
        type_name, block, block_bytes = GGML_TYPES[kind]
        values = prod(shape)
        if values % block:
            raise self.wrong(
                f"tensor {name[:60]!r} has {values:,} values, not whole blocks of {block}"
            )
        return GGUFTensor(name, shape, type_name, values // block * block_bytes), offset


def layer_numbers(value: object, layers: int, what: str) -> Iterator[int]:
    """A number a layer from a scalar or an array of the metadata; ConfigError if it is neither."""
    if isinstance(value, int | bool):
        yield from [int(value)] * layers
    elif isinstance(value, list) and len(value) >= layers:
        yield from (int(one) for one in value[:layers])
    else:
        raise ConfigError(f"GGUF field {what} is {value!r}; expected a number, or one a layer")
