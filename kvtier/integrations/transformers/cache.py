"""``TieredCache``: a transformers cache whose KV lives in a kvtier store."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvtier.attention.stream import ExactStream
from kvtier.attention.window import Row
from kvtier.errors import ClosedError, ConfigError, IdentityError, TierFullError, UnsupportedModelError
from kvtier.identity import ModelIdentity
from kvtier.integrations.transformers.adapters import adapter_state
from kvtier.integrations.transformers.hook import ForwardInputs, watch_forward
from kvtier.integrations.transformers.identity import identity_of
from kvtier.integrations.transformers.layer import TieredLayer
from kvtier.session.session import Session
from kvtier.store.store import TieredStore


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
    adapters under the cache, a forward pass whose new tokens do not fit in VRAM at once (use a smaller
    ``prefill_chunk_size``).

    Token ids are read from the model's forward calls. Where they cannot be (``inputs_embeds``, pixel values) the
    cache still works, but nothing of that sequence is shared or found again.

    Args:
        model: the transformers model (a PEFT model works too); sets the identity of the pages.
        store: a store with ``layout_of(model)``.
        identity: what ``identity_of(model)`` gave, to compute it once for several caches.
        tenant: keeps pages apart from those of other tenants.
        columns: tokens (prompt and new) to make staging room for at once; it grows on demand.
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
    ) -> None:
        self.store = store
        self.name = name
        self.identity = identity or identity_of(model, layout=store.layout, tenant=tenant)
        if identity is not None and tenant and tenant != identity.tenant:
            raise ConfigError(f"tenant is {tenant!r}, but the identity was made for {identity.tenant!r}; give one of them")
        super().__init__(layers=[TieredLayer(self, n, layer.window) for n, layer in enumerate(store.layout.layers)])
        self._stream = ExactStream(store, columns=columns)
        self._sessions = [Session(store, self.identity, name=name)]
        self._pads = [0]
        self._columns = 0
        #: Columns that each layer has been served; layers of one step differ until its last.
        self._served = [0] * len(store.layout.layers)
        self._step: _Step | None = None
        self._inputs: ForwardInputs | None = None
        self._closed = False
        self._adapters = adapter_state(model)
        self._model = weakref.ref(model)
        self._unwatch = watch_forward(model, self)

    # ------------------------------------------------------------------ prefix

    def load_prefix(self, input_ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: torch.Tensor | None = None) -> int:
        """Take over what the store has of a prompt. Call it before ``generate`` or the first forward.

        Args:
            input_ids: ``[rows, N]``, the whole prompt.
            attention_mask: ``[rows, N]``, for left-padded batches.

        Returns:
            Columns restored, the same for all rows: whole pages of each row, at most ``N - 1``. ``generate`` takes
            the full ``input_ids`` and skips them; a forward loop starts at that column.
        """
        self._open()
        if self._columns:
            raise ConfigError(f"the cache already holds {self._columns} tokens; load_prefix needs a new one or reset()")
        ids = torch.as_tensor(input_ids)
        if ids.dim() != 2 or not ids.shape[1]:
            raise ConfigError(f"input_ids have shape {tuple(ids.shape)}; give [rows, tokens] with at least one token")
        self._check_identity()
        pads = _left_padding(attention_mask, ids.shape[0], ids.shape[1])
        self._set_rows(ids.shape[0])
        found = []
        for session, pad, row in zip(self._sessions, pads, ids.tolist(), strict=True):
            found.append(pad + session.restore(row[pad:]))
        # Columns are one number for the batch: the shortest row decides, the others are cut to it.
        columns = min(found)
        if columns <= max(pads):
            columns = 0
        for session, pad in zip(self._sessions, pads, strict=True):
            session.crop(max(0, columns - pad))
        self._pads = pads if columns else [0] * len(pads)
        self._set_columns(columns)
        return columns

    # ------------------------------------------------------------------ what transformers calls

    def serve(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's ``update``."""
        if self._step is None:
            self._step = self._begin(k)
        if self._step.done[layer]:
            raise ConfigError(f"layer {layer} was updated twice in one forward pass; use one cache for one model and one call at a time")
        keys, values = self._stream.update(layer, k, v)
        self._step.done[layer] = True
        self._served[layer] = self._step.columns
        if layer == self._stream.layers[-1]:
            self._end()
        return keys, values

    def columns_of(self, layer: int) -> int:
        """Tokens that a layer has been served, padding included."""
        return self._served[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._served[layer_idx] if layer_idx < len(self._served) else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; 0 removes none. Positive numbers are an error, as in
        transformers >= 5.20, where the sign once meant an absolute length."""
        self._open()
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative integer")
        self._abort_step()
        columns = max(0, self._columns + tokens_to_remove)
        if columns == self._columns:
            return
        for session, pad in zip(self._sessions, self._pads, strict=True):
            session.crop(min(session.length, max(0, columns - pad)))
        self._set_columns(columns)

    def reset(self) -> None:
        """Forget the sequences; their sealed pages stay in the store."""
        self._open()
        self._abort_step()
        for session in self._sessions:
            session.close()
        self._sessions = [Session(self.store, self.identity, name=self.name)]
        self._pads = [0]
        self._set_columns(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` goes on from what is row ``beam_idx[i]`` now; pages are shared, unsealed ones copied."""
        self._open()
        self._select([int(i) for i in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` rows."""
        self._select([row for row in range(len(self._sessions)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select([int(i) for i in indices])

    def activate_past_recording(self) -> None:
        """Assisted decoding asks for it; every ``crop`` works here without."""

    # ------------------------------------------------------------------ what users call

    @property
    def staging_bytes(self) -> int:
        """VRAM outside the tier in which a layer's K and V are gathered, both halves."""
        return self._stream.staging.nbytes

    @property
    def sessions(self) -> Sequence[Session]:
        """One a row."""
        return tuple(self._sessions)

    def seal(self) -> int:
        """Turn full pages of the last forward into shareable ones now instead of at the next; how many."""
        self._open()
        return sum(session.seal() for session in self._sessions)

    def flush(self, timeout_s: float | None = None) -> int:
        """Seal, and wait until the disk has acknowledged everything; see ``TieredStore.flush``."""
        self.seal()
        return self.store.flush(timeout_s)

    def fork(self) -> TieredCache:
        """A second continuation of the same tokens, sharing all sealed pages. ``copy.deepcopy`` does the same."""
        self._open()
        model = self._model()
        if model is None:
            raise ClosedError("the cache's model is gone; it cannot be forked")
        other = TieredCache(model, self.store, identity=self.identity, name=self.name)
        for session in other._sessions:
            session.close()
        other._sessions = [session.fork() for session in self._sessions]
        other._pads = list(self._pads)
        other._set_columns(self._columns)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("a TieredCache cannot be pickled; its pages are in the store, under their keys")

    def close(self) -> None:
        """Give everything back. Sealed pages stay in the store. Idempotent, in any state."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self._step = None
        for session in self._sessions:
            if not self.store.closed and not session.closed:
                session.seal()
            session.close()
        self._stream.close()

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ steps

    def expect(self, inputs: ForwardInputs) -> None:
        """The model is about to run with these inputs on this cache (called by the forward hook)."""
        self._open()
        self._abort_step()
        if self._columns and inputs.rows is not None and inputs.rows == len(self._sessions) and inputs.columns is not None:
            self._check_mask(inputs)
        self._check_adapters()
        self._inputs = inputs

    def _begin(self, k: torch.Tensor) -> _Step:
        self._open()
        rows, count = k.shape[0], k.shape[-2]
        if rows != len(self._sessions):
            self._broadcast(rows)
        inputs, self._inputs = self._inputs, None
        if inputs is not None and (inputs.rows, inputs.columns) != (rows, count):
            inputs = None  # ids of something else than what this cache is fed (a vision prefix, say)
        if not self._columns:
            mask = inputs.attention_mask if inputs is not None else None
            self._pads = _left_padding(mask, rows, mask.shape[1] if mask is not None else 0)
        inputs = self._check_positions(inputs, count)
        columns = self._columns + count
        news = [max(0, columns - max(pad, self._columns)) for pad in self._pads]
        for session in self._sessions:
            session.seal()
        self.store.poll()
        self._reserve(news)
        plan, fresh = [], []
        for session, pad, new in zip(self._sessions, self._pads, news, strict=True):
            lease, is_new = session.lease()
            plan.append(Row(lease, session.tails, pad if new or session.length else columns, session.length, new, count - new))
            fresh.append(is_new)
        self._stream.begin(plan, self._columns, columns, fresh)
        ids = inputs.ids() if inputs is not None else None
        tokens = [row[count - new :] for row, new in zip(ids, news, strict=True)] if ids is not None else [None] * rows
        return _Step(columns, news, tokens, [False] * len(self._served))

    def _reserve(self, news: list[int]) -> None:
        try:
            for session, new in zip(self._sessions, news, strict=True):
                session.reserve(new)
        except TierFullError as error:
            chunk = self.store.sizes["vram"] // self.store.layout.page_bytes // 2 // len(news) * self.store.layout.page_tokens
            hint = f"; feed at most {chunk} tokens a forward pass (prefill_chunk_size={chunk})" if max(news) > max(1, chunk) else ""
            raise TierFullError(f"{error}{hint}", tier=error.tier, needed_bytes=error.needed_bytes, holders=error.holders) from None

    def _end(self) -> None:
        step = self._step
        assert step is not None
        self._step = None
        stream, event = self._stream.end()
        for session, new, tokens in zip(self._sessions, step.news, step.tokens, strict=True):
            session.rest(stream, event)
            if new:
                session.extend(new, tokens)
        self._columns = step.columns

    def _abort_step(self) -> None:
        """A forward pass that ended before its last layer (an error, a stop) has appended nothing."""
        if self._step is not None:
            self._step = None
            stream, event = self._stream.end()
            for session in self._sessions:
                session.rest(stream, event)
            self._set_columns(self._columns)

    # ------------------------------------------------------------------ rows

    def _select(self, rows: list[int]) -> None:
        """Make the rows what the rows ``rows`` are now."""
        self._abort_step()
        if rows == list(range(len(self._sessions))):
            return
        old, pads = self._sessions, self._pads
        last = {row: at for at, row in enumerate(rows)}
        new: list[Session] = []
        try:
            for at, row in enumerate(rows):
                # The last taker of a row gets the row itself.
                new.append(old[row] if last[row] == at else old[row].fork())
        except BaseException:
            for session in new:
                if session not in old:
                    session.close()
            raise
        for row, session in enumerate(old):
            if row not in last:
                session.close()
        self._sessions, self._pads = new, [pads[row] for row in rows]

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
        if not self._columns:
            self._set_rows(rows)
        elif rows % have == 0:
            self._select([row for row in range(have) for _ in range(rows // have)])
        else:
            raise ConfigError(f"the cache holds {have} sequences, the model is run on {rows}; reset() the cache or use another one")

    def _set_columns(self, columns: int) -> None:
        self._columns = columns
        self._served = [columns] * len(self._served)

    # ------------------------------------------------------------------ guards

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the TieredCache is closed; make a new one")

    def _check_identity(self) -> None:
        """The weights must still be those that the pages are keyed by."""
        model = self._model()
        if model is None:
            return
        now = identity_of(model, layout=self.store.layout, tenant=self.identity.tenant, revision=self.identity.revision or None)
        if now.digest != self.identity.digest:
            raise IdentityError("the model has changed since the cache was made (weights, adapters or configuration); make a new TieredCache")

    def _check_adapters(self) -> None:
        model = self._model()
        if model is not None and adapter_state(model) != self._adapters:
            if not self._columns:
                raise IdentityError("the active adapters have changed since the cache was made; make a new TieredCache")
            raise IdentityError(
                f"the active adapters have changed under a cache that holds {self._columns} tokens computed with the old "
                "ones; make a new TieredCache for the new adapters"
            )

    def _check_positions(self, inputs: ForwardInputs | None, count: int) -> ForwardInputs | None:
        """The new tokens must follow the cached ones. Tokens at positions of their own have KV of their own: they
        are served, but not shared (``None``).

        Raises:
            UnsupportedModelError: the model is fed tokens again that the cache holds.
        """
        if inputs is None or inputs.position_ids is None:
            return inputs
        for row, positions in enumerate(inputs.position_ids.tolist()):
            first = max(self._pads[row], self._columns)
            want = list(range(first - self._pads[row], self._columns + count - self._pads[row]))
            given = positions[count - len(want) :] if want else []
            if given != want:
                if self._columns and given and given[0] < want[0]:
                    raise UnsupportedModelError(
                        f"the model is fed position {given[0]} of a sequence of which the cache holds {want[0]} tokens. "
                        "Assisted and prompt-lookup decoding do that with a cache that was filled before; call "
                        "generate() on an empty cache for them (no load_prefix, or reset())"
                    )
                return None
        return inputs

    def _check_mask(self, inputs: ForwardInputs) -> None:
        mask = inputs.attention_mask
        if mask is None or mask.shape[1] != self._columns + (inputs.columns or 0):
            return
        pads = _left_padding(mask, mask.shape[0], mask.shape[1])
        if pads != self._pads:
            raise ConfigError(
                f"the attention mask says that the rows are padded by {pads}, the cached tokens by {self._pads}; "
                "pass the mask of the same prompt, or reset() the cache"
            )


class _Step:
    """A forward pass under way."""

    __slots__ = ("columns", "done", "news", "tokens")

    def __init__(self, columns: int, news: list[int], tokens: Sequence[list[int] | None], done: list[bool]) -> None:
        self.columns = columns
        self.news = news
        self.tokens = tokens
        self.done = done


def _left_padding(mask: torch.Tensor | None, rows: int, columns: int) -> list[int]:
    """Padding columns of each row.

    Raises:
        UnsupportedModelError: the mask has holes, or zeros at its end (right padding).
    """
    if mask is None or mask.dim() != 2:
        return [0] * rows
    pads = (mask == 0).sum(dim=1).tolist()
    for row, pad in enumerate(pads):
        if pad == columns or not bool((mask[row, pad:] != 0).all()):
            raise UnsupportedModelError(
                f"row {row} of the attention mask is not left-padded (zeros, then ones); set tokenizer.padding_side = 'left'"
            )
    return pads
