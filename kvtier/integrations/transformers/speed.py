"""What a cache says of its speed: before decoding gets slow, and when it has.

Before: from the sizes of the tiers, the weights and the tokens, when the tokens become known and each
time they have outgrown what was foreseen. At run time: from the time between two decode steps.
"""

from __future__ import annotations

import logging
import time

import torch

from kvtier.announce import LOGGER
from kvtier.cost.choose import Choice
from kvtier.cost.monitor import RateMonitor
from kvtier.cost.tier_load import Expected, stored_bytes, tier_choice
from kvtier.integrations.transformers.weights import weights_read
from kvtier.layout import SUMMARY_DTYPES
from kvtier.store.store import TieredStore

#: Tokens are foreseen anew when there are this many times as many.
_GROWTH = 1.5


class Speed:
    """Foresees and watches the speed of one cache.

    Args:
        monitor: see ``TieredCache``.
    """

    def __init__(
        self, model: torch.nn.Module, store: TieredStore, monitor: RateMonitor | None
    ) -> None:
        self._store = store
        self._weights = weights_read(model)
        self._foreseen = 0
        self._last: float | None = None
        # An emulated card runs in virtual time: the time of this machine says nothing of it.
        self._monitor = monitor
        if monitor is None and store.device.torch_device.type == "cuda":
            self._monitor = RateMonitor(cause="the KV has outgrown the VRAM tier")

    def choose(self, tokens: int) -> Choice:
        """The exact mode that should be faster for a sequence of ``tokens`` (0: not known), logged."""
        store = self._store
        layout = store.layout
        full = [layer for layer in layout.layers if layer.kind == "full"]
        split = ""
        if not full or any(x.k_dtype not in SUMMARY_DTYPES for x in full):
            split = "no layer has full attention over keys that are floats"
        choice = tier_choice(
            layout,
            store.device,
            store.sizes,
            tokens=tokens,
            weight_bytes=self._weights,
            split=split,
        )
        logging.getLogger(LOGGER).info("mode %s", choice.text)
        return choice

    def foresee(self, tokens: int, rows: int) -> None:
        """``rows`` sequences of ``tokens`` tokens are to come; what does not fit in VRAM is said."""
        if tokens * rows < _GROWTH * self._foreseen:
            return
        expected = Expected(tokens, self._weights, rows)
        if stored_bytes(self._store.layout, expected) > self._store.sizes["vram"]:
            self._foreseen = tokens * rows
            self._store.foresee(expected, stacklevel=4)

    def step(self, count: int, columns: int, rows: int) -> None:
        """A pass of ``count`` new tokens a row has ended, with ``columns`` in all."""
        now, last = time.perf_counter(), self._last
        # The time of a prefill is not that of a decode step, and neither is what follows one.
        self._last = now if count == 1 else None
        if self._monitor is None or last is None or count != 1:
            return
        kept = stored_bytes(self._store.layout, Expected(columns, self._weights, rows))
        resident = kept <= self._store.sizes["vram"]
        self._monitor.feed(rows, max(now - last, 1e-9), resident=resident, stacklevel=4)
