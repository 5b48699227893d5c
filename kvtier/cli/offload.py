"""What offloading costs, in bytes a token and in plain words."""

from __future__ import annotations

from typing import Any

from kvtier.cost.tier_load import TierLoad
from kvtier.units import format_size


def basis_words(load: TierLoad) -> str:
    """What the number rests on."""
    estimate = load.estimate
    return (
        f"{load.cause if load.kv_off else 'all KV in VRAM'}; {load.estimate.baseline_tps:.3g} tokens/s in "
        f"VRAM, {estimate.tps:.3g} so ({estimate.low:.3g} to {estimate.high:.3g}), predicted"
    )


def estimate_json(load: TierLoad) -> dict[str, Any]:
    """A prediction, for ``--json``."""
    estimate = load.estimate
    return {
        "card": load.card.name,
        "slowdown": estimate.slowdown,
        "level": estimate.level,
        "before_tps": estimate.baseline_tps,
        "after_tps": estimate.tps,
        "link": load.link,
        "link_fraction": load.off_share,
        "disk_fraction": load.off_share * load.disk_share,
        "basis": basis_words(load),
    }


def moved_words(per_token: dict[str, float]) -> str:
    """``{"host->vram": 1e8}`` -> "each new token moved 95.4 MiB from host to vram"."""
    moved = [
        f"{format_size(nbytes)} from {link.replace('->', ' to ')}"
        for link, nbytes in per_token.items()
        if nbytes >= 1
    ]
    if not moved:
        return "no KV moved between the tiers while decoding"
    return "each new token moved " + " and ".join(moved)
