"""How many pages of a sequence a step may read in one layer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.layout import PageLayout
from kvtier.units import parse_size

#: The first page, a recent one and the unsealed tail.
LEAST_PAGES = 3

_FORMS = "10%, 0.1, 64pages, 2048tokens or 512MiB"


@dataclass(frozen=True)
class Budget:
    """A limit on pages read, tail and window included.

    Attributes:
        unit: what ``amount`` counts: a share of the sequence (0..1), pages, tokens, or bytes of KV over all layers.
    """

    amount: float
    unit: Literal["share", "pages", "tokens", "bytes"]

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``10%``, ``0.1`` (a share), ``64pages``, ``2048tokens``, ``512MiB``.

        Raises:
            ConfigError: none of these, or not above 0 (a share: not at most 1).
        """
        found = re.fullmatch(r"([0-9.]+)\s*(%|pages?|tokens?|)", text.strip())
        if found is None:
            try:
                return cls(float(parse_size(text, "budget")), "bytes")
            except ConfigError:
                raise ConfigError(f"budget {text!r} cannot be read; give {_FORMS}") from None
        try:
            amount = float(found[1])
        except ValueError:
            raise ConfigError(f"budget {text!r} cannot be read; give {_FORMS}") from None
        unit = found[2].rstrip("s")
        if unit in ("", "%"):
            share = amount / 100 if unit else amount
            if not 0.0 < share <= 1.0:
                raise ConfigError(
                    f"budget {text!r} is a share of the sequence; it must be above 0 and at most 1 "
                    f"(100%); or give a unit: {_FORMS}"
                )
            return cls(share, "share")
        if amount < 1:
            raise ConfigError(f"budget {text!r} must be at least 1")
        return cls(amount, "pages" if unit == "page" else "tokens")

    def pages(self, total: int, layout: PageLayout) -> int:
        """Pages that may be read in a layer of a sequence of ``total`` pages, the tail included; at least
        ``LEAST_PAGES``, at most all."""
        if self.unit == "share":
            wanted = math.ceil(self.amount * total)
        elif self.unit == "tokens":
            wanted = math.ceil(self.amount / layout.page_tokens)
        elif self.unit == "pages":
            wanted = int(self.amount)
        else:
            planes = sum(plane.nbytes for plane in layout.planes if plane is not None)
            wanted = int(self.amount / planes)
        return min(total, max(LEAST_PAGES, wanted))

    def __str__(self) -> str:
        if self.unit == "share":
            return repr(self.amount)
        if self.unit == "bytes":
            return f"{int(self.amount)}B"
        return f"{self.amount:.12g}{self.unit}"
