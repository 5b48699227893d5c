"""Numbers that others published or logged, each with its source, against the functions of kvtier.cost.

``tests/data/reference_cases.json`` has a kind, inputs and expected results. ``KINDS`` says which
function answers a kind: it is called with the inputs as they are, so more cases need no code.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.cost import (
    crossover_tokens,
    find_model,
    fixed_state_bytes,
    kv_bytes,
    kv_step_ms,
    max_context,
    max_sequences,
    memory_budget,
    offload_decode,
    plausibility,
    prefer,
    stream_ms,
    tokens_in_pool,
)
from kvtier.cost.buffers import RuntimeBuffers
from kvtier.cost.prompt_cache import cached_tokens

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "reference_cases.json").read_text())
MiB, GiB = 2**20, 2**30

Inputs = dict[str, Any]


def _kv_bytes(inputs: Inputs) -> Inputs:
    got = kv_bytes(**inputs)
    names = ("per_token", "growth_per_token", "fixed", "fixed_mib", "total", "total_mib", "total_gib", "total_gb")  # fmt: skip
    return {name: getattr(got, name) for name in names}


def _fixed_state_bytes(inputs: Inputs) -> Inputs:
    got = fixed_state_bytes(**inputs)
    return {"bytes": got, "mib": got / MiB, "gib": got / GiB}


def _tokens_in_pool(inputs: Inputs) -> Inputs:
    inputs = dict(inputs)
    pools = {"pool_gib": GiB, "pool_mib": MiB, "pool_gb": 1e9, "pool_bytes": 1}
    pool = sum(inputs.pop(name) * unit for name, unit in pools.items() if name in inputs)
    page = inputs.pop("page_tokens", 1)
    per_token = inputs.pop("bytes_per_token", None) or kv_bytes(1, **inputs).per_token
    tokens = tokens_in_pool(pool, per_token, page_tokens=page)
    return {"tokens": tokens, "blocks": tokens // page}


def _stream_ms(inputs: Inputs) -> Inputs:
    got = stream_ms(**inputs)
    return {"ms": got.ms, "gb": got.gb, "gib": got.gib, "bytes": got.nbytes}


def _offload_decode(inputs: Inputs) -> Inputs:
    got = offload_decode(**inputs)
    return {
        "tps": got.tps,
        "tps_range": got.tps_range,
        "seconds_per_token": got.seconds_per_token,
        "slowdown": got.slowdown,
        "level": got.level,
    }


def _plausibility(inputs: Inputs) -> Inputs:
    got = plausibility(**inputs)
    return {"max_tps": got.max_tps, "plausible": got.plausible, "exceeds": got.exceeds}


KINDS: dict[str, Callable[[Inputs], Inputs]] = {
    "stream_ms": _stream_ms,
    "kv_step_ms": lambda inputs: {"ms": kv_step_ms(**inputs)},
    "crossover_tokens": lambda inputs: {"tokens": crossover_tokens(**inputs)},
    "offload_decode": _offload_decode,
    "ordering": lambda inputs: {"prefer": prefer(inputs)},
    "plausibility": _plausibility,
    "kv_bytes": _kv_bytes,
    "fixed_state_bytes": _fixed_state_bytes,
    "tokens_in_pool": _tokens_in_pool,
    "max_context": lambda inputs: {"tokens": max_context(**inputs)},
    "max_sequences": lambda inputs: {"sequences": max_sequences(**inputs)},
    "prompt_cache_tokens": lambda inputs: {"max_cached": cached_tokens(**inputs)},
}


def within(got: float, expected: float, tolerance: str) -> bool:
    """``exact``, a share (``0.1%``), an absolute difference (``1``), or ``range``: its ends."""
    if tolerance == "exact" or isinstance(expected, bool | str):
        return got == expected
    if tolerance == "range":
        tolerance = "1%"
    if tolerance.endswith("%"):
        return abs(got - expected) <= float(tolerance[:-1]) / 100 * abs(expected)
    return abs(got - expected) <= float(tolerance.removeprefix("+-"))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_published_number(case: Inputs) -> None:
    got = KINDS[case["kind"]](case["inputs"])
    for name, expected in case["expected"].items():
        if name in ("must_contain", "must_not_contain"):
            low, high = got["tps_range"]
            assert (low <= expected <= high) == (name == "must_contain"), (
                name,
                low,
                high,
                expected,
            )
            continue
        pairs = (
            zip(got[name], expected, strict=True)
            if isinstance(expected, list)
            else [(got[name], expected)]
        )
        for value, wanted in pairs:
            assert within(value, wanted, case["tolerance"]), (name, value, wanted)


# capacity_points.csv: what engines report that fits


def _rows() -> dict[tuple[str, str, str], dict[str, str]]:
    with (DATA / "capacity_points.csv").open() as file:
        return {(r["source"], r["model"], r["tokens_or_seqs"]): r for r in csv.DictReader(file)}


ROWS = _rows()


def _h100(model: str, weights: float, tokens: int, gpus: int = 1) -> int | None:
    """vLLM on an H100: it sees 79.1 GiB, fills 0.9 of it, and 3 GB are reserve."""
    shape = find_model(model)
    pool = 0.9 * 79.1 * GiB - weights - 3e9
    fits = max_sequences(
        pool_bytes=pool, tokens=tokens, bytes_per_token=shape.token_bytes("bf16"), page_tokens=16
    )
    budget = memory_budget(
        shape,
        round(79.1 * GiB),
        tokens=tokens,
        weight_bits=weights * gpus * 8 / shape.params,
        buffers=RuntimeBuffers(0.0, 0, 0, 0, 0.0, other=round(3e9)),
        gpus=gpus,
        utilization=0.9,
        chunk=1,
    )
    assert budget.max_sequences() == fits
    return fits


def _flash_next(dtype: str) -> float:
    """vLLM's pool is not in the row; the tokens per GiB that it logs are."""
    shape = find_model("qwen3.8-flash-next")
    per_gib = {"bf16": 35_310, "fp8": 62_343}[dtype]
    assert tokens_in_pool(GiB, shape.token_bytes(dtype)) == pytest.approx(per_gib, rel=0.001)
    tokens = {"bf16": 512_703, "fp8": 857_210}[dtype]
    pool = tokens / per_gib * GiB
    return tokens_in_pool(pool, shape.token_bytes(dtype))


