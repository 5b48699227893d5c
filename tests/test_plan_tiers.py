"""``kvtier plan`` with codecs of the lower tiers and with the modes of a cache; what a store foresees with codecs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli.main import main
from kvtier.coding import coded_page_bytes
from kvtier.cost.coded import Codecs, codecs_for
from kvtier.cost.constants import DEFAULTS
from kvtier.cost.models import find_model
from kvtier.cost.outlook import Load
from kvtier.cost.restore import Chain, move_seconds
from kvtier.cost.tier_load import Expected, tier_load
from kvtier.devices.cards import find_card
from kvtier.layout import CodecName, LayerLayout, PageLayout

LOAD = (
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "rtx-4060-ti-16gb",
    "--context",
    "64k",
    "--kv-off-card",
    "0.5",
)
CODECS = [name for name in get_args(CodecName) if name != "none"]
CARD = find_card("rtx-4060-ti-16gb")


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *LOAD, "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def at_64k(found: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in found["rows"] if row["context"] == 65536)
    return row


# ---------------------------------------------------------------------- codecs


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_over_the_link_are_the_codecs(codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = find_model("llama-3.1-8b").layout("bf16", 16)
    share = coded_page_bytes(layout, codec) / layout.page_bytes
    assert 0.3 < share < 0.7
    plain, coded = plan(capsys), plan(capsys, "--host-codec", codec)
    assert coded["codecs"]["host"] == {"codec": codec, "share": share}
    whole = 131072 * 65536 * 0.5
    assert coded["codecs"]["kv_over_link_bytes"] == pytest.approx(whole * share)
    times = [1 / at_64k(found)["tps"] for found in (plain, coded)]
    # The link decides; decoding takes a little of what is gained.
    assert share < times[1] / times[0] < share + 0.2


def test_fewer_bits_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    def rates(mode: str) -> list[float]:
        return [
            at_64k(plan(capsys, "--mode", mode, "--host-codec", codec))["tps"]
            for codec in ("none", "int8", "int4")
        ]

    streamed = rates("exact-stream")
    assert streamed == sorted(set(streamed))
    # Planes of int4 are small pieces, which links carry slower.
    plain, *coded = rates("select:quest,budget=4096tokens,dense=none")
    assert min(coded) > plain


def test_the_processor_decodes_before_it_attends(capsys: pytest.CaptureFixture[str]) -> None:
    plain, coded = (
        plan(capsys, "--mode", "exact-split", "--host-codec", codec) for codec in ("none", "int8")
    )
    assert at_64k(coded)["tps"] < at_64k(plain)["tps"]
    assert coded["codecs"]["kv_over_link_bytes"] is None


def test_none_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--link", "disk"), ("--mode", "select"), ("--mode", "kv-cpu")):
        plain = plan(capsys, *more)
        assert plan(capsys, *more, "--host-codec", "none", "--disk-codec", "none") == plain
        assert "codecs" not in plain


def test_less_is_read_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    plain, coded = (
        at_64k(plan(capsys, "--link", "disk", "--disk-codec", codec)) for codec in ("none", "int4")
    )
    assert coded["tps"] > 1.2 * plain["tps"]


@pytest.mark.parametrize("source", ["host", "disk"])
def test_a_prefix_is_restored_in_fewer_bytes(source: Any) -> None:
    model = find_model("llama-3.1-8b")
    share = codecs_for(model, "bf16", 16, host="int8").host_share
    plain, coded = (
        move_seconds(model, CARD, 65536, Chain(source, coded=part), DEFAULTS)
        for part in (1.0, share)
    )
    assert coded / plain == pytest.approx(share, abs=0.01)


def test_a_load_restores_what_its_codecs_left() -> None:
    model = find_model("llama-3.1-8b")
    load = Load(model, CARD, 2048, disk_prefix=True, constants=DEFAULTS)
    slow = replace(
        load,
        constants=DEFAULTS.measured(
            {"disk_bw": replace(DEFAULTS.get_constant("disk_bw"), value=1e8, low=1e8, high=1e8)}
        ),
    )
    late = [
        next(one for one in each.warnings() if one.kind == "ttft").after_ttft_s
        for each in (slow, replace(slow, codecs=codecs_for(model, "bf16", 16, disk="int4")))
    ]
    assert None not in late
    assert late[1] < 0.6 * late[0]  # type: ignore[operator]


def test_people_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LOAD, "--host-codec", "int8"]) == 0
    assert "in host RAM as int8, 59%" in capsys.readouterr().out


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 4), dim=st.sampled_from([2, 6, 64, 80]), tokens=st.sampled_from([1, 8, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]), codec=st.sampled_from(CODECS), summaries=st.booleans(),
)  # fmt: skip
def test_bytes_are_those_of_the_codec_itself(
    heads: int, dim: int, tokens: int, dtype: str, codec: str, summaries: bool
) -> None:
    import torch

    from kvtier.tiers.codec import PageCodec

    layers = [
        LayerLayout.attention(heads, dim, dtype), LayerLayout("none"), LayerLayout.mla(dim, 2, dtype),
    ]  # fmt: skip
    layout = PageLayout(layers, tokens, summaries)
    real = PageCodec(layout, codec)
    assert coded_page_bytes(layout, codec) == real.page_bytes
    page = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    out = torch.empty(1, real.page_bytes, dtype=torch.uint8)
    real.encode(page, out)  # nothing reaches past its end
    assert max(start + size for start, size in real.ranges) <= real.page_bytes


@given(disk=st.floats(0, 1), host=st.sampled_from(["none", *CODECS]))
def test_shares_stay_between_the_tiers(disk: float, host: str) -> None:
    model = find_model("gemma-3-27b") if disk > 0.5 else find_model("llama-3.1-8b")
    codecs = codecs_for(model, "bf16", 16, host=host)
    low = min(codecs.host_share, 1.0)
    assert low - 1e-9 <= codecs.on_link(disk) <= 1.0
    assert codecs.raised(disk) == codecs.on_link(disk)  # exact on disk
    if host == "none":
        assert codecs.on_link(disk) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host-codec", "int9"), "--host-codec is 'int9'; use one of none, fp8, int8, int4"),
        (("--disk-codec", "zip", "--disk-prefix"), "--disk-codec is 'zip'"),
        (("--disk-codec", "int8"), "nothing is on disk; add --disk-prefix or --link disk"),
        (("--host-codec", "int8", "--link", "fallback"), "no KV is in a host tier"),
        (("--host-codec", "int8", "--kv-dtype", "fp8"), "--host-codec: layer 0 has"),
        (("--mode", "selekt"), "did you mean select"),
        (("--mode", "select:qest,budget=10%"), "did you mean quest"),
        (("--mode", "select:quest,budget=10%,reduc=max"), "did you mean reduce"),
        (("--mode", "select:quest,budget=10%,sink=2"), "did you mean sinks"),
        (("--mode", "select:quest"), "has no budget"),
        (("--mode", "select:quest,budget=0"), "above 0"),
        (("--mode", "select:quest,budget=10%,dense=99"), "layers 0 to 31"),
        (("--mode", "select:quest,budget=10%", "--link", "cpu"), "--mode select"),
    ],
)
def test_what_cannot_be(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["plan", *LOAD, *options]))
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert message in told.err


# ---------------------------------------------------------------------- modes


def test_exact_modes_are_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    for name, same in (("exact-stream", "kv-stream"), ("exact-split", "kv-cpu")):
        assert plan(capsys, "--mode", name) == plan(capsys, "--mode", same)


def test_the_budget_counts(capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ("2048tokens", "256pages", "12.5%", "0.5", "100%")
    found = [
        plan(capsys, "--mode", f"select:quest,budget={budget},dense=none") for budget in budgets
    ]
    assert [each["selection_tokens"] for each in found] == [2048, 4096, 8192, 32768, 65536]
    rates = [at_64k(each)["tps"] for each in found]
    assert rates == sorted(set(rates), reverse=True)
    assert {at_64k(each)["mode"] for each in found} == {"select"}


def test_a_share_is_of_each_context(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate at a context does not depend on which one was asked about."""
    mode = ("--mode", "select:quest,budget=25%")
    one = at_64k(plan(capsys, *mode))
    assert main(["plan", *LOAD, "--json", *mode, "--context", "32k"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["selection_tokens"] == 8192
    assert main(["plan", *LOAD, "--json", *mode, "--context", "128k"]) == 0
    assert json.loads(capsys.readouterr().out)["selection_tokens"] == 32768
    assert one["tps"] > 0


def test_options_of_a_selection_count(capsys: pytest.CaptureFixture[str]) -> None:
    def tps(more: str) -> float:
        found: float = at_64k(plan(capsys, "--mode", f"select:quest,budget=4096tokens{more}"))[
            "tps"
        ]
        return found

    assert tps(",dense=none") > tps("") > tps(",dense=0+1+2+3")
    assert tps(",dense=none,scope=layer") > tps(",dense=none,scope=head")
    assert tps(",dense=none,prefetch=last") > tps(",dense=none,prefetch=none")


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\nfrom kvtier.cli.main import main\n"
        f"main(['plan', *{LOAD!r}, '--mode', 'select:quest,budget=10%', '--host-codec', 'int8', '--json'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- stores


def test_a_store_foresees_coded_bytes() -> None:
    layout = PageLayout([LayerLayout.attention(8, 128, "bfloat16")] * 32, 16)
    expected = Expected(tokens=65536, weight_bytes=5 * 10**9)
    sizes = {"vram": 4 << 30, "host": 2 << 30}
    found = {
        codec: tier_load(layout, CARD, expected, **sizes, codecs=Codecs.of(layout, codec))
        for codec in ("none", "int8", "int4")
    }
    plain = tier_load(layout, CARD, expected, **sizes)
    assert plain.estimate.tps == found["none"].estimate.tps
    # 8 GiB of KV: 4 in VRAM, 2 GiB of host RAM hold 2, 3.4 or all 4 of the others.
    shares = [found[codec].disk_share for codec in ("none", "int8", "int4")]
    assert shares[0] == pytest.approx(0.5, abs=0.01)
    assert shares[0] > shares[1] > shares[2] == 0
    rates = [found[codec].estimate.tps for codec in ("none", "int8", "int4")]
    assert rates == sorted(set(rates))
    room = replace(found["none"], codecs=Codecs.of(layout, "int8"))
    asked = [
        next(option for _, option, _ in load.proposals() if option.startswith("host"))
        for load in (found["none"], room)
    ]
    assert int(asked[1][5:-3]) < 0.6 * int(asked[0][5:-3])


def test_the_cause_of_a_selection_is_what_it_brings(capsys: pytest.CaptureFixture[str]) -> None:
    """Not all KV off the card: the chosen part of it, and what layers that read every page leave to the processor."""
    cold = 0.5 * 65536 * 131072
    text = ["--mode", "select:quest,budget=5%"]
    with_dense = plan(capsys, *text)["warnings"][0]["text"]
    assert "of the chosen KV come over a pinned link" in with_dense
    assert "layers that read every page are attended to by the processor" in with_dense
    without = plan(capsys, "--mode", "select:quest,budget=5%,dense=none", "--host-codec", "int8")
    assert 0 < without["codecs"]["kv_over_link_bytes"] < 0.2 * cold
    streamed = plan(capsys, "--mode", "exact-stream", "--host-codec", "int8")
    assert streamed["codecs"]["kv_over_link_bytes"] > 0.5 * cold
    assert all("every page" not in one["text"] for one in without["warnings"])
