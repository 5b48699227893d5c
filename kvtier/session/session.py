"""A session: one sequence of tokens and the pages that hold its KV.

The sequence is a block table. Its first entries are sealed pages, owned but free to move between tiers; the
last ones are tails, VRAM slots that are still being written. A step reserves room, leases the sealed pages
where they are, appends to the tails and gives the lease back; full tails become pages when the next step
begins, so that a ``crop`` in between (rejected draft tokens) seals nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from kvtier.attention.summaries import write_summaries
from kvtier.cost.tier_load import Expected
from kvtier.devices.base import Event
from kvtier.errors import ClosedError, ConfigError, IdentityError
from kvtier.identity import ModelIdentity
from kvtier.keys import KeyChain, Tokens, page_keys
from kvtier.mover import events
from kvtier.policy import ANONYMOUS, Request
from kvtier.store.lease import Lease
from kvtier.store.page import Page
from kvtier.store.store import TieredStore
from kvtier.tiers.memory import Slot


class Session:
    """One sequence in a store.

    Args:
        store: where its pages live.
        identity: what the KV is computed with; its layout must be the store's.
        name: shown in errors that say who holds pages.
        expect: how long the sequence will get, and the weights read beside it: what will be slow is said at
            once (``TieredStore.foresee``).
        request: hints for the policies: to which conversation it belongs (by default to none but itself),
            priority, time to live.

    Raises:
        IdentityError: the identity belongs to another layout, page size or codec.
    """

    def __init__(
        self,
        store: TieredStore,
        identity: ModelIdentity,
        *,
        name: str = "session",
        expect: Expected | None = None,
        request: Request = ANONYMOUS,
    ) -> None:
        if identity.layout_digest != store.layout.digest:
            raise IdentityError(
                "the identity belongs to another page layout than the store; build both from one model"
            )
        if identity.kv_quantisation != store.kv_quantisation:
            raise IdentityError(
                f"the identity is of pages kept {identity.kv_quantisation or 'exactly'}, the store keeps them "
                f"{store.kv_quantisation or 'exactly'}; give the identity "
                "kv_quantisation=store.kv_quantisation"
            )
        if expect is not None:
            store.foresee(expect, stacklevel=2)
        self.store = store
        self.identity = identity
        self.name = name
        self.page_tokens = store.layout.page_tokens
        self.owner = store.new_owner(name)
        self.request = (
            request if request.session is not None else request._replace(session=self.owner)
        )
        store.describe_identity(identity)
        #: Tokens and keys as far as the tokens are known; ``None`` once a token was not.
        self.chain: KeyChain | None = KeyChain(identity, self.page_tokens)
        #: Sealed pages in order, and the page that stands for the key of each.
        self.pages: list[Page] = []
        self.public: list[Page] = []
        #: Unsealed slots behind them, in order.
        self.tails: list[Slot] = []
        #: Tokens whose KV is in pages and tails.
        self.length = 0
        self.closed = False
        self._lease: Lease | None = None
        self._written: Event | None = None

    def __len__(self) -> int:
        return self.length

    # ------------------------------------------------------------------ prefix

    def restore(
        self,
        tokens: Tokens,
        *,
        extras: Mapping[int, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Take over the longest stored prefix of ``tokens`` in whole pages, at least one token short of all of
        them (the model must still be run on the last one). Only for an empty session.

        Returns:
            Tokens restored; prefill the rest.
        """
        self._open()
        if self.length or self.tails:
            raise ConfigError(
                f"the session already has {self.length} tokens; restore needs an empty one"
            )
        keys = page_keys(self.identity, tokens, self.page_tokens, extras)
        limit = (_count(tokens) - 1) // self.page_tokens
        lease = self.store.match(keys[: max(0, limit)], request=self.request, timeout_s=timeout_s)
        try:
            length = len(lease) * self.page_tokens
            chain = KeyChain(self.identity, self.page_tokens)
            known = {p: x for p, x in (extras or {}).items() if p < length}
            chain.append(_first(tokens, length), known)
            self.store.own(lease.pages, self.owner)
        except BaseException:
            lease.close()
            raise
        self.pages, self.public = list(lease.pages), list(lease.pages)
        self._lease, self.chain, self.length = lease, chain, length
        self.store.keep_idle(lease)
        return length

    # ------------------------------------------------------------------ a step

    def reserve(self, tokens: int, *, timeout_s: float | None = None) -> list[Slot]:
        """Make sure that ``tokens`` more tokens have slots; the slots that are new.

        Raises:
            TierFullError: VRAM has no room and nothing in it may go; nothing was changed.
        """
        self._open()
        need = self.store.layout.pages(self.length + tokens) - len(self.pages) - len(self.tails)
        if need <= 0:
            return []
        fresh = self.store.take_tails(need, owner=self.owner, timeout_s=timeout_s)
        self.tails += fresh
        return fresh

    def lease(self) -> tuple[Lease, bool]:
        """The lease over the sealed pages for a step, and whether it is a new one."""
        self._open()
        if (
            self._lease is not None
            and len(self._lease) == len(self.pages)
            and self.store.use_again(self._lease)
        ):
            return self._lease, False
        self._end_lease()
        self._lease = self.store.lease(self.pages)
        return self._lease, True

    def extend(
        self, count: int, tokens: Tokens | None, extras: Mapping[int, bytes] | None = None
    ) -> None:
        """``count`` tokens have been appended; ``tokens`` are their ids if they are known.

        Raises:
            ConfigError: more tokens than were reserved, or ids that do not fit; nothing was changed.
        """
        self._open()
        room = (len(self.pages) + len(self.tails)) * self.page_tokens
        if count < 0 or self.length + count > room:
            raise ConfigError(
                f"{count} tokens cannot be appended to {self.length}: {room} have room; reserve first"
            )
        if tokens is not None and _count(tokens) != count:
            raise ConfigError(
                f"{count} tokens were appended, but {_count(tokens)} token ids are given"
            )
        if tokens is None and count:
            self.chain = None
        if self.chain is not None and tokens is not None:
            self.chain.append(tokens, extras)
        self.length += count

    def rest(self, stream: str, event: Event) -> None:
        """The step is over: ``event`` stands for all of its work on ``stream``."""
        self._written = event
        if self._lease is not None and not self._lease.closed:
            self._lease.last_read = (stream, event)
            self.store.keep_idle(self._lease)

    def seal(self, *, timeout_s: float | None = None) -> int:
        """Turn full tails into pages: from now on they have a key, may move, and can be shared. The number of
        pages sealed."""
        self._open()
        full = self.length // self.page_tokens - len(self.pages)
        if full > 0 and self.store.layout.summaries:
            self._written = write_summaries(self.store, self.tails[:full], self._written)
        sealed = 0
        while self.tails and self.length >= (len(self.pages) + 1) * self.page_tokens:
            index = len(self.pages)
            key = self.chain.keys[index] if self.chain is not None else None
            written = self._written or self.store.device.compute_stream().record()
            page, public = self.store.seal(
                self.tails[0], key=key, parent=self.public[-1] if self.public else None,
                identity=self.identity.digest, written=written, owner=self.owner,
                request=self.request, timeout_s=timeout_s,
            )  # fmt: skip
            self.tails.pop(0)
            self.pages.append(page)
            self.public.append(public)
            sealed += 1
        return sealed

    # ------------------------------------------------------------------ whole sequence

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens. A page that is cut goes on as a tail, from a copy: others may share it.

        Raises:
            ConfigError: ``length`` is negative or more than there are.
        """
        self._open()
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot crop to {length} tokens; the sequence has {self.length}")
        if length == self.length:
            return
        full = length // self.page_tokens
        if full < len(self.pages):
            if length % self.page_tokens:
                self._end_lease()
                fresh = self.store.take_tails(1, owner=self.owner)
                try:
                    self.store.fill_tail(fresh[0], self.pages[full])
                except BaseException:
                    self.store.give_tails(fresh, [])
                    raise
            else:
                self._end_lease()
                fresh = []
            self.store.give_tails(self.tails, self._last_work())
            self.tails = fresh
            self._disown(full)
            self._written = None
        else:
            keep = self.store.layout.pages(length) - len(self.pages)
            self.store.give_tails(self.tails[keep:], self._last_work())
            del self.tails[keep:]
        self.length = length
        if self.chain is not None and len(self.chain) > length:
            self.chain.truncate(length)

    def fork(self, *, name: str | None = None) -> Session:
        """A second continuation: sealed pages are shared, unsealed ones copied."""
        self.seal()
        other = Session(self.store, self.identity, name=name or self.name, request=self.request)
        self._end_lease()  # making room for the copies may have to move pages
        slots = self.store.take_tails(len(self.tails), owner=other.owner) if self.tails else []
        try:
            if self._written is not None:
                self.store.device.compute_stream().wait(self._written)
            self.store.copy_tails(list(zip(slots, self.tails, strict=True)))
        except BaseException:
            self.store.give_tails(slots, [])
            raise
        other.tails = slots
        other.pages, other.public = list(self.pages), list(self.public)
        self.store.own(other._owned(0), other.owner)
        other.chain = self.chain.fork() if self.chain is not None else None
        other.length = self.length
        return other

    def close(self, *, ended: bool = False) -> None:
        """Give up all pages and slots. What is sealed stays in the store for others. Idempotent, in any state.

        Args:
            ended: the conversation is over too, and nobody will ask for its continuation; a policy may give
                its pages up first.
        """
        if self.closed:
            return
        if ended and not self.store.closed:
            self.store.end_session(self.request.session, [page.key for page in self.public])
        self._end_lease()
        self.store.give_tails(self.tails, self._last_work() if self.tails else [])
        self.tails = []
        self._disown(0)
        self.length = 0
        self.closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _open(self) -> None:
        if self.closed:
            raise ClosedError(f"session {self.owner} is closed; open a new one")

    def _end_lease(self) -> None:
        lease = self._lease
        if lease is not None:
            if not (lease.idle or lease.closed or self.store.closed):
                # A step was given up: it may still read the pages.
                compute = self.store.device.compute_stream()
                lease.last_read = (compute.name, compute.record())
            lease.close()
            self._lease = None

    def _last_work(self) -> list[Event]:
        if self.store.closed:
            return []
        return events([self._written, self.store.device.compute_stream().record()])

    def _owned(self, start: int) -> list[Page]:
        return [
            p
            for pair in zip(self.pages[start:], self.public[start:], strict=True)
            for p in dict.fromkeys(pair)
        ]

    def _disown(self, start: int) -> None:
        self.store.disown(self._owned(start), self.owner)
        del self.pages[start:], self.public[start:]


def _count(tokens: Tokens) -> int:
    return len(tokens)  # type: ignore[arg-type]


def _first(tokens: Tokens, count: int) -> Tokens:
    return tokens[:count]  # type: ignore[index]
