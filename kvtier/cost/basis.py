"""What an estimate rests on, kept with the estimate.

Unit convention: 1 GB = 1e9 bytes and 1 GB/s = 1e9 bytes/s; 1 GiB = 2**30 bytes. Rates of memory and
links are in GB/s, sizes of memory in GiB, and each number is printed with its unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtier.cost.constants import Constant, Constants

UNITS = "GB = 1e9 bytes, GiB = 2**30 bytes"


@dataclass(frozen=True)
class Basis:
    """Where an estimate comes from.

    Attributes:
        inputs: what was given, by name.
        formula: how they were combined.
        link: class of the slow link, with its rate and source; empty if none is used.
        constants: what was taken from elsewhere.
        command: measures the same quantity on this machine.
        units: the unit convention.
    """

    inputs: Mapping[str, object]
    formula: str
    constants: tuple[Constant, ...] = ()
    link: str = ""
    command: str = "kvtier calibrate"
    units: str = UNITS

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the constants that were measured here."""
        return tuple(c.name for c in self.constants if c.measured)

    def to_json(self) -> dict[str, object]:
        return {
            "inputs": dict(self.inputs),
            "formula": self.formula,
            "link": self.link,
            "constants": [c.to_json() for c in self.constants],
            "command": self.command,
            "units": self.units,
        }


@dataclass(frozen=True)
class Estimate:
    """A predicted quantity.

    Attributes:
        value: what is likely. low, high: the band that the bands of the constants give.
        unit: "s", "tokens/s", ...
    """

    value: float
    low: float
    high: float
    unit: str
    basis: Basis = field(repr=False)

    def contains(self, measured: float) -> bool:
        """Whether a measurement lies in the band."""
        return self.low <= measured <= self.high

    def to_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
            "basis": self.basis.to_json(),
        }


def banded(
    compute: Callable[[Constants], float], constants: Constants, unit: str, basis: Basis
) -> Estimate:
    """Evaluate with the constants as they are, and with all of them at either end of their bands:
    the widest band that they allow."""
    ends = (compute(constants.slow), compute(constants.fast))
    value = compute(constants)
    return Estimate(value, min(*ends, value), max(*ends, value), unit, basis)
