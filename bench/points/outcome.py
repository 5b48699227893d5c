"""A published row beside its prediction, and the errors of many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

#: ``point``: counts. ``fitted``: a constant was fitted on it. ``flagged``: the lint calls it
#: implausible. ``unusable``: inputs are missing; ``why`` says which.
Status = Literal["point", "fitted", "flagged", "unusable"]


@dataclass(frozen=True)
class Outcome:
    """One measured quantity.

    Attributes:
        key: names the row by its own fields.
        rule: how it was predicted.
        error: ``predicted / measured - 1``.
        low, high: band of the prediction.
    """

    key: str
    status: Status
    unit: str = ""
    measured: float | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    rule: str = ""
    why: str = ""
    note: str = ""

    @property
    def error(self) -> float | None:
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, object]:
        return {**self.__dict__, "error": self.error}


@dataclass(frozen=True)
class Summary:
    """Errors of the rows that count."""

    count: int
    median: float
    worst: float
    worst_key: str
    inside: int

    def to_json(self) -> dict[str, object]:
        return dict(self.__dict__)


def unusable(key: str, why: str) -> Outcome:
    return Outcome(key, "unusable", why=why)


def mark_fitted(outcomes: Sequence[Outcome], fits: dict[str, str]) -> list[Outcome]:
    """Rows that constants were fitted on do not count."""
    return [
        replace(one, status="fitted", note=f"fits {fits[one.key]}")
        if one.key in fits and one.status == "point"
        else one
        for one in outcomes
    ]


def summarise(outcomes: Sequence[Outcome]) -> Summary | None:
    """Median and worst absolute error of the rows with status ``point``; None without any."""
    points = [one for one in outcomes if one.status == "point" and one.error is not None]
    if not points:
        return None
    errors = [abs(one.error or 0.0) for one in points]
    worst = points[errors.index(max(errors))]
    inside = sum((one.low or 0) <= (one.measured or 0) <= (one.high or 0) for one in points)
    return Summary(len(errors), statistics.median(errors), max(errors), worst.key, inside)


def table(title: str, outcomes: Sequence[Outcome]) -> str:
    """The rows as text, with the summary below."""
    lines = [f"\n{title}", ""]
    lines.append(f"{'row':44} {'measured':>10} {'predicted':>10} {'error':>7}  {'band':>19}  rule")
    for one in outcomes:
        if one.status in ("point", "fitted"):
            assert one.error is not None
            band = f"{one.low:.4g}..{one.high:.4g}" if one.low is not None else ""
            fitted = f"  [{one.note}]" if one.note else ""
            lines.append(
                f"{one.key[:44]:44} {one.measured:10.4g} {one.predicted:10.4g} {one.error:+7.1%}  "
                f"{band:>19}  {one.rule}{fitted}"
            )
    for status, words in (("flagged", "flagged by the lint"), ("unusable", "not usable")):
        for one in outcomes:
            if one.status == status:
                lines.append(f"{one.key[:44]:44} {words}: {one.why}")
    found = summarise(outcomes)
    if found:
        lines.append(
            f"\n{found.count} rows not used for fitting: median error {found.median:.1%}, worst "
            f"{found.worst:.1%} ({found.worst_key}); {found.inside} of {found.count} inside the band"
        )
    return "\n".join(lines)
