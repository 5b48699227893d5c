"""What fits where, and how fast that should be. Sizes in bytes at full size. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from kvtier.attention.mode import Mode, parse_mode
from kvtier.cost.choose import Choice, choose_mode
from kvtier.cost.cliff import LEVELS, Level
from kvtier.cost.constants import Constant, Constants
from kvtier.cost.decode import (
    STEP_S,
    LayerLoad,
    Slowdown,
    StepTime,
    all_in_vram,
    step_time,
)
from kvtier.cost.in_place import in_place_time
from kvtier.cost.links import LinkPath
from kvtier.cost.outlook import Load
from kvtier.errors import ConfigError
from kvtier.layout import PageLayout, Plane
from kvtier.stress import in_place
from kvtier.stress.in_place import plane_bytes, summary_slots
from kvtier.stress.spec import LoadSpec
from kvtier.units import format_size

#: Tokens of a decode run that the staging memory is made for, beyond the context.
SPARE_TOKENS = 512

#: KV dtypes with which attention can be computed where pages are.
FLOATS = ("bf16",)


@dataclass(frozen=True)
class LoadPlan:
    """One context of a load: where its bytes go.

    Raises:
        ConfigError: something does not fit; names the option and what would fit.
    """

    spec: LoadSpec
    context: int

    # sizes

    @cached_property
    def layout(self) -> PageLayout:
        """Pages at full size."""
        spec = self.spec
        heads = self.kv_heads if self.computes else 1
        return spec.model.layout(
            spec.kv_dtype, spec.page_tokens, heads=heads, summaries=self._summarised
        )

    @cached_property
    def asked(self) -> Mode:
        """The mode that was asked for; exact-stream while it is to be chosen."""
        text = self.spec.mode
        return parse_mode("exact-stream" if text == "auto" else text)

    @cached_property
    def choice(self) -> Choice | None:
        """Which exact mode, and why, if that was left to the cost model."""
        if self.spec.mode != "auto":
            return None
        return choose_mode(
            self._load.work,
            constants=self._load.constants,
            split=""
            if self.spec.kv_dtype in FLOATS
            else f"{self.spec.kv_dtype} KV can only be gathered",
        )

    @cached_property
    def mode(self) -> Mode:
        """The mode of the run."""
        return self.asked if self.choice is None else parse_mode(self.choice.mode)

    @property
    def computes(self) -> bool:
        """Whether the run really computes attention, from keys that are floats: where a mode may read pages in place."""
        spec = self.spec
        return spec.payload and spec.kv_dtype in FLOATS and spec.mode != "exact-stream"

    @property
    def _summarised(self) -> bool:
        return self.asked.selection is not None and self.spec.kv_dtype in FLOATS

    @cached_property
    def kv_heads(self) -> int:
        """KV heads of the run: the model's, as far as K and V of a token are wide enough for them when scaled."""
        spec = self.spec
        sizes = [n // self.divisor for n in spec.model.part_elements(spec.kv_dtype)]
        return max(
            n for n in range(1, max(1, spec.model.kv_heads) + 1)
            if n == 1 or all(size % n == 0 and size // n % 2 == 0 for size in sizes)
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        model = self.spec.model
        return max(1, model.query_width // model.part_elements(self.spec.kv_dtype)[0])

    @cached_property
    def divisor(self) -> int:
        """How many times smaller the data of the run is."""
        spec = self.spec
        return spec.model.divisor(spec.kv_dtype, 1 / spec.scale) if spec.payload else 1

    @cached_property
    def run_layout(self) -> PageLayout:
        """Pages of the run."""
        spec = self.spec
        return spec.model.layout(
            spec.kv_dtype,
            spec.page_tokens,
            self.divisor,
            heads=self.kv_heads if self.computes else 1,
            summaries=self._summarised,
        )

    @property
    def vram(self) -> int:
        spec = self.spec
        return spec.card.card.usable_bytes if spec.vram is None else spec.vram

    @property
    def weights(self) -> float:
        """All weights."""
        return self.spec.model.weight_bytes(self.spec.weight_bits)

    @property
    def weights_in_vram(self) -> int:
        return round(self.weights * (1 - self.spec.weights_off))

    @property
    def read(self) -> float:
        """Weights read a step."""
        return self.spec.model.read_bytes(self.spec.weight_bits, self.spec.sessions)

    @property
    def paged_layers(self) -> int:
        return sum(layer.paged for layer in self.layout.layers)

    @property
    def off_layer(self) -> int:
        """Weights of a layer that come over the link each step, and the room that they pass."""
        return round(self.read * self.spec.weights_off / self.paged_layers)

    @property
    def columns(self) -> int:
        """Tokens that the staging memory has room for."""
        return self.context + SPARE_TOKENS

    @property
    def staging(self) -> int:
        """Two layers of all sequences."""
        widest = max(plane.nbytes for plane in self.layout.planes if plane is not None)
        return 2 * self.spec.sessions * self.columns * -(-widest // self.spec.page_tokens)

    @cached_property
    def summaries(self) -> int:
        """Of all pages, wherever those are, in slots of the tier."""
        if self.asked.selection is None:
            return 0
        return summary_slots(self, self.layout) * self.layout.page_bytes

    @cached_property
    def plane_stage(self) -> int:
        """Room for planes that are chosen and not in VRAM."""
        selection = self.asked.selection
        return plane_bytes(self, selection) if selection is not None else 0

    @property
    def tier(self) -> int:
        """What is left of VRAM for pages; may be negative."""
        taken = self.weights_in_vram + self.off_layer + self.staging + self.plane_stage
        return self.vram - taken - self.summaries

    @cached_property
    def tier_pages(self) -> int:
        return max(0, self.tier // self.layout.page_bytes)

    @property
    def split(self) -> dict[str, int]:
        """Where VRAM goes, in bytes."""
        parts = {
            "weights": self.weights_in_vram + self.off_layer,
            "pages": max(0, self.tier),
            "staging": self.staging,
            "planes": self.plane_stage,
            "summaries": self.summaries,
        }
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    @property
    def pages(self) -> int:
        """Sealed pages of all sequences."""
        return self.spec.sessions * (self.context // self.spec.page_tokens)

    @property
    def cold_pages(self) -> int:
        """Sealed pages that have no room in VRAM beside one unsealed page a sequence."""
        room = max(0, self.tier_pages - self.spec.sessions)
        return max(0, self.pages - room)

    @property
    def disk_pages(self) -> int:
        """Cold pages that have no room in host RAM either."""
        return max(0, self.cold_pages - self.spec.host // self.layout.page_bytes)

    @property
    def chunk(self) -> int:
        """Tokens of a prefill step: at most half of what the VRAM tier holds beside a page a
        sequence, in whole pages."""
        page = self.spec.page_tokens
        room = (self.tier_pages - self.spec.sessions) // 2 * page
        return max(page, min(self.spec.chunk, room) // page * page)

    def check(self) -> None:
        """Raise ConfigError if the load cannot run."""
        self._check_mode()
        spec, page = self.spec, self.layout.page_bytes
        beside = self.staging + self.plane_stage + self.summaries
        free = self.vram - beside - 2 * spec.sessions * page
        if self.tier_pages < 2 * spec.sessions:
            if self.weights_in_vram > free:
                share = 1 - max(0.0, free) / self.weights
                raise ConfigError(
                    f"--weights-off-card is {spec.weights_off:g}, but {format_size(self.weights)} "
                    f"of weights, {format_size(beside)} of staging memory and two pages a "
                    f"sequence do not fit in {format_size(self.vram)} of VRAM at {self.context} "
                    f"tokens; give --weights-off-card {min(1.0, share + 0.005):.2f} or more, fewer "
                    "--weight-bits, or a larger --vram"
                )
            raise ConfigError(
                f"--contexts {self.context} with --sessions {spec.sessions} needs "
                f"{format_size(beside)} of staging memory and two pages a sequence beside "
                f"{format_size(self.weights_in_vram)} of weights, more than the "
                f"{format_size(self.vram)} of --vram; give fewer tokens or sessions, or more VRAM"
            )
        held = spec.host // page * (spec.host >= page)
        if self.cold_pages > held + (spec.disk // page if spec.disk else 0):
            raise ConfigError(
                f"--host is {format_size(spec.host)}, but {self.cold_pages} pages of "
                f"{format_size(page)} do not fit in VRAM at {self.context} tokens; give "
                f"{format_size(self.cold_pages * page)} or more, or a --disk"
            )

    def _check_mode(self) -> None:
        spec, name = self.spec, self.spec.mode.partition(":")[0]
        if spec.mode in ("auto", "exact-stream"):
            return
        if spec.kv_dtype not in FLOATS:
            raise ConfigError(
                f"--mode is {name}, which computes with keys where they lie, but --kv-dtype is {spec.kv_dtype}; give "
                f"--kv-dtype {' or '.join(FLOATS)}, or --mode exact-stream"
            )
        if all(layer.kind != "full" for layer in self.layout.layers):
            raise ConfigError(
                f"--mode is {name}, but {spec.model.name} has no layer with full attention; give --mode exact-stream"
            )
        if self.asked.selection is None:
            return
        if not spec.payload:
            raise ConfigError(
                "--mode is select, which chooses pages by their keys, but --no-payload keeps none; leave one out"
            )
        if max(self.asked.selection.dense, default=0) >= len(self.layout.layers):
            raise ConfigError(
                f"--mode has dense={max(self.asked.selection.dense)}, but {spec.model.name} has layers 0 to "
                f"{len(self.layout.layers) - 1}"
            )

    # times

    @property
    def planes(self) -> list[Plane]:
        """Of the layers that have one."""
        return [plane for plane in self.layout.planes if plane is not None]

    @property
    def link(self) -> LinkPath:
        return LinkPath(self.spec.card.kind, self.spec.card.link)

    @cached_property
    def layers(self) -> list[LayerLoad]:
        """What each layer reads in a decode step at this context."""
        spec = self.spec
        weights = self.read / self.paged_layers
        share = self.cold_pages / max(1, self.pages)
        cold_tokens = share * (self.pages * spec.page_tokens)
        tokens = spec.sessions * self.context
        loads = []
        for plane in self.layout.planes:
            if plane is None:
                continue
            per_token = plane.nbytes / spec.page_tokens
            window = self.layout.layers[plane.layer].window
            seen, cold = float(tokens), cold_tokens
            if window is not None:
                # The oldest pages are the cold ones.
                seen = float(spec.sessions * min(self.context, window))
                cold = max(0.0, seen - (tokens - cold_tokens))
            parts = sum(part.nbytes > 0 for part in (plane.k, plane.v))
            loads.append(
                LayerLoad(
                    weights=weights - self.off_layer,
                    off=float(self.off_layer),
                    hot=(seen - cold) * per_token,
                    cold=cold * per_token,
                    pieces=parts * round(cold / spec.page_tokens),
                    disk=cold * per_token * self.disk_pages / max(1, self.cold_pages),
                )
            )
        return loads

    @cached_property
    def predicted(self) -> Slowdown:
        """A step, and the same with everything in VRAM."""
        return Slowdown(self._step, self._time(all_in_vram(self.layers)))

    @property
    def _step(self) -> StepTime:
        mode = self.mode
        if mode.kind == "exact-stream":
            return self._time(self.layers)
        constants = self.spec.constants
        nbytes, pieces = in_place.moved(self, mode)
        return in_place_time(
            in_place.loads(self, mode),
            self.spec.card.card,
            self.link,
            cpu_rate=constants["cpu_attention_bw"],
            handover_s=constants["handover_s"],
            moved=nbytes,
            moved_pieces=pieces,
            step_s=STEP_S + (constants["selection_s"] if mode.selection else 0.0),
        )

    def _time(self, layers: list[LayerLoad]) -> StepTime:
        return step_time(layers, self.spec.card.card, self.link)

    @cached_property
    def outlook(self) -> Load:
        """The same load as ``kvtier plan`` sees it, for the warnings."""
        load, mode = self._load, self.mode
        if not load.kv_off or mode.kind == "exact-stream":
            return load
        if mode.selection is None:
            return replace(load, mode="kv-cpu")
        return replace(load, mode="select", selection=in_place.selection_of(self, mode.selection))

    @cached_property
    def _load(self) -> Load:
        """The same without a mode."""
        spec = self.spec
        kv = sum(layer.hot + layer.cold for layer in self.layers)
        return Load(
            spec.model,
            spec.card.card,
            self.context,
            sequences=spec.sessions,
            kv_dtype=spec.kv_dtype,
            weight_bits=spec.weight_bits,
            weights_off=spec.weights_off,
            kv_off=min(1.0, sum(layer.cold for layer in self.layers) / kv) if kv else 0.0,
            disk_off=sum(layer.disk for layer in self.layers) / kv if kv else 0.0,
            link=spec.card.kind,
            asked=("weights",),
            vram=spec.vram,
            disk_prefix=bool(spec.disk),
            constants=self._constants,
        )

    @property
    def _constants(self) -> Constants:
        """Those of the table, but the rate of the link if the card was given with another."""
        kind, card = self.spec.card.kind, self.spec.card.card
        given = self.link.rate(1 << 30)
        if math.isclose(given, card.link(kind).rate, rel_tol=1e-6):
            return self.spec.constants
        return self.spec.constants.measured(
            {f"{kind}_bw": Constant(f"{kind}_bw", given, "bytes/s", "given with the card")}
        )


@dataclass(frozen=True)
class Cliff:
    """From which context on decoding slows down.

    Attributes:
        fits: longest context with everything in VRAM; 0 if the weights alone do not fit.
        begins: level -> shortest context at which it applies; None if it never does.
        limit: shortest context that does not run at all; None within the tokens searched.
    """

    fits: int
    begins: dict[Level, int | None]
    limit: int | None


def find_cliff(spec: LoadSpec) -> Cliff:
    """Search contexts in whole pages, by prediction."""

    def slow(context: int) -> float:
        plan = LoadPlan(spec, context)
        return plan.predicted.factor if plan.tier_pages >= 2 * spec.sessions else float("inf")

    # With weights behind the link a short context is the slow one, so no plain bisection: the
    # first of some lengths that is slow enough, then between it and the one before.
    lengths = sorted({round(2 ** (n / 4)) for n in range(65)})

    def first(bad: float) -> int | None:
        lo = 0
        for hi in lengths:
            if slow(hi * spec.page_tokens) >= bad:
                break
            lo = hi
        else:
            return None
        while hi - lo > 1:
            middle = (lo + hi) // 2
            lo, hi = (lo, middle) if slow(middle * spec.page_tokens) >= bad else (middle, hi)
        return hi * spec.page_tokens

    def level_from(bad: float) -> int | None:
        context = first(bad)
        return None if context is None or math.isinf(slow(context)) else context

    fits = 0
    if not spec.weights_off:
        lo, hi = 0, lengths[-1] * spec.page_tokens
        while hi - lo > spec.page_tokens:
            middle = (lo + hi) // 2
            plan = LoadPlan(spec, middle)
            whole = plan.tier_pages >= 2 * spec.sessions and not plan.cold_pages
            lo, hi = (middle, hi) if whole else (lo, middle)
        fits = lo
    begins = {name: level_from(at) for name, at in reversed(LEVELS)}
    return Cliff(fits, begins, first(math.inf))


def with_vram(spec: LoadSpec, vram: int) -> LoadSpec:
    """The same load on a card with other memory."""
    return replace(spec, vram=vram)
