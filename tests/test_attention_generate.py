"""Modes that read pages in place, through every way to generate and every kind of model and dtype."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier.attention.select import SelectDecode
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError, TierFullError, UnsupportedModelError
from kvtier.integrations.transformers.cache import TieredCache
from kvtier.integrations.transformers.layout import layout_of
from kvtier.selector import Query, Selector
from kvtier.store.store import TieredStore
from tests.tiny_models import KEYWORD, Place, dynamic, forward, generate, make, prompt

SPLIT = "exact-split"
ALL = "select:quest,budget=100%,dense=none"
SOME = "select:quest,budget=3pages,dense=none,prefetch=random"

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampled": ({}, {"do_sample": True, "temperature": 1.5, "seed": 3}),
    "beams": ({}, {"num_beams": 3}),
    "sequences": ({}, {"do_sample": True, "num_return_sequences": 3, "seed": 5}),
    "lookup": ({}, {"prompt_lookup_num_tokens": 3}),
    "padded-chunked": (
        {"rows": 3, "tokens": 40, "pads": (0, 25, 10)},
        {"prefill_chunk_size": 10, "max_new_tokens": 15},
    ),
    "padded-beams": ({"rows": 2, "pads": (9, 0)}, {"num_beams": 2, "max_new_tokens": 16}),
    "one-token": ({"tokens": 1}, {}),
    "late-row": ({"rows": 2, "tokens": 21, "pads": (0, 20)}, {"prefill_chunk_size": 1}),
}


@pytest.fixture
def place(tmp_path: Path) -> Any:
    device = EmulatedDevice()
    yield Place(tmp_path / "store", device)
    assert device.used_bytes == 0
    device.close()


def store_for(place: Place, model: Any, *, vram: int = 20, host: int = 60) -> TieredStore:
    layout = layout_of(model, page_tokens=4, summaries=True)
    return TieredStore(
        layout,
        device=place.device,
        vram=vram * layout.page_bytes,
        host=host * layout.page_bytes,
        check=True,
    )


def options_of(way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs, options = WAYS[way]
    return prompt(**({"rows": 1, "tokens": 21} | inputs)), {"max_new_tokens": 30} | options


@pytest.mark.parametrize("mode", [SPLIT, ALL])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate(place: Place, way: str, mode: str) -> None:
    model = make()
    given, options = options_of(way)
    want = generate(model, dynamic(model), given, **options)
    with store_for(place, model) as store, TieredCache(model, store, mode=mode) as cache:
        got = generate(model, cache, given, **options)
        assert cache.get_seq_length() == want.sequences.shape[1] - 1
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.logits, want.logits, strict=True):
        assert (x - y).abs().max() <= 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_lossy_selection_in_every_way_to_generate(place: Place, way: str) -> None:
    """What is chosen does not depend on where pages are: with all in VRAM the same comes out."""
    model = make()
    given, options = options_of(way)
    found = []
    for vram, host in ((90, 0), (20, 60)):
        with store_for(place, model, vram=vram, host=host) as store:
            with TieredCache(model, store, mode=SOME) as cache:
                found.append(generate(model, cache, given, **options).sequences)
                for session in cache.sessions:
                    session.seal()
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", [SPLIT, ALL])
def test_assisted_decoding(place: Place, mode: str) -> None:
    model, assistant = make(), make(num_hidden_layers=2, seed=0)
    given = prompt(1, 37)
    options = {"assistant_model": assistant, "max_new_tokens": 24}
    want = generate(model, dynamic(model), given, **options)
    with store_for(place, model) as store, TieredCache(model, store, mode=mode) as cache:
        assert torch.equal(generate(model, cache, given, **options).sequences, want.sequences)


def gpt_oss() -> Any:
    """Full and sliding layers in turn, a learned sink in each head's softmax, eager attention only."""
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=512, initializer_range=0.2, pad_token_id=0, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


