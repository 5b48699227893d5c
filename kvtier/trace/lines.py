"""Lines of a trace file, plain or gzip, and what is said about a bad one."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from kvtier.errors import ConfigError, TraceError

T = TypeVar("T")

GZIP_MAGIC = b"\x1f\x8b"
#: Bytes of a line at most; a request of a million pages takes about a tenth of it.
LINE_MAX = 256 << 20


class Bad(Exception):
    """The reason why a record cannot be used; becomes a ``TraceError`` with file and line."""


class Source:
    """One trace file, and how many bad records in it are tolerated.

    Args:
        path: plain or gzip, by content.
        skip_bad: bad records that may be left out; one more is an error.
    """

    def __init__(self, path: Path, skip_bad: int = 0) -> None:
        if skip_bad < 0:
            raise ConfigError(f"skip_bad is {skip_bad}; it must be 0 or more")
        self.path = path
        self.skip_bad = skip_bad
        self.skipped = 0

    def open(self) -> IO[bytes]:
        """The content, unzipped.

        Raises:
            TraceError: no such file, or it may not be read.
        """
        try:
            with open(self.path, "rb") as probe:
                zipped = probe.read(2) == GZIP_MAGIC
            return gzip.open(self.path, "rb") if zipped else open(self.path, "rb")  # type: ignore[return-value]
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def head(self, nbytes: int = 1 << 16) -> bytes:
        """The first bytes of the content, fewer if it ends or is damaged before."""
        with self.open() as file:
            try:
                return file.read(nbytes)
            except (OSError, EOFError, zlib.error):
                return b""

    def bad(self, line: int, reason: str) -> None:
        """Count a bad record, or fail.

        Raises:
            TraceError: more are bad than may be skipped.
        """
        self.skipped += 1
        if self.skipped > self.skip_bad:
            more = f" (the {self.skipped}th bad record)" if self.skip_bad else ""
            raise TraceError(f"{self.path}:{line}: {reason}{more}")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not blank, with their numbers. A damaged gzip ends them with a bad record."""
        number = 0
        with self.open() as file:
            while True:
                try:
                    line = file.readline(LINE_MAX)
                except EOFError:
                    self.bad(number + 1, "the gzip data is cut off here; the file is not whole")
                    return
                except (OSError, zlib.error) as error:
                    self.bad(number + 1, f"the gzip data is damaged here: {error}")
                    return
                if not line:
                    return
                number += 1
                if len(line) >= LINE_MAX:
                    self.bad(number, f"the line is longer than {LINE_MAX} bytes")
                    return
                if not line.isspace():
                    yield number, line

    def records(self, parse: Callable[[Any], T]) -> Iterator[T]:
        """``parse`` of every line as JSON; a record for which it raises ``Bad`` is bad."""
        for number, line in self.lines():
            try:
                item = parse(load_json(line))
            except Bad as error:
                self.bad(number, str(error))
            else:
                yield item


def load_json(data: bytes) -> Any:
    """JSON, or ``Bad`` with the reason."""
    try:
        return json.loads(data)
    except UnicodeDecodeError:
        raise Bad("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Bad(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise Bad(f"not JSON that can be read: {error}") from None


def mapping(value: object) -> dict[str, Any]:
    """A JSON object, or ``Bad``."""
    if not isinstance(value, dict):
        raise Bad(f"{_short(value)} is not a JSON object")
    return value


def need(record: dict[str, Any], name: str) -> Any:
    """A field that must be there, or ``Bad``."""
    if name not in record:
        raise Bad(f"{name} is missing")
    return record[name]


def number(value: object, name: str) -> float:
    """A finite number >= 0, or ``Bad``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Bad(f"{name} is {_short(value)}, not a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or result < 0:
        raise Bad(f"{name} is {_short(value)}; it must be finite and >= 0")
    return result


def count(value: object, name: str) -> int:
    """A whole number from 0 to 2**53, or ``Bad``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Bad(f"{name} is {_short(value)}, not a whole number")
    if not 0 <= value <= 1 << 53:
        raise Bad(f"{name} is {_short(value)}; it must be from 0 to 2**53")
    return value


def ids(value: object, name: str) -> list[int | str]:
    """A list of whole numbers and texts, or ``Bad``."""
    if not isinstance(value, list):
        raise Bad(f"{name} is {_short(value)}, not a list")
    kinds = set(map(type, value))
    if not kinds <= {int, str}:
        wrong = next(v for v in value if type(v) not in (int, str))
        raise Bad(f"{name} has {_short(wrong)}, which is neither a whole number nor text")
    return value


def in_order(time_s: float, last_s: float) -> float:
    """``time_s``, or ``Bad`` if it lies before the time of the record before."""
    if time_s < last_s:
        raise Bad(f"time goes back: {time_s:g} s after {last_s:g} s")
    return time_s


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