def _state_slots(row: dict[str, str]) -> int:
    """vLLM keeps this model's state in 16 bits, so half of what llama.cpp keeps, and fills the pool
    with as many states as fit."""
    shape = find_model("qwen3.8-27b")
    pool = 97_887 * MiB * float(row["util"]) - shape.weight_bytes(16) - 1e9
    return max_sequences(
        pool_bytes=pool, tokens=0, bytes_per_token=0, fixed_bytes=shape.state_bytes / 2
    )


GOT: dict[tuple[str, str], Callable[[dict[str, str]], float | None]] = {
    ("SparseEngine max_batch", "seqs @133,120"): lambda row: (
        _h100("qwen3-30b-a3b", 31.2e9, 133_120) if "Qwen" in row["model"]
        else _h100("glm-4.7-flash", 30e9, 133_120, 2)
    ),
    ("SparseEngine max_batch", "seqs @34,816"): lambda row: (
        _h100("qwen3-30b-a3b", 31.2e9, 34_816) if "Qwen" in row["model"]
        else _h100("glm-4.7-flash", 30e9, 34_816, 2)
    ),
    ("vLLM PR 24577 log", "tokens"): lambda row: tokens_in_pool(
        69.66 * GiB, find_model("qwen3-0.6b").token_bytes("bf16"), page_tokens=16
    ),
    ("pegainfer PR 554 log", "blocks of 16"): lambda row: tokens_in_pool(
        34_416 * MiB, find_model("qwen3-4b").token_bytes("bf16"), page_tokens=16
    ) / 16,
    ("llama.cpp#5137 log", "KV MiB"): lambda row: (
        find_model("mixtral-8x7b").sequence_bytes(512, "fp16") / MiB
    ),
    ("vllm#54426", "tokens"): lambda row: _flash_next("fp8" if "fp8" in row["model"] else "bf16"),
    ("club-3090 / TheTom PR 350", "GiB"): lambda row: (
        find_model("qwen3.8-27b").sequence_bytes(220_000, "fp16") / GiB
    ),
    ("recipes PR 831", "max sequences (state blocks)"): _state_slots,
    ("turboquant#308 log", "state MiB"): lambda row: 3 * find_model("qwen3.8-27b").state_bytes / MiB,
}  # fmt: skip

#: Nothing that the row says tells how large the pool was, so there is nothing to compute.
NO_INPUTS = {("syv-ai#32", "KV tokens")}


@pytest.mark.parametrize("row", ROWS.values(), ids=[" ".join(key)[:60] for key in ROWS])
def test_a_capacity_that_an_engine_reports(row: dict[str, str]) -> None:
    key = (row["source"], row["tokens_or_seqs"])
    if key in NO_INPUTS:
        assert row["tolerance"] == "info"
        return
    got = GOT[key](row)
    assert got is not None
    # "exact" in a log that prints two decimals.
    tolerance = {"info": "5%", "exact": "0.005" if "." in row["expected"] else "exact"}
    assert within(got, float(row["expected"]), tolerance.get(row["tolerance"], row["tolerance"])), (
        got
    )
