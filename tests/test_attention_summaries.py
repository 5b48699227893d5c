"""Summaries are always those of the pages that a sequence has now, whatever was cut, forked, sealed anew and moved."""

from __future__ import annotations

import random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.attention.mode import parse_mode
from kvtier.attention.select import SelectDecode
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
                assert torch.allclose(index.layer(layer)[:, row], each.transpose(0, 1), atol=1e-5)

    def teardown(self) -> None:
        for batch in (self.batch, *self.others):
            batch.close()
        self.place.__exit__(None, None, None)


TestSummaries = Summaries.TestCase
TestSummaries.settings = settings(max_examples=14, stateful_step_count=20, deadline=None)
