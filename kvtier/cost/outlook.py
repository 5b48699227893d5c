"""What a load on a card will be like: its rate, what it costs to be off the card, what would help.

A ``Load`` is one answer: a model on a card at one context, with shares of weights and KV that are
not in VRAM. ``kvtier plan`` and ``kvtier stress`` both make one and ask it for its warnings, so they
say the same of the same load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvtier.cost.budget import Budget, memory_budget
from kvtier.cost.buffers import RuntimeBuffers
from kvtier.cost.cliff import level
from kvtier.cost.coded import Codecs
from kvtier.cost.constants import DEFAULTS, Constant, Constants
from kvtier.cost.modes import DecodeEstimate, decode_estimate, selection_off
from kvtier.cost.prefill import prefill_time, vram_constant
from kvtier.cost.restore import Chain, restore_or_recompute
from kvtier.cost.shape import ModelShape
from kvtier.cost.slow_links import SlowLink, slow_link
from kvtier.cost.warning import CostWarning, Remedy, at_least
from kvtier.cost.workload import Mode, Selection, Workload, kv_read, read_weights
from kvtier.devices.cards import Card
from kvtier.units import format_size

#: Seconds by which a first token must come later before anybody notices.
LATE_S = 0.05

#: Remedies a warning lists.
MOST_REMEDIES = 5


#: What can be off the card.
Off = Literal["kv_off", "weights_off"]


@dataclass(frozen=True)
class Load:
    """A model decoding on a card.

    Attributes:
        context: tokens of each sequence. sequences: decoded together.
        kv_dtype: of the KV cache. weight_bits: None: as stored, or Q4_K_M's.
        weights_off, kv_off: shares that are not in VRAM, 0..1. asked: those of them that somebody set
            (``weights``, ``kv``), and could leave out.
        disk_off: the part of ``kv_off`` that is read from disk first; None: all if ``link`` is
            ``disk``, else nothing.
        link: how those are reached: ``pinned``, ``pageable``, ``fallback``, ``cpu`` or ``disk``.
        mode: None: what placement and link imply (``kvtier.cost.workload``). selection: of mode ``select``. selects: gives
            it for a context, where it is not the same for all.
        vram: bytes that may be used in all; None: what the card leaves.
        page_tokens: of a page. buffers: of the runtime; None: the defaults.
        disk_prefix: prompts are restored from a disk tier.
        codecs: of the tiers below VRAM.
        constants: measured here, or from a table.
    """

    model: ModelShape
    card: Card
    context: int
    sequences: int = 1
    kv_dtype: str = "bf16"
    weight_bits: float | None = None
    weights_off: float = 0.0
    kv_off: float = 0.0
    link: str = "pinned"
    asked: tuple[str, ...] = ("weights", "kv")
    disk_off: float | None = None
    mode: Mode | None = None
    selection: Selection = field(default_factory=Selection)
    selects: Callable[[int], Selection] | None = field(default=None, repr=False)
    vram: int | None = None
    page_tokens: int = 16
    buffers: RuntimeBuffers | None = None
    disk_prefix: bool = False
    codecs: Codecs = field(default_factory=Codecs)
    constants: Constants = field(default_factory=lambda: DEFAULTS, repr=False)

    # what it needs

    @cached_property
    def budget(self) -> Budget:
        """Memory of the card under this load."""
        return memory_budget(
            self.model,
            self.card if self.vram is None else self.vram,
            sequences=self.sequences,
            tokens=self.context,
            dtype=self.kv_dtype,
            weight_bits=self.weight_bits,
            page_tokens=self.page_tokens,
            buffers=self.buffers,
            weights_off=self.weights_off,
            kv_off=self.kv_off,
            summary_tokens=self.selected.page_tokens if self.mode == "select" else 0,
        )

    @cached_property
    def selected(self) -> Selection:
        """What mode ``select`` reads at this context."""
        return self.selection if self.selects is None else self.selects(self.context)

    @property
    def fits(self) -> bool:
        return self.budget.fits

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return self.model.native_bits if self.weight_bits is None else self.weight_bits

    @cached_property
    def resident(self) -> Load:
        """The same with everything in VRAM, whether it fits or not."""
        return replace(self, weights_off=0.0, kv_off=0.0, disk_off=None, mode=None)

    def placed(self) -> Load | None:
        """This load with so much more off the card that it fits, whichever of KV and weights decodes
        faster; itself if it fits, None if nothing makes it fit."""
        if self.fits:
            return self
        found = [self.with_off("kv_off"), self.with_off("weights_off")]
        ready = [load for load in found if load is not None]
        if not ready:
            return replace(self, kv_off=1.0).with_off("weights_off")
        return max(ready, key=lambda load: load.estimate.tps)

    def with_off(self, name: Off) -> Load | None:
        """The smallest share of a kind off the card that fits, in steps of a percent."""

        def at(percent: int) -> Load:
            share = percent / 100
            if name == "kv_off":
                return replace(self, kv_off=share)
            return replace(self, weights_off=share)

        if not at(100).fits:
            return None
        now = self.kv_off if name == "kv_off" else self.weights_off
        first, last = int(100 * now) + 1, 100
        while first < last:
            middle = (first + last) // 2
            if at(middle).fits:
                last = middle
            else:
                first = middle + 1
        return at(last)

    # how fast it is

    @cached_property
    def work(self) -> Workload:
        """As the time model takes it."""
        return Workload(
            model=self.model,
            card=self.card,
            context=self.context,
            batch=self.sequences,
            weight_bits=self.weight_bits,
            kv_dtype=self.kv_dtype,
            weights_off=self.weights_off,
            kv_off=self.kv_off,
            weights_link=self.link,
            kv_link=self.link if self.link in ("pinned", "pageable", "fallback") else "pinned",
            selection=self.selected,
            on_link=self.codecs.on_link(self.disk_share),
            raised=self.codecs.raised(self.disk_share),
        )

    @cached_property
    def estimate(self) -> DecodeEstimate:
        """Tokens/s of all sequences, with its band and its baseline."""
        mode: Mode = self.mode or (
            "vram" if not self.kv_off else "kv-cpu" if self.link == "cpu" else "kv-stream"
        )
        constants = self.constants
        if self.disk_share and mode == "kv-stream":
            constants = constants.measured({f"{self.work.kv_link}_bw": self._chained()})
        return decode_estimate(self.work, mode, constants=constants)

    @property
    def disk_share(self) -> float:
        """Share of the KV off the card that is on disk."""
        if self.disk_off is None:
            return 1.0 if self.link == "disk" else 0.0
        return self.disk_off / self.kv_off if self.kv_off else 0.0

    def _chained(self) -> Constant:
        """Rate of KV that passes the link, a share of it after it was read from disk; in bytes of the link."""
        link = slow_link(self.work.kv_link, self.card, self.constants)
        disk = slow_link("disk", self.card, self.constants)
        from_disk = self.disk_share * self.codecs.disk_share / self.work.on_link

        def rate(at_link: float, at_disk: float) -> float:
            return 1 / (1 / at_link + from_disk / at_disk)

        return Constant(
            f"{self.work.kv_link}_bw",
            rate(link.likely, disk.likely),
            "bytes/s",
            f"{link}, after {disk} for {self.disk_share:.0%} of it",
            low=rate(link.low, disk.low),
            high=rate(link.high, disk.high),
        )

    @cached_property
    def slow(self) -> SlowLink:
        """The link class of what is off the card."""
        return slow_link(self.link, self.card, self.constants)

    @cached_property
    def prefill_s(self) -> float | None:
        """Seconds to compute a prompt of the whole context; None if the card's FLOPS are unknown."""
        if self.card.bf16_flops is None or not self.context:
            return None
        return prefill_time(
            self.model,
            self.card,
            self.context,
            weight_bits=self.bits,
            kv_dtype=self.kv_dtype,
            constants=self.constants,
        ).value

    @property
    def off_bytes(self) -> tuple[float, float]:
        """Bytes of weights and of KV off the card that a step reads."""
        weights = self.weights_off * read_weights(self.work, self.constants)
        if self.estimate.mode == "select":
            return weights, sum(selection_off(self.work, self.constants))
        return weights, self.kv_off * kv_read(self.work, "vram")

    @property
    def kv_over_link(self) -> float | None:
        """Bytes of KV that cross the link in a step, coded as they are there; None where none is off the card, or the
        processor attends to it."""
        if not self.kv_off or self.estimate.mode not in ("kv-stream", "select"):
            return None
        if self.estimate.mode == "select":
            return selection_off(self.work, self.constants)[0]
        return self.off_bytes[1] * self.work.on_link

    @property
    def off_share(self) -> float:
        """Share of the bytes read a step that is off the card."""
        read = kv_read(self.work, "select" if self.estimate.mode == "select" else "vram")
        total = read_weights(self.work, self.constants) + read
        return min(1.0, sum(self.off_bytes) / max(1.0, total))

    # what is to be said

    def warnings(self) -> list[CostWarning]:
        """All warnings of this load, the loudest first."""
        found = [self._slowdown(), self._needless(), self._late()]
        return sorted((one for one in found if one is not None), key=lambda one: -one.loudness)

    def _slowdown(self) -> CostWarning | None:
        if level(self.estimate.slowdown) == "none":
            return None
        return self._make("slowdown", level(self.estimate.slowdown), self.cause)

    def _needless(self) -> CostWarning | None:
        shares = (("weights", self.weights_off), ("KV", self.kv_off))
        asked = [(name, share) for name, share in shares if share and name.lower() in self.asked]
        if not asked or not self.resident.fits:
            return None
        budget = self.resident.budget
        what = " and ".join(f"{share:.0%} of the {name}" for name, share in asked)
        return self._make(
            "needless",
            at_least(self.estimate.slowdown, "notice"),
            f"{what} would be off the card, but everything fits in VRAM "
            f"({format_size(budget.used)} of {format_size(budget.usable)})",
            most=1,
            note="(A stale offload setting on cards that hold the model cost 19x in vLLM issue 57771.)",
        )

    def _late(self) -> CostWarning | None:
        """Restoring the prompt from disk takes longer than computing it."""
        if not (self.disk_prefix or (self.disk_share and self.kv_off)):
            return None
        if self.prefill_s is None or self.context < 1:
            return None
        restore = restore_or_recompute(
            self.model,
            self.card,
            self.context,
            chain=Chain("disk", coded=self.codecs.disk_share),
            kv_dtype=self.kv_dtype,
            weight_bits=self.bits,
            constants=self.constants,
        )
        computed, loaded = restore.recompute.value, restore.load.value
        if loaded - computed < LATE_S:
            return None
        disk = slow_link("disk", self.card, self.constants)
        stored = self.model.sequence_bytes(self.context, self.kv_dtype) * self.codecs.disk_share
        tps = self.estimate.tps
        return replace(
            self._make(
                "ttft",
                at_least(loaded / computed, "notice"),
                f"{format_size(stored)} of KV of {self.context:,} tokens come from disk "
                f"({disk}); throughput may rise all the same",
                note=(
                    "(LMCache on 8 H100 with a 70B model and an SSD tier: time to first token +121 % "
                    "at 10,000 tokens, +48 % at 50,000, -3 % at 100,000, throughput higher at each.)"
                ),
            ),
            link="disk",
            before_ttft_s=computed,
            after_ttft_s=loaded,
            remedies=(
                Remedy(
                    f"compute such prompts anew: first token after {computed:.2f} s",
                    "no disk tier",
                    tps,
                ),
                *self._prefix_in_ram(tps),
            ),
        )

    def _prefix_in_ram(self, tps: float) -> Iterator[Remedy]:
        restore = restore_or_recompute(
            self.model,
            self.card,
            self.context,
            chain=Chain("host", coded=self.codecs.host_share),
            kv_dtype=self.kv_dtype,
            weight_bits=self.bits,
            constants=self.constants,
        )
        if restore.load.value < restore.recompute.value:
            yield Remedy(
                f"keep them in host RAM: first token after {restore.load.value:.2f} s",
                "a larger host tier",
                tps,
            )

    @property
    def cause(self) -> str:
        """Which bytes come over which link."""
        weights, kv = self.off_bytes
        parts = []
        if weights:
            how = "are computed by the processor over" if self.link == "cpu" else "come over"
            parts.append(f"{_gb(weights)} of weights {how} a {_class(self.slow)}")
        if kv and self.estimate.mode == "kv-cpu":
            parts.append(self._attended(f"{_gb(kv)} of KV"))
        elif kv and self.estimate.mode == "select":
            chosen, dense = selection_off(self.work, self.constants)
            if chosen:
                link = slow_link(self.work.kv_link, self.card, self.constants)
                parts.append(f"{_gb(chosen)} of the chosen KV come over a {_class(link)}")
            if dense:
                parts.append(self._attended(f"{_gb(dense)} of KV in layers that read every page"))
        elif kv:
            link = slow_link(self.work.kv_link, self.card, self.constants)
            disk = slow_link("disk", self.card, self.constants)
            first = (
                f", {_gb(kv * self.disk_share * self.codecs.disk_share)} of them from a {_class(disk)} first"
                if self.disk_share
                else ""
            )
            parts.append(f"{_gb(kv * self.work.on_link)} of KV come over a {_class(link)}{first}")
        vram = self.card.memory_bandwidth * self.constants[vram_constant(self.card)]
        return (
            f"at {self.context:,} tokens {self.off_share:.0%} of the bytes read per token are off the "
            f"card: {', '.join(parts)}; the VRAM of {self.card.name} gives {vram / 1e9:.0f} GB/s"
        )

    def _attended(self, what: str) -> str:
        rate = self.constants.get_constant("cpu_attention_bw")
        return (
            f"{what} are attended to by the processor over a cpu link of "
            f"{rate.value / 1e9:.3g} GB/s ({_known(rate.measured, rate.low, rate.high)})"
        )

    def _make(
        self, kind: str, loud: str, cause: str, note: str = "", most: int = MOST_REMEDIES
    ) -> CostWarning:
        estimate = self.estimate
        return CostWarning(
            kind,  # type: ignore[arg-type]
            loud,  # type: ignore[arg-type]
            cause,
            self.link,
            estimate.baseline_tps,
            estimate.tps,
            estimate.low,
            estimate.high,
            tuple(self.remedies()[:most]),
            note=note,
        )

    def proposals(self) -> Iterator[tuple[str, str, Load]]:
        """What could be done instead: in words, as options, and the load with it."""
        from kvtier.cost.faster import proposals

        return proposals(self)

    def remedies(self) -> list[Remedy]:
        """What would decode faster, the fastest first; at least one."""
        from kvtier.cost.faster import faster

        return faster(self)


def _gb(nbytes: float) -> str:
    """In powers of 1000, as the rates beside it."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _class(link: SlowLink) -> str:
    """The link class in words: rate, band, and whether it was measured."""
    known = _known(link.measured, link.low, link.high)
    return f"{link.kind} link of {link.likely / 1e9:.3g} GB/s ({known})"


def _known(measured: bool, low: float, high: float) -> str:
    return "measured" if measured else f"class assumed: {low / 1e9:.3g} to {high / 1e9:.3g} GB/s"
