"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1_500_000, 1_500_000),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1k", 1_000),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 * 2**29),
        ("512MiB", 2**29),
        (" 2 TB ", 2 * 10**12),
        ("2TiB", 2**41),
        ("0.5KiB", 512),
    ],
)
def test_parse(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "bad", ["", "GB", "1 XB", "-1", "1e9", "1,5GB", "1.GB", "nan", -1, 1.5, True, None]
)
def test_what_is_no_size_says_so(bad: object) -> None:
    with pytest.raises(ConfigError, match="vram size"):
        parse_size(bad, "vram size")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1572864, "1.50 MiB"),
        (2**40, "1.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_within_its_two_digits(size: int) -> None:
    back = parse_size(format_size(size))
    assert abs(back - size) <= 0.005 * max(size, 1) + 1
