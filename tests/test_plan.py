"""``kvtier plan``: what it answers, what it refuses, and how it is drawn."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.cli.chart import Chart, Mark, Series, svg, write_chart
from kvtier.cli.main import main
from kvtier.cost.cliff import level
from kvtier.cost.models import models
from kvtier.cost.weight_dtype import WEIGHT_DTYPES, weight_bits
from kvtier.devices.cards import cards
from kvtier.errors import ConfigError

BASE = ("plan", "--model", "llama-3.1-8b", "--gpu", "rtx-4060-ti-16gb")
REFERENCE = (*BASE, "--weights-dtype", "q4_k_m", "--weights-off-card", "0.2")


@pytest.fixture(autouse=True, scope="module")
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No measurements of the machine that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("none")))
        yield


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict:  # type: ignore[type-arg]
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr of a wrong command."""
    assert main(list(args)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kvtier plan: error: ")
    return err


# Answers


def test_the_reference_case(capsys: pytest.CaptureFixture[str]) -> None:
    """42.5 -> 3.8 tokens/s on a 16 GB RTX 4060 Ti, and only by the fallback's link class."""
    data = answer(capsys, *REFERENCE, "--link", "fallback")
    slow = data["warnings"][0]
    assert {"level", "cause", "link", "before_tps", "after_tps", "remedies"} <= set(slow)
    assert (slow["level"], slow["link"]) == ("severe", "fallback")
    assert slow["before_tps"] == pytest.approx(42.5, rel=0.05)
    assert slow["after_low_tps"] < 3.8 < slow["after_high_tps"]
    assert "fallback" in slow["cause"]
    for remedy in slow["remedies"]:
        assert remedy["predicted_tps"] > slow["after_tps"]
    for link, low, high in (("pinned", 10, 13), ("cpu", 17, 24)):
        other = answer(capsys, *REFERENCE, "--link", link)["warnings"][0]
        assert low < other["after_tps"] < high
        assert other["after_low_tps"] > 3.8


def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, *BASE, "--context", "64k", "--sequences", "2")
    assert {
        "model", "gpu", "context", "sequences", "kv_dtype", "kv_bytes_per_token", "weight_bits",
        "weight_bytes", "link", "off_card", "fits", "budget", "rows", "sweep", "cliff", "warnings",
        "claim", "basis", "profile", "units",
    } == set(data)  # fmt: skip
    assert data["kv_bytes_per_token"] == 131072
    assert data["sweep"] == []
    assert data["claim"] is None
    assert {c["basis"] for c in data["basis"]["constants"]} == {"table"}
    assert "GiB = 2**30" in data["units"]
    assert data["budget"]["used_bytes"] == pytest.approx(
        sum(part["bytes"] for part in data["budget"]["parts"]), abs=20
    )
    for row in data["rows"]:
        assert row["low_tps"] <= row["tps"] <= row["high_tps"]
        assert row["tps"] == pytest.approx(2000 / row["tpot_ms"])
        assert row["level"] == level(row["baseline_tps"] / row["tps"])
        assert row["prefill_s"] > 0
    rates = [row["tps"] for row in data["rows"]]
    assert rates == sorted(rates, reverse=True)


def test_what_must_be_off_the_card_is_worked_out(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, *BASE, "--context", "128k")
    off = data["off_card"]
    assert off["worked_out"]
    assert (off["asked_weights"], off["asked_kv"]) == (0, 0)
    assert 0.3 < off["kv"] < 0.6
    assert data["budget"]["fits"]
    assert data["warnings"][0]["kind"] == "slowdown"
    less = answer(capsys, *BASE, "--context", "128k", "--kv-off-card", str(off["kv"] - 0.02))
    assert less["off_card"]["worked_out"]
    assert less["off_card"]["kv"] + less["off_card"]["weights"] > off["kv"] - 0.02
    assert less["budget"]["fits"]
    more = answer(capsys, *BASE, "--context", "128k", "--kv-off-card", "0.9")
    assert more["off_card"] == {
        "weights": 0, "kv": 0.9, "asked_weights": 0, "asked_kv": 0.9, "worked_out": False
    }  # fmt: skip


