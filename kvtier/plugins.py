"""Classes by name: entry points, ``module:Class``, and parameters in text.

Residency policies and selectors are both asked for this way.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from kvtier.errors import ConfigError

T = TypeVar("T")


def meant(name: str, known: Iterable[str]) -> str:
    """What may have been meant by an unknown name, to end a message with; empty if nothing is near."""
    near = difflib.get_close_matches(name, list(known), 2, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class Plugins:
    """The classes of one entry point group.

    Args:
        group: name of the group.
        kind: what they are, for messages.
    """

    def __init__(self, group: str, kind: str) -> None:
        self.group = group
        self.kind = kind

    def load(
        self, spec: str, base: type[T], *, extra: dict[str, str] | None = None
    ) -> tuple[type[T], dict[str, Any], dict[str, str]]:
        """The class and parameters of ``NAME``, ``NAME:key=value,...``, ``module:Class`` or
        ``module:Class:key=value,...``. A value in parentheses may have commas and colons in it. Values are read as
        int, float, true/false or text, by the type of the parameter's default; parameters without one are not the
        user's to set.

        Args:
            base: what the class must be a subclass of.
            extra: parameters that every class of the group has, with their defaults.

        Returns:
            The class, the values given to it, and the extra parameters, given or by default.

        Raises:
            ConfigError: unknown name, class or parameter, or a value that is not of the parameter's type.
        """
        head, params = self._split(spec)
        cls = self._find(head, spec, base)
        known = {
            name: p.default
            for name, p in inspect.signature(cls.__init__).parameters.items()
            if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
        }
        common = {name: params.pop(name, default) for name, default in (extra or {}).items()}
        values: dict[str, Any] = {}
        for name, text in params.items():
            if name not in known:
                allowed = ", ".join((*known, *common)) or "none"
                raise ConfigError(
                    f"{self.kind} {head!r} has no parameter {name!r}; it has: {allowed}"
                    f"{meant(name, (*known, *common))}"
                )
            values[name] = self._convert(name, text, known[name], head)
        return cls, values, common

    def names(self) -> list[str]:
        """What can be asked for by name, of all installed packages."""
        return sorted(registered(self.group))

    def _split(self, spec: str) -> tuple[str, dict[str, str]]:
        """``module:Class:key=value`` -> (``module:Class``, {key: value})."""
        before, sep, _ = spec.partition("=")
        if not sep or ":" not in before:
            return spec.strip(), {}
        head, _, _ = before.rpartition(":")
        params: dict[str, str] = {}
        for item in split_list(spec[len(head) + 1 :], f"{self.kind} {spec!r}"):
            name, sep, value = item.partition("=")
            name, value = name.strip(), value.strip()
            if not sep or not name:
                raise ConfigError(f"{self.kind} {spec!r}: {item!r} is not of the form key=value")
            if name in params:
                raise ConfigError(f"{self.kind} {spec!r}: {name} is given twice")
            if value.startswith("(") and value.endswith(")"):
                value = value[1:-1]
            params[name] = value
        return head.strip(), params

    def _find(self, head: str, spec: str, base: type[T]) -> type[T]:
        if ":" in head:
            module, _, attribute = head.partition(":")
            try:
                cls = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise ConfigError(f"{self.kind} {spec!r} cannot be imported: {error}") from error
        else:
            found = registered(self.group)
            if head not in found:
                raise ConfigError(
                    f"{self.kind} {head!r} is unknown; known are {', '.join(sorted(found))}, or give "
                    f"module:Class{meant(head, found)}"
                )
            cls = found[head].load()
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(
                f"{self.kind} {spec!r} is not a subclass of {base.__module__}.{base.__qualname__}"
            )
        return cls

    def _convert(self, name: str, text: str, default: object, head: str) -> object:
        try:
            if isinstance(default, bool):
                return {"true": True, "false": False}[text.lower()]
            if isinstance(default, int):
                return int(text)
            if isinstance(default, float):
                return float(text)
        except (ValueError, KeyError):
            kind = type(default).__name__
            raise ConfigError(
                f"{self.kind} {head!r}: {name}={text!r} is not of type {kind}"
            ) from None
        return text


def split_list(text: str, what: str, separator: str = ",") -> list[str]:
    """The items of a list, where a separator in parentheses separates nothing. ``what`` is named in errors."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == separator and not depth:
            items.append("")
        else:
            items[-1] += letter
    if depth:
        raise ConfigError(f"{what}: the parentheses do not match")
    return items


@functools.cache
def registered(group: str) -> dict[str, EntryPoint]:
    """The named classes of all installed packages; the scan takes tens of milliseconds."""
    return {point.name: point for point in entry_points(group=group)}
