"""What hits are worth: predicted time to first token and tokens/s on a named card, from ``kvtier.cost``.

The only file of the replay that knows the cost model. Requests are taken one at a time, without
queueing or batching, with all weights in VRAM:

    TTFT = pages from disk / disk rate + pages from host RAM / link + prefill of the rest

with ``kvtier.cost.prefill``. A decode step reads the weights and the request's KV; what found no room in VRAM comes
over the link in every step.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.cost.constants import DEFAULTS
from kvtier.cost.decode import LayerLoad, step_time
from kvtier.cost.links import DISK_RATE, link_path
from kvtier.cost.models import find_model
from kvtier.cost.prefill import prefill_seconds
from kvtier.devices.spec import parse_card
from kvtier.errors import ConfigError


class Served:
    """What each request of a replay found; one number a request in each array, in pages."""

    def __init__(self) -> None:
        self.entries: array[int] = array("q")
        self.hits: array[int] = array("q")
        self.host: array[int] = array("q")
        self.disk: array[int] = array("q")
        self.cold: array[int] = array("q")

    def add(self, entry: int, hits: int, host: int = 0, disk: int = 0, cold: int = 0) -> None:
        """Of entry ``entry``: pages found, of those on disk and in host RAM, and those that stay outside
        VRAM while it decodes."""
        for numbers, value in zip(
            (self.entries, self.hits, self.host, self.disk, self.cold),
            (entry, hits, host, disk, cold),
            strict=True,
        ):
            numbers.append(value)


@dataclass(frozen=True)
class Times:
    """Predicted seconds and rates over all requests.

    Attributes:
        ttft_mean_s, ttft_p50_s, ttft_p95_s: time to first token.
        recompute_mean_s: the mean if nothing were cached.
        prompt_tokens_per_s: prompt tokens over the sum of all times to first token.
        decode_tokens_per_s: of one sequence, the mean over requests by step time.
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    recompute_mean_s: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float


class Predictor:
    """Times on one card with one model.

    Args:
        model, gpu: as for ``kvtier.cost.models.find_model`` and ``kvtier.devices.spec.parse_card``.
        kv_dtype: of the KV cache. weight_bits: of a weight.
    """

    def __init__(
        self, model: str, gpu: str, *, kv_dtype: str = "bf16", weight_bits: float = 16.0
    ) -> None:
        self.model = find_model(model)
        spec = parse_card(gpu)
        self.card = spec.card
        if self.card.bf16_flops is None:
            raise ConfigError(
                f"the matrix peak of {self.card.name} is not known, so no prefill can be predicted; "
                "name another card"
            )
        if not 0 < weight_bits <= 64:
            raise ConfigError(f"weight_bits is {weight_bits}; it must be above 0 and at most 64")
        self.kv_dtype, self.weight_bits = kv_dtype, weight_bits
        try:
            self.page_bytes(1)
        except KeyError:
            raise ConfigError(f"the KV dtype {kv_dtype!r} is unknown; try bf16 or fp8") from None
        self._link = link_path(self.card, spec.kind)

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of a page of the model."""
        return self.model.layout(self.kv_dtype, page_tokens).page_bytes

    def describe(self) -> dict[str, Any]:
        """The basis of the estimates, for reports."""
        return {
            "model": self.model.name,
            "gpu": self.card.name,
            "kv_dtype": self.kv_dtype,
            "weight_bits": self.weight_bits,
            "link": f"{self._link.kind} {self._link.rate(1 << 30) / 1e9:.1f} GB/s",
            "disk": f"{DISK_RATE / 1e9:.1f} GB/s (assumed)",
            "matrix_efficiency": DEFAULTS["matrix_efficiency"],
            "requests": "one at a time, no queueing or batching",
        }

    def prefill_s(self, new: int, context: int) -> float:
        """Seconds to compute ``new`` tokens at the end of ``context``."""
        return prefill_seconds(
            self.model, self.card, new, DEFAULTS,
            before=context - new, weight_bits=self.weight_bits, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def load_s(self, host_pages: int, disk_pages: int, page_bytes: int) -> float:
        """Seconds to bring pages up, one after another."""
        nbytes = (host_pages + disk_pages) * page_bytes
        return disk_pages * page_bytes / DISK_RATE + self._link.seconds(
            nbytes, host_pages + disk_pages
        )

    def decode_s(self, hot_bytes: float, cold_bytes: float, cold_pages: int) -> float:
        """Seconds of a decode step of one sequence."""
        layers = max(1, self.model.attention_layers)
        load = LayerLoad(
            weights=self.model.read_bytes(self.weight_bits) / layers,
            hot=hot_bytes / layers,
            cold=cold_bytes / layers,
            pieces=cold_pages,
        )
        return step_time([load] * layers, self.card, self._link).seconds

    def times(self, served: Served, tokens: Sequence[int], page_tokens: int) -> Times:
        """Over all requests of a replay.

        Args:
            tokens: prompt tokens of each entry of the trace.
        """
        size = self.page_bytes(page_tokens)
        ttft, full, steps = array("d"), array("d"), array("d")
        prompt = 0
        known: dict[tuple[int, int], float] = {}
        rows = zip(served.entries, served.hits, served.host, served.disk, served.cold, strict=True)
        for entry, hits, host, disk, cold in rows:
            asked = max(tokens[entry], 1)
            prompt += asked
            # The last token is always computed: its logits are what the first new token needs.
            new = max(1, asked - hits * page_tokens)
            ttft.append(self.load_s(host, disk, size) + self.prefill_s(new, asked))
            full.append(self.prefill_s(asked, asked))
            # Contexts within 1 % or so of each other share one step time.
            pages = max(1, round(asked / page_tokens))
            pages = round(pages, 2 - len(str(pages)))
            if (pages, cold) not in known:
                outside = min(pages, cold)
                known[pages, cold] = self.decode_s((pages - outside) * size, outside * size, cold)
            steps.append(known[pages, cold])
        if not ttft:
            return Times(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ranked = sorted(ttft)
        return Times(
            ttft_mean_s=statistics.fmean(ttft),
            ttft_p50_s=ranked[len(ranked) // 2],
            ttft_p95_s=ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))],
            recompute_mean_s=statistics.fmean(full),
            prompt_tokens_per_s=prompt / sum(ttft),
            decode_tokens_per_s=1 / statistics.fmean(steps),
        )
