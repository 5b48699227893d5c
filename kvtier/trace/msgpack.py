"""Reading msgpack, as far as event streams use it: no extension types.

Specification: msgpack/msgpack, spec.md. Written here since nothing else of kvtier needs a package
for it, and since a trace file is input that is not trusted: sizes are checked against the bytes
that are there before anything is allocated.
"""

from __future__ import annotations

import struct
from typing import Any

from kvtier.trace.lines import Bad

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d",
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_LENGTHS = {1: ">B", 2: ">H", 4: ">I"}
_DEPTH_MAX = 32


class Unpacker:
    """Reads one value after another from bytes.

    Attributes:
        at: offset of the next value.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def done(self) -> bool:
        return self.at >= len(self._data)

    def value(self, depth: int = 0) -> Any:
        """The next value.

        Raises:
            Bad: the data ends inside it, or it is of a type that events do not use.
        """
        if depth > _DEPTH_MAX:
            raise Bad(f"values are nested more than {_DEPTH_MAX} deep")
        tag = self._take(1)[0]
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag <= 0x8F:
            return self._map(tag & 0x0F, depth)
        if tag <= 0x9F:
            return self._array(tag & 0x0F, depth)
        if tag <= 0xBF:
            return self._text(tag & 0x1F)
        if tag == 0xC0:
            return None
        if tag in (0xC2, 0xC3):
            return tag == 0xC3
        if tag in _NUMBERS:
            form = _NUMBERS[tag]
            return struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if 0xC4 <= tag <= 0xC6:
            return self._take(self._length(1 << tag - 0xC4))
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._length(1 << tag - 0xD9))
        if tag in (0xDC, 0xDD):
            return self._array(self._length(2 << tag - 0xDC), depth)
        if tag in (0xDE, 0xDF):
            return self._map(self._length(2 << tag - 0xDE), depth)
        raise Bad(f"a value of type 0x{tag:02x}, which events do not use")

    def _take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if end > len(self._data):
            raise Bad("the data ends inside a record")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _length(self, nbytes: int) -> int:
        return int(struct.unpack(_LENGTHS[nbytes], self._take(nbytes))[0])

    def _text(self, nbytes: int) -> str:
        try:
            return self._take(nbytes).decode()
        except UnicodeDecodeError:
            raise Bad("a text is not UTF-8") from None

    def _array(self, length: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self._fits(length))]

    def _map(self, length: int, depth: int) -> dict[Any, Any]:
        found = {}
        for _ in range(self._fits(2 * length) // 2):
            key = self.value(depth + 1)
            if not isinstance(key, str | int | bytes):
                raise Bad("a map has a key that is neither text nor a number")
            found[key] = self.value(depth + 1)
        return found

    def _fits(self, values: int) -> int:
        if values > len(self._data) - self.at:
            raise Bad("the data ends inside a record")
        return values
