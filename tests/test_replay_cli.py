"""``kvtier replay`` from the outside: output, exit status, and how fast it starts."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.main import main
from kvtier.cli.replay_options import split_policies
from kvtier.errors import ConfigError

DATA = Path(__file__).parent / "data" / "traces"
HEAD = str(DATA / "mooncake_synth_head800.jsonl.gz")
REFERENCE = json.loads((DATA / "reference.json").read_text())["mooncake_synth_head800"]


def run(*argv: str) -> int:
    return main(["replay", *argv])


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert run(*argv, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return dict(json.loads(out))


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Two conversations in turn, six times."""
    path = tmp_path / "small.jsonl"
    turns = [
        {"timestamp": 1000 * n, "input_length": 64, "output_length": 1,
         "hash_ids": [10 * (n % 2) + k for k in range(4)]}
        for n in range(12)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return str(path)


def test_json_has_the_reference_values(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, HEAD, "--policies", "lru,fifo", "--sizes", "1%,5%", "--order", "head")
    cells = {(c["policy"], c["pages"]): c for c in told["cells"]}
    assert list(cells) == [("lru", 162), ("lru", 808), ("fifo", 162), ("fifo", 808)]
    for share, pages in (("0.01", 162), ("0.05", 808)):
        for policy in ("lru", "fifo"):
            cell, expected = cells[policy, pages], REFERENCE["cells"][share][policy]
            assert {n: cell[n] for n in expected} == expected
            assert (cell["requests"], cell["block_refs"]) == (800, 18882)
    for row, share in zip(told["headroom"], ("0.01", "0.05"), strict=True):
        expected = REFERENCE["cells"][share]
        assert row["opt_prefix_hits"] == expected["opt"]["prefix_hits"]
        assert row["lru_prefix_hits"] == expected["lru"]["prefix_hits"]
    assert told["trace"]["unique_blocks"] == 16156


def test_the_headroom_comes_first(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, "--policies", "lru,fifo", "--pages", "4,8") == 0
    out = capsys.readouterr().out
    assert out.index("best possible gain") < out.index("prefix hits  ")
    assert "12 requests" in out
    assert run(small, "--pages", "4", "--no-headroom") == 0
    assert "best possible gain" not in capsys.readouterr().out


def test_tiers_links_and_times(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(
        capsys, small, "--vram", "8MiB", "--host", "32MiB", "--disk", "1GiB",
        "--model", "llama-3.1-8b", "--gpu", "rtx-4090",
    )  # fmt: skip
    (cell,) = told["cells"]
    assert list(cell["tiers"]) == ["vram", "host", "disk"]
    assert cell["tiers"]["vram"]["pages"] == 8 * 2**20 // told["trace"]["block_bytes"]
    assert cell["prefix_hits"] + cell["misses"] == cell["block_refs"] == 48
    assert cell["link_bytes"]["host->disk"] == 8 * told["trace"]["block_bytes"]
    # Of a few pages, loading may take as long as computing.
    assert 0 < cell["times"]["ttft_mean_s"] <= 1.05 * cell["times"]["recompute_mean_s"]
    assert told["basis"]["model"].startswith("Llama")
    assert run(small, "--vram", "8MiB", "--page-bytes", "1MiB") == 0
    assert "moved" in capsys.readouterr().out


def test_find_size(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, small, "--find-size", "--target-hit", "0.8", "--policies", "lru,fifo")
    assert {row["policy"]: row["pages"] for row in told["find_size"]} == {
        "lru": 8, "opt": 8, "fifo": 8,
    }  # fmt: skip
    assert run(small, "--find-size", "--target-hit", "0.9") == 1
    assert "83.33 % at most" in capsys.readouterr().out


def test_machines(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(
        capsys, small, "--machines", "3", "--router", "round-robin", "--pages", "8",
        "--shared-pages", "8", "--overflow", "100/min",
    )  # fmt: skip
    without, shared = told["cells"]
    assert (without["shared_pages"], shared["shared_pages"]) == (0, 8)
    assert without["location_misses"] == 16
    assert shared["location_misses"] == 0
    assert shared["content_misses"] == without["content_misses"] == 8
    assert run(small, "--machines", "2") == 0
    assert "elsewhere" in capsys.readouterr().out


def test_block_tokens(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, small, "--block-tokens", "32", "--pages", "4")
    assert (told["trace"]["block_tokens"], told["trace"]["block_refs"]) == (32, 24)


@pytest.mark.parametrize("name", ["curves.svg", "curves.html"])
def test_plots_are_files_of_their_own(name: str, small: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert run(small, "--policies", "lru,fifo", "--pages", "4,6,8", "--plot", str(path)) == 0
    text = path.read_text()
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    root = ET.fromstring(svg)
    points = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(points) == 3 * 3  # lru, fifo and the optimum
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_csv_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("time,key,size\n0,a,60\n1,b,50\n2,a,60\n3,b,50\n4,b,50\n")
    (cell,) = as_json(capsys, str(path), "--host", "110")["cells"]
    assert (cell["prefix_hits"], cell["capacity_bytes"]) == (3, 110)


REFUSED: list[tuple[list[str], str]] = [
    (["--policies", "nonsense"], "'nonsense' is unknown"),
    (["--policies", "lru:size=3"], "has no parameter 'size'"),
    (["--policies", "lru,,fifo"], "separated by commas"),
    (["--policies", "mq:queues=abc"], "is not of type int"),
    (["--sizes", "5"], "is not a share"),
    (["--sizes", "0%"], "is not a share"),
    (["--sizes", "101%"], "is not a share"),
    (["--sizes", "nan%"], "is not a share"),
    (["--pages", "0"], "a tier of 0 blocks"),
    (["--pages", "x"], "is not a whole number"),
    (["--pages", "5", "--sizes", "1%"], "exclude each other"),
    (["--pages", "5", "--vram", "1GiB"], "exclude each other"),
    (["--vram", "0"], "give one tier a size"),
    (["--vram", "1GiB"], "give --page-bytes"),
    (["--vram", "1", "--page-bytes", "2"], "give at least that"),
    (["--vram", "4", "--page-bytes", "2", "--policies", "opt"], "an optimum for one tier"),
    (["--vram", "many"], "--vram is 'many'"),
    (["--page-bytes", "0"], "--page-bytes is 0"),
    (["--skip-bad", "-1"], "--skip-bad is -1"),
    (["--skip-bad", "some"], "not a whole number"),
    (["--format", "tar"], "--format is 'tar'"),
    (["--block-tokens", "0"], "--block-tokens is 0"),
    (["--block-tokens", "17"], "give a multiple of 16"),
    (["--block-tokens", "16000"], "more than any request has"),
    (["--find-size"], "needs --target-hit"),
    (["--target-hit", "0.5"], "give that too"),
    (["--find-size", "--target-hit", "1.5"], "at most 1"),
    (["--find-size", "--target-hit", "0.5", "--pages", "3"], "leave out --pages"),
    (["--machines", "0"], "--machines is 0"),
    (["--machines", "2", "--router", "dns"], "--router is 'dns'"),
    (["--machines", "2", "--overflow", "0"], "give requests a minute above 0"),
    (["--machines", "2", "--vram", "1GiB"], "does not go with"),
    (["--machines", "2", "--find-size", "--target-hit", "0.5"], "does not go with"),
    (["--machines", "2", "--policies", "opt"], "knows the future"),
    (["--router", "round-robin"], "is for --machines"),
    (["--model", "llama-3.1-8b"], "give both"),
    (["--model", "no-such-model", "--gpu", "rtx-4090"], "no-such-model"),
    (["--model", "llama-3.1-8b", "--gpu", "abacus"], "abacus"),
    (["--workers", "0"], "--workers is 0"),
    (["--plot", "curves.png"], "ends in .svg or .html"),
    (["--plot", "/no/such/folder/x.svg", "--pages", "5"], "cannot be written"),
    (["--host-write", "write_through"], "are for --vram"),
    (["--order", "sideways"], "invalid choice"),
    (["--speed", "9"], "unknown option --speed"),
]


@pytest.mark.parametrize(("argv", "reason"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_what_makes_no_sense_is_one_line_and_exit_status_2(
    argv: list[str], reason: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(small, *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvtier replay: error: ")
    assert reason in err


def test_a_bad_trace_is_one_line_with_file_and_line(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(gzip.compress(Path(small).read_bytes() + b"oops\n"))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(Path(HEAD).read_bytes()[:20_000])
    for path, reason in (
        (bad, f"{bad}:13: not JSON"),
        (cut, f"{cut}:"),
        (tmp_path / "none", "cannot be read"),
    ):
        assert run(str(path)) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert reason in err
    told = as_json(capsys, str(bad), "--skip-bad", "1", "--pages", "4")
    assert (told["trace"]["skipped"], told["trace"]["requests"]) == (1, 12)


def test_policies_with_parameters_are_told_apart() -> None:
    assert split_policies("lru, mq:queues=4,lifetime=9,fifo") == [
        "lru",
        "mq:queues=4,lifetime=9",
        "fifo",
    ]
    assert split_policies("ttl:inner=(mq:queues=4,lifetime=9),seconds=60,arc") == [
        "ttl:inner=(mq:queues=4,lifetime=9),seconds=60", "arc",
    ]  # fmt: skip
    assert split_policies("my.module:Class:a=1,my.module:Other") == [
        "my.module:Class:a=1", "my.module:Other",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="parentheses"):
        split_policies("ttl:inner=(lru")


def test_it_loads_nothing_heavy(small: str) -> None:
    program = (
        "import sys; from kvtier.cli.main import main\n"
        f"status = main(['replay', {small!r}, '--pages', '4'])\n"
        "heavy = {'torch', 'cupy', 'transformers', 'lmdb', 'numpy', 'matplotlib', 'asyncio'}\n"
        "print(status, *sorted({n.split('.')[0] for n in sys.modules} & heavy), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.split() == ["0"]
