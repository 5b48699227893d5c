"""How much slower decoding gets when a share of the bytes it reads lies behind a slow link.

A decode step is bound by the bytes it reads: all weights and all KV, once a token. If a share ``f``
of them comes over a link that is ``r`` times slower than VRAM, the step takes

    slowdown = 1 + f (r - 1),    r = BW_fast / BW_slow

times as long as with everything in VRAM: ``1 - f`` units for the fast bytes and ``f r`` for the
slow ones, with no overlap of the two. It is the two-level memory access time of Hennessy and
Patterson, "Computer Architecture" (the average over hits and misses), with bandwidths in the place
of latencies.

Reference case: a 16 GB RTX 4060 Ti (288 GB/s) with a fifth of an 8B model in system RAM fell from
42.5 to 3.8 tokens/s, a slowdown of 11.2. With f = 0.2 the formula gives that for 5.5 GB/s, which is
inside the 4 to 6 GB/s of the driver's own fallback over PCIe 4.0 x8; a pinned copy on the same slot
(about 13 GB/s) would have cost 5.2, so the cliff belongs to the fallback and not to offloading as
such.

What it leaves out: overlap (it is an upper bound where copies hide behind compute), launch and link
latency, and compute-bound steps (large batches, prefill). Within a factor of two it held for the
reference case.
"""

from __future__ import annotations

from typing import Literal

from kvtier.errors import ConfigError

Level = Literal["none", "notice", "warning", "severe"]

#: Slowdown from which each level applies, the worst first.
LEVELS: tuple[tuple[Level, float], ...] = (("severe", 5.0), ("warning", 2.0), ("notice", 1.3))


def slowdown(fraction: float, ratio: float) -> float:
    """``1 + f (r - 1)``.

    Args:
        fraction: ``f``, share of the bytes read per token that comes over the slow link, 0..1.
        ratio: ``r``, bandwidth of the fast memory over that of the slow link, > 0.

    Raises:
        ConfigError: an argument is out of its range.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"fraction is {fraction}; it must lie between 0 and 1")
    if not ratio > 0.0:
        raise ConfigError(f"ratio is {ratio}; it must be > 0")
    return 1.0 + fraction * (ratio - 1.0)


def level(value: float) -> Level:
    """How loudly a slowdown is to be announced."""
    return next((name for name, at_least in LEVELS if value >= at_least), "none")
