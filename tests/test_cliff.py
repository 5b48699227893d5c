"""The slowdown formula: the reference case, its limits, and what callers rely on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.offload import moved_words
from kvtier.cost.cliff import level, slowdown
from kvtier.errors import ConfigError


def test_reference_case_of_the_rtx_4060_ti() -> None:
    """A fifth of an 8B model outside VRAM: 42.5 tokens/s became 3.8, by a link of 4 to 6 GB/s."""
    fast, seen = 42.5, 3.8
    predicted = [fast / slowdown(0.2, 288 / link) for link in (4.0, 6.0)]
    assert predicted[0] < seen < predicted[1]
    # a pinned copy over the same slot would not have been such a cliff
    assert fast / slowdown(0.2, 288 / 13.0) > 2 * seen


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e6))
def test_more_bytes_on_a_slower_link_never_get_faster(a: float, b: float, ratio: float) -> None:
    low, high = sorted((a, b))
    assert 1.0 <= slowdown(low, ratio) <= slowdown(high, ratio) <= max(1.0, ratio) * (1 + 1e-12)


@pytest.mark.parametrize(("fraction", "ratio"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.0), (0.5, -3.0)])
def test_arguments_out_of_range_are_refused(fraction: float, ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"must"):
        slowdown(fraction, ratio)


@pytest.mark.parametrize(
    ("value", "name"),
    [(1.0, "none"), (1.29, "none"), (1.3, "notice"), (1.99, "notice"), (2.0, "warning"),
     (4.99, "warning"), (5.0, "severe"), (100.0, "severe")],
)  # fmt: skip
def test_levels(value: float, name: str) -> None:
    assert level(value) == name


def test_moved_bytes_in_words() -> None:
    assert moved_words({"host->vram": 2.0**21, "disk->host": 0.0}) == (
        "each new token moved 2.00 MiB from host to vram"
    )
    assert moved_words({"host->vram": 0.0}) == "no KV moved between the tiers while decoding"
