"""Modes of attention on tiny models: exact ones equal dense attention, lossy ones do with the whole budget, and what moves
or is guessed changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.attention.budget import Budget
from kvtier.attention.mode import parse_mode
from kvtier.attention.select import SelectDecode
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.integrations.transformers.cache import TieredCache
from kvtier.integrations.transformers.layout import layout_of
from kvtier.kernels.summary import summarise_pages
from kvtier.layout import LayerLayout, PageLayout
from kvtier.store.store import TieredStore
from tests.tiny_models import Place, dynamic, forward, generate, make, prompt

EXACT = ("exact-split", "select:quest,budget=100%", "select:omnikv,budget=1.0,filters=1,wait=0")
LOSSY = (
    "select:quest,budget=4pages,dense=none",
    "select:quest,budget=4pages,scope=layer,dense=0",
    "select:arkbox,budget=40tokens,sinks=0",
    "select:oracle,budget=40%,recent=8",
    "select:window,budget=4pages",
    "select:omnikv,budget=4pages,filters=0,wait=0,dense=none",
)


@pytest.fixture
def place(tmp_path: Path) -> Any:
    device = EmulatedDevice()
    yield Place(tmp_path / "store", device)
    device.close()


def store_for(
    place: Place, model: Any, *, vram: int = 10, host: int = 40, disk: int = 0
) -> TieredStore:
    layout = layout_of(model, page_tokens=8, summaries=True)
    return TieredStore(
        layout,
        device=place.device,
        vram=vram * layout.page_bytes,
        host=host * layout.page_bytes,
        disk=disk,
        path=place.path if disk else None,
        check=True,
    )


def teacher_forced(
    model: Any, cache: Any, ids: torch.Tensor, prefill: int, chunk: int = 24
) -> torch.Tensor:
    """Logits of each token from ``prefill`` on, fed one by one."""
    for start in range(0, prefill, chunk):
        forward(model, cache, ids[:, start : min(start + chunk, prefill)])
    steps = [forward(model, cache, ids[:, n : n + 1])[:, -1] for n in range(prefill, ids.shape[1])]
    return torch.stack(steps, 1)


# ---------------------------------------------------------------------- exact modes


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("kind", ["llama", "llama-mha", "qwen3", "gemma3"])
def test_modes_that_read_all_equal_dense_attention(place: Place, kind: str, mode: str) -> None:
    model = make(kind, attention="sdpa")
    ids = prompt(1, 150)["input_ids"]
    want = teacher_forced(model, dynamic(model), ids, 120)
    with store_for(place, model) as store, TieredCache(model, store, mode=mode) as cache:
        got = teacher_forced(model, cache, ids, 120)
        tiers = store.stats().tiers
        assert tiers["host"].pages > 0
    assert (got - want).abs().max() <= 1e-4
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("mode", EXACT)
def test_padded_batches_and_generate(place: Place, mode: str) -> None:
    model = make("llama")
    given = prompt(3, 60, pads=(0, 13, 31))
    want = generate(model, dynamic(model), given)
    with store_for(place, model, vram=24) as store, TieredCache(model, store, mode=mode) as cache:
        got = generate(model, cache, given)
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.logits, want.logits, strict=True):
        assert (x - y).abs().max() <= 1e-4


@pytest.mark.parametrize("mode", EXACT)
def test_all_pages_back_from_disk(place: Place, mode: str) -> None:
    model = make("llama")
    ids = prompt(1, 140)["input_ids"]
    want = teacher_forced(model, dynamic(model), ids, 121)
    with store_for(place, model, disk=8 << 20) as store, TieredCache(model, store) as cache:
        teacher_forced(model, cache, ids[:, :122], 121)
        cache.flush()
    # No host tier: pages beyond VRAM are read from disk at every step.
    with (
        store_for(place, model, vram=9, host=0, disk=8 << 20) as store,
        TieredCache(model, store, mode=mode) as cache,
    ):
        assert cache.load_prefix(ids[:, :121]) == 120
        assert store.stats().tiers["vram"].pages < 15
        got = teacher_forced_from(model, cache, ids, 120)
    assert (got[:, 1:] - want).abs().max() <= 1e-4


def teacher_forced_from(model: Any, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    return torch.stack(
        [forward(model, cache, ids[:, n : n + 1])[:, -1] for n in range(start, ids.shape[1])], 1
    )


# ---------------------------------------------------------------------- lossy modes


@pytest.mark.parametrize("mode", LOSSY)
def test_where_pages_are_and_what_is_guessed_change_nothing(place: Place, mode: str) -> None:
    model = make("llama")
    ids = prompt(1, 170)["input_ids"]
    results = []
    for vram, host, disk, prefetch in (
        (40, 0, 0, "none"),
        (10, 40, 0, "none"),
        (10, 40, 0, "last"),
        (10, 40, 0, "hidden"),
        (10, 40, 0, "random"),
        (10, 2, 8 << 20, "random"),
    ):
        with (
            store_for(place, model, vram=vram, host=host, disk=disk) as store,
            TieredCache(model, store, mode=f"{mode},prefetch={prefetch}") as cache,
        ):
            results.append(teacher_forced(model, cache, ids, 130))
            paged = cache._engine.paged
            assert isinstance(paged, SelectDecode)
            assert paged.counts["layer reads"]
            if vram == 10:
                assert paged.counts["planes not in VRAM"]
    for other in results[1:]:
        assert (other - results[0]).abs().max() <= 1e-4
    dense = teacher_forced(model, dynamic(model), ids, 130)
    assert (results[0] - dense).abs().max() > 1e-3, "the budget left nothing out"


@pytest.mark.parametrize(
    "mode", ["select:quest,budget=4pages", "select:quest,budget=4pages,scope=layer"]
)
def test_no_more_than_the_budget_is_read(place: Place, mode: str) -> None:
    model = make("llama")
    ids = prompt(1, 130)["input_ids"]
    with store_for(place, model) as store, TieredCache(model, store, mode=mode) as cache:
        teacher_forced(model, cache, ids, 100)
        paged = cache._engine.paged
        assert isinstance(paged, SelectDecode)
        assert 0 < paged.counts["pages read"] <= 4 * paged.counts["layer reads"]


def test_pages_of_lossy_steps_are_not_found_by_exact_ones(place: Place) -> None:
    model = make("llama")
    ids = prompt(1, 130)["input_ids"]
    with store_for(place, model, vram=40) as store:
        with TieredCache(model, store, mode="select:window,budget=3pages") as cache:
            teacher_forced(model, cache, ids, 96)
            cache.seal()
        with TieredCache(model, store) as cache:
            assert cache.load_prefix(ids) == 96


def test_pages_of_exact_split_are_found(place: Place) -> None:
    model = make("llama")
    ids = prompt(1, 130)["input_ids"]
    with store_for(place, model, vram=40) as store:
        with TieredCache(model, store, mode="exact-split") as cache:
            teacher_forced(model, cache, ids, 96)
            cache.seal()
        with TieredCache(model, store) as cache:
            assert cache.load_prefix(ids) == 128


# ---------------------------------------------------------------------- summaries


def index_of(cache: TieredCache, row: int = 0) -> Any:
    paged = cache._engine.paged
    assert isinstance(paged, SelectDecode)
    return paged._indexes[row]


def check_summaries(store: TieredStore, cache: TieredCache) -> int:
    """Each page's summary in the index is that of the page's own keys; the number of pages."""
    layout = store.layout
    for row, session in enumerate(cache.sessions):
        index = index_of(cache, row)
        index.grow(store.lend(index.lacking(len(session.pages)), "summaries"))
        with store.lease(session.pages) as lease:
            index.follow(lease)
            for number in range(len(lease)):
                page = lease.read(number)
                for layer, part in enumerate(layout.summary_parts):
                    assert part is not None
                    k = layout.plane(layer).k
                    keys = page[k.offset : k.stop].view(torch.float32).view(8, k.heads, k.dim)
                    low, high = keys.amin(0), keys.amax(0)
                    kept = index.layer(layer).gather()[number]
                    assert torch.equal(kept[0], low)
                    assert torch.equal(kept[1], high)
                    spread = (keys - (low + high) / 2).abs().mean(0)
                    assert torch.allclose(kept[3], spread, atol=1e-5)
    return len(index)


def test_summaries_follow_crop_fork_and_sealing_anew(place: Place) -> None:
    model = make("llama")
    ids = prompt(1, 120)["input_ids"]
    mode = "select:quest,budget=3pages"
    with store_for(place, model, vram=30) as store:
        with TieredCache(model, store, mode=mode) as cache:
            teacher_forced(model, cache, ids[:, :90], 80)
            assert check_summaries(store, cache) == 11
            cache.crop(-29)
            other = 2 + (ids[:, 61:] + 5) % 90
            forward(model, cache, other[:, :20])
            teacher_forced_from(model, cache, other, 20)
            cache.seal()
            assert check_summaries(store, cache) == 15
            with cache.fork() as second:
                teacher_forced_from(model, second, ids, 100)
                second.seal()
                assert check_summaries(store, second) == 17
            assert check_summaries(store, cache) == 15


def test_summaries_survive_disk_and_restart(place: Place) -> None:
    model = make("llama")
    ids = prompt(1, 120)["input_ids"]
    mode = "select:quest,budget=3pages"
    with (
        store_for(place, model, disk=8 << 20) as store,
        TieredCache(model, store, mode=mode) as cache,
    ):
        teacher_forced(model, cache, ids[:, :105], 104)
        cache.flush()
    with store_for(place, model, vram=8, host=0, disk=8 << 20) as store:
        with TieredCache(model, store, mode=mode) as cache:
            assert cache.load_prefix(ids[:, :105]) == 104
            teacher_forced_from(model, cache, ids[:, :106], 104)
            assert check_summaries(store, cache) == 13


def test_summaries_are_charged_to_the_vram_tier(place: Place) -> None:
    model = make("llama")
    ids = prompt(1, 200)["input_ids"]
    with store_for(place, model, vram=12) as store:
        with TieredCache(model, store, mode="select:quest,budget=3pages") as cache:
            teacher_forced(model, cache, ids, 190)
            tier = store.stats().tiers["vram"]
            assert 0 < cache.summary_bytes < tier.used_bytes <= tier.capacity_bytes
        assert store.stats().tiers["vram"].used_bytes <= 12 * store.layout.page_bytes
        slots = store.take_tails(1)
        store.give_tails(slots, [])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    tokens=st.integers(1, 8),
    wild=st.booleans(),
)
def test_quest_is_a_bound_through_a_layer_of_pages(
    seed: int, dtype: torch.dtype, heads: tuple[int, int], tokens: int, wild: bool
) -> None:
    from kvtier.kernels.scores import quest_scores
    from kvtier.kernels.table import PageTable

    torch.manual_seed(seed)
    q_heads, kv_heads = heads
    keys = torch.randn(5, 8, kv_heads, 16) * (50 if wild else 1)
    keys = keys.to(dtype)
    size = keys[0].nbytes
    slab = torch.full((5 * size + 15,), 255, dtype=torch.uint8)
    slab = slab[(-slab.data_ptr()) % 16 :][: 5 * size]
    slab.view(dtype).view_as(keys)[:, :tokens] = keys[:, :tokens]
    table = PageTable(
        [slab],
        [(0, n * size) for n in range(5)],
        page_bytes=size,
        page_tokens=8,
        tokens=[tokens] * 5,
    )
    summary = summarise_pages(table, start=0, heads=kv_heads, dim=16, dtype=dtype)
    q = torch.randn(q_heads, 16).to(dtype)
    bounds = quest_scores(q, summary).view(kv_heads, -1, 5)
    dots = torch.einsum(
        "hgd,pthd->hgpt", q.float().view(kv_heads, -1, 16), keys[:, :tokens].float()
    )
    slack = 1e-5 * dots.abs().amax().clamp_min(1)
    assert (bounds >= dots.amax(-1) - slack).all()


# ---------------------------------------------------------------------- mass


def test_mass_reaches_the_policy_and_is_the_softmax_share(place: Place, monkeypatch: Any) -> None:
    model = make("llama", num_hidden_layers=1, attention="eager")
    ids = prompt(1, 90)["input_ids"]
    told: list[tuple[list[bytes], list[float]]] = []
    with (
        store_for(place, model, vram=6) as store,
        TieredCache(model, store, mode="exact-split") as cache,
    ):
        monkeypatch.setattr(
            store, "attended", lambda keys, mass, **_: told.append((list(keys), list(mass)))
        )
        teacher_forced(model, cache, ids, 80)
    with torch.no_grad():
        shares = model(ids, output_attentions=True, use_cache=False).attentions[0][0].mean(0)
    for step, (keys, mass) in enumerate(told):
        row = shares[80 + step]
        want = row[: len(keys) * 8].view(-1, 8).sum(1)
        assert torch.allclose(torch.tensor(mass), want, atol=1e-5)
    assert len(told) == 10


# ---------------------------------------------------------------------- what is refused


def test_selection_needs_summaries(place: Place) -> None:
    model = make("llama")
    with place.store(model) as store:
        with pytest.raises(ConfigError, match="summaries=True"):
            TieredCache(model, store, mode="select:quest,budget=10%")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_outside_the_attention_interface_is_told(place: Place) -> None:
    model = make("llama")
    ids = prompt(1, 40)["input_ids"]
    with store_for(place, model) as store, TieredCache(model, store, mode="exact-split") as cache:
        forward(model, cache, ids[:, :30])
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedModelError, match="exact-stream"):
            forward(model, cache, ids[:, 30:31])


def test_two_caches_share_a_model_and_leave_it_as_it_was(place: Place) -> None:
    model = make("llama", attention="eager")
    ids = prompt(1, 60)["input_ids"]
    want = teacher_forced(model, dynamic(model), ids, 50)
    with store_for(place, model, vram=30) as store:
        first = TieredCache(model, store, mode="exact-split")
        second = TieredCache(model, store, mode="select:quest,budget=100%")
        first.close()
        assert (teacher_forced(model, second, ids, 50) - want).abs().max() <= 1e-4
        second.close()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact", "unknown"),
        ("select:quest", "no budget"),
        ("select:nobody,budget=10%", "'nobody' is unknown; known are .*quest"),
        ("select:quest,budget=10%,bogus=1", "no parameter 'bogus'"),
        ("select:quest,budget=0%", "above 0"),
        ("select:quest,budget=120%", "at most 1"),
        ("select:quest,budget=ten", "cannot be read"),
        ("select:quest,budget=10%,dense=first", "dense='first'"),
        ("select:quest,budget=10%,scope=page", "head, layer"),
        ("select:quest,budget=10%,prefetch=magic", "last"),
        ("select:quest,budget=10%,recent=-1", "whole number"),
        ("select:quest,budget=10%,reduce=sum", "softmax-mean"),
        ("select:omnikv,budget=10%", "calibrate-filters"),
        ("select:omnikv,budget=10%,filters=8+2", "ascending"),
        ("select:quest,10%", "key=value"),
    ],
)
def test_wrong_modes_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mode(text)


@given(
    total=st.integers(1, 5000),
    budget=st.one_of(
        st.floats(0.001, 1.0).map(lambda x: f"{x:.4f}" if x >= 0.001 else "1%"),
        st.integers(1, 6000).map(lambda n: f"{n}pages"),
        st.integers(1, 100_000).map(lambda n: f"{n}tokens"),
        st.integers(1, 1 << 30).map(lambda n: f"{n}B"),
    ),
)
def test_budgets_are_kept_within_the_sequence(total: int, budget: str) -> None:
    layout = PageLayout([LayerLayout.attention(2, 16, "float16")] * 4, 16)
    parsed = Budget.parse(budget)
    pages = parsed.pages(total, layout)
    assert min(total, 3) <= pages <= total
    assert Budget.parse(str(parsed)).pages(total, layout) == pages


def test_auto_says_what_it_took_and_why(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    ids = prompt(1, 60)["input_ids"]
    with (
        caplog.at_level("INFO", "kvtier"),
        store_for(place, model, vram=20, host=0) as store,
        TieredCache(model, store, mode="auto") as cache,
    ):
        assert cache.mode == "exact-stream"
        assert "is in VRAM" in cache.mode_choice
        forward(model, cache, ids)
        forward(model, cache, ids[:, :1])
    assert [r.getMessage() for r in caplog.records].count(f"mode {cache.mode_choice}") == 1
    with (
        store_for(place, model) as store,
        TieredCache(model, store, mode="auto", columns=200) as cache,
    ):
        assert cache.mode in ("exact-stream", "exact-split")
        assert cache.mode_choice.startswith(f"{cache.mode}: with ")
