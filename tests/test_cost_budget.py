"""Where the memory goes, what fits, and what would make it fit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cost import find_model, memory_budget
from kvtier.cost.budget import Budget
from kvtier.cost.buffers import (
    NO_BUFFERS,
    SOURCES,
    RuntimeBuffers,
    activation_bytes,
    logits_bytes,
    parse_buffers,
)
from kvtier.cost.models import models
from kvtier.devices.cards import find_card
from kvtier.errors import ConfigError

GiB, GB = 2**30, 10**9
LLAMA = find_model("llama-3.1-8b")

#: Llama-3.1-70B in Q4_0: 37.22 GiB, 4.53 bits a weight (ollama#6279).
LLAMA_70B = find_model("llama-3.1-70b")
Q4_0 = 39.97e9 * 8 / LLAMA_70B.params


# published cases


def test_70b_does_not_fit_one_card_of_40_gb_although_35_gb_of_weights_would() -> None:
    """Nominal 4-bit weights of 35 GB leave out metadata, KV and buffers: 43.2 to 43.7 GB in all."""
    card = find_card("a100-sxm4-40gb")
    for gpu in (card, round(42.5e9)):
        budget = memory_budget(LLAMA_70B, gpu, tokens=8192, weight_bits=Q4_0)
        assert not budget.fits
        assert budget.part("kv") == pytest.approx(2.68e9, rel=0.01)
        assert 43.2e9 < budget.used < 44.5e9
    nominal = memory_budget(LLAMA_70B, card, tokens=8192, weight_bits=4, buffers=NO_BUFFERS)
    assert nominal.part("weights") == pytest.approx(35.3e9, rel=0.01)
    assert nominal.fits


def test_70b_fits_two_cards_of_24_gib_at_8k_and_not_at_32k() -> None:
    def two(tokens: int) -> Budget:
        return memory_budget(LLAMA_70B, 24 * GiB, gpus=2, tokens=tokens, weight_bits=Q4_0)

    assert two(8192).fits
    assert 5e9 < 2 * two(8192).free < 9e9
    assert not two(32_768).fits
    assert not memory_budget(
        LLAMA_70B,
        24 * GiB,
        gpus=2,
        tokens=32_768,
        weight_bits=Q4_0,
        buffers=RuntimeBuffers(graphs=0),
    ).fits


def test_flash_next_holds_sixteen_sequences_of_128k_in_fp8_but_not_in_bf16() -> None:
    """Two RTX PRO 6000 at 0.9: 63.8 GB of KV in bf16, 36.1 in fp8, about 50 to spare (references:
    vllm PR 53896, vllm#54426). The figures are of both cards together, so one card of twice the size."""
    model = find_model("qwen3.8-flash-next")
    both = {
        "sequences": 16, "tokens": 131_072, "utilization": 0.9, "chunk": 1,
        "buffers": RuntimeBuffers(0.0, 0, 0, 0, 0.0, other=5 * GB),
    }  # fmt: skip
    pool = 2 * 97_887 * 2**20
    bf16 = memory_budget(model, pool, dtype="bf16", **both)
    fp8 = memory_budget(model, pool, dtype="fp8", **both)
    assert bf16.part("kv") == pytest.approx(63.8e9, rel=0.002)
    assert fp8.part("kv") == pytest.approx(36.1e9, rel=0.002)
    assert bf16.part("weights") == pytest.approx(129.8e9, rel=0.001)
    assert (bf16.fits, fp8.fits) == (False, True)
    longest = bf16.longest_context()
    assert longest is not None
    assert longest == pytest.approx(103_000, rel=0.02)


def test_27b_sessions_are_limited_by_their_state_too() -> None:
    model = find_model("qwen3.8-27b")
    free = memory_budget(
        model, round(model.weight_bytes(4) + 8 * GiB), tokens=8192, weight_bits=4, chunk=1,
        buffers=NO_BUFFERS,
    )  # fmt: skip
    assert free.max_sequences() == 12
    assert free.changed(state_slots=7).max_sequences() == 7
    assert not free.changed(state_slots=7, sequences=8).fits


def test_activations_and_logits_are_what_vllm_logs() -> None:
    """Llama-3-8B, 8,192 tokens and 256 sequences: 1.26 GiB (vLLM PR 10511)."""
    model = find_model("llama-3-8b")
    total = activation_bytes(model, 8192) + logits_bytes(model, 256)
    assert total / GiB == pytest.approx(1.26, rel=0.03)


# parts


def test_every_part_has_a_source_and_they_add_up() -> None:
    budget = memory_budget(LLAMA, find_card("rtx-4060-ti-16gb"), tokens=[100, 5000, 7], kv_off=0.5)
    assert budget.sequences == 3
    assert all(part.source for part in budget.parts)
    assert budget.used == sum(part.nbytes for part in budget.parts)
    assert budget.usable == pytest.approx(16 * GiB * (1 - 0.0175))
    for name in ("weights", "kv", "page rounding", "activations", "logits", "allocator slack",
                 "cuda context", "cuda graphs", "workspace", "staging"):  # fmt: skip
        assert budget.part(name) > 0, name
    assert "GiB" in "".join(budget.lines())


@given(
    lengths=st.lists(st.integers(0, 20_000), min_size=1, max_size=12),
    page=st.sampled_from([1, 16, 64, 256]),
    name=st.sampled_from(["llama-3.1-8b", "gemma-3-27b", "qwen3.5-27b", "deepseek-v3", "deepseek-v4-flash"]),
)  # fmt: skip
@settings(deadline=None)
def test_pages_waste_less_than_one_a_sequence_and_window(lengths: list[int], page: int, name: str) -> None:  # fmt: skip
    model = find_model(name)
    budget = memory_budget(model, 10**15, tokens=lengths, page_tokens=page, buffers=NO_BUFFERS)
    waste = budget.part("page rounding")
    assert budget.part("kv") + budget.part("state") == pytest.approx(
        sum(model.sequence_bytes(n, "bf16") for n in lengths)
    )
    one = sum(layer.token_bytes(budget.dtype) * (2 if layer.rate else 1) for layer in model.layers)
    assert 0 <= waste <= len(lengths) * one * page
    if page == 1:
        assert waste == pytest.approx(0, abs=1e-3)


def test_a_mean_of_unlike_lengths_wastes_half_a_page_each() -> None:
    same = {"sequences": 4, "page_tokens": 64, "buffers": NO_BUFFERS}
    mean = memory_budget(LLAMA, 10**12, tokens=1000, mean=True, **same)
    assert mean.part("page rounding") == 4 * 31.5 * 131_072
    spread = [1000 + n for n in range(-32, 32)]
    exact = memory_budget(LLAMA, 10**12, tokens=spread, page_tokens=64, buffers=NO_BUFFERS)
    assert exact.part("page rounding") / 64 == mean.part("page rounding") / 4


def test_gpus_split_heads_and_state_but_not_a_latent() -> None:
    llama, mla, hybrid = (find_model(n) for n in ("llama-3.1-70b", "deepseek-v3", "qwen3.5-27b"))
    for gpus, share in ((1, 1), (2, 1 / 2), (8, 1 / 8), (16, 1 / 8)):
        load = {"tokens": 10_000, "gpus": gpus, "buffers": NO_BUFFERS}
        whole = llama.sequence_bytes(10_000, "bf16")
        assert memory_budget(llama, 10**12, **load).part("kv") == pytest.approx(whole * share)
        assert memory_budget(mla, 10**12, **load).part("kv") == mla.sequence_bytes(10_000, "bf16")
        state = memory_budget(hybrid, 10**12, **load).part("state")
        assert state == pytest.approx(hybrid.state_bytes / gpus)
        weights = memory_budget(llama, 10**12, weight_bits=16, **load).part("weights")
        assert weights == pytest.approx(llama.params * 2 / gpus)


# limits


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([model.slug for model in models()][::5]),
    gib=st.integers(4, 200),
    sequences=st.integers(1, 40),
    tokens=st.integers(1, 200_000),
    dtype=st.sampled_from(["bf16", "fp8", "int4"]),
    page=st.sampled_from([1, 16, 256]),
)
def test_the_longest_context_and_the_most_sequences_fit_and_one_more_does_not(
    name: str, gib: int, sequences: int, tokens: int, dtype: str, page: int
) -> None:
    budget = memory_budget(
        find_model(name),
        gib * GiB,
        sequences=sequences,
        tokens=tokens,
        dtype=dtype,
        page_tokens=page,
    )
    longest, most = budget.longest_context(), budget.max_sequences()
    if longest is not None:
        assert longest == 0 or budget.changed(tokens=longest).fits
        assert not budget.changed(tokens=longest + 1).fits
    if most is not None:
        assert most == 0 or budget.changed(sequences=most).fits
        assert not budget.changed(sequences=most + 1).fits
    if budget.fits:
        assert longest is None or longest >= tokens
        assert most is None or most >= sequences
        assert budget.remedies() == []
    for remedy in budget.remedies():
        assert budget.changed(**remedy.change).fits, remedy


