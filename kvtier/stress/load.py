"""One context of a load: the real store, sessions and modes of attention on the emulated card.

What is emulated is the card alone. Pages are reserved, sealed, evicted and streamed by the code that
serves a model; only the model is missing: K, V and queries are made up of (sequence, token, layer), so that
what attention gets can be compared byte for byte, and the time of a layer's own kernels comes from
the bytes and operations of its weights (``kvtier.stress.forward``).
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

from kvtier.attention.engine import AttentionEngine
from kvtier.attention.select import SelectDecode
from kvtier.attention.window import Row
from kvtier.cost.decode import STEP_S
from kvtier.cost.monitor import RateMonitor
from kvtier.devices.cards import VRAM_EFFICIENCY
from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.operations import Span
from kvtier.errors import CopyFailedError, KvtierError, OffloadWarning, PageLostError
from kvtier.identity import ModelIdentity
from kvtier.session.session import Session
from kvtier.store.store import TieredStore
from kvtier.stress.forward import LONGEST_WAIT_S, Forward, Weights
from kvtier.stress.in_place import summary_slots
from kvtier.stress.plan import SPARE_TOKENS, LoadPlan
from kvtier.stress.report import ContextResult, empty_result

#: ``(phase, done, total, store)``: after every step.
Watch = Callable[[str, int, int, TieredStore], None]

#: Errors after which a step can be tried again, and how often.
_RETRIES = 20
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
        self._fixed_s = STEP_S
        if plan.mode.selection is not None:
            self._fixed_s += plan.spec.constants["selection_s"]

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
        self.weights = Weights(plan, device)
        try:
            store = TieredStore(
                plan.run_layout,
                device=device,
                vram=self._vram(),
                host=self._pages(self.spec.host),
                disk=round(self.spec.disk * self._scale),
                path=self._folder(),
                policy=self.spec.policy,
                check=self.spec.check,
            )
        except BaseException:
            self.weights.free()
            raise
        try:
            self._serve(store)
        finally:
            self._close(store)

    def _vram(self) -> int:
        """The tier: pages, and slots for the summaries that are taken from it."""
        plan = self.plan
        lent = summary_slots(plan, plan.run_layout) if plan.summaries else 0
        return (plan.tier_pages + lent) * plan.run_layout.page_bytes

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
            self.weights.free()
            for what, left in (("VRAM", self.device.used_bytes), ("host", self.device.host_bytes)):
                if left:
                    result.books.append(f"{left} bytes of {what} memory were not given back")
        except KvtierError as error:
            result.books.append(f"closing: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------ serving

    def _serve(self, store: TieredStore) -> None:
        result, spec = self.result, self.spec
        self.store = store
        self.sessions: list[Session] = []
        self.engine = AttentionEngine(store, self.plan.mode, columns=self.plan.columns)
        self.forward = Forward(self.plan, store, self.engine, self.weights)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._close_sessions)
                # At once for all sequences: growing it later would take more.
                self.engine.stream.staging.fit(spec.sessions, self.plan.columns, store.timeout_s)
                if isinstance(self.engine.paged, SelectDecode):
                    # Before the tier is full of pages, which would have to go for them.
                    pages = self.plan.context // spec.page_tokens
                    self.engine.paged.reserve([pages] * spec.sessions)
                self._prefill()
                moved = {name: link.bytes for name, link in store.stats().links.items()}
                result.prefill_s = self.device.now_s
                self._decode()
                stats = store.stats()
                result.moved = {
                    name: (link.bytes - moved[name]) / self._scale
                    for name, link in stats.links.items()
                }
                result.selected = self.forward.selected
                result.evicted = {name: tier.pages_out for name, tier in stats.tiers.items()}
                result.pages = sum(len(session.pages) for session in self.sessions)
                result.cold_pages = sum(
                    "vram" not in page.copies for session in self.sessions for page in session.pages
                )
                self._check_books()
        finally:
            result.checked_bytes = self.forward.checked
            self.engine.close()
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
                    self.device.synchronize(LONGEST_WAIT_S)
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
            self.device.synchronize(LONGEST_WAIT_S)
            self.device.host_work(self._fixed_s)
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
            attention=self.plan.mode.text,
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
                    self.device.synchronize(LONGEST_WAIT_S)
        raise CopyFailedError(f"a step failed {_RETRIES} times in a row")

    def _try_step(self, numbers: list[int], new: int) -> None:
        sessions = [self.sessions[number] for number in numbers]
        for session in sessions:
            session.seal()
        self.store.poll()
        self.engine.prepare([session.pages for session in sessions], new)
        for session in sessions:
            session.reserve(new)
        before = sessions[0].length
        rows = [Row(s.lease()[0], s.tails, 0, s.length, new, 0) for s in sessions]
        try:
            self.engine.begin(rows, before, before + new)
            self.forward.run(numbers, before, new)
        finally:
            name, event = self.engine.end()
            for session in sessions:
                session.rest(name, event)
        for number, session in zip(numbers, sessions, strict=True):
            session.extend(new, _tokens(number, before, new))

    @staticmethod
    def _traffic(reads: Sequence[Span], writes: Sequence[Span]) -> int:
        """The stream declares what it touches, whole pages and once a step: enough to find races, but not
        what each layer moves. ``Forward`` charges that."""
        return 0

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
