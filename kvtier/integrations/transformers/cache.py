"""``TieredCache``: a transformers cache whose KV lives in a kvtier store."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvtier.attention.engine import AttentionEngine
from kvtier.attention.filters import with_filters
from kvtier.attention.mode import Mode, parse_mode
from kvtier.attention.window import Row
from kvtier.cost.monitor import RateMonitor
from kvtier.errors import ClosedError, ConfigError, UnsupportedModelError
from kvtier.identity import ModelIdentity
from kvtier.integrations.transformers.attention import Attached, mark
from kvtier.integrations.transformers.feed import Feed, left_padding, read_feed
from kvtier.integrations.transformers.guard import ModelGuard
from kvtier.integrations.transformers.hook import ForwardInputs, watch_forward
from kvtier.integrations.transformers.layer import TieredLayer
from kvtier.integrations.transformers.rows import (
    check_prompt,
    give_back_spare,
    reserve_all,
    select_rows,
)
from kvtier.integrations.transformers.speed import Speed
from kvtier.session.session import Session
from kvtier.store.store import TieredStore

# Memory made under inference_mode could never be written outside it again.
_plain_tensors = torch.inference_mode(False)


class TieredCache(Cache):
    """The KV cache of one ``generate`` call or forward loop, in three tiers, exact.

    Pass it as ``cache=`` (transformers >= 5.24) or ``past_key_values=`` (before)::

        cache = TieredCache(model, store)
        cache.load_prefix(input_ids)
        model.generate(input_ids, cache=cache)
        cache.close()

    Works with: greedy and sampled decoding, beam search, several return sequences, left-padded batches, chunked
    prefill (``prefill_chunk_size``), assisted and prompt-lookup decoding (``crop``), GQA, MLA and sliding-window
    layers. Refused with an error: right padding, layers without a page layout (recurrent, linear), a change of
    adapters under the cache, batches of several adapters (``adapter_names``), another model than the one given
    here, a forward pass whose new tokens do not fit in VRAM at once (use a smaller ``prefill_chunk_size``).

    Token ids are read from the model's forward passes. Rows of which the ids do not tell all (``inputs_embeds``, images,
    positions or masks of your own) are served, but not shared or found again.

    One thing cannot be seen: a cache that holds one prompt, given to ``generate`` with another, longer one. As with
    every transformers cache the first tokens of the second prompt are then taken from the first. Call ``reset()`` between
    prompts; after ``load_prefix`` other tokens than those of its prompt are refused.

    For inference only: no gradient flows through cached K and V. Not for two threads at once.

    Args:
        model: the transformers model (a PEFT model works too); sets the identity of the pages.
        store: a store with ``layout_of(model)``.
        identity: what ``identity_of(model)`` gave, to compute it once for several caches. The weights must not have
            changed since; a change of adapters is noticed.
        tenant: keeps pages apart from those of other tenants.
        columns: tokens (prompt and new) to make staging room for at once; it grows on demand. With it, or
            with the prompt of ``load_prefix``, or as soon as the tokens outgrow the VRAM tier, an
            OffloadWarning says what that costs on this card.
        mode: how a step of decoding reads pages: ``exact-stream`` (with the model's own attention, bit for bit),
            ``exact-split`` (pages in host memory are read by the CPU), or ``select:NAME,budget=...`` (reads some pages
            only; see ``kvtier.attention.mode.parse_mode``), or ``auto``: the one of the exact two that should be
            faster with ``columns`` tokens, see ``mode_choice``. All but the first change the model's attention
            implementation while the cache is open.
        monitor: compares the measured rate of decoding with a prediction or a baseline. None: on a GPU the
            rate while everything is in VRAM is learned and compared with the rate after that.

    Raises:
        IdentityError: the identity cannot be determined, or belongs to another layout, other adapters or another codec.
        ConfigError: the mode is unknown or does not fit the layout.
        UnsupportedModelError: the model cannot be served in this mode.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: TieredStore,
        *,
        identity: ModelIdentity | None = None,
        tenant: str = "",
        columns: int = 0,
        name: str = "cache",
        mode: str | Mode = "exact-stream",
        monitor: RateMonitor | None = None,
    ) -> None:
        self._speed = Speed(model, store, monitor)
        if columns:
            self._speed.foresee(columns, 1)
        self.store = store
        self.name = name
        self._guard = ModelGuard(model, store.layout, identity, tenant, store.kv_quantisation)
        self.identity = self._guard.identity
        layers: list[Any] = [
            TieredLayer(self, n, x.window) for n, x in enumerate(store.layout.layers)
        ]
        super().__init__(layers=layers)
        #: Which mode ``auto`` took, and why; empty if the mode was given.
        self.mode_choice = ""
        if mode == "auto":
            choice = self._speed.choose(columns)
            mode, self.mode_choice = choice.mode, choice.text
        self._engine = AttentionEngine(
            store,
            mode if isinstance(mode, Mode) else parse_mode(with_filters(mode, self.identity)),
            columns=columns,
        )
        self._attached = Attached(model, self._engine) if self._engine.paged is not None else None
        if self._attached is not None:
            # A cache that is dropped without close leaves the model as it was, too.
            weakref.finalize(self, self._attached.close).atexit = False
        self._sessions = [Session(store, self.identity, name=name)]
        self._pads = [0]
        #: Whether all tokens are at the positions that they have in a sequence of their own.
        self._usual = True
        self._columns = 0
        #: Columns that each layer has been served; layers of one pass differ until its last.
        self._served = [0] * len(store.layout.layers)
        #: The prompt of ``load_prefix`` until it has all been fed: each row's tokens.
        self._prompt: list[list[int]] | None = None
        self._inputs: ForwardInputs | None = None
        self._step: Feed | None = None
        self._done = [False] * len(store.layout.layers)
        self._last = self._engine.stream.layers[-1]
        self._closed = False
        self._unwatch = watch_forward(model, self)

    # ------------------------------------------------------------------ prefix

    @_plain_tensors
    def load_prefix(
        self,
        input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: torch.Tensor | None = None,
    ) -> int:
        """Take over what the store has of a prompt. Call it before ``generate`` or the first forward.

        Args:
            input_ids: ``[rows, N]``, the whole prompt.
            attention_mask: ``[rows, N]``, for left-padded batches.

        Returns:
            Columns restored, the same for all rows: whole pages of each row, at most ``N - 1``. ``generate`` takes
            the full ``input_ids`` and skips them; a forward loop starts at that column.

        Raises:
            IdentityError: the model is not what it was when the cache was made.
            ConfigError: the cache holds tokens already.
            UnsupportedModelError: the mask is not that of a left-padded batch.
        """
        self._open()
        if self._columns:
            raise ConfigError(
                f"the cache already holds {self._columns} tokens; load_prefix needs a new one, or reset()"
            )
        ids = torch.as_tensor(input_ids)
        if ids.dim() != 2 or not ids.shape[1]:
            raise ConfigError(
                f"input_ids have shape {tuple(ids.shape)}; give [rows, tokens] with at least one token"
            )
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise ConfigError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(ids.shape)}; "
                "they must be equal"
            )
        rows, width = ids.shape
        pads = left_padding(attention_mask, rows)
        if max(pads) == width:
            raise UnsupportedModelError(
                "a row of the attention mask is all zeros; give each row a token"
            )
        self.reset()
        self._speed.foresee(width, rows)
        self._guard.check_identity()
        self._set_rows(rows)
        prompt = [row[pad:] for row, pad in zip(ids.tolist(), pads, strict=True)]
        try:
            found = [
                pad + session.restore(tokens)
                for session, pad, tokens in zip(self._sessions, pads, prompt, strict=True)
            ]
            # Columns are one number for the batch: the shortest row decides, the others are cut to it.
            columns = min(found)
            if columns <= max(pads):
                columns = 0
            for session, pad in zip(self._sessions, pads, strict=True):
                session.crop(max(0, columns - pad))
        except BaseException:
            self.reset()
            raise
        self._prompt = prompt
        self._pads = pads if columns else [0] * rows
        self._set_columns(columns)
        return columns

    # ------------------------------------------------------------------ what transformers calls

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new K and V, ``[rows, heads, tokens, dim]``; all that it attends to."""
        return self.serve(layer_idx, key_states, value_states)

    def serve(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's ``update``."""
        if self._step is None:
            self._begin(k)
        step = self._step
        assert step is not None
        if self._done[layer]:
            raise ConfigError(
                f"layer {layer} was updated twice in one forward pass; use one cache for one model "
                "and one call at a time"
            )
        keys, values = self._engine.update(layer, k, v)
        self._done[layer] = True
        self._served[layer] = step.columns
        if self._engine.reads_in_place(layer):
            return mark(keys, self._engine, layer), values
        if layer == self._last and not self._engine.paged:
            self._end(step)
        return keys, values

    def columns_of(self, layer: int) -> int:
        """Tokens that a layer has been served, padding included."""
        return self._served[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._served[layer_idx] if layer_idx < len(self._served) else 0

    @_plain_tensors
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; 0 removes none. Positive numbers are an error, as in
        transformers >= 5.20, where the sign once meant an absolute length."""
        self._open()
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative integer"
            )
        self._abort()
        columns = max(0, self._columns + tokens_to_remove)
        if columns == self._columns:
            return
        before = [session.length for session in self._sessions]
        try:
            for session, pad in zip(self._sessions, self._pads, strict=True):
                session.crop(min(session.length, max(0, columns - pad)))
        except BaseException:
            if before != [session.length for session in self._sessions]:
                self.reset()  # some rows are cut, some are not: no state to go on from
            raise
        self._prompt = None
        self._engine.forget()
        self._set_columns(columns)

    def reset(self) -> None:
        """Forget the sequences; their sealed pages stay in the store."""
        self._open()
        self._abort()
        for session in self._sessions:
            session.close()
        self._sessions = [Session(self.store, self.identity, name=self.name)]
        self._pads = [0]
        self._usual = True
        self._prompt = None
        self._guard.verified = False
        self._engine.forget()
        self._set_columns(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` goes on from what is row ``beam_idx[i]`` now; pages are shared, unsealed ones copied."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` rows."""
        self._select([row for row in range(len(self._sessions)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``: numbers, or a boolean a row."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist())

    def activate_past_recording(self) -> None:
        """Assisted decoding asks for it; every ``crop`` works here without."""

    # ------------------------------------------------------------------ what users call

    @property
    def staging_bytes(self) -> int:
        """VRAM outside the tier in which a layer's K and V are gathered, both halves."""
        return self._engine.staging_bytes

    @property
    def summary_bytes(self) -> int:
        """VRAM in which the summaries of all pages are kept (mode ``select``); taken from the tier."""
        return self._engine.summary_bytes

    @property
    def mode(self) -> str:
        """How decoding reads pages."""
        return self._engine.mode.text

    @property
    def pages_read(self) -> float | None:
        """Sealed pages that a layer that selects has read in a step, the mean; ``None`` if all are read."""
        return self._engine.pages_read

    @property
    def sessions(self) -> Sequence[Session]:
        """One a row."""
        return tuple(self._sessions)

    @_plain_tensors
    def seal(self) -> int:
        """Turn full pages of the last forward into shareable ones now instead of at the next; how many."""
        self._open()
        return sum(session.seal() for session in self._sessions)

    def flush(self, timeout_s: float | None = None) -> int:
        """Seal, and wait until the disk has acknowledged everything; see ``TieredStore.flush``."""
        self.seal()
        return self.store.flush(timeout_s)

    @_plain_tensors
    def fork(self) -> TieredCache:
        """A second continuation of the same tokens, sharing all sealed pages. ``copy.deepcopy`` does the same."""
        self._open()
        self._abort()
        model = self._guard.model
        if model is None:
            raise ClosedError("the cache's model is gone; it cannot be forked")
        self._guard.check_adapters(self._columns)
        other = TieredCache(
            model, self.store, identity=self.identity, name=self.name, mode=self._engine.mode
        )
        try:
            sessions: list[Session] = []
            for session in self._sessions:
                sessions.append(session.fork())
        except BaseException:
            for session in sessions:
                session.close()
            other.close()
            raise
        for session in other._sessions:
            session.close()
        other._sessions = sessions
        other._pads = list(self._pads)
        other._usual = self._usual
        other._prompt = self._prompt
        other._guard.verified = self._guard.verified
        other._set_columns(self._columns)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TieredCache cannot be pickled; its pages are in the store, under their keys"
        )

    @_plain_tensors
    def close(self) -> None:
        """Give everything back. Sealed pages stay in the store. Idempotent, in any state, also after the store."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        with contextlib.ExitStack() as stack:
            # Last to first, each even if one before it fails.
            if self._attached is not None:
                stack.callback(self._attached.close)
            stack.callback(_unless_closed, self._engine.close)
            for session in self._sessions:
                stack.callback(_unless_closed, session.close)
                if not self.store.closed:
                    stack.callback(_unless_closed, session.seal)
            stack.callback(_unless_closed, self._abort)

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ passes

    def expect(self, inputs: ForwardInputs) -> None:
        """The model is about to run with these inputs on this cache (called by the forward hook)."""
        self._open()
        self._abort()
        self._guard.check_adapters(self._columns)
        if inputs.input_ids is not None and not inputs.input_ids.numel():
            raise UnsupportedModelError(
                f"the model is fed no token, and the cache holds {self._columns}: it is left over from another, "
                "longer prompt; use reset() or a new TieredCache"
            )
        self._inputs = inputs

    def finished(self, complete: bool) -> None:
        """The model's run on this cache has ended, ``complete`` if not by an exception (called by the forward hook).
        One that did not get to the last layer has appended nothing."""
        self._inputs = None
        if self._closed or self._step is None:
            return
        if complete and self._done[self._last] and not self._engine.unread:
            self._end(self._step)
            return
        unread, missing = (
            self._engine.unread,
            self._done.index(False) if False in self._done else -1,
        )
        self._abort()
        if complete and unread:
            raise UnsupportedModelError(
                f"layer {min(unread)} was not read through transformers' attention interface; this model can be "
                "served in mode exact-stream only"
            )
        if complete:
            raise UnsupportedModelError(
                f"the model has finished without updating layer {missing}; the cache serves only models that "
                "run all layers of the store's layout, in order"
            )

    @_plain_tensors
    def _begin(self, k: torch.Tensor) -> None:
        self._open()
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            raise UnsupportedModelError(
                "the cache is updated outside a forward pass of the model that it was made for; "
                "make a TieredCache for the model that you run"
            )
        if not self._columns and not self._guard.verified:
            self._guard.check_identity()
        rows, count = k.shape[0], k.shape[-2]
        if rows != len(self._sessions):
            self._broadcast(rows)
        feed = read_feed(
            inputs,
            before=self._columns,
            count=count,
            pads=self._pads,
            lengths=[session.length for session in self._sessions],
            usual=self._usual,
        )
        if self._prompt is not None and check_prompt(self._prompt, self._sessions, feed):
            self._prompt = None
        self._speed.foresee(feed.columns, rows)
        self._pads, self._usual = feed.pads, feed.usual
        for session in self._sessions:
            session.seal()
        self.store.poll()
        self._engine.prepare([session.pages for session in self._sessions], feed.count)
        reserve_all(self._sessions, feed.news)
        try:
            rows_now = [
                Row(session.lease()[0], session.tails, pad, session.length, new, count - new)
                for session, pad, new in zip(self._sessions, feed.pads, feed.news, strict=True)
            ]
            # Batched matrix products round differently on other strides; single ones do not.
            self._engine.stream.contiguous = rows > 1 and self._guard.eager
            self._engine.begin(rows_now, self._columns, feed.columns, in_place=not inputs.masked)
        except BaseException:
            self._undo()
            raise
        self._step = feed
        self._done = [False] * len(self._done)

    def _end(self, step: Feed) -> None:
        self._step = None
        # What a lossy step computes is not what the model would have: such tokens get keys of their own.
        note = None if self._engine.exact else self._engine.mode.text.encode()
        self._rest()
        for session, new, tokens in zip(self._sessions, step.news, step.tokens, strict=True):
            if new:
                at = session.length
                extras = dict.fromkeys(range(at, at + new), note) if note else None
                session.extend(new, tokens, extras)
        self._set_columns(step.columns)
        self._speed.step(step.count, step.columns, len(self._sessions))

    def _rest(self) -> None:
        """The leases may be ended from now on, behind the work of this pass."""
        stream, event = self._engine.end()
        for session in self._sessions:
            session.rest(stream, event)

    def _abort(self) -> None:
        """A forward pass that ended before its last layer (an error, a stop) has appended nothing."""
        if self._step is None:
            return
        self._step = None
        self._undo()

    def _undo(self) -> None:
        self._rest()
        give_back_spare(self._sessions)
        self._set_columns(self._columns)

    # ------------------------------------------------------------------ rows

    @_plain_tensors
    def _select(self, rows: list[int]) -> None:
        """Make the rows what the rows ``rows`` are now."""
        self._open()
        self._abort()
        if rows == list(range(len(self._sessions))):
            return
        self._sessions = select_rows(self._sessions, rows)
        self._engine.rearrange(rows)
        self._pads = [self._pads[row] for row in rows]
        if self._prompt is not None:
            self._prompt = [self._prompt[row] for row in rows]

    def _set_rows(self, rows: int) -> None:
        while len(self._sessions) < rows:
            self._sessions.append(Session(self.store, self.identity, name=self.name))
            self._pads.append(0)
        while len(self._sessions) > rows:
            self._sessions.pop().close()
            self._pads.pop()

    def _broadcast(self, rows: int) -> None:
        """More rows than were restored: ``num_beams`` or ``num_return_sequences`` on one prompt."""
        have = len(self._sessions)
        if rows % have == 0 and (self._columns or self._prompt is not None):
            self._select([row for row in range(have) for _ in range(rows // have)])
        elif not self._columns:
            self._prompt = None
            self._set_rows(rows)
        else:
            raise ConfigError(
                f"the cache holds {have} sequences, the model is run on {rows}; "
                "reset() the cache or use another one"
            )

    def _set_columns(self, columns: int) -> None:
        self._columns = columns
        self._served = [columns] * len(self._served)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the TieredCache is closed; make a new one")


def _unless_closed(action: Callable[[], object]) -> None:
    """A store or device that was closed has taken its memory back already."""
    with contextlib.suppress(ClosedError):
        action()
