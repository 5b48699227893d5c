"""Each kernel gives what its torch reference gives: bit for bit where it ends in integers, fp8 or bf16."""

from __future__ import annotations

import re
from pathlib import Path

import cpumod
import pytest
import torch
from bodies import BODIES
from places import Place

from kvtier.kernels import merge_partials, quantise_keys
from kvtier.kernels.launch import launcher_for, source


@pytest.mark.parametrize("body", BODIES)
def test_equals_the_reference(place: Place, body: str) -> None:
    BODIES[body](place)


def test_the_bodies_launch_every_kernel(library: Path) -> None:
    launcher = cpumod.CpuLauncher(library)
    for body in BODIES.values():
        body(Place(torch.device("cpu"), launcher))
    code = re.sub(r"#define.*(?:\\\n.*)*", "", source())
    instances = re.findall(r"^(?:MOVE|SUMMARISE|SCORES|ATTEND)\((\w+),", code, re.MULTILINE)
    instances += [
        f"{verb}_{suffix}"
        for suffix in re.findall(r"^QUANTISE\((\w+),", code, re.MULTILINE)
        for verb in ("quantise_channels", "quantise_groups", "dequantise")
    ]
    instances += re.findall(r"^KVT_EXPORT\((\w+),", code, re.MULTILINE)
    assert len(instances) > 30
    assert set(instances) - set(launcher.launched) == set()
    assert set(launcher.launched) - set(instances) == set()


def test_the_default_dtype_of_torch_does_not_matter(library: Path) -> None:
    """Models are often built under another one."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        launcher = cpumod.CpuLauncher(library)
        x = torch.randn(1, 4, 8)
        assert quantise_keys(x, "int8", launcher=launcher).scale.dtype == torch.float32
        assert quantise_keys(x, "int8").scale.dtype == torch.float32
        outs, lses = (
            torch.zeros(2, 1, 4, dtype=torch.float32),
            torch.zeros(2, 1, dtype=torch.float32),
        )
        assert merge_partials(outs, lses, launcher=launcher).out.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_installed_source_is_the_one_under_test() -> None:
    assert source() == cpumod.SOURCE.read_text()


@pytest.mark.cuda
def test_a_gpu_runs_the_kernels_and_not_the_reference() -> None:
    assert launcher_for(torch.device("cuda")) is not None