def test_what_never_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    args = (*BASE, "--vram", "1GiB", "--context", "8k")
    data = answer(capsys, *args)
    assert data["fits"] is False
    assert {"context": 8192, "fits": False} in data["rows"]
    assert data["basis"] is None
    assert main(list(args)) == 0
    out = capsys.readouterr().out
    assert "does not fit at 8,192 tokens" in out


def test_shares_and_sizes_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    whole = answer(capsys, *BASE)["weight_bytes"]
    for text in ("0.2", "20%", f"{round(whole / 5)}B"):
        data = answer(capsys, *BASE, "--weights-off-card", text)
        assert data["off_card"]["asked_weights"] == pytest.approx(0.2, abs=1e-6)


def test_nothing_off_the_card_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *BASE, "--context", "8k")["warnings"] == []


def test_what_fits_and_is_off_the_card_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    """A stale offload setting on a card that holds the model."""
    found = answer(capsys, *BASE, "--weights-off-card", "0.9", "--context", "2k")["warnings"]
    (needless,) = [one for one in found if one["kind"] == "needless"]
    assert needless["level"] == "severe"
    assert "everything fits" in needless["cause"]


def test_a_disk_prefix_can_be_later(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100-sxm5-80gb", "--context", "10000")
    assert answer(capsys, *args)["warnings"] == []
    (late,) = answer(capsys, *args, "--disk-prefix")["warnings"]
    assert late["kind"] == "ttft"
    assert late["link"] == "disk"
    assert late["after_ttft_s"] > late["before_ttft_s"]


def test_modes_have_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    base = (*BASE, "--context", "64k", "--kv-off-card", "0.5")
    rates = {
        mode: answer(capsys, *base, *(("--mode", mode) if mode else ()))["rows"][-1]
        for mode in ("", "kv-stream", "kv-cpu", "select")
    }
    assert rates[""]["mode"] == "kv-stream"
    assert rates[""]["tps"] == rates["kv-stream"]["tps"]
    assert rates["kv-cpu"]["tps"] < rates["kv-stream"]["tps"] < rates["select"]["tps"]
    assert answer(capsys, *base, "--link", "cpu")["rows"][-1]["mode"] == "kv-cpu"


def test_claims_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    high = answer(capsys, *BASE, "--context", "2k", "--claimed-tps", "600")["claim"]
    assert not high["plausible"]
    assert high["exceeds"] == pytest.approx(600 / high["limit"])
    low = answer(capsys, *BASE, "--context", "2k", "--claimed-tps", "40")["claim"]
    assert low["plausible"]
    assert low["exceeds"] < 1
    assert main([*BASE, "--context", "2k", "--claimed-tps", "600"]) == 0
    assert "x the roofline" in capsys.readouterr().out


def test_a_sweep_finds_the_cliff(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, *BASE, "--sweep", "context")
    fits, begins = data["cliff"]["fits_up_to"], data["cliff"]["begins"]
    assert fits < begins["notice"] < begins["warning"] < begins["severe"] <= 131072
    contexts = [row["context"] for row in data["sweep"]]
    assert contexts == sorted(set(contexts))
    assert contexts[-1] == 131072
    assert all(row["level"] == "none" for row in data["sweep"] if row["context"] <= fits)
    past = [row for row in data["sweep"] if row["context"] >= begins["severe"]]
    assert all(row["level"] == "severe" for row in past)


def test_weights_behind_a_link_are_a_cliff_from_the_first_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = answer(capsys, *REFERENCE, "--link", "fallback")
    assert data["cliff"]["begins"] == {"notice": 1, "warning": 1, "severe": 1}


def test_people_get_a_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*REFERENCE, "--link", "fallback"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Llama-3.1-8B", "RTX 4060 Ti 16GB", "weights 3.66", "free", "severe", "instead:",
        "--link pinned", "tokens/s", "fallback link", "from a table", "GiB = 2^30 bytes", "20% W",
    ):  # fmt: skip
        assert words in out
    assert "…" not in out
    assert out.count("\n") < 30


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-models"]) == 0
    out = capsys.readouterr().out
    assert all(model.slug in out for model in models())
    assert main(["plan", "--list-gpus"]) == 0
    out = capsys.readouterr().out
    assert all(card.slug in out for card in cards())
    data = answer(capsys, "plan", "--list-models", "--list-gpus")
    assert len(data["models"]) == len(models())
    assert len(data["gpus"]) == len(cards())


