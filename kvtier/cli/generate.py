"""Greedy generation in plain forward calls, so that two caches can go through the same ones."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.cli.history import Call

if TYPE_CHECKING:
    import torch

#: Called with the number of tokens that were just done.
Progress = Callable[[int], None]


@dataclass
class Generation:
    """What a run produced.

    Attributes:
        tokens: generated ids, the last one not fed back.
        logits: one float tensor ``[vocabulary]`` on the host for each token, if they were kept.
        ttft_s: seconds from the lookup of the prompt to the first token.
        decode_s: seconds for all tokens after the first.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate after the first token; None if there was only one."""
        steps = len(self.tokens) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


def chunk_calls(start: int, stop: int, chunk: int) -> list[Call]:
    """Calls that prefill ``[start, stop)``, each ending at a multiple of ``chunk`` or at ``stop``.

    Boundaries are counted from token 0, wherever a run starts, so that two runs of one prompt share
    them.
    """
    calls = []
    while start < stop:
        end = min(stop, (start // chunk + 1) * chunk)
        calls.append((start, end))
        start = end
    return calls


class Driver:
    """A model and a cache, advanced call by call.

    ``cache`` is passed as ``cache=`` or, to models of transformers before 5.24, as
    ``past_key_values=``.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self._model = model
        self._cache = cache
        known = inspect.signature(model.forward).parameters
        self._keyword = "cache" if "cache" in known else "past_key_values"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ``ids`` ``[1, n]``; returns the logits after the last of them, ``[vocabulary]``."""
        import torch

        with torch.no_grad():
            out = self._model(
                input_ids=ids, use_cache=True, logits_to_keep=1, **{self._keyword: self._cache}
            )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def prefill(self, ids: torch.Tensor, calls: Iterable[Call], advance: Progress) -> torch.Tensor:
        """Make ``calls`` on ``ids`` ``[1, n]``; returns the logits after the last one."""
        logits = None
        for start, stop in calls:
            logits = self.forward(ids[:, start:stop])
            advance(stop - start)
        assert logits is not None, "a prompt always leaves at least one token to compute"
        return logits

    def decode(
        self,
        logits: torch.Tensor,
        *,
        count: int,
        stop_ids: frozenset[int],
        keep_logits: bool,
        since: float,
        advance: Progress,
    ) -> Generation:
        """Take the likeliest token ``count`` times, or until one of ``stop_ids``.

        Args:
            logits: ``[vocabulary]``, what the prefill ended with.
            since: ``time.perf_counter()`` at the start of the request.
        """
        import torch

        result = Generation()
        first = 0.0
        while True:
            token = int(logits.argmax())
            result.tokens.append(token)
            if keep_logits:
                result.logits.append(logits.float().cpu().clone())
            now = time.perf_counter()
            if len(result.tokens) == 1:
                first = now
                result.ttft_s = now - since
            result.decode_s = now - first
            advance(1)
            if len(result.tokens) >= count or token in stop_ids:
                return result
            logits = self.forward(torch.tensor([[token]], device=logits.device))


def stop_tokens(model: Any) -> frozenset[int]:
    """The ids after which the model wants to stop."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
