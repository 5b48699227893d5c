"""The slowdown formula: the reference case, its limits, and what callers rely on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.offload import Estimate, estimate, moved_words, named_card
from kvtier.cost.cliff import DecodeStep, level, slowdown
from kvtier.errors import ConfigError

GB = 1e9


def step(**changes: float) -> DecodeStep:
    values = {
        "weight_bytes": 5 * GB,
        "kv_bytes": 3 * GB,
        "link_bytes": 0.0,
        "disk_bytes": 0.0,
        "vram_bw": 288 * GB,
        "link_bw": 13 * GB,
        "disk_bw": 3 * GB,
    }
    return DecodeStep(**{**values, **changes})


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


def test_nothing_offloaded_costs_nothing() -> None:
    assert step().slowdown == 1.0
    assert step().level == "none"


def test_a_decode_step_counts_weights_and_kv() -> None:
    """2 of 8 GB over a link 288/13 as slow."""
    assert step(link_bytes=2 * GB).slowdown == pytest.approx(1 + 0.25 * (288 / 13 - 1))


def test_bytes_from_disk_pay_both_links() -> None:
    from_host, from_disk = step(link_bytes=2 * GB), step(link_bytes=2 * GB, disk_bytes=2 * GB)
    extra_seconds = (from_disk.slowdown - from_host.slowdown) * 8 / 288
    assert extra_seconds == pytest.approx(2 / 3)


SIZES = {"weight_bytes": 5 * GB, "kv_bytes": 3 * GB, "link_bytes": 2 * GB, "disk_bytes": 0.0}


def on(device: str, **sizes: float) -> Estimate:
    spec = named_card(device, "emulated rtx-4060-ti-16gb")
    assert spec is not None
    return estimate(spec, **{**SIZES, **sizes})


def test_estimates_take_the_named_card_and_link() -> None:
    kinds = ("pinned", "pageable", "fallback")
    found = [on(f"emulated:rtx-4060-ti-16gb,link={kind}").slowdown for kind in kinds]
    assert 1.3 < found[0] < found[1] < found[2]
    assert on("auto").slowdown == on("emulated").slowdown == found[0]
    assert on("emulated:rtx-4090").slowdown != found[0]


def test_a_card_that_is_not_in_the_table_gets_no_estimate() -> None:
    assert named_card("cuda:0", "cuda:0 Some Card 9000") is None
    spec = named_card("cuda:0", "cuda:0 NVIDIA GeForce RTX 4090")
    assert spec is not None
    assert spec.card.name == "RTX 4090"


def test_the_warning_says_how_slow_why_and_what_to_do() -> None:
    text = on("auto").warning(kv_bytes=3 * 10**9)
    assert text is not None
    for word in ("severe", "RTX 4060 Ti 16GB", "67%", "--vram 2862MiB", "288 GB/s"):
        assert word in text


def test_no_warning_when_nothing_is_offloaded() -> None:
    assert on("auto", link_bytes=0).warning(kv_bytes=1) is None


def test_moved_bytes_in_words() -> None:
    assert moved_words({"host->vram": 2.0**21, "disk->host": 0.0}) == (
        "each new token moved 2.00 MiB from host to vram"
    )
    assert moved_words({"host->vram": 0.0}) == "no KV moved between the tiers while decoding"