def test_memory_does_not_limit_a_model_whose_windows_are_full() -> None:
    budget = memory_budget(find_model("mistral-7b-v0.1"), 24 * GiB)
    assert budget.longest_context() is None
    assert budget.max_sequences() not in (None, 0)


def test_remedies_are_of_every_kind_and_say_how_much() -> None:
    budget = memory_budget(
        LLAMA, find_card("rtx-4060-ti-8gb"), sequences=4, tokens=16_384, weight_bits=4.9
    )
    found = {one.kind: one for one in budget.remedies()}
    assert set(found) == {"context", "sequences", "card", "gpus", "kv_off"}
    context = found["context"].change["tokens"]
    assert f"{16_384 - context:,} fewer" in found["context"].text  # type: ignore[operator]
    assert found["card"].change["vram"].vram_bytes == 16 * GiB  # type: ignore[attr-defined]
    longer = memory_budget(LLAMA, 16 * GiB, sequences=2, tokens=32_768, weight_bits=8.5)
    kinds = {one.kind: one for one in longer.remedies()}
    assert {"kv_dtype", "weights", "weights_off", "kv_off"} <= set(kinds)
    assert "fp8" in kinds["kv_dtype"].text
    assert json.dumps([one.to_json() for one in budget.remedies()])


def test_two_changes_where_one_is_not_enough() -> None:
    budget = memory_budget(
        find_model("llama-3.1-405b"), find_card("rtx-3060-12gb"), tokens=131_072, weight_bits=8.5
    )
    found = budget.remedies()
    assert [one.kind for one in found] == ["card", "weights_off"]
    assert all(len(one.change) == 2 and budget.changed(**one.change).fits for one in found)