def test_warnings_are_log_events(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = answer(capsys, *REFERENCE, "--link", "fallback")
    assert [event.offload for event in caplog.records] == data["warnings"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(WEIGHT_DTYPES))
def test_weight_dtypes(name: str) -> None:
    assert weight_bits(name.upper()) == WEIGHT_DTYPES[name] == weight_bits(str(WEIGHT_DTYPES[name]))


def test_a_config_file_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu = ("--gpu", "rtx-4090")
    data = answer(capsys, "plan", "--model", str(tmp_path), *gpu, "--weights-dtype", "q4_k_m")
    assert data["kv_bytes_per_token"] == 131072
    assert [row["context"] for row in data["rows"]] == [512, 2048, 8192]
    del config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers" in refused(capsys, "plan", "--model", str(tmp_path), *gpu)


# What it refuses


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--weights-off-card", "1.5"), ("--weights-off-card", "between 0 and 1", "2GB")),
        (("--weights-off-card", "-0.1"), ("--weights-off-card", "between 0 and 1")),
        (("--weights-off-card", "-2GB"), ("--weights-off-card", "0.2")),
        (("--kv-off-card", "120%"), ("--kv-off-card", "100%")),
        (("--kv-off-card", "lots"), ("--kv-off-card", "0.2")),
        (("--weights-off-card", "900GB"), ("--weights-off-card", "more than all", "weights")),
        (("--weights-off-card", "nan"), ("--weights-off-card",)),
        (("--kv-dtype", "fp7"), ("--kv-dtype", "fp7", "fp8")),
        (("--weights-dtype", "q4_k_x"), ("--weights-dtype", "q4_k_m")),
        (("--bits", "99"), ("1 to 32",)),
        (("--context", "0"), ("--context", "8k")),
        (("--context", "-5"), ("--context", "8k")),
        (("--context", "9" * 30), ("--context",)),
        (("--sequences", "0"), ("--sequences",)),
        (("--sequences", "2.5"), ("--sequences",)),
        (("--link", "usb"), ("--link", "pinned, pageable, fallback, cpu, disk")),
        (("--mode", "magic"), ("--mode", "kv-stream")),
        (("--mode", "select", "--kv-off-card", "0.5", "--link", "cpu"), ("--mode select",)),
        (("--vram", "-1GB"), ("--vram",)),
        (("--vram", "0"), ("--vram",)),
        (("--page-tokens", "0"), ("--page-tokens",)),
        (("--buffers", "colour=3"), ("--buffers", "colour", "cuda_context")),
        (("--claimed-tps", "fast"), ("--claimed-tps", "40")),
        (("--claimed-tps", "0"), ("--claimed-tps",)),
        (("--sweep", "vram"), ("--sweep", "context")),
        (("--plot", "cliff.gif"), ("--plot", ".svg")),
        (("--plot", "no/such/folder/cliff.svg"), ("--plot", "folder")),
        (("--wieghts-off-card", "0.2"), ("--weights-off-card",)),
    ],
)
def test_wrong_options_are_one_line(
    args: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *BASE, *args)
    for word in words:
        assert word in said


