"""The entries of pytest-benchmark still fit what they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_entry_runs_once() -> None:
    micro = Path(__file__).parents[1] / "bench" / "micro.py"
    options = ["-q", "--benchmark-disable", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(micro)],
        cwd=micro.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
