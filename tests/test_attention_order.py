"""Attention over pages where they are, against dense attention on plain tensors; and the order of its copies and work."""

from __future__ import annotations

import random
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier.attention.engine as engine_module
import kvtier.attention.planes as planes_module
import kvtier.attention.select as select_module
import kvtier.attention.summaries as summaries_module
import kvtier.session.session as session_module
from kvtier.attention.engine import AttentionEngine
from kvtier.attention.mode import parse_mode
from kvtier.errors import RaceError
from kvtier.kernels.attention import Partial, merge, partial_attention
from kvtier.kernels.table import PageTable
from tests.paged_batch import FULL, SLIDING, PagedBatch, a_store, dense

EVERYTHING = "select:quest,budget=100%,dense=none"


# ---------------------------------------------------------------------- exact


@settings(deadline=None, max_examples=40)
@given(
    mode=st.sampled_from(["exact-split", EVERYTHING]),
    pads=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    page=st.sampled_from([1, 3, 4]),
    counts=st.lists(st.sampled_from([1, 1, 1, 2, 7]), min_size=3, max_size=12),
    vram=st.integers(0, 4),
    host=st.integers(0, 6),
    wild=st.sampled_from([0.0, 1.0, 30.0]),
    share=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 2**16),
)
def test_any_partition_of_a_sequence_gives_dense_attention(
    mode: str,
    pads: list[int],
    page: int,
    counts: list[int],
    vram: int,
    host: int,
    wild: float,
    share: float,
    seed: int,
) -> None:
    pads = [pad - min(pads) for pad in pads]
    need = len(pads) * (max(counts) // page + 3 + 2 * sum(counts) // page)  # summaries take room
    with a_store([FULL, SLIDING, FULL], page=page, vram=need + vram, host=host) as store:
        batch = PagedBatch(store, parse_mode(mode), pads, seed=seed, wild=wild)
        dice = random.Random(seed)
        try:
            for count in counts:
                batch.step(count)
                batch.drop_down(dice, share)
        finally:
            batch.close()
        assert batch.worst <= 1e-4


def test_the_partitions_above_include_all_tiers() -> None:
    with a_store([FULL] * 2, vram=6, host=4) as store:
        batch = PagedBatch(store, parse_mode("exact-split"), [0])
        for _ in range(18):
            batch.step(3)
            batch.step(1)
        assert set(batch.sessions[0].lease()[0].tiers()) == {"vram", "host", "disk"}
        batch.close()
        assert batch.worst <= 1e-5


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    last=st.integers(1, 4),
    size=st.sampled_from([0.1, 1.0, 60.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_merging_is_exact_and_in_any_order(
    parts: list[int], last: int, size: float, dtype: torch.dtype, seed: int
) -> None:
    """Parts of so many pages each, some of none; the last page holds ``last`` of its 4 tokens."""
    torch.manual_seed(seed)
    pages, kv_heads, heads, dim = sum(parts), 2, 4, 8
    kv = torch.randn(pages, 2, 4, kv_heads, dim).to(dtype)
    # Logits of up to +-size: unit queries against keys of that length, by sqrt(dim).
    q = torch.nn.functional.normalize(torch.randn(heads, dim), dim=-1) * size * dim**0.5
    kv[:, 0] = torch.nn.functional.normalize(kv[:, 0].float(), dim=-1).to(dtype)
    q = q.to(dtype)
    raw = torch.empty(kv.nbytes + 16, dtype=torch.uint8)
    slab = raw[-raw.data_ptr() % 16 :][: kv.nbytes]
    slab.view(dtype).view_as(kv).copy_(kv)
    counts = [4] * (pages - 1) + [last]
    order = torch.randperm(pages).tolist()
    found: list[Partial] = []
    half = kv[0, 0].nbytes
    for part in parts:
        mine, order = order[:part], order[part:]
        table = PageTable(
            [slab], [(0, n * 2 * half) for n in mine], page_bytes=2 * half, page_tokens=4,
            tokens=[counts[n] for n in mine],
        )  # fmt: skip
        found.append(partial_attention(q, table, k_start=0, v_start=half, kv_heads=kv_heads)[0])
    keys, values = (
        kv[:, side].reshape(pages * 4, kv_heads, dim)[: pages * 4 - 4 + last].transpose(0, 1)
        for side in (0, 1)
    )
    want = dense(q.float(), keys.float(), values.float())
    whole = merge(found)
    assert (whole.out - want).abs().max() <= 2e-5
    dice = random.Random(seed)
    for _ in range(3):
        dice.shuffle(found)
        again = merge(found)
        assert (again.out - whole.out).abs().max() <= 1e-6
        assert torch.allclose(again.lse, whole.lse, rtol=3e-7, atol=1e-6)
        one = found[0]
        for each in found[1:]:
            one = merge([one, each])
        # Two by two each step rounds the logarithm anew: half a bit of 60 is 2e-6.
        assert (one.out - whole.out).abs().max() <= 3e-6 * len(found) * float(values.abs().max())


# ---------------------------------------------------------------------- order

Kind = type[AttentionEngine]


def selected(kind: Kind) -> None:
    """Pages in all tiers; halves and bounce memory change hands with every layer, some copies are never read."""
    for scope in ("head", "layer"):
        mode = parse_mode(f"select:quest,budget=6pages,scope={scope},dense=none,prefetch=random")
        with a_store([FULL] * 4, vram=20, host=5) as store:
            batch = PagedBatch(store, mode, [0, 3], engine=kind, exact=False)
            batch.step(1)
            for _ in range(12):
                batch.step(4)
                batch.step(1)
            batch.close()


def on_two_streams(kind: Kind) -> None:
    """Steps that nothing but their own events orders, summaries that grow between them."""
    mode = parse_mode("select:quest,budget=4pages,dense=none")
    with a_store([FULL] * 3, page=2, vram=90, host=0, disk=0) as store:
        streams = [store.device.stream("one"), store.device.stream("two")]
        batch = PagedBatch(store, mode, [0], engine=kind, exact=False)
        batch.step(8)
        for number in range(14):
            with store.device.on(streams[number % 2]):
                batch.step(1)
        with store.device.on(streams[0]):
            batch.close()


def summarised_on_another_stream(kind: Kind) -> None:
    """Tails that one stream has filled are summarised on another; pages sealed there are read here."""
    mode = parse_mode("select:quest,budget=3pages,dense=none")
    with a_store([FULL], vram=40, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        batch = PagedBatch(store, mode, [0], engine=kind, exact=False)
        with store.device.on(one):
            batch.step(8)
        with store.device.on(two):
            batch.sessions[0].seal()
        other = PagedBatch(store, mode, [0], engine=kind, exact=False)
        other.sessions[0].close()
        with store.device.on(one):
            # A fork waits for the tails that it copies: here there are none.
            other.sessions = [batch.sessions[0].fork()]
            other.columns = batch.columns
            other.plain = dict(batch.plain)
            other.step(1)
        other.close()
        batch.close()


def grown_on_another_stream(kind: Kind) -> None:
    """Summaries that one stream has read move to larger memory on another, and nothing was sealed in between."""
    mode = parse_mode("select:quest,budget=3pages,dense=none")
    with a_store([FULL] * 2, page=2, vram=90, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        batch = PagedBatch(store, mode, [0], engine=kind, exact=False)
        with store.device.on(one):
            batch.step(8)
            batch.step(1)
            batch.sessions[0].crop(8)
            batch.columns = 8
            batch.plain = {at: (k[:, :8], v[:, :8]) for at, (k, v) in batch.plain.items()}
            batch.step(6)
            batch.step(1)
            batch.step(1)
            batch.step(1)
            batch.sessions[0].seal()
        with store.device.on(two):
            batch.engine.prepare([batch.sessions[0].pages * 3], 1)
            batch.step(1)
        with store.device.on(one):
            batch.close()


def rows_that_go(kind: Kind) -> None:
    """A row's summaries are given up right behind the step that read them, and another stream writes to their slots;
    and the other way round."""
    mode = parse_mode("select:quest,budget=3pages,dense=none")
    with a_store([FULL] * 2, vram=60, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        batch = PagedBatch(store, mode, [0, 0], engine=kind, exact=False)
        with store.device.on(one):
            batch.step(20)
            batch.step(1)
            batch.step(1)  # nothing is fetched in it, which would wait for everything
            batch.engine.rearrange([1])
        other = PagedBatch(store, mode, [0], engine=kind, exact=False, seed=1)
        with store.device.on(two):
            other.step(14, ids=False)
        other.close()
        batch.close()
    with a_store([FULL], page=2, vram=60, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        first, second = (PagedBatch(store, mode, [0], engine=kind, exact=False) for _ in range(2))
        with store.device.on(two):
            second.step(12)
        with store.device.on(one):
            first.step(2, ids=False)
            first.close()  # its slot is the lowest that is free
        with store.device.on(two):
            second.step(1)
        second.close()


def given_up(kind: Kind) -> None:
    """A step that ends in its middle, with copies under way that nobody waited for."""
    mode = parse_mode("select:quest,budget=12pages,dense=none,prefetch=random")
    for how in ("close", "go on"):
        with a_store([FULL] * 4, vram=9, host=1) as store:
            batch = PagedBatch(store, mode, [0], engine=kind, exact=False)
            for _ in range(12):
                batch.step(4)
            batch.step(1)
            batch.begin(1)
            batch.layer(0, 1)
            if how == "close":
                batch.engine.close()
                continue_at = store.device.compute_stream().record()
                batch.sessions[0].rest("compute", continue_at)
            else:
                batch.sessions[0].rest(*batch.engine.end())
                batch.sessions[0].close()
                # The slots that the copies read are another's now, behind the event.
                fresh = PagedBatch(store, mode, [0], engine=kind, exact=False, seed=1)
                for _ in range(12):
                    fresh.step(4, ids=False)
                fresh.close()
            batch.close()


SCENARIOS: tuple[Callable[[Kind], None], ...] = (
    selected,
    on_two_streams,
    summarised_on_another_stream,
    grown_on_another_stream,
    rows_that_go,
    given_up,
)


def everything(kind: Kind) -> None:
    for scenario in SCENARIOS:
        scenario(kind)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that has to grow often."""
    monkeypatch.setattr(planes_module, "MIN_PLANES", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_races(scenario: Callable[[Kind], None]) -> None:
    scenario(AttentionEngine)


MODULES = (planes_module, select_module, summaries_module, engine_module)
_WAIT = re.compile(
    r"^( *)(\S.*(?:\.wait|\.synchronize|stage\.end|paged\.end|self\.wait|index\.used|order_behind)\(.*\))$",
    re.MULTILINE,
)


def mutants() -> list[Any]:
    """Every wait of the modules, with what is left when it is taken out."""
    found = []
    for module in MODULES:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        for number, match in enumerate(_WAIT.finditer(source)):
            changed = source[: match.start()] + match[1] + "pass" + source[match.end() :]
            name = module.__name__.rpartition(".")[2]
            found.append(pytest.param(module, changed, id=f"{name} {number}: {match[2]}"))
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("module", "source"), mutants())
def test_every_wait_is_needed(
    module: types.ModuleType, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = types.ModuleType(module.__name__)
    mutant.__file__ = "mutant"
    monkeypatch.setitem(sys.modules, module.__name__, mutant)
    exec(compile(source, "mutant", "exec"), mutant.__dict__)
    kind = AttentionEngine
    if module is engine_module:
        kind = mutant.AttentionEngine
    elif module is select_module:
        monkeypatch.setattr(engine_module, "SelectDecode", mutant.SelectDecode)
    elif module is planes_module:
        mutant.MIN_PLANES = 1  # type: ignore[attr-defined]
        monkeypatch.setattr(select_module, "PlaneStage", mutant.PlaneStage)
    else:
        monkeypatch.setattr(select_module, "SummaryIndex", mutant.SummaryIndex)
        monkeypatch.setattr(session_module, "write_summaries", mutant.write_summaries)
    with pytest.raises(RaceError):
        everything(kind)
