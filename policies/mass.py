"""Least decayed attention mass: the page that got the least attention of late goes first.

Origin: H2O (Zhang et al., arXiv 2306.14048) keeps the tokens with the largest attention mass,
summed up over all steps. Undecayed sums favour age: a page that mattered once beats a page that
matters now, and a young one never catches up. So the sum decays here: after ``half_life`` requests a
share counts half (``half_life=inf`` is H2O's sum). Without measured mass this is LRFU (Lee et al.,
IEEE Transactions on Computers 50(12), 2001), each request giving its pages equal shares of 1.

* A use without mass gives each of its n pages the share 1/n: what measured shares are on average.
* A page that comes alone starts with the average share of its own sequence, 1/(depth + 1), as if used
  once: with zero it would be the next victim before anybody could attend to it.

Cost: O(1) a used page, O(log n) amortised for everything else (see ``kvtier.policies.decayed``).
"""

from __future__ import annotations

from typing import ClassVar

from kvtier.policies.decayed import DecayedPolicy


class Mass(DecayedPolicy):
    """Least decayed attention mass first.

    Args:
        leaf_first: see ResidencyPolicy.
        half_life: requests after which a share counts half; at least 0.01, ``inf`` for no decay.

    Raises:
        ConfigError: ``half_life`` is below 0.01 or no number.
    """

    name: ClassVar[str] = "mass"

    def __init__(self, *, leaf_first: bool, half_life: float = 64.0) -> None:
        super().__init__(leaf_first=leaf_first, half_life=half_life)
