"""Measured against predicted tokens/s while it runs.

A plan can be wrong: a driver starts to page VRAM out, a link is shared, a disk is slow. The monitor
compares what is measured with the rate predicted for the placement and with the rate that everything
in VRAM would have, and warns once a cause, and again only when it gets a level worse.

The rate is the median of the last samples, so that a single slow step says nothing, and a level counts
once it has been past it for ``patience`` samples in a row.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.cost.cliff import Level, level
from kvtier.cost.warning import CostWarning, Remedy
from kvtier.errors import ConfigError

#: Samples that the median is taken of, and how many of them a judgement needs.
WINDOW = 15
LEAST_SAMPLES = 4
PATIENCE = 3

_RANK: dict[Level, int] = {"none": 0, "notice": 1, "warning": 2, "severe": 3}


@dataclass
class RateMonitor:
    """Watches one load. Safe to feed from several threads.

    Attributes:
        predicted_tps: predicted for the placement, tokens/s of all sequences; None if unknown.
        baseline_tps: with everything in VRAM, predicted or measured; None: learned from the samples that are
            fed as ``resident``.
        predicted_low_tps: slow end of the prediction's band; what is inside the band is as
            predicted. None: ``predicted_tps / 1.3``.
        link: class of the slow link.
        cause: why it was predicted to be slower than the baseline.
        remedies: what would be better, for the warnings.
        warm_up: samples to leave out: first calls compile and allocate.
    """

    predicted_tps: float | None = None
    baseline_tps: float | None = None
    predicted_low_tps: float | None = None
    link: str = "pinned"
    cause: str = "KV or weights come from outside VRAM"
    remedies: Sequence[Remedy] = ()
    warm_up: int = 2
    patience: int = PATIENCE
    window: int = WINDOW
    warnings: list[CostWarning] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        for name in ("predicted_tps", "baseline_tps", "predicted_low_tps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; give tokens/s > 0, or None")
        for name, least in (("patience", 1), ("warm_up", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; give {least} or more")
        self._lock = threading.Lock()
        self._learns = self.baseline_tps is None
        self._recent: deque[float] = deque(maxlen=self.window)
        self._seconds = 0.0  # a token, median of the recent ones
        self._seen = 0
        self._past: dict[str, int] = {}
        self._said: dict[str, int] = {}

    @property
    def measured_tps(self) -> float | None:
        """Smoothed tokens/s; None until the warm-up is over."""
        return 1 / self._seconds if self._seconds else None

    def sample(self, tokens: float, seconds: float, *, resident: bool = False) -> list[CostWarning]:
        """Feed ``tokens`` that took ``seconds``.

        Args:
            resident: everything that was read was in VRAM: the sample belongs to the baseline, if that is
                to be learned.

        Returns:
            Warnings that are new with this sample; the caller announces them (``feed`` does both).

        Raises:
            ConfigError: not positive.
        """
        if not (tokens > 0 and 0 < seconds < math.inf):
            raise ConfigError(f"a sample of {tokens} tokens in {seconds} s; give numbers > 0")
        with self._lock:
            self._seen += 1
            if self._seen <= self.warm_up:
                return []
            self._recent.append(seconds / tokens)
            self._seconds = statistics.median(self._recent)
            if len(self._recent) < min(LEAST_SAMPLES, self.window):
                return []
            if resident and self._learns:
                self.baseline_tps = 1 / self._seconds
                return []
            fresh = [one for one in (self._below_plan(), self._below_baseline()) if one]
            self.warnings += fresh
            return fresh

    def feed(
        self, tokens: float, seconds: float, *, resident: bool = False, stacklevel: int = 1
    ) -> None:
        """``sample``, and announce what it found."""
        for one in self.sample(tokens, seconds, resident=resident):
            one.announce(stacklevel + 1)

    def _below_plan(self) -> CostWarning | None:
        """Slower than predicted: something else is wrong than what was warned about."""
        if self.predicted_tps is None:
            return None
        low = self.predicted_low_tps or self.predicted_tps / 1.3
        measured = 1 / self._seconds
        factor = self.predicted_tps / measured
        found = level(factor) if measured < low else "none"
        if not self._is_new("plan", found):
            return None
        return self._make(
            found,
            self.predicted_tps,
            f"it is below the predicted {self.predicted_tps:.3g} tokens/s for this placement (at "
            f"least {low:.3g}): the {self.link} link, the driver or another process takes more time "
            "than planned for",
            (
                Remedy(
                    "find what slows it: driver paging, memory that is not pinned, another process "
                    "on the card or the link",
                    "kvtier calibrate",
                    self.predicted_tps,
                ),
                *self.remedies,
            ),
        )

    def _below_baseline(self) -> CostWarning | None:
        """Slower than with everything in VRAM, and not yet said: the plan's own warning covers the
        level that it predicted."""
        if self.baseline_tps is None:
            return None
        found = level(self.baseline_tps * self._seconds)
        if self.predicted_tps is not None:
            told = level(self.baseline_tps / self.predicted_tps)
            self._said["baseline"] = max(self._said.get("baseline", 0), _RANK[told])
        if not self._is_new("baseline", found):
            return None
        stay = Remedy("everything in VRAM", "a larger --vram", self.baseline_tps)
        return self._make(found, self.baseline_tps, self.cause, (*self.remedies, stay))

    def _is_new(self, cause: str, found: Level) -> bool:
        """Whether a level has lasted, and is worse than what was said of this cause."""
        rank = _RANK[found]
        if rank <= self._said.get(cause, 0):
            self._past[cause] = 0
            return False
        self._past[cause] = self._past.get(cause, 0) + 1
        if self._past[cause] < self.patience:
            return False
        self._said[cause], self._past[cause] = rank, 0
        return True

    def _make(
        self, found: Level, before: float, cause: str, remedies: Sequence[Remedy]
    ) -> CostWarning:
        measured = 1 / self._seconds
        return CostWarning(
            "measured", found, cause, self.link, before, measured, measured, measured,
            tuple(remedies),
        )  # fmt: skip
