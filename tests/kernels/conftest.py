"""Where the kernels are built, and where they run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cpumod
import pytest
import torch
from places import Place

#: Builds are named by their content; the ones of sources long gone are of no use to anybody.
_KEEP_S = 7 * 24 * 3600.0


@pytest.fixture(scope="session")
def builds(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for builds, kept from run to run."""
    if sys.platform != "linux" or cpumod.compiler() is None:
        pytest.skip("the shim needs Linux and g++")
    cache = getattr(pytestconfig, "cache", None)  # absent with -p no:cacheprovider
    if cache is None:
        return tmp_path_factory.mktemp("kernels")
    folder = cache.mkdir("kvtier-kernels")
    for file in folder.iterdir():
        if file.stat().st_mtime < time.time() - _KEEP_S:
            file.unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="session")
def library(builds: Path) -> Path:
    """The kernels, built for the CPU."""
    return cpumod.build(cpumod.SOURCE.read_text(), "values", builds)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same inputs in every run, and one thread, which is fastest for inputs this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[*cpumod.ORDERS, pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest) -> Place:
    """The CPU with threads in three orders, and a GPU."""
    if request.param == "cuda":
        return Place(torch.device("cuda", torch.cuda.current_device()), None)
    library = request.getfixturevalue("library")
    return Place(torch.device("cpu"), cpumod.CpuLauncher(library, request.param))
