"""Sizes and times as people write them. GB = 1e9 bytes, GiB = 2**30 bytes; never mixed."""

from __future__ import annotations

import re

from kvtier.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip


def parse_size(value: int | str, what: str = "size") -> int:
    """Bytes from ``1500000``, ``"1.5GB"``, ``"512MiB"`` or ``"0"``.

    Raises:
        ConfigError: not a number with a known unit, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{what} is {value!r}; give bytes as an integer or text such as '512MiB'")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(
                f"{what} is {value!r}; give a number and a unit of B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
            )
        size = round(float(match.group(1)) * unit)
    if size < 0:
        raise ConfigError(f"{what} is {value!r}; it must not be negative")
    return size


def format_size(nbytes: float) -> str:
    """``1572864`` -> ``"1.50 MiB"``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
