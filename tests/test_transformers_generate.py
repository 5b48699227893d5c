"""``generate`` and forward loops over a ``TieredCache``: the same tokens and logits as ``DynamicCache``, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from tiny_models import Place, assert_same, dynamic, forward, generate, make, prompt, tiered  # noqa: E402

from kvtier.devices.emulated import EmulatedDevice  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    device = EmulatedDevice(vram_bytes=64 << 20)
    yield Place(tmp_path / "kv", device)
    assert device.used_bytes == 0
    device.close()


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (prompt, options of generate, sizes of the store)
    "greedy": ({}, {}, {}),
    "sampled": ({}, {"do_sample": True, "temperature": 1.5, "seed": 3}, {}),
    "beams": ({}, {"num_beams": 3}, {"vram": 11}),
    "sequences": ({}, {"do_sample": True, "num_return_sequences": 3, "seed": 5}, {"vram": 11}),
    "lookup": ({}, {"prompt_lookup_num_tokens": 3}, {}),
    "chunked": ({"tokens": 61}, {"prefill_chunk_size": 11, "max_new_tokens": 5}, {}),
    "chunked-pages": ({"tokens": 64}, {"prefill_chunk_size": 16, "max_new_tokens": 5}, {}),
    "padded": ({"rows": 3, "pads": (0, 13, 5)}, {}, {"vram": 10}),
    "padded-chunked": (
        {"rows": 3, "tokens": 40, "pads": (0, 25, 10)},
        {"prefill_chunk_size": 10, "max_new_tokens": 15},
        {"vram": 10},
    ),
    "padded-beams": ({"rows": 2, "pads": (9, 0)}, {"num_beams": 2}, {"vram": 14}),
    "one-token": ({"tokens": 1}, {}, {"vram": 2}),
}


def run_both(place: Place, model: Any, way: str) -> None:
    inputs, options, sizes = WAYS[way]
    options = {"max_new_tokens": 40} | options
    given = prompt(**({"rows": 1, "tokens": 21} | inputs))
    want = generate(model, dynamic(model), given, **options)
    with (
        place.store(model, **({"vram": 4, "host": 2} | sizes)) as store,
        tiny.TieredCache(model, store) as cache,
    ):
        got = generate(model, cache, given, **options)
        assert cache.get_seq_length() == want.sequences.shape[1] - 1
        assert tiny.used_all_tiers(store)
    assert_same(got, want)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate(place: Place, way: str) -> None:
    run_both(place, make(), way)


ATTENTION = [
    (kind, how)
    for kind in tiny.KINDS
    for how in ("sdpa", "eager")
    if (kind, how) != ("gemma2", "sdpa")
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "attention"), ATTENTION)
def test_every_kind_of_model(place: Place, kind: str, dtype: Any, attention: str) -> None:
    run_both(place, make(kind, dtype=dtype, attention=attention), "greedy")


@pytest.mark.parametrize("way", ["beams", "lookup", "padded-chunked", "chunked"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "deepseek"])
def test_windows_and_latents_in_other_ways(place: Place, kind: str, way: str) -> None:
    run_both(place, make(kind), way)


@pytest.mark.parametrize("way", ["beams", "padded", "padded-chunked"])
def test_batches_of_plain_matrix_products(place: Place, way: str) -> None:
    run_both(place, make("llama-mha", attention="eager"), way)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "attention"), ATTENTION)
def test_everything(place: Place, kind: str, dtype: Any, attention: str, way: str) -> None:
    run_both(place, make(kind, dtype=dtype, attention=attention), way)


def test_assisted_decoding(place: Place) -> None:
    model, assistant = make(), make(num_hidden_layers=2, seed=0)
    given = prompt(1, 37)
    options = {"assistant_model": assistant, "max_new_tokens": 24}
    want = generate(model, dynamic(model), given, **options)
    with tiered(place, model) as cache:
        assert_same(generate(model, cache, given, **options), want)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_forward_loop(place: Place, kind: str) -> None:
    model = make(kind)
    ids = prompt(2, 50)["input_ids"]
    other = dynamic(model)
    with tiered(place, model, vram=8) as cache:
        at = 0
        for count in (17, 1, 1, 8, 15, 1, 7):
            part = ids[:, at : at + count]
            assert torch.equal(forward(model, cache, part), forward(model, other, part))
            at += count
            assert cache.get_seq_length() == other.get_seq_length() == at
        assert torch.equal(
            forward(model, cache, part, logits_to_keep=1),
            forward(model, other, part, logits_to_keep=1),
        )


def test_the_decoder_alone_is_watched_too(place: Place) -> None:
    model = make()
    ids = prompt(1, 33)["input_ids"]
    with tiered(place, model) as cache:
        with torch.no_grad():
            got = model.model(ids, **{tiny.KEYWORD: cache}).last_hidden_state
            want = model.model(ids, **{tiny.KEYWORD: dynamic(model)}).last_hidden_state
        assert torch.equal(got, want)
        cache.flush()
        with tiny.TieredCache(model, cache.store) as second:
            assert second.load_prefix(ids) == 32


def test_inference_mode_may_be_mixed_with_normal_mode(place: Place) -> None:
    model = make()
    ids = prompt(1, 30)["input_ids"]
    other = dynamic(model)
    with tiered(place, model) as cache:
        for part, mode in (
            (ids, torch.inference_mode),
            (ids, torch.no_grad),
            (ids, torch.enable_grad),
        ):
            with mode():
                got = model(part, **{tiny.KEYWORD: cache}).logits
            with torch.no_grad():
                want = model(part, **{tiny.KEYWORD: other}).logits
            assert torch.equal(got, want)


# ---------------------------------------------------------------------- restore


def restart(
    place: Place,
    model: Any,
    given: dict[str, Any],
    first: dict[str, Any] | None = None,
    **sizes: Any,
) -> None:
    """Compute a prompt in one pass, and leave its pages on disk."""
    inputs = dict(first or given)
    if "attention_mask" in inputs:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    rows, tokens = inputs["input_ids"].shape
    with tiered(place, model, vram=rows * (tokens // tiny.PAGE + 2), **sizes) as cache:
        with torch.no_grad():
            model(**inputs, **{tiny.KEYWORD: cache})
        assert cache.flush() == 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_restored_after_a_restart(place: Place, kind: str, dtype: Any) -> None:
    model = make(kind, dtype=dtype)
    given = prompt(1, 61)
    restart(place, model, given)
    want = generate(model, tiny.prefilled(model, given, 56), given)
    with tiered(place, model, vram=3) as cache:
        assert cache.load_prefix(**given) == 56
        assert_same(generate(model, cache, given), want)


@pytest.mark.parametrize(
    ("tokens", "restored"), [(1, 0), (2, 0), (7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (64, 56)]
)
def test_never_the_whole_prompt(place: Place, tokens: int, restored: int) -> None:
    model = make()
    given = prompt(1, tokens)
    restart(place, model, given)
    want = generate(model, tiny.prefilled(model, given, restored), given)
    with tiered(place, model) as cache:
        assert cache.load_prefix(**given) == restored
        assert_same(generate(model, cache, given), want)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_restored_into_several_rows(place: Place, options: dict[str, Any]) -> None:
    model = make()
    given = prompt(1, 45)
    restart(place, model, given)
    rows = 3 if "num_beams" in options else 2
    reference = tiny.prefilled(model, given, 40)
    reference.batch_repeat_interleave(rows)
    want = generate(model, reference, given, **options)
    with tiered(place, model, vram=12) as cache:
        assert cache.load_prefix(**given) == 40
        assert_same(generate(model, cache, given, **options), want)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_restored_batch_with_padding(place: Place, kind: str) -> None:
    model = make(kind)
    given = prompt(3, 50, pads=(0, 13, 6))
    restart(place, model, given)
    with tiered(place, model, vram=20) as cache:
        columns = cache.load_prefix(**given)
        # The rows have 50, 37 and 44 tokens, so 48, 32 and 40 of them are to be had: up to columns 48, 45 and 46.
        assert columns == 45
        want = generate(model, tiny.prefilled(model, given, columns), given)
        assert_same(generate(model, cache, given), want)


def test_a_row_finds_what_another_padding_left(place: Place) -> None:
    model = make()
    left = prompt(2, 40, pads=(0, 11))
    restart(place, model, left)
    alone = {name: x[1:, 11:] for name, x in left.items()}
    with tiered(place, model) as cache:
        assert cache.load_prefix(**alone) == 24


def test_second_turn(place: Place) -> None:
    model = make()
    first = prompt(1, 30)
    with tiered(place, model) as cache:
        answer = generate(model, cache, first, max_new_tokens=21).sequences
        cache.flush()
    ids = torch.cat([answer, prompt(1, 9, seed=4)["input_ids"]], dim=1)
    second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # 50 of the 51 tokens have been through the model; 48 of them are whole pages.
    reference = dynamic(model)
    generate(model, reference, first, max_new_tokens=21)
    reference.crop(48 - reference.get_seq_length())
    want = generate(model, reference, second)
    with tiered(place, model) as cache:
        assert cache.load_prefix(**second) == 48
        assert_same(generate(model, cache, second), want)


def test_one_cache_through_two_turns(place: Place) -> None:
    model = make("mistral")
    first = prompt(1, 30)
    other = dynamic(model)
    with tiered(place, model) as cache:
        for turn in range(3):
            out = generate(model, cache, first, max_new_tokens=9)
            assert_same(out, generate(model, other, first, max_new_tokens=9))
            ids = torch.cat([out.sequences, prompt(1, 5, seed=turn)["input_ids"]], dim=1)
            first = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
