"""The tests have the same names in every process that collects them.

Several processes share the tests out by name, so a name that holds the time, a random number or the order of
a set ends the run now and then, before a single test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
#: What gives another value in each process.
CHANGING = {
    "time", "time_ns", "monotonic", "perf_counter", "now", "today", "uuid1", "uuid4", "getpid", "random",
    "randint", "randbytes", "urandom", "token_bytes", "token_hex", "id", "hash", "mkdtemp", "mkstemp",
}  # fmt: skip
#: Values that hold the time unless it is given.
TIMED = {"GzipFile", "compress"}


def changing(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what makes the names of parametrized tests change."""
    for node in ast.walk(ast.parse(source)):
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
                "parametrize"
            ):
                yield from changing_values(decorator)


def changing_values(decorator: ast.Call) -> Iterator[tuple[int, str]]:
    ordered = [node.args[0] for node in ast.walk(decorator) if is_sorted(node)]
    for node in ast.walk(decorator):
        if node in ordered:
            continue
        if isinstance(node, ast.Set | ast.SetComp):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            timed = name.startswith("gzip.") and last in TIMED
            if (
                last in CHANGING
                or name in ("set", "frozenset")
                or (timed and "mtime" not in {keyword.arg for keyword in node.keywords})
            ):
                yield node.lineno, ast.unparse(node)


def is_sorted(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "sorted" and bool(node.args)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("test_*.py")), ids=lambda path: path.stem)
def test_no_name_changes_from_process_to_process(path: Path) -> None:
    assert list(changing(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "values",
    ["[gzip.compress(b'')]", "[time.time()]", "set(NAMES)", "{1, 2}", "[x for x in {'a'}]", "[os.urandom(4)]"],
    ids=str,
)  # fmt: skip
def test_what_changes_is_found(values: str) -> None:
    source = f"@pytest.mark.parametrize('x', {values})\ndef test(x): ..."
    assert len(list(changing(source))) == 1
    assert not list(
        changing("@pytest.mark.parametrize('x', [gzip.compress(b'', mtime=0)])\ndef test(x): ...")
    )