def test_names_have_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "llama-3.1-8b" in refused(capsys, "plan", "--model", "lama-3.1-8b", "--gpu", "rtx-4090")
    assert "rtx-4090" in refused(capsys, "plan", "--model", "llama-3.1-8b", "--gpu", "rtx-409")
    assert "--model is missing" in refused(capsys, "plan", "--gpu", "rtx-4090")
    assert "--gpu is missing" in refused(capsys, "plan", "--model", "llama-3.1-8b")


_TEXT = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "0.2", "1.5", "20%", "2GB", "8k", "nan", "inf", "1e400", "-0.0", "fp8",
         "cpu", "disk", "fallback", "pinned", "int4", "bf16", "q4_0", "select", "kv-cpu", "kv-stream",
         "context", "999999999999", "graphs=0", "none", "int4:group=64", " 3 ", "1_000", "１"]
    ),
    st.text(max_size=6),
)  # fmt: skip
_OPTIONS = (
    "--context", "--sequences", "--kv-dtype", "--weights-dtype", "--weights-off-card", "--kv-off-card",
    "--link", "--mode", "--vram", "--page-tokens", "--buffers", "--claimed-tps", "--sweep",
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    model=st.one_of(st.sampled_from([m.slug for m in models()]), _TEXT),
    gpu=st.one_of(st.sampled_from([c.slug for c in cards()]), _TEXT),
    options=st.dictionaries(st.sampled_from(_OPTIONS), _TEXT, max_size=4),
    as_json=st.booleans(),
)
def test_no_option_value_gives_a_traceback(
    capsys: pytest.CaptureFixture[str], model: str, gpu: str, options: dict[str, str], as_json: bool
) -> None:
    args = [
        f"--model={model}",
        f"--gpu={gpu}",
        *(f"{name}={text}" for name, text in options.items()),
    ]
    status = main(["plan", *args, *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert status in (0, 2), err
    if status == 2:
        assert err.count("\n") == 1
        assert out == ""
    elif as_json:
        json.loads(out)


# Fast and light


def test_it_imports_no_torch() -> None:
    program = (
        "import sys\nfrom kvtier.cli.main import main\n"
        f"status = main({[*REFERENCE, '--link', 'fallback']!r})\n"
        "heavy = {n.split('.')[0] for n in sys.modules} & {'torch', 'cupy', 'transformers', 'lmdb', 'numpy'}\n"
        "print(status, sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert done.stderr == ""


# Plots


def test_plots_of_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for suffix in (".svg", ".html"):
        path = tmp_path / f"cliff{suffix}"
        assert main([*BASE, "--plot", str(path)]) == 0
        text = path.read_text(encoding="utf-8")
        assert "severe from" in text
        assert "fits up to" in text
        assert "Llama-3.1-8B on RTX 4060 Ti 16GB" in text
        # nothing is fetched
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    root = ET.fromstring((tmp_path / "cliff.svg").read_text(encoding="utf-8"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2
    capsys.readouterr()


def test_a_png_needs_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cliff.png"
    if find_spec("matplotlib") is None:
        said = refused(capsys, *BASE, "--plot", str(path))
        assert "kvtier[plot]" in said
        assert not path.exists()
    else:
        assert main([*BASE, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")


@settings(max_examples=50, deadline=None)
@given(
    points=st.lists(
        st.tuples(st.floats(1, 1e9), st.floats(0, 1e12)), max_size=6, unique_by=lambda p: p[0]
    ),
    name=st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8),
    style=st.sampled_from(["line", "dashes", "dots"]),
)
def test_any_chart_is_well_formed(points: list[tuple[float, float]], name: str, style: str) -> None:
    points = sorted(points)
    band = [(x, y, 2 * y) for x, y in points]
    drawn = svg(Chart(f"<{name}>", [Series(name, points, band, style)], marks=[Mark(512, name)]))
    ET.fromstring(drawn)
    assert "nan" not in drawn


def test_a_chart_is_not_written_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(ConfigError, match="folder"):
        write_chart(Chart("t", []), tmp_path / "a.svg")
