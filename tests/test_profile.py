"""The profile of a machine: stored and read back whole, refused when it is not one, used where it applies."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.main import main
from kvtier.cost.constants import DEFAULTS
from kvtier.cost.profile import (
    FORMAT,
    Machine,
    Measurement,
    Profile,
    default_path,
    installed_card,
    load_profile,
    middle,
    own_profile,
    store_profile,
    this_machine,
)
from kvtier.cost.slow_links import slow_link
from kvtier.devices.cards import cards, find_card
from kvtier.errors import ConfigError

GiB = 2**30
H200 = find_card("h200-sxm-141gb")
PLAN = ("plan", "--model", "llama-3.1-8b", "--gpu", "rtx-4060-ti-16gb")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(**values: float) -> tuple[Measurement, ...]:
    units = {"vram_share": "share of peak", "cpu_share": "share of peak", "gpu_step": "s"}
    return tuple(
        Measurement(n, v, units.get(n, "bytes/s"), f"how of {n}") for n, v in values.items()
    )


def profile(gpu: str = "", gpu_bytes: int = 0, **values: float) -> Profile:
    return Profile(this_machine(gpu, gpu_bytes), "2026-11-30T12:00:00Z", measured(**values))


TEXT = st.text(max_size=20)
POSITIVE = st.floats(1e-9, 1e15)
MEASUREMENTS = st.builds(
    lambda name, values, unit, how: Measurement(
        name, sorted(values)[1], unit, how, min(values), max(values)
    ),
    TEXT,
    st.tuples(POSITIVE, POSITIVE, POSITIVE),
    st.sampled_from(["bytes/s", "s", "share of peak"]),
    TEXT,
)
PROFILES = st.builds(
    Profile,
    st.builds(
        Machine,
        TEXT,
        st.integers(1, 512),
        st.integers(1, 1 << 50),
        TEXT,
        st.integers(0, 1 << 50),
        TEXT,
    ),
    TEXT,
    st.lists(MEASUREMENTS, unique_by=lambda one: one.name, max_size=5).map(tuple),
    st.booleans(),
    st.dictionaries(TEXT, TEXT, max_size=3),
)


@given(PROFILES)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, wanted: Profile) -> None:
    path = tmp_path_factory.getbasetemp() / "round" / "profile.json"
    store_profile(wanted, path)
    assert load_profile(path) == wanted
    assert [one.name for one in path.parent.iterdir()] == ["profile.json"]


@given(PROFILES, st.data())
def test_a_damaged_file_is_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, wanted: Profile, data: st.DataObject
) -> None:
    """Cut, overwritten or with a field changed to anything: a ConfigError, or a profile that is valid."""
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    store_profile(wanted, path)
    raw = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["cut", "byte", "field"]))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 2))]
    elif kind == "byte":
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    else:
        whole = json.loads(raw)
        whole[data.draw(st.sampled_from(sorted(whole)))] = data.draw(
            st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none(), max_size=2)
        )
        raw = bytearray(json.dumps(whole).encode())
    path.write_bytes(raw)
    error = loading_error(path)
    assert error or kind != "cut"
    assert not error or (str(path) in error and "kvtier calibrate" in error)


def loading_error(path: Path) -> str:
    """What loading says; empty if it succeeds. Anything but a ConfigError is raised."""
    try:
        load_profile(path)
    except ConfigError as error:
        return str(error)
    return ""


def test_another_format_says_which(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile().to_json() | {"format": FORMAT + 1}))
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        load_profile(path)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    store_profile(profile(disk_read=1e9), path)
    before = path.read_bytes()

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        store_profile(profile(disk_read=2e9), path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_nothing_names_an_owner(tmp_path: Path) -> None:
    text = json.dumps(profile(disk_read=1e9).to_json())
    assert os.uname().nodename not in text
    assert str(Path.home()) not in text


# Where it applies


def test_host_constants_apply_to_any_card() -> None:
    mine = profile(cpu_weights=10e9, cpu_share=1.0, cpu_attention=3e9, disk_read=2e9)
    constants = mine.constants(find_card("rtx-4090"))
    assert constants["disk_bw"] == 2e9
    assert constants["cpu_attention_bw"] == constants["server_cpu_attention_bw"] == 3e9
    assert {n for n in constants if constants.get_constant(n).measured} == {
        "disk_bw", "dram_bw", "cpu_efficiency", "server_cpu_efficiency", "cpu_attention_bw",
        "server_cpu_attention_bw",
    }  # fmt: skip
    link = slow_link("cpu", None, constants)
    assert link.likely == 10e9
    assert link.measured
    assert "how of" in link.source
    assert constants["pinned_bw"] == DEFAULTS["pinned_bw"]


def test_card_constants_apply_to_the_measured_card_alone() -> None:
    mine = profile(
        "NVIDIA H200", 140 * GiB, pinned_h2d=55e9, pageable_h2d=9e9, vram_share=0.9, gpu_step=2e-3
    )
    here, other = mine.constants(H200), mine.constants(find_card("rtx-4090"))
    assert slow_link("pinned", H200, here).likely == 55e9
    assert slow_link("pageable", H200, here).measured
    assert (here["hbm_efficiency"], here["step_s"]) == (0.9, 2e-3)
    assert here["vram_efficiency"] == DEFAULTS["vram_efficiency"]
    assert not any(other.get_constant(n).measured for n in other)
    assert dict(other) == dict(DEFAULTS)
    assert mine.summary(H200)["gives"] == ["hbm_efficiency", "pageable_bw", "pinned_bw", "step_s"]


@pytest.mark.parametrize(
    ("name", "gib", "slug"),
    [
        ("NVIDIA H200", 139.8, "h200-sxm-141gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.7, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.8, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA GeForce RTX 4070", 11.7, "rtx-4070"),
        ("Another card", 24, None),
        ("", 0, None),
    ],
)
def test_drivers_names(name: str, gib: float, slug: str | None) -> None:
    found = installed_card(name, round(gib * GiB))
    assert (found and found.slug) == slug


def test_every_card_is_found_by_its_own_name_or_not_at_all() -> None:
    wrong = {
        (card.slug, found.slug)
        for card in cards()
        if (found := installed_card(f"NVIDIA {card.name}", round(0.98 * card.vram_bytes)))
        and found.slug != card.slug
    }
    assert not wrong


def test_middle() -> None:
    one = middle("x", [5, 1, 2, 3, 4, 100, 6, 7, 8, 9, 10], "s", "")
    assert (one.low, one.value, one.high) == (2, 6, 10)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="measurement x"):
            Measurement("x", wrong, "s", "")


# kvtier plan


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict, str]:  # type: ignore[type-arg]
    assert main([*PLAN, *args, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_plan_uses_it_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    off = ("--weights-off-card", "0.2", "--link", "cpu")
    before, err = answer(capsys, *off)
    assert (before["profile"], err) == (None, "")
    store_profile(profile(cpu_weights=3e9, cpu_share=1.0), default_path())
    after, err = answer(capsys, *off)
    assert err == ""
    assert after["warnings"][0]["after_tps"] < before["warnings"][0]["after_tps"]
    basis = {c["name"]: c["basis"] for c in after["basis"]["constants"]}
    assert basis["dram_bw"] == "measured"
    assert basis["step_s"] == "table"
    assert after["link"]["measured"]
    assert after["profile"]["date"] == "2026-11-30T12:00:00Z"
    assert "dram_bw" in after["profile"]["gives"]
    assert answer(capsys, *off, "--profile", "none")[0] == before
    assert main([*PLAN, *off]) == 0
    out = capsys.readouterr().out
    assert "measured (2026-11-30 on" in out
    assert "from a table: vram_efficiency" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: replace(p, machine=replace(p.machine, cpu="Z80")), "of another machine (Z80"),
        (lambda p: replace(p, machine=replace(p.machine, cores=4096)), "of another machine"),
    ],
)
def test_a_profile_of_another_machine(
    capsys: pytest.CaptureFixture[str], change: object, words: str
) -> None:
    """Found by default it is one line and not used; named, it is used, and its machine is said."""
    other = change(profile(disk_read=1e9))  # type: ignore[operator]
    store_profile(other, default_path())
    data, err = answer(capsys)
    assert data["profile"] is None
    assert err.count("\n") == 1
    assert words in err
    data, err = answer(capsys, "--profile", str(default_path()))
    assert err == ""
    assert data["profile"]["machine"]["cpu"] == other.machine.cpu


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"format": 99}', b'{"format": 1}']
)
def test_a_profile_that_is_none(capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    default_path().parent.mkdir()
    default_path().write_bytes(content)
    data, err = answer(capsys)
    assert data["profile"] is None
    assert err.startswith("kvtier plan: note: not used: profile")
    assert err.count("\n") == 1
    assert main([*PLAN, "--profile", str(default_path())]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvtier plan: error: --profile: profile")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["/nowhere/at/all.json", "/", "", "a\0b"])
def test_a_profile_that_cannot_be_read(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([*PLAN, "--profile", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_this_machine_is_its_own() -> None:
    here = this_machine()
    assert here.cores >= 1
    assert here.cpu
    assert here.same_host(replace(here, kernel="other", gpu="other"))
    store_profile(Profile(here, "2026-11-30T12:00:00Z", ()), default_path())
    assert own_profile() == (Profile(here, "2026-11-30T12:00:00Z", ()), "")
