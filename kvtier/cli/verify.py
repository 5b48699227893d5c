"""The same generation with transformers' own cache, to compare with, logit by logit.

Floating-point sums depend on the order of their terms, and a matrix product may choose another
order for another number of rows: the same prompt in other chunks gives logits that differ in their
last bits. What is promised is that a page comes back as it was saved, so the comparison repeats the
forward calls that made the saved pages (``history``), cuts its cache back to what was restored, and
then makes the calls of the run it checks. Any difference that is left was made by the tiers, and
the largest one allowed is 0.0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.cli.generate import Driver, Generation, Progress
from kvtier.cli.history import Call, Source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Comparison:
    """Two generations of one prompt.

    Attributes:
        identical: the same tokens, all of them.
        max_logit_difference: largest absolute difference of any logit, over the steps up to the
            first differing token; 0.0 means the same bits (-0.0 equals 0.0).
        first_difference: index of the first differing token, or None.
        exact_source: the calls that made the restored pages are known, so equal bits can be
            demanded.
        tolerance: the largest difference of a logit that is allowed.
    """

    identical: bool
    max_logit_difference: float
    first_difference: int | None
    exact_source: bool
    tolerance: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether more differs than may. Tokens may, where logits may: two may be as good as equal."""
        if not self.tolerance and not self.identical:
            return True
        return self.exact_source and self.max_logit_difference > self.tolerance


def reference(
    model: Any,
    ids: torch.Tensor,
    *,
    source: Source,
    restored: int,
    calls: list[Call],
    tokens: int,
    stop_ids: frozenset[int],
    advance: Progress,
) -> Generation:
    """Generate with ``DynamicCache``: repeat ``source``, cut back to ``restored``, then make
    ``calls`` on ``ids``."""
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    if restored and hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()  # without it a full sliding window cannot be cut back
    driver = Driver(model, cache)
    since = time.perf_counter()
    earlier = torch.tensor([source.tokens], device=ids.device, dtype=ids.dtype)
    for start, stop in source.calls:
        _cut(cache, start)
        driver.prefill(earlier, [(start, stop)], advance)
    _cut(cache, restored)
    logits = driver.prefill(ids, calls, advance)
    return driver.decode(
        logits,
        count=tokens,
        stop_ids=stop_ids,
        keep_logits=True,
        since=since,
        advance=lambda _: None,
    )


def tolerance_of(mode: str, dtype: torch.dtype) -> float:
    """What logits may differ by in a mode: nothing where the same sums are made in the same order."""
    import torch

    if mode == "exact-stream":
        return 0.0
    return 1e-3 if dtype in (torch.float32, torch.float64) else 32 * torch.finfo(dtype).eps


def compare(
    ours: Generation, theirs: Generation, *, exact_source: bool, tolerance: float = 0.0
) -> Comparison:
    """Compare ``ours`` with the reference; both must have kept their logits."""
    pairs = zip(ours.tokens, theirs.tokens, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(ours.tokens) != len(theirs.tokens):
        first = min(len(ours.tokens), len(theirs.tokens))
    steps = len(ours.tokens) if first is None else first + 1
    worst = 0.0
    for a, b in zip(ours.logits[:steps], theirs.logits[:steps], strict=False):
        difference = float((a - b).abs().max())
        # a NaN anywhere is a difference, and must not vanish in max()
        worst = max(worst, difference if difference == difference else float("inf"))
    return Comparison(first is None, worst, first, exact_source, tolerance)


def _cut(cache: Any, length: int) -> None:
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)
