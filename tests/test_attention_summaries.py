"""Summaries are always those of the pages that a sequence has now, whatever was cut, forked, sealed anew and moved."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.attention.mode import parse_mode
from kvtier.attention.select import SelectDecode
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import TierFullError
from kvtier.layout import PageLayout
from kvtier.store.store import TieredStore
from tests.paged_batch import FULL, SLIDING, PagedBatch, a_store

PAGE = 3


class Summaries(RuleBasedStateMachine):
    """One sequence with a second continuation now and then, in a store of three small tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.place = a_store([FULL, SLIDING, FULL], page=PAGE, vram=40, host=4)
        self.store = self.place.__enter__()
        self.batch = self.fresh(0)
        self.others: list[PagedBatch] = []
        self.number = 0
        self.decoded = False

    def fresh(self, seed: int) -> PagedBatch:
        mode = parse_mode("select:quest,budget=3pages,dense=none,prefetch=random")
        return PagedBatch(self.store, mode, [0], seed=seed, exact=False)

    @rule(count=st.integers(2, 8), ids=st.booleans())
    @precondition(lambda self: self.batch.columns < 40)
    def prefill(self, count: int, ids: bool) -> None:
        self.batch.step(count, ids=ids)
        self.batch.step(1)
        self.decoded = True

    @rule()
    @precondition(lambda self: self.batch.columns < 45)
    def decode(self) -> None:
        self.batch.step(1)
        self.decoded = True

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        length = int(self.batch.columns * share)
        self.batch.sessions[0].crop(length)
        self.batch.engine.forget()
        self.batch.columns = length
        self.batch.plain = {
            at: (k[:, :length], v[:, :length]) for at, (k, v) in self.batch.plain.items()
        }
        self.decoded = False

    @rule(share=st.floats(0, 0.8), count=st.integers(2, 12))
    @precondition(lambda self: self.decoded)
    def cut_and_grow_again(self, share: float, count: int) -> None:
        """Other tokens where tokens were whose summaries have been read."""
        self.crop(share)
        self.prefill(count, True)

    @rule(keep=st.booleans())
    @precondition(lambda self: self.batch.columns and len(self.others) < 2)
    def fork(self, keep: bool) -> None:
        self.number += 1
        other = self.fresh(self.number)
        other.sessions[0].close()
        other.sessions = [self.batch.sessions[0].fork()]
        other.columns, other.plain = self.batch.columns, dict(self.batch.plain)
        first, second = (self.batch, other) if keep else (other, self.batch)
        self.batch = first
        self.others.append(second)
        self.decoded = False

    @rule()
    @precondition(lambda self: self.others)
    def switch(self) -> None:
        self.others.append(self.batch)
        self.batch = self.others.pop(0)
        self.decoded = False

    @rule(share=st.floats(0, 1), seed=st.integers(0, 99))
    def demote(self, share: float, seed: int) -> None:
        self.batch.drop_down(random.Random(seed), share)

    @invariant()
    def summaries_are_those_of_the_pages(self) -> None:
        paged = self.batch.engine.paged
        if not self.decoded or not isinstance(paged, SelectDecode):
            return
        index, layout = paged._indexes[0], self.store.layout
        keys, pages = self.batch.plain, len(self.batch.sessions[0].pages)
        assert len(index) == pages
        for layer, part in enumerate(layout.summary_parts):
            assert (part is None) == (layer == 1)
            if part is None or not pages:
                continue
            k = keys[layer, 0][0][:, : pages * PAGE].view(part.heads, pages, PAGE, part.dim)
            low, high = k.amin(2), k.amax(2)
            want = [low, high, k.mean(2), (k - (low + high)[:, :, None] / 2).abs().mean(2)]
            for row, each in enumerate(want):
                assert torch.allclose(
                    index.layer(layer).gather()[:, row], each.transpose(0, 1), atol=1e-5
                )

    def teardown(self) -> None:
        for batch in (self.batch, *self.others):
            batch.close()
        self.place.__exit__(None, None, None)


