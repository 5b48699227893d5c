"""A disk tier that takes itself for larger than memory, with nothing of it in the page cache."""

from __future__ import annotations

import pytest


def larger_than_memory(patch: pytest.MonkeyPatch) -> None:
    for module in ("disk_open", "disk_reader", "read_ahead"):
        patch.setattr(f"kvtier.tiers.{module}.free_memory_bytes", lambda: 0)
    patch.setattr("kvtier.tiers.map_place.in_memory", lambda address, nbytes: False)
