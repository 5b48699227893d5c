"""Policies from text, as configuration and the command line give them.

    SPEC   = NAME [":" PARAMS] | MODULE ":" CLASS [":" PARAMS]
    PARAMS = KEY "=" VALUE ("," KEY "=" VALUE)*

A value in parentheses may have commas and colons in it, so a policy can be the parameter of another:
``ttl:inner=(mq:queues=4),seconds=60``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from kvtier.errors import ConfigError
from kvtier.policy.base import ResidencyPolicy
from kvtier.policy.facts import Order

GROUP = "kvtier.policies"


def load_policy(
    spec: str, *, leaf_first: bool, clock: Callable[[], float] = time.monotonic
) -> ResidencyPolicy:
    """A policy from ``NAME``, ``NAME:key=value,...``, ``module:Class`` or ``module:Class:key=value,...``.

    Names are the entry points of the group ``kvtier.policies``. Values are read as int, float, true/false
    or text, by the type of the parameter's default. Every policy also has the parameter ``order``
    (``tail``, the default, or ``head``; see ``ResidencyPolicy``).

    Raises:
        ConfigError: unknown name, class or parameter, or a value that is not of the parameter's type.
    """
    head, params = _split(spec)
    cls = _find(head, spec)
    known = {
        name: p.default
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name != "leaf_first"
    }
    order = params.pop("order", "tail")
    if order not in ("tail", "head"):
        raise ConfigError(f"policy {head!r}: order={order!r}; use tail or head")
    values: dict[str, Any] = {}
    for name, text in params.items():
        if name not in known:
            allowed = ", ".join((*known, "order"))
            raise ConfigError(f"policy {head!r} has no parameter {name!r}; it has: {allowed}")
        values[name] = _convert(name, text, known[name], head)
    policy = cls(leaf_first=leaf_first, **values)
    policy.set_up(order=cast(Order, order), clock=clock)
    return policy


def policy_names() -> list[str]:
    """Names that ``load_policy`` knows, of all installed packages."""
    return sorted(_registered())


@functools.cache
def _registered() -> dict[str, EntryPoint]:
    """The named policies of all installed packages; the scan takes tens of milliseconds."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _split(spec: str) -> tuple[str, dict[str, str]]:
    """``module:Class:key=value`` -> (``module:Class``, {key: value})."""
    before, sep, _ = spec.partition("=")
    if not sep or ":" not in before:
        return spec.strip(), {}
    head, _, _ = before.rpartition(":")
    params: dict[str, str] = {}
    for item in split_list(spec[len(head) + 1 :], spec):
        name, sep, value = item.partition("=")
        name, value = name.strip(), value.strip()
        if not sep or not name:
            raise ConfigError(f"policy {spec!r}: {item!r} is not of the form key=value")
        if name in params:
            raise ConfigError(f"policy {spec!r}: {name} is given twice")
        if value.startswith("(") and value.endswith(")"):
            value = value[1:-1]
        params[name] = value
    return head.strip(), params


def split_list(text: str, spec: str, separator: str = ",") -> list[str]:
    """The items of a list, where a separator in parentheses separates nothing."""
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
        raise ConfigError(f"policy {spec!r}: the parentheses do not match")
    return items


def _find(head: str, spec: str) -> type[ResidencyPolicy]:
    if ":" in head:
        module, _, attribute = head.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"policy {spec!r} cannot be imported: {error}") from error
    else:
        found = _registered()
        if head not in found:
            raise ConfigError(
                f"policy {head!r} is unknown; known are {', '.join(sorted(found))}, or give module:Class"
            )
        cls = found[head].load()
    if not (isinstance(cls, type) and issubclass(cls, ResidencyPolicy)):
        raise ConfigError(f"policy {spec!r} is not a subclass of kvtier.policy.ResidencyPolicy")
    return cls


def _convert(name: str, text: str, default: object, policy: str) -> object:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
    except (ValueError, KeyError):
        kind = type(default).__name__
        raise ConfigError(f"policy {policy!r}: {name}={text!r} is not of type {kind}") from None
    return text
