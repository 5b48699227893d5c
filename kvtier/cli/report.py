"""The result of a run, as JSON and as text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.cli.offload import basis_words, estimate_json, moved_words
from kvtier.cli.verify import Comparison
from kvtier.cost.tier_load import TierLoad
from kvtier.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TIERS = ("vram", "host", "disk")
LINKS = ("vram->host", "host->vram", "host->disk", "disk->host")


@dataclass
class Report:
    """Everything a run has to say.

    Attributes:
        model, device, policy: as people read them.
        mode: how decoding read pages; ``pages_read`` of them (sealed ones) a step in a layer that selects, the mean;
            None where every page is read. ``summary_bytes``: VRAM of their summaries.
        text: what was generated.
        page_tokens, chunk_tokens: tokens in a page, and per prefill call.
        kv_bytes: KV of all tokens, prompt and generated.
        staging_bytes: VRAM for gathering one layer's pages, beside the VRAM tier.
        restored_tokens, computed_tokens: of the prompt; their sum is ``prompt_tokens``.
        cold_ttft_s: time to first token of the run that restored nothing of this prompt, if known.
        flush_s: time until everything was acknowledged on disk, after the last token.
        tiers, links: counters at the end of the generation.
        link_bytes_per_token: bytes over each link for one decoded token.
        planned, measured: estimates from the tier sizes before, and from the bytes that moved
            after.
        comparison: result of ``--verify``.
        warnings: records of all of them, in order (``kvtier.announce``).
    """

    model: str
    device: str
    policy: str
    page_tokens: int
    chunk_tokens: int
    kv_bytes: int
    staging_bytes: int
    prompt_tokens: int
    restored_tokens: int
    generated_tokens: int
    ttft_s: float
    decode_tokens_per_s: float | None
    tiers: dict[str, Any]
    links: dict[str, Any]
    link_bytes_per_token: dict[str, float]
    mode: str = "exact-stream"
    mode_choice: str = ""
    pages_read: float | None = None
    summary_bytes: int = 0
    text: str = ""
    cold_ttft_s: float | None = None
    flush_s: float = 0.0
    planned: TierLoad | None = None
    measured: TierLoad | None = None
    comparison: Comparison | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.restored_tokens

    @property
    def saved_s(self) -> float | None:
        """How much sooner than the first run the first token came; None if nothing was restored."""
        if self.cold_ttft_s is None or self.restored_tokens == 0:
            return None
        return self.cold_ttft_s - self.ttft_s

    @property
    def failed(self) -> bool:
        """A comparison was asked for, and more differed than may."""
        return self.comparison is not None and self.comparison.failed

    def as_json(self) -> str:
        """One object; ``identical`` and ``max_logit_difference`` are null without ``--verify``."""
        c = self.comparison
        data: dict[str, Any] = {
            "identical": None if c is None else c.identical,
            "max_logit_difference": None if c is None else c.max_logit_difference,
            "first_difference": None if c is None else c.first_difference,
            "reference_is_exact": None if c is None else c.exact_source,
            "tolerance": None if c is None else c.tolerance,
            "model": self.model,
            "device": self.device,
            "policy": self.policy,
            "mode": self.mode,
            "mode_choice": self.mode_choice,
            "pages_read_per_step": self.pages_read,
            "summary_bytes": self.summary_bytes,
            "page_tokens": self.page_tokens,
            "chunk_tokens": self.chunk_tokens,
            "kv_bytes": self.kv_bytes,
            "staging_bytes": self.staging_bytes,
            "prompt_tokens": self.prompt_tokens,
            "restored_tokens": self.restored_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "ttft_s": self.ttft_s,
            "cold_ttft_s": self.cold_ttft_s,
            "saved_s": self.saved_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "flush_s": self.flush_s,
            "tiers": {
                name: {
                    key: getattr(tier, key)
                    for key in (
                        "capacity_bytes",
                        "used_bytes",
                        "peak_bytes",
                        "pages",
                        "pages_in",
                        "pages_out",
                        "hits",
                        "codec",
                        "pages_coded",
                    )
                }
                | {
                    key: getattr(tier, key) if math.isfinite(getattr(tier, key)) else None
                    for key in ("worst_error", "relative_error")
                }
                for name, tier in self.tiers.items()
            },
            "links": {
                name: {"bytes": link.bytes, "copies": link.copies}
                for name, link in self.links.items()
            },
            "link_bytes_per_token": self.link_bytes_per_token,
            "estimate": None if self.measured is None else estimate_json(self.measured),
            "planned_estimate": None if self.planned is None else estimate_json(self.planned),
            "text": self.text,
            "warnings": self.warnings,
        }
        return json.dumps(data, indent=2)

    def render(self, console: Console) -> None:
        """Print for people."""
        console.print()
        console.print(self.text.strip(), style="italic", markup=False, highlight=False)
        console.print()
        console.print(tier_table(self.tiers, self.links))
        say = _plain(console)
        peak = format_size(self.tiers["vram"].peak_bytes)
        say(
            f"KV of {self.prompt_tokens + self.generated_tokens:,} tokens: "
            f"{format_size(self.kv_bytes)}, of which the VRAM tier held at most {peak} "
            f"(and a staging buffer of {format_size(self.staging_bytes)})"
        )
        say(f"prompt: {self.restored_tokens:,} tokens restored, {self.computed_tokens:,} computed")
        say(f"time to first token: {self.ttft_s:.2f} s{self._saved_words()}")
        if self.decode_tokens_per_s is not None:
            say(f"decoding: {self.decode_tokens_per_s:.2f} tokens/s on this machine")
        if self.mode_choice:
            say(f"mode {self.mode_choice}")
        if self.pages_read is not None:
            total = -(-(self.prompt_tokens + self.generated_tokens) // self.page_tokens)
            say(
                f"mode {self.mode}: a layer that selects read {self.pages_read:.1f} of {total:,} pages a step; "
                f"summaries take {format_size(self.summary_bytes)} of the VRAM tier"
            )
        for name, tier in self.tiers.items():
            if tier.pages_coded:
                say(
                    f"{name} in {tier.codec}: {tier.pages_coded:,} pages coded, largest error "
                    f"{tier.worst_error:.3g}, relative error {tier.relative_error:.2%}"
                )
            elif tier.codec != "none":
                say(f"{name} in {tier.codec}: no page coded in this run")
        say(f"offloading: {moved_words(self.link_bytes_per_token)}")
        if self.measured is not None:
            on = self.measured
            say(
                f"on {on.card.name} that would be {on.estimate.slowdown:.1f}x slower than in VRAM: "
                f"{basis_words(on)}"
            )
        self._render_comparison(say)

    def _saved_words(self) -> str:
        if self.saved_s is None or self.cold_ttft_s is None:
            return ""
        return f" instead of {self.cold_ttft_s:.2f} s in the first run: {self.saved_s:.2f} s saved"

    def _render_comparison(self, say: Any) -> None:
        c = self.comparison
        if c is None:
            return
        if c.tolerance:
            self._render_tolerance(say, c)
            return
        if not c.identical:
            say(
                f"NOT identical to transformers' DynamicCache: token {c.first_difference} differs, "
                f"largest logit difference {c.max_logit_difference:.3g}"
            )
            return
        say(
            f"identical to transformers' DynamicCache: all {self.generated_tokens} tokens, "
            f"largest logit difference {c.max_logit_difference}"
        )
        if not c.exact_source:
            say("(how the restored pages were computed is not on record: rounding may differ)")

    def _render_tolerance(self, say: Any, c: Comparison) -> None:
        tokens = (
            f"all {self.generated_tokens} tokens are the same"
            if c.identical
            else f"token {c.first_difference} differs"
        )
        verdict = "NOT equal" if c.failed else "equal"
        say(
            f"{verdict} to transformers' DynamicCache within {c.tolerance:.2g}, which {self.mode} may differ by, "
            f"since it adds in another order: {tokens}, largest logit difference {c.max_logit_difference:.3g}"
        )


def tier_table(tiers: dict[str, Any], links: dict[str, Any]) -> Table:
    """The tiers now: what they hold, what they may hold, what has moved. Fits 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in (
        "tier",
        "pages",
        "bytes",
        "limit",
        "in/out",
        "hits",
        "moved down",
        "moved up",
    ):
        table.add_column(title, justify="left" if title == "tier" else "right", no_wrap=True)
    down = {"vram": "vram->host", "host": "host->disk"}
    up = {"host": "host->vram", "disk": "disk->host"}
    for name in TIERS:
        tier = tiers[name]
        moved = [
            format_size(links[link].bytes) if link in links else ""
            for link in (down.get(name, ""), up.get(name, ""))
        ]
        table.add_row(
            name,
            f"{tier.pages:,}",
            format_size(tier.used_bytes),
            format_size(tier.capacity_bytes),
            f"{tier.pages_in:,}/{tier.pages_out:,}",
            f"{tier.hits:,}",
            *moved,
        )
    return table


def _plain(console: Console) -> Any:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    return say
