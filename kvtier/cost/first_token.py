"""Seconds to a request's first token by where its known tokens lie, and what they occupy.

Known tokens are loaded or computed again, whichever is sooner: a tier that is slower than computing is
not waited for. (An engine that always loads is what the ``ttft`` warning is about.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvtier.cost.constants import Constants
from kvtier.cost.demand import Turn
from kvtier.cost.prefill import prefill_seconds
from kvtier.cost.restore import Chain, move_seconds
from kvtier.cost.shape import ModelShape
from kvtier.cost.slow_links import slow_link
from kvtier.devices.cards import Card

Place = Literal["vram", "host", "disk", "nowhere"]
PLACES: tuple[Place, ...] = ("vram", "host", "disk", "nowhere")


@dataclass(frozen=True)
class Way:
    """How a request gets to its first token.

    Attributes:
        seconds: until it, nothing else going on. compute_s: of them on the card.
        link_s, disk_s: that the link and the disk are busy with it.
        found: tokens that were not computed, by place.
    """

    seconds: float
    compute_s: float
    link_s: float = 0.0
    disk_s: float = 0.0
    found: tuple[tuple[Place, float], ...] = ()


class FirstToken:
    """Ways of the requests of one model on one card; remembers what it has computed."""

    def __init__(
        self,
        model: ModelShape,
        card: Card,
        constants: Constants,
        *,
        kv_dtype: str = "bf16",
        weight_bits: float | None = None,
    ) -> None:
        self.model, self.card, self.constants = model, card, constants
        self.kv_dtype, self.weight_bits = kv_dtype, weight_bits
        self._computed: dict[tuple[float, float], float] = {}
        self._ways: dict[tuple[Turn, Place, Place], Way] = {}

    @cached_property
    def link_rate(self) -> float:
        """Bytes/s of pinned copies to the card."""
        return slow_link("pinned", self.card, self.constants).likely

    def way(self, turn: Turn, prefix: Place, session: Place) -> Way:
        """The soonest way with the shared prefix at one place and the rest of what is known at another."""
        key = (turn, prefix, session)
        if key not in self._ways:
            self._ways[key] = min(self._choices(turn, prefix, session), key=lambda way: way.seconds)
        return self._ways[key]

    def _choices(self, turn: Turn, prefix: Place, session: Place) -> list[Way]:
        choices = [self._way(turn, [])]
        if turn.shared and prefix != "nowhere":
            choices.append(self._way(turn, [(prefix, turn.shared)]))
        # A page is of no use without those before it.
        if turn.before > turn.shared and session != "nowhere":
            if not turn.shared:
                choices.append(self._way(turn, [(session, turn.before)]))
            elif prefix != "nowhere":
                own = turn.before - turn.shared
                choices.append(self._way(turn, [(prefix, turn.shared), (session, own)]))
        return choices

    def _way(self, turn: Turn, found: list[tuple[Place, float]]) -> Way:
        known = sum(tokens for _, tokens in found)
        compute = self._compute(turn.prompt - known, known)
        moved = link = disk = 0.0
        for place, tokens in found:
            if place != "host" and place != "disk":
                continue
            nbytes = self.model.sequence_bytes(tokens, self.kv_dtype)
            moved += move_seconds(
                self.model, self.card, tokens, Chain(place), self.constants, self.kv_dtype
            )
            link += nbytes / (self.link_rate * self.constants["restore_efficiency"])
            disk += nbytes / self.constants["disk_bw"] if place == "disk" else 0.0
        return Way(moved + compute, compute, link, disk, tuple(found))

    def _compute(self, tokens: float, before: float) -> float:
        key = (tokens, before)
        if key not in self._computed:
            self._computed[key] = prefill_seconds(
                self.model, self.card, tokens, self.constants, before=before,
                weight_bits=self.weight_bits, kv_dtype=self.kv_dtype,
            )  # fmt: skip
        return self._computed[key]
