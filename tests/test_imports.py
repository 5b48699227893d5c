"""What is imported: nothing heavy before it is needed, and nothing from a higher layer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "cupy", "transformers", "lmdb")
PURE = (
    "kvtier",
    "kvtier.policy",
    "kvtier.layout",
    "kvtier.identity",
    "kvtier.keys",
    "kvtier.announce",
    "kvtier.errors",
    "kvtier.processors",
    "kvtier.units",
)

#: From the top to the bottom. A module may import from its own layer and from lower ones.
LAYERS = (
    ("cli",),
    ("demo",),
    ("integrations", "stress"),
    ("session", "attention", "replay"),
    ("store",),
    ("trace", "cost"),
    ("tiers", "mover"),
    ("devices",),
    ("policies",),
    ("kernels",),
    ("policy", "selector"),
    (
        "coding",
        "layout",
        "identity",
        "keys",
        "announce",
        "plugins",
        "folders",
        "processors",
        "errors",
        "units",
    ),
)
HEIGHT = {name: -row for row, names in enumerate(LAYERS) for name in names}

Import = tuple[str, int]


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of the package."""
    for folder, prefix in (
        ("kvtier", "kvtier"),
        ("kernels", "kvtier.kernels"),
        ("policies", "kvtier.policies"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((prefix, *(p for p in parts if p != "__init__"))), path


def layer(module: str) -> str:
    """``kvtier.store.page`` -> ``store``; empty for ``kvtier`` itself."""
    return [*module.split("."), ""][1]


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports_of(
    source: str, module: str, package: bool, names: set[str], *, lazy: bool = True
) -> list[Import]:
    """Modules of kvtier that ``source`` imports with their lines, ``TYPE_CHECKING`` aside.

    ``lazy=False`` leaves out what is imported inside functions.
    """
    found: list[Import] = []
    home = module.split(".") if package else module.split(".")[:-1]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                found.append((inner if inner in names else target, node.lineno))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and is_type_checking(child):
                for other in child.orelse:  # type: ignore[attr-defined]
                    visit(other)
            elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child)

    visit(ast.parse(source))
    return [(name, line) for name, line in found if name.split(".")[0] == "kvtier"]


def upward(module: str, imports: list[Import]) -> list[str]:
    """Sentences about the imports that do not run downwards."""
    here = layer(module)
    wrong = []
    for target, line in imports:
        there = layer(target)
        if not there:
            wrong.append(
                f"{module}:{line} imports kvtier itself; import the module that defines the name"
            )
        elif there not in HEIGHT:
            wrong.append(f"{module}:{line} imports {target}, which has no layer")
        elif HEIGHT[there] > HEIGHT[here]:
            wrong.append(f"{module}:{line} imports {target}, from a higher layer")
    return wrong


def test_every_module_has_a_layer() -> None:
    without = [name for name, _ in modules() if layer(name) and layer(name) not in HEIGHT]
    assert not without, f"give these a place in LAYERS: {without}"


def test_imports_run_downwards() -> None:
    names = {name for name, _ in modules()}
    wrong: list[str] = []
    for name, path in modules():
        imports = imports_of(
            path.read_text(), name, path.name == "__init__.py", names, lazy=name != "kvtier"
        )
        if name == "kvtier":
            wrong += [
                f"kvtier imports {target} at once; import it in __getattr__"
                for target, _ in imports
            ]
        else:
            wrong += upward(name, imports)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("kvtier.store.x", "from kvtier.session import y", 1),
        ("kvtier.store.x", "def f():\n    import kvtier.cli.main", 1),
        ("kvtier.store.x", "try:\n    from ..attention import y\nexcept ImportError:\n    pass", 1),
        ("kvtier.store.x", "from .. import session", 1),
        ("kvtier.store.x", "from kvtier import errors, session", 1),
        ("kvtier.store.x", "import kvtier", 1),
        ("kvtier.store.x", "import kvtier.novel", 1),
        ("kvtier.store.x", "if TYPE_CHECKING:\n    from kvtier.session import y", 0),
        (
            "kvtier.store.x",
            "if TYPE_CHECKING:\n    pass\nelse:\n    from kvtier.session import y",
            1,
        ),
        ("kvtier.store.x", "from kvtier.tiers.memory import y\nfrom . import z\nimport torch", 0),
        ("kvtier.session.x", "from kvtier.attention import y", 0),
        ("kvtier.demo.x", "from kvtier.integrations.transformers import y", 0),
        ("kvtier.integrations.x", "import kvtier.demo", 1),
        ("kvtier.policies.x", "from kvtier.policy import PageFacts", 0),
        ("kvtier.policy", "from kvtier.policies.lru import LRU", 1),
    ],
)
def test_the_check_itself(module: str, source: str, count: int) -> None:
    names = {"kvtier.session", "kvtier.errors", "kvtier.store.z"}
    assert len(upward(module, imports_of(source, module, False, names))) == count


@pytest.mark.parametrize("module", PURE)
def test_nothing_heavy_is_imported_before_it_is_needed(module: str) -> None:
    loaded = f"{{n.split('.')[0] for n in sys.modules}} & set({HEAVY!r})"
    program = f"import sys, {module}\nprint(*sorted({loaded}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [], f"import {module} loads {done.stdout.strip()}"