@pytest.mark.parametrize("mode", [SPLIT, ALL])
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "deepseek", "gpt-oss"])
def test_other_layers_stay_exact(place: Place, kind: str, mode: str) -> None:
    model = gpt_oss() if kind == "gpt-oss" else make(kind)
    given = prompt(2, 50, pads=(0, 7))
    options = {"max_new_tokens": 20}
    before = model.config._attn_implementation
    want = generate(model, dynamic(model), given, **options)
    with store_for(place, model, vram=40) as store, TieredCache(model, store, mode=mode) as cache:
        got = generate(model, cache, given, **options)
        read = cache._engine._paged_layers
        assert read == {n for n, x in enumerate(store.layout.layers) if x.kind == "full"}
        assert bool(read) == (kind in ("gemma3", "gpt-oss"))
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.logits, want.logits, strict=True):
        assert (x - y).abs().max() <= 1e-4
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("mode", [SPLIT, ALL, "select:arkbox,budget=100%,scope=layer,dense=none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision(place: Place, dtype: torch.dtype, mode: str, attention: str) -> None:
    model = make(dtype=dtype, attention=attention)
    ids = prompt(1, 70)["input_ids"]
    other = dynamic(model)
    with store_for(place, model) as store, TieredCache(model, store, mode=mode) as cache:
        forward(model, cache, ids[:, :60])
        forward(model, other, ids[:, :60])
        for n in range(60, 70):
            got, want = (forward(model, x, ids[:, n : n + 1]).float() for x in (cache, other))
            assert (got - want).abs().max() <= 16 * torch.finfo(dtype).eps * want.abs().max()


def test_a_mask_of_four_dimensions_is_obeyed(place: Place) -> None:
    """It may hide any token, so pages are not read in place."""
    model = make(attention="sdpa")
    ids = prompt(1, 41)["input_ids"]
    mask = torch.zeros(1, 1, 1, 41)
    mask[..., 5:20] = torch.finfo(torch.float32).min
    other = dynamic(model)
    with store_for(place, model) as store, TieredCache(model, store, mode=SPLIT) as cache:
        results = []
        for each in (cache, other):
            forward(model, each, ids[:, :40])
            results.append(
                forward(
                    model, each, ids[:, 40:], attention_mask=mask, position_ids=torch.tensor([[40]])
                )
            )
    assert torch.allclose(*results, atol=1e-5)


# ---------------------------------------------------------------------- rows that move


class Diary(Selector):
    """Remembers the queries of its sequence: third-party selectors may keep what they like."""

    name = "diary"

    def __init__(self) -> None:
        self.seen: list[float] = []

    def scores(self, query: Query) -> torch.Tensor:
        self.seen.append(float(query.q.sum()))
        return torch.zeros(query.kv_heads, query.pages)


def diaries(cache: TieredCache) -> list[list[float]]:
    paged = cache._engine.paged
    assert isinstance(paged, SelectDecode)
    return [list(x.seen) for x in paged.chooser._selectors]  # type: ignore[attr-defined]


def test_what_a_selector_knows_moves_with_its_row(place: Place) -> None:
    model = make()
    ids = prompt(3, 40)["input_ids"]
    mode = f"select:{__name__}:Diary,budget=3pages,dense=none"
    with store_for(place, model, vram=80) as store, TieredCache(model, store, mode=mode) as cache:
        forward(model, cache, ids[:, :38])
        forward(model, cache, ids[:, 38:39])
        before = diaries(cache)
        assert len({tuple(x) for x in before}) == 3
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        assert diaries(cache) == [before[2], before[2], before[0]]
        forward(model, cache, ids[:, 39:40])
        after = diaries(cache)
        assert after[0][: len(before[2])] == before[2]
        assert after[0] != after[1], "the copies are one object"
        cache.crop(-1)
        assert diaries(cache) == [[], [], []]
        cache.batch_select_indices(torch.tensor([1]))
        forward(model, cache, ids[:1, 39:40])
        assert len(diaries(cache)) == 1


def test_memory_of_rows_that_went_away_is_given_back(place: Place) -> None:
    model = make()
    ids = prompt(4, 60)["input_ids"]
    with store_for(place, model, vram=120) as store:
        with TieredCache(model, store, mode=SOME) as cache:
            forward(model, cache, ids[:, :58])
            forward(model, cache, ids[:, 58:59])
            four = cache.summary_bytes
            cache.batch_select_indices(torch.tensor([3]))
            assert 0 < cache.summary_bytes <= four // 3
            forward(model, cache, ids[:1, 59:60])
            cache.reset()
            forward(model, cache, ids[:2, :30])
            forward(model, cache, ids[:2, 30:31])
        assert store._placement.lent == 0
        assert place.device.used_bytes == sum(
            slab.nbytes for slab in store._placement.slots["vram"]._slabs
        )


def test_a_cache_that_is_dropped_leaves_the_model_as_it_was(place: Place) -> None:
    model = make(attention="sdpa")
    with store_for(place, model) as store:
        cache = TieredCache(model, store, mode="select:quest,budget=3pages,prefetch=hidden")
        assert model.config._attn_implementation == "kvtier_sdpa"
        del cache
        gc.collect()
        assert model.config._attn_implementation == "sdpa"
        assert not any(x._forward_pre_hooks for x in model.model.layers)


@pytest.mark.parametrize("when", ["new", "filled", "in a step", "twice", "after the store"])
def test_closed_in_any_state(place: Place, when: str) -> None:
    model = make()
    ids = prompt(1, 40)["input_ids"]
    store = store_for(place, model)
    cache = TieredCache(model, store, mode=SOME)
    if when != "new":
        forward(model, cache, ids[:, :38])
        forward(model, cache, ids[:, 38:39])
    if when == "in a step":
        hook = model.model.layers[1].register_forward_pre_hook(_stop)
        with pytest.raises(RuntimeError, match="stopped"):
            forward(model, cache, ids[:, 39:])
        hook.remove()
        assert cache.get_seq_length() == 39
        forward(model, cache, ids[:, 39:])
    if when == "after the store":
        store.close()
    for _ in range(2 if when == "twice" else 1):
        cache.close()
    store.close()


def _stop(*_: Any) -> None:
    raise RuntimeError("stopped")


# ---------------------------------------------------------------------- room


def test_summaries_that_do_not_fit_are_told(place: Place) -> None:
    model = make()
    ids = prompt(1, 200)["input_ids"]
    with store_for(place, model, vram=6) as store, TieredCache(model, store, mode=SOME) as cache:
        for start in range(0, 196, 4):
            forward(model, cache, ids[:, start : start + 4])
        with pytest.raises(TierFullError, match="6 pages"):
            forward(model, cache, ids[:, 196:197])
        assert cache.summary_bytes == 0
        assert store._placement.lent == 0
        # Nothing was appended, and what reads all pages still works.
        assert cache.get_seq_length() == 196
        forward(model, cache, ids[:, 196:198])


def test_summaries_grow_in_a_tier_that_is_full(place: Place) -> None:
    model = make()
    ids = prompt(1, 120)["input_ids"]
    want = []
    for vram in (90, 15):
        with (
            store_for(place, model, vram=vram) as store,
            TieredCache(model, store, mode=SOME) as cache,
        ):
            forward(model, cache, ids[:, :20])
            want.append([forward(model, cache, ids[:, n : n + 1]) for n in range(20, 120)])
            tier = store.stats().tiers["vram"]
            assert 0 < cache.summary_bytes < tier.used_bytes <= tier.capacity_bytes
    for x, y in zip(*want, strict=True):
        assert torch.allclose(x, y, atol=1e-4)


def test_split_mode_does_not_thrash_a_small_host_tier(place: Place) -> None:
    """What the host tier cannot take beside the step's other pages stays on disk, instead of pushing those out."""
    model = make()
    ids = prompt(1, 120)["input_ids"]
    layout = layout_of(model, page_tokens=4)
    with (
        TieredStore(
            layout, device=place.device, vram=8 * layout.page_bytes, host=6 * layout.page_bytes,
            disk=16 << 20, path=place.path, check=True,
        ) as store,
        TieredCache(model, store, mode=SPLIT) as cache,
    ):  # fmt: skip
        for start in range(0, 112, 8):
            forward(model, cache, ids[:, start : start + 8])
        forward(model, cache, ids[:, 112:113])
        tiers = store.stats().tiers
        before = tiers["host"].pages_out
        assert tiers["host"].pages == 6
        for n in range(113, 116):
            forward(model, cache, ids[:, n : n + 1])
        assert store.stats().tiers["host"].pages_out == before


# ---------------------------------------------------------------------- mass


@pytest.mark.parametrize("policy", ["mass", "mass:half_life=4"])
def test_the_page_with_most_mass_stays_in_vram(place: Place, policy: str) -> None:
    """With mass measured, the least attended pages go down, wherever they lie in the sequence."""
    model = make("llama", num_hidden_layers=1, attention="eager")
    ids = prompt(1, 120)["input_ids"]
    layout = layout_of(model, page_tokens=4)
    with (
        TieredStore(
            layout, device=place.device, vram=26 * layout.page_bytes, host=60 * layout.page_bytes,
            policy=policy, check=True,
        ) as store,
        TieredCache(model, store, mode=SPLIT) as cache,
    ):  # fmt: skip
        forward(model, cache, ids[:, :80])
        for n in range(80, 96):
            forward(model, cache, ids[:, n : n + 1])
        with torch.no_grad():
            shares = model(ids[:, :96], output_attentions=True, use_cache=False).attentions[0][0]
        # Of the pages that all steps saw, the decayed sums as the policy defines them.
        gamma = 0.5 ** (1 / (4 if "4" in policy else 64))
        mass = torch.zeros(20)
        for step in range(80, 96):
            mass = mass * gamma + shares.mean(0)[step, :80].view(20, 4).sum(1)
        # Room for something else pushes half of the pages out.
        slots = store.take_tails(14)
        tiers = [
            "vram" if "vram" in page.copies else "host" for page in cache.sessions[0].pages[:20]
        ]
        assert 0 < tiers.count("vram") < 20
        best = int(mass.argmax())
        assert tiers[best] == "vram"
        hot = mass[[t == "vram" for t in tiers]]
        cold = mass[[t == "host" for t in tiers]]
        # All but the starting value of new pages, which fades, is the measured mass.
        assert hot.median() > cold.median()
        store.give_tails(slots, [])


def test_one_step_of_a_batch_is_one_touch(place: Place, monkeypatch: Any) -> None:
    """Mass decays by steps: rows of a batch must not count as steps."""
    model = make()
    ids = prompt(1, 40)["input_ids"].expand(3, -1)
    told: list[tuple[list[bytes], list[float]]] = []
    with store_for(place, model, vram=60) as store, TieredCache(model, store, mode=SPLIT) as cache:
        forward(model, cache, ids[:, :39])
        monkeypatch.setattr(store, "attended", lambda *x: told.append(x))
        forward(model, cache, ids[:, 39:40])
    assert len(told) == 1
    keys, mass = told[0]
    assert len(keys) == len(set(keys)) == 27
    assert 1.0 < sum(mass) <= 3.0


def test_a_step_that_was_given_up_tells_no_mass(place: Place, monkeypatch: Any) -> None:
    model = make()
    ids = prompt(1, 40)["input_ids"]
    with store_for(place, model) as store, TieredCache(model, store, mode=SPLIT) as cache:
        forward(model, cache, ids[:, :39])
        told: list[Any] = []
        monkeypatch.setattr(store, "attended", lambda *x: told.append(x))
        hook = model.model.layers[1].register_forward_pre_hook(_stop)
        with pytest.raises(RuntimeError, match="stopped"):
            forward(model, cache, ids[:, 39:])
        assert not told
        hook.remove()
        forward(model, cache, ids[:, 39:])
        assert len(told) == 1


# ---------------------------------------------------------------------- refused


def test_soft_capped_logits_are_refused_at_once(place: Place) -> None:
    model = make("gemma2")
    with store_for(place, model) as store:
        with pytest.raises(UnsupportedModelError, match=r"softcap.*exact-stream"):
            TieredCache(model, store, mode=SPLIT)
    assert not model.config._attn_implementation.startswith("kvtier")


def test_filters_must_be_layers_of_full_attention(place: Place) -> None:
    model = make("gemma3")  # layer 1 of 3 is full
    with store_for(place, model) as store:
        with pytest.raises(ConfigError, match="layer 1 go by layer 0"):
            TieredCache(
                model, store, mode="select:omnikv,budget=3pages,filters=0,wait=0,dense=none"
            )


def test_attention_of_other_parts_is_left_alone(place: Place) -> None:
    """A model of several parts: only the decoder's attention changes."""
    model = make(attention="sdpa")
    with store_for(place, model) as store, TieredCache(model, store, mode=SPLIT):
        assert model.get_decoder().config._attn_implementation == "kvtier_sdpa"
        with torch.no_grad():  # another cache, and none
            ids = prompt(1, 9)["input_ids"]
            plain = model(ids, use_cache=False).logits
            assert torch.equal(model(ids, **{KEYWORD: dynamic(model)}).logits, plain)


# ---------------------------------------------------------------------- guesses


def late(place: Place, model: Any, ids: torch.Tensor, prefetch: str) -> int:
    """Planes that had to be fetched while their layer waited."""
    mode = (
        f"select:quest,budget=4pages,scope=layer,dense=none,recent=0%,sinks=0,prefetch={prefetch}"
    )
    with store_for(place, model, vram=14) as store, TieredCache(model, store, mode=mode) as cache:
        for start in range(0, 100, 10):
            forward(model, cache, ids[:, start : start + 10])
        for n in range(100, 110):
            forward(model, cache, ids[:, n : n + 1])
        paged = cache._engine.paged
        assert isinstance(paged, SelectDecode)
        assert paged.counts["planes not in VRAM"] > 50
        return paged.counts["planes fetched late"]


def test_guesses_from_the_hidden_state_are_better_than_chance(place: Place) -> None:
    """In a model whose layers change the residual stream little, as trained ones do, they are nearly always right."""
    model = make("qwen3", num_hidden_layers=6)
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data *= 0.05
    ids = prompt(1, 120)["input_ids"]
    hidden, chance, none = (late(place, model, ids, how) for how in ("hidden", "random", "none"))
    assert hidden < 0.5 * chance
    assert chance < none
