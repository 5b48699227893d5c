"""What a selector moves: pages it chooses, and those of them that are not in VRAM.

A step reads a budget of pages in each layer. Of the pages chosen at a look (every ``MOVE_EVERY`` steps,
``kvtier.attention.engine``) those not in VRAM move there, as many as may; the others stay where they are.
With c the share of the chosen pages that are new each step, a page chosen at a look is still chosen k steps
later with 1 - c k, so with s the mean of max(0, 1 - c k) over the steps k = 1..M between two looks

    missing = s * (1 - hot) * (1 - moved) + (1 - s) * (1 - hot')

of what is chosen. ``hot'`` is the share in VRAM of the pages that were not chosen at the look: it is less than
that of all pages, for what was chosen has taken their room. That is the slow end: it takes each new page for
one that has not been chosen for long, as if a query never turned back.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvtier.errors import ConfigError

#: Steps between two looks at which pages should be in VRAM, and the part of the tier that moves at each at most:
#: those of ``kvtier.attention.engine``.
MOVE_EVERY = 8
MOVE_SHARE = 16

#: Share of the chosen pages that are new each step, where nothing was measured: about what Quest has on
#: SmolLM2-135M-Instruct and real texts (``bench/quality.py``).
CHURN = 0.2


@dataclass(frozen=True)
class Locality:
    """How alike the choices of neighbouring steps, heads and layers are.

    Attributes:
        churn: share of a head's chosen pages that it did not choose a step before.
        heads: pages that the heads of a layer choose together beyond those of one, over the budget.
        layers: the same of the layers of a step.
    """

    churn: float = CHURN
    heads: float = 0.5
    layers: float = 0.5

    def __post_init__(self) -> None:
        for name in ("churn", "heads", "layers"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"locality has {name}={value:g}; it is a share from 0 to 1")

    def __str__(self) -> str:
        return f"churn={self.churn:g},heads={self.heads:g},layers={self.layers:g}"


def parse_locality(text: str) -> Locality:
    """``0.2`` or ``churn=0.2,heads=0.5,layers=0.5``; what is left out has its default.

    Raises:
        ConfigError: an unknown name, or a value that is no share.
    """
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = item.rpartition("=")
        name = name.strip() or "churn"
        known = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", number)
        if name not in ("churn", "heads", "layers") or name in values or known is None:
            raise ConfigError(
                f"{item!r} of {text!r} cannot be read; give a share such as 0.2, or churn=0.2,heads=0.5,layers=0.5"
            )
        values[name] = float(known[1]) / (100 if known[2] else 1)
    return Locality(**values)


@dataclass(frozen=True)
class Traffic:
    """What one sequence chooses in one layer and step, in pages; means over the steps between two looks.

    Attributes:
        planes: chosen by any head. read: by each.
        missing: of ``planes`` those not in VRAM.
        ahead: sent over the link before the layer's turn, on a guess; some of them in vain.
        late: of ``missing``, what was not guessed and crosses the link when the layer has chosen.
        moved: pages a step that move to VRAM with all their layers.
    """

    planes: float
    read: float
    missing: float
    ahead: float
    late: float
    moved: float


def traffic(
    pages: float,
    budget: float,
    hot: float,
    locality: Locality,
    *,
    always: float = 0.0,
    heads: int = 8,
    guessed: bool = True,
    vram_pages: float = math.inf,
) -> Traffic:
    """What a selector of ``budget`` pages in a sequence of ``pages`` moves.

    Args:
        hot: share of the pages that are in VRAM.
        always: pages that are read whatever the query: the first ones and the recent ones.
        heads: lists of pages a layer has, one a KV head or one in all.
        guessed: copies are sent ahead for the pages of the step before.
        vram_pages: room in VRAM for pages of this sequence, which limits how many move.
    """
    budget = min(budget, pages)
    always = min(always, budget)
    free = budget - always
    if budget >= pages:
        return Traffic(pages, pages, 0.0, 0.0, 0.0, 0.0)
    apart = locality.heads * (1 - 1 / max(1, heads))
    chosen = min(free * (1 + apart), pages - always)
    ever = min(free * (1 + apart + locality.layers), pages - always)
    cold = 1 - hot
    wanted = ever * cold
    most = max(1.0, vram_pages / MOVE_SHARE)
    covered = min(1.0, most / wanted) if wanted else 1.0
    lasting = sum(max(0.0, 1 - locality.churn * k) for k in range(1, MOVE_EVERY + 1)) / MOVE_EVERY
    others = pages - always - ever
    kept = always + ever - wanted * (1 - covered)
    new_cold = min(1.0, max(cold, 1 - (pages * hot - kept) / others)) if others > 0 else cold
    missing = chosen * (lasting * cold * (1 - covered) + (1 - lasting) * new_cold)
    fresh = min(1.0, locality.churn)
    late = min(missing, chosen * new_cold * fresh) if guessed else missing
    # The guess is what the step before chose: as much of it is missing, though not all of it is chosen again.
    ahead = missing if guessed else 0.0
    # Of what one look moved, what has left the choice by the next makes room for its successors.
    moved = min(wanted * min(1.0, locality.churn * MOVE_EVERY), most) / MOVE_EVERY
    return Traffic(always + chosen, budget, missing, ahead, late, moved)
