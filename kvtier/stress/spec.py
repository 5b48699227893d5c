"""What to load a card with. Sizes in bytes at full size, whatever the scale of a run. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cost.churn import Locality
from kvtier.cost.constants import DEFAULTS, Constants
from kvtier.cost.models import Q4_K_M_BITS, ModelShape
from kvtier.devices.cards import Direction
from kvtier.devices.spec import CardSpec
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.devices.faults import Faults

#: Host memory of an ordinary workstation.
DEFAULT_HOST_BYTES = 64 * 10**9
DEFAULT_PAGE_TOKENS = 256
DEFAULT_STEPS = 16


@dataclass(frozen=True)
class Duration:
    """How long to decode at each context: a number of steps, or virtual seconds."""

    steps: int | None = DEFAULT_STEPS
    seconds: float | None = None

    def over(self, steps: int, seconds: float) -> bool:
        if self.steps is not None:
            return steps >= self.steps
        return seconds >= (self.seconds or 0.0)


def parse_duration(text: str) -> Duration:
    """``32`` or ``32steps``, or ``1.5s`` of virtual time."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|ms|steps?)?\s*", text)
    value = float(match[1]) if match else 0.0
    unit = (match[2] or "steps") if match else ""
    if value <= 0 or (unit.startswith("step") and value != int(value)):
        raise ConfigError(
            f"duration is {text!r}; give steps such as 32, or virtual time such as 2s"
        )
    if unit.startswith("step"):
        return Duration(int(value), None)
    return Duration(None, value * (1e-3 if unit == "ms" else 1.0))


#: Fault -> example, for messages.
FAULTS = {
    "copy-fail": "0.01",
    "stall": "0.01",
    "stall-s": "0.5",
    "slow": "0.1",
    "slow-factor": "10",
    "alloc-fail": "0.01",
    "fail-h2d": "3",
    "fail-d2h": "3",
    "stall-h2d": "3",
    "stall-d2h": "3",
    "slow-h2d": "3",
    "slow-d2h": "3",
    "fail-alloc": "2",
    "no-pin": "0",
    "seed": "1",
}
_RATES = ("copy-fail", "stall", "slow", "alloc-fail")


@dataclass(frozen=True)
class FaultPlan:
    """Faults to make anew for each run. See ``parse_faults``."""

    values: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values)

    def make(self) -> Faults:
        from kvtier.devices.faults import Faults

        at = self.values.get
        faults = Faults(
            int(at("seed", 0)),
            copy_failure_rate=at("copy-fail", 0.0),
            stall_rate=at("stall", 0.0),
            stall_s=at("stall-s", 0.5),
            slow_rate=at("slow", 0.0),
            slow_factor=at("slow-factor", 10.0),
            alloc_failure_rate=at("alloc-fail", 0.0),
        )
        directions: tuple[Direction, Direction] = ("h2d", "d2h")
        for direction in directions:
            if nth := at(f"fail-{direction}"):
                faults.fail_copy(direction, int(nth))
            if nth := at(f"stall-{direction}"):
                faults.stall_copy(direction, at("stall-s", 0.5), int(nth))
            if nth := at(f"slow-{direction}"):
                faults.slow_link(direction, at("slow-factor", 10.0), int(nth))
        if nth := at("fail-alloc"):
            faults.fail_alloc(int(nth))
        if "no-pin" in self.values:
            faults.refuse_pinning(int(at("no-pin", 0)))
        return faults


def parse_faults(text: str) -> FaultPlan:
    """``copy-fail=0.01,slow-h2d=100,seed=3``.

    By probability a copy or allocation: ``copy-fail``, ``stall``, ``slow``, ``alloc-fail``. At the
    n-th: ``fail-h2d``, ``fail-d2h``, ``stall-h2d``, ``stall-d2h``, ``fail-alloc``; ``slow-h2d`` and
    ``slow-d2h`` from the n-th on. ``stall-s`` (default 0.5) and ``slow-factor`` (default 10) say how
    much, ``no-pin=BYTES`` refuses to pin more host memory than that, ``seed`` seeds the rates.
    """
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in FAULTS:
            raise ConfigError(f"fault {name!r} is unknown; use {', '.join(FAULTS)}")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(
                f"fault {name} is {number!r}; give e.g. {name}={FAULTS[name]}"
            ) from None
        if name in _RATES:
            wrong = not 0.0 <= value <= 1.0
        elif name in ("stall-s", "slow-factor"):
            wrong = not value >= (1.0 if name == "slow-factor" else 0.0)
        else:
            wrong = value != int(value) or value < (0 if name in ("no-pin", "seed") else 1)
        if wrong:
            raise ConfigError(f"fault {name} is {number}; give e.g. {name}={FAULTS[name]}")
        values[name] = value
    return FaultPlan(values)


@dataclass(frozen=True)
class LoadSpec:
    """A load.

    Attributes:
        card: the card with its link.
        model: geometry and weights.
        contexts: tokens of each sequence, one run each.
        sessions: sequences decoded together.
        policy: residency policy of all tiers.
        mode: ``exact-stream``, ``exact-split``, ``select:NAME,budget=...``, or ``auto``, which leaves the choice
            between the exact ones to the cost model.
        locality: how alike the pages are that neighbouring steps, heads and layers look for.
        duration: of decoding at each context.
        kv_dtype: ``kvtier.cost.models.KV_DTYPES``.
        weight_bits: bits a weight takes.
        weights_off: share of the weights behind the link.
        vram: memory that may be used in all; None: the card's less a margin.
        host, disk: tiers below. path: folder of the disk tier.
        page_tokens: tokens in a page.
        chunk: tokens of a prefill step.
        scale: size of the data relative to full size that is wanted, (0, 1].
        payload: False keeps no bytes, at full size.
        faults: what goes wrong.
        check: recount all books after every call of the store.
        constants: of the processor and the disk.
    """

    card: CardSpec
    model: ModelShape
    contexts: tuple[int, ...]
    sessions: int = 1
    policy: str = "lru"
    mode: str = "exact-stream"
    locality: Locality = field(default_factory=Locality)
    duration: Duration = Duration()
    kv_dtype: str = "bf16"
    weight_bits: float = Q4_K_M_BITS
    weights_off: float = 0.0
    vram: int | None = None
    host: int = DEFAULT_HOST_BYTES
    disk: int = 0
    path: Path | None = None
    page_tokens: int = DEFAULT_PAGE_TOKENS
    chunk: int = 4096
    scale: float = 1 / 128
    payload: bool = True
    faults: FaultPlan = FaultPlan()
    check: bool = False
    constants: Constants = field(default_factory=lambda: DEFAULTS, repr=False)
