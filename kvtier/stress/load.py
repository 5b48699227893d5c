"""One context of a load: the real store, sessions and exact-stream attention on the emulated card.

What is emulated is the card alone. Pages are reserved, sealed, evicted and streamed by the code that
serves a model; only the model is missing: K and V are a pattern of (sequence, token, layer), so that
what attention gets can be compared byte for byte, and the time of a layer's own kernels comes from
the bytes and operations of its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.attention.stream import ExactStream
from kvtier.attention.window import Row
from kvtier.cost.decode import STEP_S
from kvtier.cost.links import DISK_RATE
from kvtier.cost.monitor import RateMonitor
from kvtier.devices.base import Buffer
from kvtier.devices.cards import VRAM_EFFICIENCY
from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.operations import Span
from kvtier.errors import CopyFailedError, KvtierError, OffloadWarning, PageLostError
from kvtier.identity import ModelIdentity
from kvtier.session.session import Session
from kvtier.store.store import TieredStore
from kvtier.stress.pattern import compare, values
from kvtier.stress.plan import SPARE_TOKENS, LoadPlan
from kvtier.stress.report import ContextResult, empty_result

#: ``(phase, done, total, store)``: after every step.
Watch = Callable[[str, int, int, TieredStore], None]

#: Errors after which a step can be tried again, and how often.
_RETRIES = 20
#: Virtual seconds for the work of a step.
_LONGEST_WAIT_S = 3600.0
#: How often lost sequences are computed anew before the context is given up.
_REBUILDS = 3


@dataclass(frozen=True)
class StepTimes:
    """Virtual seconds of one decode step, and those its copies to VRAM and its kernels took."""

    seconds: float
    h2d_s: float
    compute_s: float


def run_context(
    plan: LoadPlan,
    *,
    watch: Watch | None = None,
    trace: Path | None = None,
    steps: Callable[[StepTimes], None] | None = None,
) -> ContextResult:
    """Prefill and decode at one context.

    Args:
        watch: told after every step.
        trace: file for the run's Chrome trace.
        steps: told the times of every decode step.

    Raises:
        ConfigError: the plan does not fit; names the option.
    """
    plan.check()
    return _Load(plan, watch, trace, steps).run()


class _Load:
    def __init__(
        self,
        plan: LoadPlan,
        watch: Watch | None,
        trace: Path | None,
        steps: Callable[[StepTimes], None] | None,
    ) -> None:
        self.plan, self.spec = plan, plan.spec
        self.result = empty_result(plan)
        self.failures: Counter[str] = Counter()
        self._watch, self._trace, self._steps = watch, trace, steps
        self._scale = 1 / plan.divisor
        self._checks = 0

    def run(self) -> ContextResult:
        began = time.process_time()
        spec, plan, result = self.spec, self.plan, self.result
        self.device = EmulatedDevice(
            spec.card.card,
            link=spec.card.link,
            vram_bytes=plan.vram,
            pinned=spec.card.kind != "pageable",
            faults=spec.faults.make(),
            trace_limit=1_000_000 if self._trace else 1,
            scale=self._scale,
            payload=spec.payload,
            efficiency=VRAM_EFFICIENCY,
            traffic=self._traffic,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OffloadWarning)
            try:
                self._run()
            except KvtierError as error:
                self._failed(error)
                result.error = f"{type(error).__name__}: {error}"
            except AssertionError as error:
                self._failed(error)
                result.error = f"wrong bytes: {error}"
            finally:
                if self._trace is not None:
                    self.device.write_trace(self._trace)
                self.device.close()
        result.warnings = [
            dict(w.message.record) for w in caught if isinstance(w.message, OffloadWarning)
        ]
        result.failures = dict(self.failures)
        result.cpu_s = time.process_time() - began
        return result

    # ------------------------------------------------------------------ setting up

    def _run(self) -> None:
        plan, device = self.plan, self.device
        self.weights = self._reserve(plan.weights_in_vram)
        self.scratch = self._reserve(plan.off_layer)
        off = self.spec.weights_off * plan.weights
        self.off_weights = self._reserve(off, host=True)
        try:
            store = TieredStore(
                plan.run_layout,
                device=device,
                vram=plan.tier_pages * plan.run_layout.page_bytes,
                host=self._pages(self.spec.host),
                disk=round(self.spec.disk * self._scale),
                path=self._folder(),
                policy=self.spec.policy,
                check=self.spec.check,
            )
        except BaseException:
            self._free_weights()
            raise
        try:
            self._serve(store)
        finally:
            self._close(store)

    def _reserve(self, nbytes: float, *, host: bool = False) -> Buffer | None:
        size = round(nbytes * self._scale)
        return self.device.reserve(size, host=host) if size else None

    def _pages(self, nbytes: int) -> int:
        """A tier of as many pages as ``nbytes`` hold at full size."""
        return nbytes // self.plan.layout.page_bytes * self.plan.run_layout.page_bytes

    def _folder(self) -> Path | None:
        """A folder of its own: pages of another context would be found again."""
        path = self.spec.path
        return None if path is None else path / f"context-{self.plan.context}"

    def _close(self, store: TieredStore) -> None:
        """Close everything and recount: nothing may be left."""
        result = self.result
        try:
            result.books += [f"the store: {text}" for text in store.close()]
            self._free_weights()
            for what, left in (("VRAM", self.device.used_bytes), ("host", self.device.host_bytes)):
                if left:
                    result.books.append(f"{left} bytes of {what} memory were not given back")
        except KvtierError as error:
            result.books.append(f"closing: {type(error).__name__}: {error}")

    def _free_weights(self) -> None:
        for buffer in (self.weights, self.scratch, self.off_weights):
            if buffer is not None:
                self.device.free(buffer)

    # ------------------------------------------------------------------ serving

    def _serve(self, store: TieredStore) -> None:
        result, spec = self.result, self.spec
        self.store = store
        self.sessions: list[Session] = []
        self.stream = ExactStream(store, columns=self.plan.columns)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._close_sessions)
                # At once for all sequences: growing it later would take more.
                self.stream.staging.fit(spec.sessions, self.plan.columns, store.timeout_s)
                self._prefill()
                moved = {name: link.bytes for name, link in store.stats().links.items()}
                result.prefill_s = self.device.now_s
                self._decode()
                stats = store.stats()
                result.moved = {
                    name: (link.bytes - moved[name]) / self._scale
                    for name, link in stats.links.items()
                }
                result.evicted = {name: tier.pages_out for name, tier in stats.tiers.items()}
                result.pages = sum(len(session.pages) for session in self.sessions)
                result.cold_pages = sum(
                    "vram" not in page.copies for session in self.sessions for page in session.pages
                )
                self._check_books()
        finally:
            self.stream.close()
        if result.decode_s > 0:
            result.emulated_tps = result.steps * spec.sessions / result.decode_s

    def _prefill(self) -> None:
        """Compute every sequence, one after the other, in chunks."""
        spec, plan = self.spec, self.plan
        total = spec.sessions * plan.context
        for number in range(spec.sessions):
            if number == len(self.sessions):
                self.sessions.append(Session(self.store, self._identity(), name=f"load {number}"))
            session = self.sessions[number]
            while session.length < plan.context:
                count = min(plan.chunk, plan.context - session.length)
                self._step([number], count)
                self._tell("prefill", number * plan.context + session.length, total)
                # As whoever samples a token does.
                with contextlib.suppress(CopyFailedError):  # told to whoever needs the bytes
                    self.device.synchronize(_LONGEST_WAIT_S)
            session.seal()

    def _decode(self) -> None:
        result, spec = self.result, self.spec
        began = last = self.device.now_s
        numbers = list(range(spec.sessions))
        predicted = self.plan.predicted
        monitor = RateMonitor(
            predicted_tps=predicted.step.tokens_per_s(spec.sessions),
            baseline_tps=predicted.baseline.tokens_per_s(spec.sessions),
            link=spec.card.kind,
        )
        while not spec.duration.over(result.steps, last - began):
            if self.sessions[0].length >= self.plan.context + SPARE_TOKENS:
                break
            busy_before = dict(self.device.stats.busy_s)
            try:
                self._step(numbers, 1)
            except PageLostError:
                self._rebuild()
                # What it took to compute the sequences anew is no decoding.
                began += self.device.now_s - last
                last = self.device.now_s
                continue
            self.device.synchronize(_LONGEST_WAIT_S)
            self.device.host_work(STEP_S)
            result.steps += 1
            monitor.feed(spec.sessions, self.device.now_s - last)
            if self._steps is not None:
                busy = self.device.stats.busy_s
                self._steps(
                    StepTimes(
                        self.device.now_s - last,
                        busy["h2d"] - busy_before["h2d"],
                        busy["vram"] - busy_before["vram"],
                    )
                )
            last = self.device.now_s
            result.decode_s = last - began
            done = result.steps if spec.duration.steps else round(result.decode_s * 1e3)
            self._tell(
                "decode", done, spec.duration.steps or round((spec.duration.seconds or 0) * 1e3)
            )

    def _rebuild(self) -> None:
        if self.result.rebuilt >= _REBUILDS:
            raise PageLostError(f"pages were lost again after {_REBUILDS} times of recomputing")
        self.result.rebuilt += 1
        self._close_sessions()
        self._prefill()

    def _close_sessions(self) -> None:
        for session in self.sessions:
            with contextlib.suppress(CopyFailedError):
                session.close()
        self.sessions = []

    def _identity(self) -> ModelIdentity:
        layout = self.store.layout
        return ModelIdentity(
            model=self.spec.model.name,
            revision="",
            weights_digest=hashlib.sha256(self.spec.model.name.encode()).digest(),
            weights_quantisation=f"{self.spec.weight_bits} bits",
            kv_dtype=self.spec.kv_dtype,
            kv_quantisation="",
            rope="",
            attention="exact-stream",
            layout_digest=layout.digest,
            page_tokens=layout.page_tokens,
        )

    # ------------------------------------------------------------------ a step

    def _step(self, numbers: list[int], new: int) -> None:
        """One forward pass of some sequences; again if a copy fails, since it has appended nothing."""
        for _ in range(_RETRIES):
            try:
                return self._try_step(numbers, new)
            except PageLostError as error:
                self._failed(error)
                raise
            except CopyFailedError as error:
                self._failed(error)
                with contextlib.suppress(CopyFailedError):
                    self.device.synchronize(_LONGEST_WAIT_S)
        raise CopyFailedError(f"a step failed {_RETRIES} times in a row")

    def _try_step(self, numbers: list[int], new: int) -> None:
        sessions = [self.sessions[number] for number in numbers]
        for session in sessions:
            session.seal()
        self.store.poll()
        for session in sessions:
            session.reserve(new)
        before = sessions[0].length
        rows = [Row(s.lease()[0], s.tails, 0, s.length, new, 0) for s in sessions]
        try:
            self.stream.begin(rows, before, before + new)
            for layer in self.stream.layers:
                self._layer(layer, numbers, before, new)
        finally:
            name, event = self.stream.end()
            for session in sessions:
                session.rest(name, event)
        for number, session in zip(numbers, sessions, strict=True):
            session.extend(new, _tokens(number, before, new))

    def _layer(self, layer: int, numbers: list[int], before: int, new: int) -> None:
        plan, device = self.plan, self.device
        compute = device.compute_stream()
        place = self.stream.layers.index(layer)
        reads = []
        if self.off_weights is not None and self.scratch is not None:
            # As when a kernel touches memory that the driver has paged out: nothing hides it.
            size = self.scratch.nbytes
            start = min(place * size, self.off_weights.nbytes - size)
            device.copy(
                compute, [(self.scratch.range(), self.off_weights.range(start, start + size))]
            )
            reads.append(self.scratch.range())
        plane, payload = self.store.layout.plane(layer), self.spec.payload
        k, v = (
            values(part, layer, numbers, before, before + new, payload=payload)
            for part in (plane.k, plane.v)
        )
        read_before = self._from_disk()
        got = self.stream.update(layer, k, v)
        if payload and (before + place) % len(self.stream.layers) == 0:
            for side in got:
                self.result.checked_bytes += compare(side, layer, numbers, before + new)
        kv_bytes = self._kv_bytes(place, sum(side.nbytes for side in got))
        if self.weights is not None:
            share = self.weights.nbytes // len(self.stream.layers)
            reads.append(self.weights.range(place * share, (place + 1) * share))
        tokens = new * len(numbers)
        active = self.spec.model.active_params or self.spec.model.params
        device.compute(
            compute,
            f"layer {layer}",
            nbytes=plan.read / plan.paged_layers * self._scale + kv_bytes,
            flops=2 * active * tokens / plan.paged_layers * self._scale,
            reads=reads,
        )
        if self.spec.disk:
            # The disk is no part of the emulated card; the host waits while it reads.
            device.host_work((self._from_disk() - read_before) / (DISK_RATE * self._scale))

    def _from_disk(self) -> int:
        return self.store.stats().links["disk->host"].bytes if self.spec.disk else 0

    @staticmethod
    def _traffic(reads: Sequence[Span], writes: Sequence[Span]) -> int:
        """The stream declares what it touches, whole pages and once a step: enough to find races, but not
        what each layer moves. ``_layer`` charges that."""
        return 0

    def _kv_bytes(self, place: int, filled: int) -> int:
        """What a layer's gathering and attention move: hot bytes are read and written on their way into
        staging memory and read again by attention, cold ones are there already and read once."""
        cold = sum(at.nbytes for at in self.stream.staging.halves[place % 2].cold)
        return 3 * filled - 2 * cold

    # ------------------------------------------------------------------ books

    def _check_books(self) -> None:
        try:
            self.store.check()
        except AssertionError as error:
            self.result.books.append(str(error))
        stats = self.store.stats()
        for name, tier in stats.tiers.items():
            if tier.pages_in - tier.pages_out > tier.pages:
                self.result.books.append(
                    f"{name}: {tier.pages_in} pages came and {tier.pages_out} went, {tier.pages} "
                    "are there"
                )
        if self.device.used_bytes > self.device.capacity_bytes:
            self.result.books.append("more VRAM is in use than there is")

    def _failed(self, error: Exception) -> None:
        self.failures[type(error).__name__] += 1

    def _tell(self, phase: str, done: int, total: int) -> None:
        if self._watch is not None:
            self._watch(phase, min(done, total), total, self.store)


def _tokens(number: int, before: int, new: int) -> list[int]:
    return [number * 1_000_003 + token for token in range(before, before + new)]