TestSummaries = Summaries.TestCase
TestSummaries.settings = settings(max_examples=14, stateful_step_count=20, deadline=None)


# ---------------------------------------------------------------------- the tier's memory


def decoded(
    vram: int, limit: int | None, pads: list[int], grow: bool, *, columns: int = 160
) -> tuple[list[torch.Tensor], int, int]:
    """Logits' stand-ins of steps in a store whose slabs are all taken before the first summary is; the peak of the
    device's memory, and what is not the tier's of it."""
    layout = PageLayout([FULL, SLIDING, FULL], 4, summaries=True)
    with tempfile.TemporaryDirectory() as folder:
        device = EmulatedDevice(vram_bytes=limit or 16 << 20)
        store = TieredStore(
            layout, device=device, vram=vram * layout.page_bytes, host=6 * layout.page_bytes,
            disk=4 << 20, path=folder, check=True, durability="relaxed",
        )  # fmt: skip
        store.give_tails(store.take_tails(vram), [])
        assert device.used_bytes == vram * layout.page_bytes
        mode = parse_mode("select:quest,budget=4pages,dense=none,scope=layer,prefetch=random")
        batch = PagedBatch(store, mode, pads, exact=False)
        staging = batch.engine.stream.staging
        staging.fit(len(pads), columns, 30.0)
        outs: list[torch.Tensor] = []
        attend = batch.engine.attend

        def kept(*of: Any) -> torch.Tensor:
            outs.append(attend(*of))
            return outs[-1]

        batch.engine.attend = kept  # type: ignore[method-assign]
        try:
            for _ in range(12):
                batch.step(4)
            batch.step(1)
            for _ in range(20 if grow else 3):
                batch.step(3 if grow else 1)
                batch.step(1)
            beside = batch.engine.staging_bytes
        finally:
            batch.close()
            store.close()
        assert device.used_bytes == 0
        return outs, device.stats.peak_bytes, beside


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("pads", [[0], [0, 5]])
def test_pages_and_summaries_take_no_more_than_the_tier(pads: list[int], grow: bool) -> None:
    """A device that has the tier and the staging memory, and not a byte more, is enough."""
    vram = 10 + 14 * len(pads)  # with ``grow`` there is no room for all pages
    want, _, beside = decoded(vram, None, pads, grow)
    limit = vram * PageLayout([FULL, SLIDING, FULL], 4, summaries=True).page_bytes + beside
    got, peak, _ = decoded(vram, limit, pads, grow)
    assert peak <= limit
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_tier_without_room_for_summaries_changes_nothing() -> None:
    """Rows get theirs together or not at all."""
    with a_store([FULL] * 2, page=2, vram=12, host=8) as store:
        mode = parse_mode("select:quest,budget=3pages,dense=none")
        batch = PagedBatch(store, mode, [0, 0], exact=False)
        for _ in range(6):
            batch.step(2)
        held = store.take_tails(10, owner="somebody")
        before = store.stats().tiers["vram"].used_bytes
        with pytest.raises(TierFullError) as told:
            batch.engine.prepare([[page] * 30 for page in (None, None)], 1)  # type: ignore[list-item]
        assert told.value.tier == "vram"
        assert batch.engine.summary_bytes == 0
        assert store.stats().tiers["vram"].used_bytes <= before
        store.give_tails(held, [])
        batch.step(1)
        assert batch.engine.summary_bytes > 0
        batch.close()


def test_slots_of_summaries_are_no_pages_to_the_policy() -> None:
    with a_store([FULL] * 2, page=2, vram=20, host=8) as store:
        policy = store._directory.policies["vram"]
        slots = store.lend(3, "summaries")
        assert policy.capacity == 17
        with pytest.raises(TierFullError, match=r"summaries \(3 pages\)"):
            store.take_tails(18)
        store.take_back(slots, [])
        assert policy.capacity == 20
