"""Policies from text, as configuration and the command line give them.

    SPEC   = NAME [":" PARAMS] | MODULE ":" CLASS [":" PARAMS]
    PARAMS = KEY "=" VALUE ("," KEY "=" VALUE)*

A value in parentheses may have commas and colons in it, so a policy can be the parameter of another:
``ttl:inner=(mq:queues=4),seconds=60``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

from kvtier.errors import ConfigError
from kvtier.plugins import Plugins
from kvtier.policy.base import ResidencyPolicy
from kvtier.policy.facts import Order

GROUP = "kvtier.policies"

_PLUGINS = Plugins(GROUP, "policy")


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
    cls, values, common = _PLUGINS.load(
        spec,
        ResidencyPolicy,  # type: ignore[type-abstract]
        extra={"order": "tail"},
    )
    if common["order"] not in ("tail", "head"):
        raise ConfigError(f"policy {spec!r}: order={common['order']!r}; use tail or head")
    policy = cls(leaf_first=leaf_first, **values)
    policy.set_up(order=cast(Order, common["order"]), clock=clock)
    return policy


def policy_names() -> list[str]:
    """Names that ``load_policy`` knows, of all installed packages."""
    return _PLUGINS.names()
