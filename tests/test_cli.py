"""The command line: options, messages, exit statuses, planning, records. Without a model."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.generate import Generation, chunk_calls
from kvtier.cli.history import FILE, History, Run
from kvtier.cli.main import main
from kvtier.cli.options import RunOptions
from kvtier.cli.report import LINKS, Report
from kvtier.cli.sizing import plan_sizes
from kvtier.cli.verify import Comparison, compare, tolerance_of
from kvtier.errors import ConfigError
from kvtier.layout import LayerLayout, PageLayout
from kvtier.store.stats import TierStats

LAYOUT = PageLayout([LayerLayout.attention(3, 64, "float32")] * 30, page_tokens=32)
TIER: dict[str, int] = {
    "capacity_bytes": 10,
    "used_bytes": 5,
    "peak_bytes": 7,
    "pages": 1,
    "pages_in": 2,
    "pages_out": 1,
    "hits": 3,
}


def demo_options(**changes: object) -> RunOptions:
    options = RunOptions(
        demo=True,
        model=None,
        prompt_file=None,
        prompt_tokens=None,
        vram=None,
        host=None,
        disk=None,
        store=Path("kvtier-demo"),
        max_new_tokens=32,
        page_tokens=32,
        chunk=512,
        policy="lru",
        mode="exact-stream",
        device="auto",
        verify=True,
        json=True,
    )
    return replace(options, **changes)


def report(**changes: object) -> Report:
    values = {
        "model": "m",
        "device": "d",
        "policy": "lru",
        "text": "and so on",
        "page_tokens": 32,
        "chunk_tokens": 512,
        "kv_bytes": 1000,
        "staging_bytes": 10,
        "prompt_tokens": 100,
        "restored_tokens": 96,
        "generated_tokens": 4,
        "ttft_s": 0.5,
        "cold_ttft_s": 20.5,
        "decode_tokens_per_s": 5.0,
        "flush_s": 0.1,
        "tiers": {name: TierStats(**TIER) for name in ("vram", "host", "disk")},
        "links": {name: SimpleNamespace(bytes=4, copies=2) for name in LINKS},
        "link_bytes_per_token": dict.fromkeys(LINKS, 2.0),
        "comparison": Comparison(True, 0.0, None, True),
    }
    return Report(**{**values, **changes})


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("", ["no command", "run"]),
        ("walk", ["'walk'", "'run'"]),
        ("run", ["--model is missing", "--demo"]),
        ("run --demo --vramm 3", ["unknown option --vramm", "did you mean --vram?"]),
        ("run --demo --zzz", ["unknown option --zzz", "kvtier run --help"]),
        ("run --demo extra", ["'extra'"]),
        ("run --demo --vram 3x", ["--vram", "'3x'", "GiB"]),
        ("run --demo --host -5", ["--host"]),
        ("run --demo --disk", ["--disk"]),
        ("run --demo --max-new-tokens 0", ["--max-new-tokens is 0", "at least 1"]),
        ("run --demo --max-new-tokens many", ["--max-new-tokens", "'many'", "whole number"]),
        ("run --demo --prompt-tokens 1", ["--prompt-tokens is 1", "at least 2"]),
        ("run --demo --policy fifo9", ["--policy", "'fifo9'", "lru", "mass"]),
        ("run --demo --prompt-file /no/such/file", ["--prompt-file", "/no/such/file"]),
        ("run --model m --prompt-file {file} --host 0 --disk 0", ["--vram is missing", "512MiB"]),
        (
            "run --model m --prompt-file {file} --vram 1MB --host 0 --disk 1MB",
            ["--store", "--disk 0"],
        ),
        ("run --demo --store {file}", ["--store", "not a directory"]),
        ("run --demo --mode exact", ["'exact' is unknown", "exact-split", "select:NAME"]),
        ("run --demo --mode select:quest", ["no budget", "10%"]),
        ("run --demo --mode select:omnikv,budget=ten", ["budget 'ten'"]),
        ("run --demo --verify --mode select:quest,budget=9%", ["--verify", "exact-split"]),
    ],
)
def test_wrong_options_give_one_line_and_status_2(
    arguments: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("words", encoding="utf-8")
    assert main(arguments.format(file=file).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_model_that_is_not_here_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("words", encoding="utf-8")
    missing = str(tmp_path / "no-model")
    sizes = ["--vram", "1MB", "--host", "0", "--disk", "0"]
    assert main(["run", "--model", missing, "--prompt-file", str(prompt), *sizes]) == 2
    assert missing in capsys.readouterr().err.splitlines()[-1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvtier 0.")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvtier.cli.main import main; main(['run', '--help']);"
        "print('HEAVY', [m for m in ('torch', 'transformers', 'lmdb', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "HEAVY []" in done.stdout
    assert "--verify" in done.stdout


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "kvtier"
    done = subprocess.run(
        [str(command), "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0


# ---------------------------------------------------------------- sizes and calls


def test_demo_takes_a_third_in_vram_and_a_third_in_host() -> None:
    plan = plan_sizes(demo_options(), LAYOUT, 4187)
    assert plan.kv_bytes == (4187 + 32) * 46080
    assert plan.vram <= plan.kv_bytes / 3
    assert plan.kv_bytes / 3 - plan.vram < LAYOUT.page_bytes
    assert plan.vram % LAYOUT.page_bytes == 0
    assert plan.host == plan.vram
    assert plan.disk == 4 * plan.kv_bytes
    assert plan.chunk == 512


def test_sizes_that_were_asked_for_win() -> None:
    asked = demo_options(vram=10**8, host=0, disk=7)
    plan = plan_sizes(asked, LAYOUT, 4187)
    assert (plan.vram, plan.host, plan.disk) == (10**8, 0, 7)


@given(st.integers(2, 200), st.integers(1, 2000), st.integers(1, 64))
def test_a_chunk_is_whole_pages_and_fits_in_half_the_vram(
    pages: int, chunk: int, page_tokens: int
) -> None:
    layout = PageLayout([LayerLayout.attention(1, 8, "float16")], page_tokens=page_tokens)
    options = demo_options(vram=pages * layout.page_bytes, chunk=chunk, page_tokens=page_tokens)
    plan = plan_sizes(options, layout, 10_000)
    assert plan.chunk % page_tokens == 0
    assert page_tokens <= plan.chunk <= max(page_tokens, pages // 2 * page_tokens)


def test_too_little_vram_names_the_least() -> None:
    with pytest.raises(ConfigError, match=r"--vram .* 2880KiB or more"):
        plan_sizes(demo_options(vram=LAYOUT.page_bytes), LAYOUT, 4187)
    with pytest.raises(ConfigError, match=r"a third of the prompt's KV"):
        plan_sizes(demo_options(), LAYOUT, 64)


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 700))
def test_calls_tile_the_prompt_at_the_same_boundaries(start: int, length: int, chunk: int) -> None:
    stop = start + length
    calls = chunk_calls(start, stop, chunk)
    assert calls[0][0] == start
    assert calls[-1][1] == stop
    assert all(a[1] == b[0] for a, b in pairwise(calls))
    assert all(0 < b - a <= chunk for a, b in calls)
    whole = {stop for _, stop in chunk_calls(0, stop, chunk)}
    assert {b for _, b in calls} <= whole


# ---------------------------------------------------------------- records of runs


def a_run(tokens: list[int], calls: list[tuple[int, int]], **changes: str) -> Run:
    return Run(
        identity=changes.get("identity", "model"),
        numerics=changes.get("numerics", "cpu"),
        tokens=tokens,
        prompt_tokens=len(tokens),
        calls=list(calls),
    )


PROMPT = list(range(100, 170))


def cold_run(folder: Path) -> None:
    """A run of 70 tokens in chunks of 32 that restored nothing and generated three tokens."""
    history = History(folder)
    run = a_run(PROMPT, [(0, 32), (32, 64), (64, 70)])
    source = history.begin(run, 0, 64)
    assert (source.tokens, source.calls, source.exact) == ([], [], True)
    history.finish(run, [7, 8, 9], 20.0, 0)


def test_a_restored_run_learns_which_calls_made_its_pages(tmp_path: Path) -> None:
    cold_run(tmp_path)
    run = a_run(PROMPT, [(64, 70)])
    source = History(tmp_path).begin(run, 64, 64)
    assert source.exact
    assert source.calls == [(0, 32), (32, 64)]
    assert source.tokens == PROMPT[:64]
    assert run.cold_ttft_s == 20.0


def test_a_partly_restored_run_repeats_the_call_it_cuts_into(tmp_path: Path) -> None:
    cold_run(tmp_path)
    history = History(tmp_path)
    run = a_run(PROMPT, [(48, 64), (64, 70)])
    source = history.begin(run, 48, 64)
    assert source.calls == [(0, 32), (32, 64)]
    # and a third run repeats both, the second cut back to 48
    third = History(tmp_path).begin(a_run(PROMPT, [(64, 70)]), 64, 64)
    assert third.calls == [(0, 32), (32, 64), (48, 64)]


def test_a_run_that_restored_everything_keeps_the_record(tmp_path: Path) -> None:
    cold_run(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    history = History(tmp_path)
    run = a_run(PROMPT, [(64, 70)])
    history.begin(run, 64, 64)
    history.finish(run, [7, 8, 9], 0.1, 64)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_longer_prompt_finds_the_calls_of_the_shorter_one(tmp_path: Path) -> None:
    cold_run(tmp_path)
    longer = [*PROMPT, 7, 8, *range(500, 520)]
    source = History(tmp_path).begin(a_run(longer, [(72, 92)]), 72, 91)
    assert source.exact
    assert source.calls == [(0, 32), (32, 64), (64, 70), (70, 71), (71, 72)]
    assert source.tokens == [*PROMPT, 7, 8]


@pytest.mark.parametrize("change", [{"identity": "other"}, {"numerics": "other"}])
def test_calls_of_another_model_or_rounding_are_not_taken(
    tmp_path: Path, change: dict[str, str]
) -> None:
    cold_run(tmp_path)
    source = History(tmp_path).begin(a_run(PROMPT, [(64, 70)], **change), 64, 64)
    assert not source.exact


def test_the_record_is_on_disk_before_the_first_page(tmp_path: Path) -> None:
    History(tmp_path).begin(a_run(PROMPT, [(0, 70)]), 0, 64)  # and is killed
    source = History(tmp_path).begin(a_run(PROMPT, [(32, 70)]), 32, 64)
    assert source.exact
    assert source.calls == [(0, 70)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"runs": [{"x": 1}]}', b"\xff\xfe"])
def test_a_damaged_record_only_costs_exactness(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    source = History(tmp_path).begin(a_run(PROMPT, [(32, 70)]), 32, 64)
    assert not source.exact


def test_records_are_bounded(tmp_path: Path) -> None:
    for start in range(40):
        History(tmp_path).begin(a_run([start, 1, 2], [(0, 3)]), 0, 0)
    assert len(json.loads((tmp_path / FILE).read_text())["runs"]) == 16
    assert os.listdir(tmp_path) == [FILE]


# ---------------------------------------------------------------- comparison and report


def generation(tokens: list[int], logits: list[list[float]]) -> Generation:
    return Generation(tokens, [torch.tensor(row) for row in logits])


def test_equal_generations_are_identical() -> None:
    a = generation([1, 0], [[0.0, 1.0], [2.0, 1.0]])
    assert compare(a, a, exact_source=True) == Comparison(True, 0.0, None, True)


def test_the_smallest_difference_of_a_logit_is_seen() -> None:
    a = generation([1, 0], [[0.0, 1.0], [2.0, 1.0]])
    b = generation([1, 0], [[0.0, 1.0], [2.0, 1.0 + 2**-20]])
    found = compare(a, b, exact_source=True)
    assert found.identical
    assert found.max_logit_difference == 2**-20


def test_a_nan_is_a_difference() -> None:
    a = generation([1], [[0.0, float("nan")]])
    assert compare(
        a, generation([1], [[0.0, 1.0]]), exact_source=True
    ).max_logit_difference == float("inf")


@pytest.mark.parametrize(("tokens", "at"), [([1, 1, 3], 1), ([1, 2], 2)])
def test_the_first_differing_token_is_named(tokens: list[int], at: int) -> None:
    a = generation([1, 2, 3], [[0.0]] * 3)
    found = compare(a, generation(tokens, [[0.0]] * len(tokens)), exact_source=True)
    assert not found.identical
    assert found.first_difference == at


def test_json_has_the_promised_fields() -> None:
    data = json.loads(report().as_json())
    for name in (
        "identical",
        "max_logit_difference",
        "kv_bytes",
        "prompt_tokens",
        "restored_tokens",
        "computed_tokens",
        "ttft_s",
        "decode_tokens_per_s",
        "warnings",
        "staging_bytes",
    ):
        assert name in data
    for tier in ("vram", "host", "disk"):
        assert {"capacity_bytes", "peak_bytes", "pages_in", "pages_out"} <= set(data["tiers"][tier])
    assert data["restored_tokens"] + data["computed_tokens"] == data["prompt_tokens"]
    assert data["saved_s"] == 20.0


def test_a_mode_is_reported_with_what_it_read() -> None:
    data = json.loads(report().as_json())
    assert (data["mode"], data["pages_read_per_step"], data["tolerance"]) == (
        "exact-stream",
        None,
        0.0,
    )
    chosen = report(
        mode="select:quest,budget=9%", pages_read=3.5, summary_bytes=1024, comparison=None
    )
    data = json.loads(chosen.as_json())
    assert (data["pages_read_per_step"], data["summary_bytes"]) == (3.5, 1024)
    assert "read 3.5 of 4 pages a step" in rendered(chosen)
    near = report(mode="exact-split", comparison=Comparison(True, 1e-5, None, True, 1e-3))
    assert "equal to transformers' DynamicCache within 0.001" in rendered(near)
    assert "identical" not in rendered(near)
    far = report(mode="exact-split", comparison=Comparison(True, 2e-3, None, True, 1e-3))
    assert "NOT equal" in rendered(far)


def test_what_may_differ_depends_on_the_mode_and_the_dtype() -> None:
    assert tolerance_of("exact-stream", torch.bfloat16) == 0.0
    assert tolerance_of("exact-split", torch.float32) == 1e-3
    assert tolerance_of("exact-split", torch.bfloat16) == 0.25


def rendered(shown: Report) -> str:
    from rich.console import Console

    console = Console(record=True, width=300)
    shown.render(console)
    return console.export_text()


def test_without_verify_nothing_is_claimed() -> None:
    data = json.loads(report(comparison=None).as_json())
    assert data["identical"] is None
    assert data["max_logit_difference"] is None


def test_text_report_says_what_was_saved_and_what_was_moved() -> None:
    text = rendered(report())
    for words in (
        "96 tokens restored, 4 computed",
        "0.50 s instead of 20.50 s",
        "20.00 s saved",
        "5.00 tokens/s",
        "each new token moved",
        "identical to transformers",
        "and so on",
    ):
        assert words in text


def test_a_codec_is_reported_with_its_error() -> None:
    from rich.console import Console

    coded = replace(
        report().tiers["host"], codec="int8", pages_coded=3, worst_error=0.25, relative_error=0.005
    )
    console = Console(record=True, width=140)
    one = report(tiers=report().tiers | {"host": coded})
    one.render(console)
    words = "host in int8: 3 pages coded, largest error 0.25, relative error 0.50%"
    assert words in console.export_text()
    told = json.loads(one.as_json())["tiers"]
    assert (told["host"]["codec"], told["host"]["worst_error"]) == ("int8", 0.25)
    assert (told["vram"]["codec"], told["vram"]["relative_error"]) == ("none", 0.0)
    one.tiers["host"] = replace(coded, worst_error=float("inf"))
    assert json.loads(one.as_json())["tiers"]["host"]["worst_error"] is None


@pytest.mark.parametrize(
    ("comparison", "failed"),
    [
        (None, False),
        (Comparison(True, 0.0, None, True), False),
        (Comparison(True, 1e-6, None, True), True),
        (Comparison(True, 1e-6, None, False), False),
        (Comparison(False, 1.0, 3, False), True),
        (Comparison(True, 9e-4, None, True, 1e-3), False),
        (Comparison(False, 9e-4, 3, True, 1e-3), False),
        (Comparison(True, 2e-3, None, True, 1e-3), True),
        (Comparison(True, 2e-3, None, False, 1e-3), False),
    ],
)
def test_a_difference_fails_the_run(comparison: Comparison | None, failed: bool) -> None:
    assert report(comparison=comparison).failed is failed


def test_a_terminal_sees_bars_and_tiers_and_a_file_one_line_a_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import io

    from rich.console import Console

    from kvtier.cli import display as module

    monkeypatch.setattr(module, "_REFRESH_S", 0.0)
    stats = SimpleNamespace(tiers=report().tiers, links=report().links)
    seen = {}
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=140)
        with module.Display(console, quiet=False) as display:
            display.watch(lambda: stats)
            advance = display.phase("prefill", 64, done=32)
            advance(16)
            advance(16)
        seen[terminal] = out.getvalue()
    assert "prefill" in seen[True]
    assert "hits" in seen[True]
    assert "prefill: 32 tokens in" in seen[False]
    assert seen[False].count("\n") == 1


def test_every_command_has_a_help_text() -> None:
    from kvtier.cli.main import build_parser

    def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from all_parsers(inner)

    found = list(all_parsers(build_parser()[0]))
    assert len(found) > 8
    for parser in found:
        assert "usage: kvtier" in parser.format_help()