def test_a_budget_as_json() -> None:
    data = memory_budget(LLAMA, find_card("rtx-3060-12gb"), tokens=100_000).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["fits"] is False
    assert sum(part["bytes"] for part in data["parts"]) == pytest.approx(data["used_bytes"], abs=20)  # type: ignore[attr-defined]
    assert "2^30" in str(data["units"])


# what is kept off the card


def test_what_is_off_the_card_takes_no_room_there_but_for_staging() -> None:
    load = {"tokens": 32_768, "buffers": NO_BUFFERS, "chunk": 1}
    here = memory_budget(LLAMA, 24 * GiB, **load)
    half = memory_budget(LLAMA, 24 * GiB, kv_off=0.5, weights_off=0.25, **load)
    assert half.part("kv") == here.part("kv") / 2
    assert half.part("weights") == here.part("weights") * 0.75
    layers = 2 * here.part("kv") / 32 + 0.25 * LLAMA.read_bytes() / 32
    assert half.part("staging") == pytest.approx(layers)
    assert here.part("staging") == 0


# inputs


def test_buffers_can_be_given() -> None:
    assert parse_buffers("none") == NO_BUFFERS
    some = parse_buffers("graphs=0,cuda_context=400MiB,slack=0.25")
    assert (some.graphs, some.cuda_context, some.slack) == (0, 400 * 2**20, 0.25)
    assert some.workspace == RuntimeBuffers().workspace
    assert {"cuda_context", "graphs", "workspace", "slack", "driver"} <= set(SOURCES)
    for text, part in (("heap=1", "heap"), ("slack=2", "slack"), ("slack=x", "slack"), ("graphs=-1", "graphs")):  # fmt: skip
        with pytest.raises(ConfigError, match=part):
            parse_buffers(text)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"sequences": 0}, "sequences is 0"),
        ({"tokens": -1}, "tokens is -1"),
        ({"tokens": [10, -5]}, "tokens is -5"),
        ({"tokens": [10, 5], "sequences": 3}, "2 lengths for 3"),
        ({"tokens": [10, 5], "mean": True}, "mean"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"gpus": 0}, "gpus"),
        ({"weights_off": 1.5}, "weights_off is 1.5"),
        ({"kv_off": -0.1}, "kv_off"),
        ({"utilization": 0}, "utilization"),
        ({"utilization": 1.2}, "utilization"),
        ({"dtype": "fp5"}, "fp5"),
        ({"weight_bits": -4}, "bits"),
        ({"vram": 0}, "vram"),
        ({"state_slots": -1}, "state_slots"),
    ],
)
def test_wrong_input_names_the_field_and_the_fix(change: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        _ = memory_budget(**{"model": LLAMA, "vram": 24 * GiB, **change}).used  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert "give" in str(caught.value) or "use" in str(caught.value)


def test_a_budget_needs_no_torch() -> None:
    program = (
        "import sys; from kvtier.cost import find_model, memory_budget;"
        "b = memory_budget(find_model('llama-3.1-8b'), 8 * 2**30, tokens=32768); b.to_json();"
        "print(sorted({'torch', 'numpy', 'transformers', 'lmdb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
