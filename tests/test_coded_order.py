"""Planes that are decoded on their way to attention: what orders them, and that it is all declared."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier.attention.coded as coded_module
from kvtier.attention.coded import CodedPlanes, Wanted
from kvtier.devices.base import Event
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import CopyFailedError, RaceError
from kvtier.keys import page_keys
from kvtier.layout import LayerLayout, PageLayout
from kvtier.store.store import TieredStore

LAYOUT = PageLayout([LayerLayout.attention(2, 8, "float32")] * 2, 4)
PLANE = LAYOUT.plane(1)
PAGES = 3

Kind = type[CodedPlanes]


@contextmanager
def coded_pages(kind: Kind) -> Iterator[tuple[EmulatedDevice, Callable[[], None], Any]]:
    """A device; what brings a layer of all pages of a store to fresh memory and has attention read it, in order; the
    ``CodedPlanes`` that it goes through."""
    on = EmulatedDevice()
    store = TieredStore(LAYOUT, device=on, vram="1MiB", host="1MiB", host_codec="int8")
    try:
        keys = page_keys(b"i" * 32, range(PAGES * LAYOUT.page_tokens), LAYOUT.page_tokens)
        for parent, key in zip([None, *keys], keys, strict=False):
            values = torch.randn(LAYOUT.page_bytes // 4, generator=torch.Generator().manual_seed(0))
            store.put(key, values.view(torch.uint8), parent=parent)
        planes = kind(store)
        with store.match(keys, promote=False) as lease:
            to = on.alloc(PAGES * PLANE.nbytes)
            places = [to.range(n * PLANE.nbytes, (n + 1) * PLANE.nbytes) for n in range(PAGES)]
            slots = [copy.slot for copy in lease.copies]
            wanted = [
                Wanted(slot, [(at, 0)])
                for slot, at in zip(slots, places, strict=True)
                if slot is not None and slot.codec is not None
            ]
            assert len(wanted) == PAGES

            def bring() -> None:
                stream, compute = on.stream("h2d"), on.compute_stream()
                stream.wait(compute.record())
                planes.bring(stream, PLANE, wanted)
                compute.wait(stream.record())
                on.use(compute, "attention", reads=places)

            yield on, bring, planes
    finally:
        on.close()


def in_order(kind: Kind) -> None:
    with coded_pages(kind) as (on, bring, planes):
        bring()
        bring()
        on.synchronize(10.0)
        planes.close()


def decoded_before_they_came(kind: Kind) -> None:
    """Decoding is behind all that was before the copy, and all later work is behind it: only the copy is not."""
    with coded_pages(kind) as (on, bring, _):
        copy, launch = on.copy, on.launch
        before: list[Event] = []

        def noted(stream: Any, parts: Any) -> None:
            before.append(stream.record())
            copy(stream, parts)

        def beside(stream: Any, name: str, kernel: Any, **ranges: Any) -> None:
            other = on.stream("beside")
            other.wait(before[-1])
            launch(other, name, kernel, **ranges)
            stream.wait(other.record())

        on.copy, on.launch = noted, beside  # type: ignore[method-assign]
        bring()


def read_before_they_are_decoded(kind: Kind) -> None:
    """Decoding is behind the copy, and nothing is behind it."""
    with coded_pages(kind) as (on, bring, _):
        launch = on.launch

        def beside(stream: Any, name: str, kernel: Any, **ranges: Any) -> None:
            other = on.stream("beside")
            other.wait(stream.record())
            launch(other, name, kernel, **ranges)

        on.launch = beside  # type: ignore[method-assign]
        bring()


def decoded_though_they_never_came(kind: Kind) -> None:
    with coded_pages(kind) as (on, bring, _):
        on.faults.fail_copy("h2d")
        bring()
        on.synchronize(10.0)


def closed_behind_their_backs(kind: Kind) -> None:
    """The scratch memory is given up while work on it may be under way."""
    with coded_pages(kind) as (_, bring, planes):
        bring()
        planes.close()


#: What each of them ends in.
OUTCOMES: dict[Callable[[Kind], None], type[Exception] | None] = {
    in_order: None,
    decoded_before_they_came: RaceError,
    read_before_they_are_decoded: RaceError,
    decoded_though_they_never_came: CopyFailedError,
    closed_behind_their_backs: None,
}


def outcome(scenario: Callable[[Kind], None], kind: Kind) -> type[Exception] | None:
    try:
        scenario(kind)
    except (RaceError, CopyFailedError) as error:
        return type(error)
    return None


@pytest.mark.parametrize("scenario", OUTCOMES)
def test_how_it_ends(scenario: Callable[[Kind], None]) -> None:
    assert outcome(scenario, CodedPlanes) is OUTCOMES[scenario]


# ---------------------------------------------------------------------- nothing may be left out


class _Without(ast.NodeTransformer):
    """Leaves out the ``number``-th of what the module tells the device of order: ranges that an operation reads or
    writes, and waits."""

    def __init__(self, number: int) -> None:
        self.left, self.what = number, ""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg in ("reads", "writes") and self._found(ast.unparse(keyword)):
                keyword.value = ast.List([], ast.Load())
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in ("wait", "synchronize") and self._found(ast.unparse(node)):
            return ast.Constant(None)
        return node

    def _found(self, what: str) -> bool:
        self.left -= 1
        if self.left == -1:
            self.what = what
        return self.left == -1


def mutants() -> list[Any]:
    assert coded_module.__file__ is not None
    source = Path(coded_module.__file__).read_text(encoding="utf-8")
    found: list[Any] = []
    while True:
        change = _Without(len(found))
        tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
        if not change.what:
            return found
        found.append(pytest.param(tree, id=change.what))


def test_the_mutants_include_what_decoding_declares() -> None:
    names = [str(param.id) for param in mutants()]
    assert any(name.startswith("reads=") for name in names)
    assert any(name.startswith("writes=") for name in names)


@pytest.mark.parametrize("tree", mutants())
def test_everything_declared_is_needed(tree: ast.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = types.ModuleType(coded_module.__name__)
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(tree, "mutant", "exec"), mutant.__dict__)
    found = {scenario: outcome(scenario, mutant.CodedPlanes) for scenario in OUTCOMES}
    assert found != OUTCOMES, "no scenario notices it"
