"""``TieredCache`` as an object: crop, rows, forks, what it refuses, and what it survives."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from tiny_models import (  # noqa: E402
    PAGE,
    Place,
    assert_same,
    dynamic,
    forward,
    generate,
    make,
    prompt,
    tiered,
)

from kvtier.devices.emulated import EmulatedDevice  # noqa: E402
from kvtier.errors import (  # noqa: E402
    ClosedError,
    ConfigError,
    CopyFailedError,
    IdentityError,
    KvtierError,
    LayoutError,
    PageLostError,
    TierFullError,
    UnsupportedModelError,
)
from kvtier.integrations.transformers.cache import TieredCache  # noqa: E402
from kvtier.integrations.transformers.identity import identity_of  # noqa: E402
from kvtier.integrations.transformers.layout import layout_of  # noqa: E402


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    device = EmulatedDevice(vram_bytes=64 << 20)
    yield Place(tmp_path / "kv", device)
    assert device.used_bytes == 0
    device.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


def found(cache: TieredCache, ids: torch.Tensor) -> int:
    """Tokens of a prompt that the store has by now."""
    cache.flush()
    with TieredCache(cache._guard.model, cache.store) as other:
        return other.load_prefix(torch.cat([ids, ids[:, :1]], dim=1))


# ---------------------------------------------------------------------- crop, reset, rows


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("cut", [0, 1, 3, 8, 21, 40, 59, 60])
def test_crop_and_another_continuation(place: Place, kind: str, cut: int) -> None:
    model = make(kind)
    ids = prompt(1, 60)["input_ids"]
    other = dynamic(model)
    other.activate_past_recording()
    with tiered(place, model, vram=9, host=2) as cache:
        assert torch.equal(forward(model, cache, ids), forward(model, other, ids))
        if cut % 2:
            cache.seal()  # so that the cut goes through sealed pages
        cache.crop(-cut)
        if cut < 60:
            other.crop(-cut)
        else:
            other = dynamic(model)
        assert cache.get_seq_length() == 60 - cut
        for seed in (1, 2):
            more = prompt(1, 19, seed=seed)["input_ids"]
            assert torch.equal(forward(model, cache, more), forward(model, other, more))
        whole = torch.cat([ids[:, : 60 - cut], prompt(1, 19, seed=1)["input_ids"]], dim=1)
        assert found(cache, whole) == whole.shape[1] // PAGE * PAGE


def test_crop_takes_negative_counts_only(place: Place, model: Any) -> None:
    ids = prompt(1, 20)["input_ids"]
    with tiered(place, model) as cache:
        cache.crop(0)
        cache.crop(-5)
        forward(model, cache, ids)
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)
        assert cache.get_seq_length() == 20
        cache.crop(-1000)
        assert cache.get_seq_length() == 0
        assert torch.equal(forward(model, cache, ids), forward(model, dynamic(model), ids))


def test_draft_tokens_never_become_pages(place: Place, model: Any) -> None:
    ids = prompt(1, 2 * PAGE)["input_ids"]
    with tiered(place, model) as cache:
        forward(model, cache, ids)
        cache.crop(-1)
        assert found(cache, ids) == PAGE


def test_reset(place: Place, model: Any) -> None:
    with tiered(place, model) as cache:
        for seed in range(3):
            given = prompt(seed + 1, 25, seed=seed)
            with_cache = generate(model, cache, given, max_new_tokens=4, prefill_chunk_size=8)
            assert_same(
                with_cache,
                generate(model, dynamic(model), given, max_new_tokens=4, prefill_chunk_size=8),
            )
            cache.reset()
            assert cache.get_seq_length() == 0


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [0, 0, 2], [2, 2, 1, 0, 0]])
def test_rows_can_be_permuted_and_copied(place: Place, model: Any, order: list[int]) -> None:
    given = prompt(3, 21, pads=(0, 4, 0))
    other = dynamic(model)
    mask = given["attention_mask"]
    index = torch.tensor(order)
    after = torch.cat([mask, torch.ones_like(mask[:, :3])], dim=1)[index]
    more = prompt(len(order), 3, seed=9)["input_ids"]
    with tiered(place, model, vram=24) as cache:
        for each in (cache, other):
            forward(model, each, given["input_ids"], attention_mask=mask)
        cache.reorder_cache(index)
        other.reorder_cache(index)
        got = forward(model, cache, more, attention_mask=after)
        assert torch.equal(got, forward(model, other, more, attention_mask=after))


def test_rows_can_be_selected_and_repeated(place: Place, model: Any) -> None:
    ids = prompt(3, 20)["input_ids"]
    other = dynamic(model)
    with tiered(place, model, vram=24) as cache:
        for each in (cache, other):
            forward(model, each, ids)
            each.batch_select_indices(torch.tensor([2, 0]))
            each.batch_repeat_interleave(2)
        more = prompt(4, 5, seed=3)["input_ids"]
        assert torch.equal(forward(model, cache, more), forward(model, other, more))
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        other.batch_select_indices(torch.tensor([0, 3]))
        more = more[:2]
        assert torch.equal(forward(model, cache, more), forward(model, other, more))


def test_a_fork_continues_bit_for_bit(place: Place, model: Any) -> None:
    ids, more = prompt(1, 29)["input_ids"], prompt(1, 11, seed=5)["input_ids"]
    other = dynamic(model)
    forward(model, other, ids)
    with tiered(place, model, vram=8) as cache:
        forward(model, cache, ids)
        with copy.deepcopy(cache) as twin:
            assert cache.sessions[0].pages
            assert twin.sessions[0].pages == cache.sessions[0].pages
            forward(model, cache, prompt(1, 11, seed=6)["input_ids"])
            assert torch.equal(forward(model, twin, more), forward(model, other, more))


def test_a_cache_is_not_pickled(place: Place, model: Any) -> None:
    with tiered(place, model) as cache:
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(cache)
        with pytest.raises(TypeError, match="pickle"):
            copy.copy(cache)


# ---------------------------------------------------------------------- refused


def test_right_padding(place: Place, model: Any) -> None:
    given = prompt(2, 20)
    given["attention_mask"][1, 15:] = 0
    with tiered(place, model, vram=8) as cache:
        with pytest.raises(UnsupportedModelError, match="padding_side"):
            generate(model, cache, given)
        with pytest.raises(UnsupportedModelError, match="padding_side"):
            cache.load_prefix(**given)
        given["attention_mask"][1] = 1
        given["attention_mask"][1, 7] = 0
        with pytest.raises(UnsupportedModelError, match="left-padded"):
            generate(model, cache, given)


def test_padding_without_its_mask_later_on(place: Place, model: Any) -> None:
    given = prompt(2, 20, pads=(0, 5))
    with tiered(place, model, vram=8) as cache:
        forward(
            model, cache, **{"ids": given["input_ids"], "attention_mask": given["attention_mask"]}
        )
        with pytest.raises(ConfigError, match="attention mask"):
            forward(model, cache, given["input_ids"][:, :1])
        with pytest.raises(ConfigError, match="padded by"):
            forward(model, cache, given["input_ids"][:, :1], attention_mask=torch.ones(2, 21))


@pytest.mark.parametrize(
    "change", [{"num_key_value_heads": 4}, {"head_dim": 16}, {"num_hidden_layers": 2}]
)
def test_a_store_of_another_geometry(place: Place, model: Any, change: dict[str, Any]) -> None:
    other = make(**change)
    with place.store(model) as store, pytest.raises(LayoutError, match="layout_of"):
        TieredCache(other, store)


def test_a_store_of_another_dtype(place: Place, model: Any) -> None:
    with place.store(model) as store:
        half = make(dtype=torch.bfloat16)
        with TieredCache(half, store) as cache, pytest.raises(LayoutError, match="float32"):
            forward(half, cache, prompt(1, 5)["input_ids"])


def test_another_model_than_the_one_it_was_made_for(place: Place, model: Any) -> None:
    ids = prompt(1, 10)["input_ids"]
    twin = make(seed=1)
    with tiered(place, model) as cache:
        with pytest.raises(UnsupportedModelError, match="made for"):
            forward(twin, cache, ids)
        with pytest.raises(UnsupportedModelError, match="made for"):
            forward(copy.deepcopy(model), cache, ids)
        assert torch.equal(forward(model, cache, ids), forward(model, dynamic(model), ids))


def test_a_pass_that_skips_layers(place: Place) -> None:
    model = make()
    ids = prompt(1, 10)["input_ids"]
    with tiered(place, model) as cache:
        last = model.model.layers
        model.model.layers = last[:2]
        with pytest.raises(UnsupportedModelError, match="layer 2"):
            forward(model, cache, ids)
        model.model.layers = last
        assert torch.equal(forward(model, cache, ids), forward(model, dynamic(model), ids))


def test_assisted_decoding_on_a_filled_cache(place: Place, model: Any) -> None:
    given = prompt(1, 20)
    with tiered(place, model) as cache:
        forward(model, cache, given["input_ids"][:, :16])
        with pytest.raises(UnsupportedModelError, match="assisted"):
            generate(model, cache, given, prompt_lookup_num_tokens=3)
        cache.reset()
        assert_same(
            generate(model, cache, given, prompt_lookup_num_tokens=3),
            generate(model, dynamic(model), given, prompt_lookup_num_tokens=3),
        )


@pytest.mark.parametrize("tokens", [5, 13, 14, 15, 27, 28])
def test_a_cache_left_over_from_another_prompt(place: Place, model: Any, tokens: int) -> None:
    # A longer prompt than what the cache holds cannot be told from a continuation; see the class.
    with tiered(place, model, vram=8) as cache:
        generate(model, cache, prompt(1, 20), max_new_tokens=9)
        assert cache.get_seq_length() == 28
        with pytest.raises(UnsupportedModelError, match="left over"):
            generate(model, cache, prompt(1, tokens, seed=2))


def test_other_tokens_than_those_of_load_prefix(place: Place, model: Any) -> None:
    given, wrong = prompt(1, 30), prompt(1, 30, seed=1)
    with tiered(place, model) as cache:
        forward(model, cache, given["input_ids"])
        cache.flush()
        cache.reset()
        assert cache.load_prefix(**given) == 24
        with pytest.raises(ConfigError, match="load_prefix"):
            generate(model, cache, wrong)
        assert_same(
            generate(model, cache, given), generate(model, tiny.prefilled(model, given, 24), given)
        )
        cache.reset()
        generate(model, cache, wrong)


def test_load_prefix_wants_an_empty_cache(place: Place, model: Any) -> None:
    given = prompt(1, 10)
    with tiered(place, model) as cache:
        forward(model, cache, given["input_ids"])
        with pytest.raises(ConfigError, match="10 tokens"):
            cache.load_prefix(**given)
        cache.reset()
        for bad in (torch.zeros(1, 0), torch.zeros(3)):
            with pytest.raises(ConfigError, match="shape"):
                cache.load_prefix(bad)
        with pytest.raises(ConfigError, match="shape"):
            cache.load_prefix(given["input_ids"], torch.ones(1, 9))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_pass_larger_than_vram_names_a_size_that_works(
    place: Place, model: Any, rows: int
) -> None:
    given = prompt(rows, 60, pads=(5, 0, 11)[:rows])
    with tiered(place, model, vram=2 * rows + 1) as cache:
        with pytest.raises(TierFullError, match=r"prefill_chunk_size=\d+") as caught:
            generate(model, cache, given)
        size = int(str(caught.value).split("prefill_chunk_size=")[1].split(")")[0])
        options = {"prefill_chunk_size": size, "max_new_tokens": 4}
        assert_same(
            generate(model, cache, given, **options),
            generate(model, dynamic(model), given, **options),
        )


def test_a_pass_that_no_chunk_size_could_serve(place: Place, model: Any) -> None:
    with (
        tiered(place, model, vram=2) as cache,
        pytest.raises(TierFullError, match="make vram at least"),
    ):
        generate(model, cache, prompt(3, 60))


def test_a_closed_cache(place: Place, model: Any) -> None:
    ids = prompt(1, 10)["input_ids"]
    with place.store(model) as store:
        cache = TieredCache(model, store)
        forward(model, cache, ids)
        cache.close()
        cache.close()
        for use in (
            lambda: forward(model, cache, ids),
            lambda: cache.load_prefix(ids),
            lambda: cache.crop(-1),
            cache.reset,
            cache.seal,
            cache.fork,
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
        ):
            with pytest.raises((ClosedError, UnsupportedModelError)):
                use()


def test_a_closed_store_does_not_keep_the_cache_from_closing(model: Any) -> None:
    layout = layout_of(model, page_tokens=PAGE)
    from kvtier.store.store import TieredStore

    store = TieredStore(layout, device="emulated", vram=8 * layout.page_bytes)
    cache = TieredCache(model, store)
    forward(model, cache, prompt(1, 30)["input_ids"])
    store.close()
    cache.close()
    assert not model.model._forward_pre_hooks


def test_weights_that_changed(place: Place) -> None:
    model = make()
    ids = prompt(1, 20)["input_ids"]
    with tiered(place, model, vram=8) as cache:
        forward(model, cache, ids)
        cache.flush()
        cache.reset()
        weight = model.model.layers[1].self_attn.k_proj.weight.data
        weight[3, 2] += 1e-3
        with pytest.raises(IdentityError, match="changed"):
            cache.load_prefix(ids)
        with pytest.raises(IdentityError, match="changed"):
            forward(model, cache, ids)
        weight[3, 2] -= 1e-3
    with tiered(place, model) as cache:
        cache.load_prefix(ids)


@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["full_attention"] * 4),
        lambda: transformers.Gemma4TextConfig(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2),
        lambda: transformers.Qwen3NextConfig(num_hidden_layers=4),
    ],
    ids=["gemma3n", "gemma4", "qwen3-next"],
)  # fmt: skip
def test_layers_without_a_layout(config: Any) -> None:
    with pytest.raises(UnsupportedModelError):
        layout_of(config(), dtype="float32")


# ---------------------------------------------------------------------- served, but not shared


def test_embeddings_instead_of_ids(place: Place, model: Any) -> None:
    given = prompt(1, 33)
    embeds = {"inputs_embeds": model.get_input_embeddings()(given["input_ids"]).detach()}
    with tiered(place, model, vram=7) as cache:
        assert_same(
            generate(model, cache, embeds, max_new_tokens=20),
            generate(model, dynamic(model), embeds, max_new_tokens=20),
        )
        assert found(cache, given["input_ids"]) == 0


def test_positions_of_ones_own(place: Place, model: Any) -> None:
    ids = prompt(1, 24)["input_ids"]
    positions = torch.arange(24)[None] * 2
    with tiered(place, model) as cache:
        got = forward(model, cache, ids, position_ids=positions)
        other = dynamic(model)
        assert torch.equal(got, forward(model, other, ids, position_ids=positions))
        for at in (50, 7):
            step = {"ids": ids[:, :1], "position_ids": torch.tensor([[at]])}
            assert torch.equal(forward(model, cache, **step), forward(model, other, **step))
        assert found(cache, ids) == 0


def test_positions_that_count_the_padding(place: Place, model: Any) -> None:
    # Without position_ids the model counts columns: the padded row's keys are rotated by its padding.
    given = prompt(2, 29, pads=(0, 5))
    ids, mask = given["input_ids"], given["attention_mask"]
    for positions, shared in (
        (None, 0),
        (torch.arange(29)[None], 0),
        ((mask.cumsum(-1) - 1).clamp(0), 24),
    ):
        with tiered(place, model, vram=9) as cache:
            got = forward(model, cache, ids, attention_mask=mask, position_ids=positions)
            want = forward(model, dynamic(model), ids, attention_mask=mask, position_ids=positions)
            assert torch.equal(got, want)
            assert found(cache, ids[:1]) == 24
            assert found(cache, ids[1:, 5:]) == shared


def test_a_mask_of_ones_own(place: Place, model: Any) -> None:
    ids = prompt(1, 24)["input_ids"]
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    mask[..., 10:, 3] = False
    with tiered(place, model) as cache:
        got = forward(model, cache, ids, attention_mask=mask)
        want = forward(model, dynamic(model), ids, attention_mask=mask)
        assert torch.equal(got, want)
        assert found(cache, ids) == 0


def test_an_identity_made_once(place: Place, model: Any) -> None:
    ids = prompt(1, 24)["input_ids"]
    with place.store(model) as store:
        identity = identity_of(model, layout=store.layout, tenant="a")
        with pytest.raises(ConfigError, match="tenant"):
            TieredCache(model, store, identity=identity, tenant="b")
        with TieredCache(model, store, identity=identity, tenant="a") as cache:
            forward(model, cache, ids)
            cache.flush()
        for tenant, expected in (("a", 16), ("", 0)):
            with TieredCache(model, store, tenant=tenant) as cache:
                assert cache.load_prefix(ids) == expected


# ---------------------------------------------------------------------- things that go wrong


class Boom(Exception):
    pass


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("where", ["self_attn", "mlp"])
def test_an_exception_inside_a_pass(place: Place, layer: int, where: str) -> None:
    model = make("gemma3")
    given = prompt(1, 30)
    want = generate(model, dynamic(model), given)
    module = getattr(model.model.layers[layer], where)
    plain = module.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise Boom

    with tiered(place, model, vram=6) as cache:
        for at in (0, 20):
            if at:
                cache.reset()
                forward(model, cache, given["input_ids"][:, :at])
            module.forward = fails
            try:
                with pytest.raises(Boom):
                    generate(model, cache, given)
            finally:
                module.__dict__.pop("forward")
            assert module.forward == plain
            # The last layer's mlp comes after all KV was appended: those tokens count.
            done = layer == 2 and where == "mlp"
            assert cache.get_seq_length() == (30 if done else at)
            if done:
                cache.crop(at - 30)
            got = generate(model, cache, given)
            if at == 0:
                assert_same(got, want)
            else:
                assert torch.equal(got.sequences[:, :30], given["input_ids"])


def test_a_failed_pass_gives_its_room_back(place: Place) -> None:
    model = make()
    ids = prompt(1, 40)["input_ids"]
    attention = model.model.layers[1].self_attn

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise Boom

    with place.store(model, vram=6, host=0, disk=0) as store:
        with TieredCache(model, store) as first, TieredCache(model, store) as second:
            attention.forward = fails
            with pytest.raises(Boom):
                forward(model, first, ids)
            del attention.forward
            got = forward(model, second, ids)
            assert torch.equal(got, forward(model, dynamic(model), ids))


def test_a_failed_copy_during_decoding(place: Place, model: Any) -> None:
    ids = prompt(1, 40)["input_ids"]
    more = prompt(1, 1, seed=3)["input_ids"]
    other = dynamic(model)
    with tiered(place, model, vram=3, host=8, disk=0) as cache:
        for at in range(0, 40, 10):
            part = ids[:, at : at + 10]
            assert torch.equal(forward(model, cache, part), forward(model, other, part))
        place.device.faults.fail_copy("h2d")
        with pytest.raises(CopyFailedError):
            forward(model, cache, more)
        # Only the staging memory was hit, not the page: the same step succeeds now.
        assert cache.get_seq_length() == 40
        assert torch.equal(forward(model, cache, more), forward(model, other, more))


def test_a_failed_copy_of_planes_from_disk(place: Place, model: Any) -> None:
    ids = prompt(1, 40)["input_ids"]
    other = dynamic(model)
    with tiered(place, model, vram=2, host=0) as cache:
        for at in range(0, 40, 8):
            part = ids[:, at : at + 8]
            assert torch.equal(forward(model, cache, part), forward(model, other, part))
        for _ in range(2):
            place.device.faults.fail_copy("h2d")
            with pytest.raises(CopyFailedError):
                forward(model, cache, ids[:, :1])
        for _ in range(3):
            assert torch.equal(forward(model, cache, ids[:, :1]), forward(model, other, ids[:, :1]))


def flip_a_byte(folder: Path, page: bytes) -> None:
    """Damage the stored copy of a page's bytes."""
    file = next(folder.rglob("data.mdb"))
    data = bytearray(file.read_bytes())
    at = data.find(page[64:256])
    assert at > 0
    while at > 0:
        data[at + 5] ^= 0x40
        at = data.find(page[64:256])
    file.write_bytes(data)


