"""The table of cards and the priors on their links."""

import subprocess
import sys

import pytest

from kvtier.devices.cards import DEFAULT_CARD, Card, LinkModel, cards, find_card
from kvtier.errors import ConfigError

GB = 1e9


def test_every_row_is_complete_and_says_where_it_comes_from():
    assert len(cards()) >= 70
    for card in cards():
        assert card.source, card.name
        assert 2**30 <= card.vram_bytes <= 2**40
        assert 50 * GB < card.memory_bandwidth < 10_000 * GB
        assert card.unified or (card.pcie_gen in (3, 4, 5) and card.pcie_lanes in (8, 16))
        assert find_card(card.slug) is card
    assert len({card.slug for card in cards()}) == len(cards())


@pytest.mark.parametrize(
    "name", ["rtx-4060-ti-16gb", "RTX 4060 Ti 16GB", "NVIDIA GeForce RTX 4060 Ti 16GB"]
)
def test_a_card_is_found_however_its_name_is_written(name):
    card = find_card(name)
    assert card.vram_bytes == 16 * 2**30
    assert card.memory_bandwidth == 288 * GB
    assert (card.pcie_gen, card.pcie_lanes) == (4, 8)
    assert find_card(DEFAULT_CARD) is card


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("rtx-4060ti-16gb", "rtx-4060-ti-16gb"), ("h200", "h200-sxm-141gb"), ("rtx-4060-ti", "8gb")],
)
def test_an_unknown_card_gives_the_nearest_names(name, nearest):
    with pytest.raises(ConfigError, match=nearest):
        find_card(name)


def test_a_name_like_nothing_gives_an_example():
    with pytest.raises(ConfigError, match=DEFAULT_CARD):
        find_card("")


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.slug)
def test_link_classes_are_ordered_and_sourced(card):
    links = [card.link(kind) for kind in ("pinned", "pageable", "fallback")]
    for link in links:
        assert 0 < link.low <= link.rate <= link.high
        assert link.source
        assert ".md" not in link.source
    assert links[0].rate >= links[1].rate >= links[2].rate
    if not card.unified:
        assert links[0].rate > links[1].rate


def test_only_slow_links_explain_42_to_4_tokens_a_second():
    """An 8B Q4_K_M model reads 4.63 GB a token; a fifth of it beyond VRAM took 42.5 to 3.8."""
    card = find_card("rtx-4060-ti-16gb")

    def tokens(rate):
        return 1 / (0.8 / 42.5 + 0.2 * 4.63 * GB / rate)

    for kind in ("pageable", "fallback"):
        link = card.link(kind)
        assert tokens(link.low) < 3.8 < tokens(link.high)
    assert tokens(card.link("pinned").low) > 2 * 3.8


def test_a_card_of_ones_own():
    card = Card("My Card", 2**30, 100 * GB, pcie_gen=4, pcie_lanes=4)
    assert card.slug == "my-card"
    assert 5 * GB < card.link("pinned").rate < 7.9 * GB
    with pytest.raises(ConfigError, match="PCIe"):
        Card("No Link", 2**30, 100 * GB)
    with pytest.raises(ConfigError, match="positive"):
        Card("No Memory", 0, 100 * GB, pcie_gen=4, pcie_lanes=4)
    with pytest.raises(ConfigError, match="pinned, pageable, fallback"):
        card.link("nvlink")  # type: ignore[arg-type]


def test_copy_times_follow_the_model():
    link = LinkModel(h2d=13 * GB, d2h=10 * GB)
    big = 128 * 2**20
    assert big / link.device_s("h2d", big) == pytest.approx(13 * GB, rel=0.01)
    assert big / link.device_s("d2h", big) == pytest.approx(10 * GB, rel=0.01)
    assert big / link.device_s("h2d", big, pinned=False) == pytest.approx(0.45 * 13 * GB, rel=0.01)
    small = 32 * 2**20
    pieces = small // 4096
    assert small / link.device_s("h2d", small, pieces) < 6.5 * GB
    assert small / link.device_s("d2h", small, pieces) > 6.5 * GB
    assert link.rate("h2d", 15 * 4096, 15) == 13 * GB
    assert link.host_s(100) > 50 * link.per_call_s
    with pytest.raises(ConfigError, match="d2d"):
        link.rate("d2d", 1)


def test_the_table_needs_no_torch():
    code = "import sys, kvtier.devices.cards as c; c.cards(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
