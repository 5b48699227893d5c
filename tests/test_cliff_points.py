"""The bench of published measurements: it reads what it is given, counts what it may, and reaches its
goal."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cost.constants import DEFAULTS

BENCH = Path(__file__).resolve().parent.parent / "bench"
DATA = BENCH / "data"


def run(*args: object, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH / "cliff_points.py"), *map(str, args)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stdout if not status else done.stdout + done.stderr


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(run("--json"))  # type: ignore[no-any-return]


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for file in found["files"] for row in file["rows"]}


def source(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, lines: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, lines[0])
        out.writeheader()
        out.writerows(lines)
    return path


def test_the_goal_is_reached_on_rows_not_used_for_fitting(found: dict[str, Any]) -> None:
    summary = found["summary"]
    assert summary["count"] >= 60
    assert summary["median"] <= 0.15
    assert summary["worst"] <= 0.35
    for file in found["files"]:
        assert file["summary"]["median"] <= 0.15
        assert file["summary"]["worst"] <= 0.35


def test_every_row_is_listed(found: dict[str, Any]) -> None:
    offload, first, lanes = (file["rows"] for file in found["files"])
    assert len(offload) == len(source("cliff_points.csv"))
    assert len(lanes) == len(source("sparseengine_points.csv"))
    assert len(first) >= len(source("ttft_points.csv"))
    for row in (*offload, *first, *lanes):
        assert row["status"] in ("point", "fitted", "flagged", "unusable")
        assert row["why"] if row["status"] in ("flagged", "unusable") else row["predicted"] > 0


def test_rows_marked_implausible_are_flagged_and_no_others(found: dict[str, Any]) -> None:
    flagged = {key for key, row in rows(found).items() if row["status"] == "flagged"}
    assert len(flagged) == 4
    assert "REJECT-PLASMON" in flagged
    assert sum("ollama" in key and "warm" in key for key in flagged) == 2
    assert sum("barrahome" in key for key in flagged) == 1


def test_the_mark_is_not_what_flags_them(tmp_path: Path) -> None:
    """The same rows without the word: the arithmetic has to find them."""
    lines = [row for row in source("cliff_points.csv") if row["id"] == "REJECT-PLASMON"]
    lines[0].update(id="a row", suggested_use="validate", quality="good", note="")
    got = json.loads(run("--json", write(tmp_path / "a.csv", lines)))
    assert rows(got)["a row"]["status"] == "flagged"
    lines[0]["after_tps"] = "4.0"
    got = json.loads(run("--json", write(tmp_path / "b.csv", lines)))
    assert rows(got)["a row"]["status"] == "point"


def test_the_anchor_is_predicted_and_nothing_is_fitted_on_it(found: dict[str, Any]) -> None:
    anchor = rows(found)["4060TI"]
    assert anchor["status"] == "point"
    assert anchor["low"] < 3.8 < anchor["high"]
    assert all(fit["row"] != "4060TI" for fit in found["fits"])


def test_constants_are_fitted_on_rows_that_are_there_and_reproduce_them(
    found: dict[str, Any],
) -> None:
    every = rows(found)
    fits = found["fits"]
    assert len({fit["row"] for fit in fits}) == len(fits)
    for fit in fits:
        row = every[fit["row"]]
        assert row["status"] == "fitted"
        assert abs(row["error"]) < (0.01 if fit["how"] == "solved" else 0.05)
        if not fit["scope"]:
            assert DEFAULTS[fit["constant"]] == float(fit["value"])


def test_the_document_has_the_numbers_that_the_bench_prints(found: dict[str, Any]) -> None:
    text = (BENCH.parent / "docs" / "cost-model.md").read_text()
    for file in (*found["files"], found):
        summary = file["summary"]
        line = f"{summary['count']} | {summary['median']:.1%} | {summary['worst']:.1%}"
        assert line in text, f"docs/cost-model.md lacks {line!r}"
    for fit in found["fits"]:
        assert f"`{fit['constant']}`" in text


def test_models_that_read_a_part_of_their_weights_are_not_called_implausible(
    tmp_path: Path,
) -> None:
    base = next(r for r in source("cliff_points.csv") if r["id"] == "INV-ngl8")
    line = {**base, "bytes_read_per_token_gb": "", "model": "gemma4:e2b", "weights_gb": "20"}
    line.update(id="sparse", after_tps="30", before_tps="90")
    dense = {**line, "id": "dense", "model": "Qwen2.5-32B"}
    got = rows(json.loads(run("--json", write(tmp_path / "rows.csv", [line, dense]))))
    assert got["sparse"]["status"] == "unusable"
    assert got["dense"]["status"] == "flagged"
    assert "before offloading" in got["dense"]["why"]


def test_predictions_do_not_look_at_the_answer(tmp_path: Path) -> None:
    lines = [row for row in source("cliff_points.csv") if row["id"] in ("INV-ngl8", "GS-2048")]
    before = rows(json.loads(run("--json", write(tmp_path / "a.csv", lines))))
    for row in lines:
        row["after_tps"] = str(float(row["after_tps"]) * 0.9)
        row["slowdown_x"] = row["implied_slow_gbs"] = row["note"] = ""
        row["suggested_use"] = row["quality"] = ""
    after = rows(json.loads(run("--json", write(tmp_path / "b.csv", lines))))
    for key in before:
        assert after[key]["predicted"] == before[key]["predicted"]
        assert after[key]["error"] > before[key]["error"]


def test_other_rows_of_the_same_studies(tmp_path: Path) -> None:
    """More layers off the card are slower, longer contexts are slower, and more sequences are more
    tokens/s in all."""

    def rates(name: str, key: dict[str, str], field: str, values: list[object]) -> list[float]:
        base = next(r for r in source(name) if all(r[k] == v for k, v in key.items()))
        lines = [{**base, field: str(value)} for value in values]
        if "id" in base:
            lines = [{**line, "id": f"row {n}"} for n, line in enumerate(lines)]
        got = json.loads(run("--json", write(tmp_path / "rows.csv", lines)))
        return [row["predicted"] for row in got["files"][0]["rows"]]

    cliff = "cliff_points.csv"
    assert _falls(rates(cliff, {"id": "INV-ngl8"}, "slow_fraction", [0.1, 0.3, 0.7, 0.95]))
    assert _falls(rates(cliff, {"id": "GS-2048"}, "context_tokens", [2048, 8192, 32768]))
    assert _falls(rates(cliff, {"id": "UNS70B-2339"}, "context_tokens", [512, 8039, 30000]))
    assert _falls(rates(cliff, {"id": "UNS-kv"}, "context_tokens", [32768, 65536, 131072]))
    lanes = {"model": "glm-4.7-flash-bf16", "lane": "sengine-snapkv"}
    grown = rates("sparseengine_points.csv", lanes, "batch", [1, 8, 32])
    assert grown == sorted(grown)
    prompt = rates("ttft_points.csv", {"prompt_tokens": "50000"}, "prompt_tokens", [80000, 40000])
    assert prompt[0] > prompt[2]


def _falls(values: list[float]) -> bool:
    return values == sorted(values, reverse=True) and len(set(values)) == len(values)


def test_rows_without_inputs_say_what_is_missing(tmp_path: Path) -> None:
    base = next(r for r in source("cliff_points.csv") if r["id"] == "INV-ngl8")
    lines = [
        {**base, "id": "a", "host_memory": "unknown"},
        {**base, "id": "b", "slow_fraction": ""},
        {**base, "id": "c", "after_tps": ""},
        {**base, "id": "d", "mechanism": "magic"},
    ]
    got = rows(json.loads(run("--json", write(tmp_path / "rows.csv", lines))))
    words = {"a": "memory", "b": "share", "c": "after_tps", "d": "magic"}
    for key, word in words.items():
        assert got[key]["status"] == "unusable"
        assert word in got[key]["why"]


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    wrong = tmp_path / "x.csv"
    wrong.write_text("id,gpu\n1,2\n")
    text = run(wrong, status=2)
    assert text.count("\n") == 1
    assert "no column" in text
    assert "cannot be read" in run(tmp_path / "none.csv", status=2)


def test_the_report_keeps_the_two_comparisons_apart() -> None:
    text = run()
    for part in (
        "rows not used for fitting: median error", "matched batch", "largest batch",
        "with 30 against 3 sequences", "predicted to fit 3, as many as all KV does",
        "weights_out", "GB = 1e9 bytes", "[fits cpu_efficiency]",
    ):  # fmt: skip
        assert part in text
    run("--worst", "0.0001", status=1)