def test_a_damaged_page_is_computed_again(place: Place, model: Any) -> None:
    given = prompt(1, 50)
    with tiered(place, model, vram=9) as cache:
        forward(model, cache, given["input_ids"])
        cache.flush()
        session = cache.sessions[0]
        with cache.store.lease(session.pages) as lease:
            third = lease.read(3).numpy().tobytes()
    with tiered(place, model) as cache:
        assert cache.load_prefix(**given) == 48
    flip_a_byte(place.path, third)
    want = generate(model, tiny.prefilled(model, given, 24), given)
    with tiered(place, model, vram=5) as cache:
        assert cache.load_prefix(**given) == 24
        assert_same(generate(model, cache, given), want)
        assert cache.store.stats().damaged == 1


def test_a_page_lost_between_match_and_use(place: Place, model: Any) -> None:
    given = prompt(1, 60)
    with tiered(place, model, vram=9) as cache:
        forward(model, cache, given["input_ids"])
        cache.flush()
        with cache.store.lease(cache.sessions[0].pages) as lease:
            pages = [lease.read(n).numpy().tobytes() for n in range(len(lease))]
    with tiered(place, model, vram=3, host=0) as cache:
        assert cache.load_prefix(**given) == 56
        lost = cache.sessions[0]._lease.tiers().index("disk")
        flip_a_byte(place.path, pages[lost])
        with pytest.raises(PageLostError, match="again"):
            generate(model, cache, given, max_new_tokens=2)
        cache.reset()
        options = {"max_new_tokens": 4, "prefill_chunk_size": 8}
        assert_same(
            generate(model, cache, given, **options),
            generate(model, dynamic(model), given, **options),
        )


def test_a_card_too_small_for_the_staging_memory(tmp_path: Path, model: Any) -> None:
    layout = layout_of(model, page_tokens=PAGE)
    device = EmulatedDevice(vram_bytes=9 * layout.page_bytes)
    place = Place(tmp_path / "kv", device)
    ids = prompt(1, 60)["input_ids"]
    other = dynamic(model)
    with tiered(place, model, vram=8) as cache:
        with pytest.raises(KvtierError, match="VRAM"):
            forward(model, cache, ids)
        assert cache.get_seq_length() == 0
        part = ids[:, :5]
        assert torch.equal(forward(model, cache, part), forward(model, other, part))
    device.close()


def test_a_dropped_cache_takes_its_hooks_along(place: Place) -> None:
    model = make()
    with place.store(model) as store:
        cache = TieredCache(model, store)
        cache.close()
        assert not model.model._forward_pre_hooks
        assert not model.model._forward_hooks
        cache = TieredCache(model, store)
        del cache
        gc.collect()
        with torch.no_grad():
            model(prompt(1, 3)["input_ids"])
        assert not model.model._forward_pre_hooks
        assert not model.model._forward_hooks


def test_compute_streams_may_change(place: Place, model: Any) -> None:
    ids = prompt(1, 60)["input_ids"]
    other = dynamic(model)
    streams = [place.device.stream(name) for name in ("one", "two")]
    with tiered(place, model, vram=4, host=2) as cache:
        for at in range(0, 40, 8):
            part = ids[:, at : at + 8]
            with place.device.on(streams[at // 8 % 2]):
                assert torch.equal(forward(model, cache, part), forward(model, other, part))
        with place.device.on(streams[0]):
            cache.seal()
        with TieredCache(model, cache.store) as second:
            with place.device.on(streams[1]):
                assert second.load_prefix(ids[:, :41]) == 40
                plain = tiny.prefilled(model, {"input_ids": ids[:, :41]}, 40)
                part = ids[:, 40:41]
                assert torch.allclose(
                    forward(model, second, part), forward(model, plain, part), atol=1e-4
                )


def test_a_fork_may_go_on_another_stream(place: Place, model: Any) -> None:
    ids = prompt(1, 30)["input_ids"]
    other = dynamic(model)
    one, two = place.device.stream("one"), place.device.stream("two")
    with tiered(place, model, vram=12, host=0, disk=0) as cache:
        with place.device.on(one):
            forward(model, cache, ids[:, :5])  # a part of a page, which the fork has to copy
            forward(model, other, ids[:, :5])
            twin = copy.deepcopy(cache)
        with place.device.on(two), twin:
            part = ids[:, 5:]
            assert torch.equal(forward(model, twin, part), forward(model, other, part))
