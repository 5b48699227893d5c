"""A session that writes and checks known bytes: what attention does, without the attention."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Tokens

import torch
from store_model import IDENTITY, LAYOUT, PAGE

from kvtier.devices.base import Buffer, Device
from kvtier.mover import order_behind
from kvtier.session.session import Session
from kvtier.store.store import TieredStore
from kvtier.tiers.memory import Slot

TOKENS = LAYOUT.page_tokens
#: Where the bytes of one token lie in a page: (first byte, bytes) of token 0, part by part.
PARTS = [
    (part.offset, part.nbytes // TOKENS)
    for plane in LAYOUT.planes
    if plane is not None
    for part in (plane.k, plane.v)
]
TOKEN_BYTES = sum(nbytes for _, nbytes in PARTS)


def token_bytes(prefix: Tokens[int], variant: int) -> bytes:
    """The KV of the last token of ``prefix``, as run number ``variant`` computes it."""
    return hashlib.shake_128(repr((list(prefix), variant)).encode()).digest(TOKEN_BYTES)


def of_page(page: bytes, token: int) -> bytes:
    """The bytes of one token of a page."""
    return b"".join(page[at + token * n : at + (token + 1) * n] for at, n in PARTS)


class Sequence:
    """A session, and what it must hold.

    Attributes:
        tokens: its tokens.
        kv: the KV of each token.
    """

    def __init__(
        self,
        store: TieredStore,
        session: Session | None = None,
        *,
        scratch: Buffer | None = None,
    ) -> None:
        #: VRAM for one page; with it, each step also reads the leased pages that are in host RAM.
        self.scratch = scratch
        self.store = store
        self.session = session or Session(store, IDENTITY, name="test")
        self.tokens: list[int] = []
        self.kv: list[bytes] = []
        #: Whether the tokens are known to the session.
        self.named = True

    def restore(self, tokens: list[int]) -> int:
        """See ``Session.restore``; takes what is found as this sequence's numbers."""
        found = self.session.restore(tokens)
        assert found % TOKENS == 0
        assert found < max(1, len(tokens))
        self.tokens = tokens[:found]
        with self.store.lease(self.session.pages) as lease:
            pages = [lease.read(i).numpy().tobytes() for i in range(len(lease))]
        self.kv = [of_page(page, token) for page in pages for token in range(TOKENS)]
        return found

    def append(self, tokens: list[int], variant: int, *, named: bool = True) -> None:
        """A step: seal, reserve, lease, write the new tokens, rest."""
        session, device = self.session, self.store.device
        session.seal()
        session.reserve(len(tokens))
        lease, _ = session.lease()
        compute = device.compute_stream()
        for slot in session.tails:
            order_behind(compute, slot)
        for copy in lease.copies:
            if copy.tier == "vram" and copy.written is not None:
                compute.wait(copy.written)
        reads = [c.slot.range() for c in lease.copies if c.tier == "vram" and c.slot is not None]
        new: list[bytes] = []
        for number in range(len(tokens)):
            new.append(token_bytes(self.tokens + tokens[: number + 1], variant))
        sealed = len(session.pages)
        writes = []
        for number, data in enumerate(new):
            page, token = divmod(len(self.tokens) + number, TOKENS)
            slot, start = session.tails[page - sealed], 0
            for at, nbytes in PARTS:
                piece = torch.frombuffer(bytearray(data[start : start + nbytes]), dtype=torch.uint8)
                writes.append((slot.range(at + token * nbytes, nbytes), piece))
                start += nbytes

        def kernel() -> None:
            for target, piece in writes:
                target.raw().copy_(piece)

        device.launch(compute, "append", kernel, reads=reads, writes=[at for at, _ in writes])
        for copy in lease.copies:
            if copy.tier == "host" and copy.slot is not None and self.scratch is not None:
                device.copy(compute, [(self.scratch.range(), copy.slot.range())])
        session.rest(compute.name, compute.record())
        session.extend(len(tokens), tokens if named else None)
        self.named = self.named and (named or not tokens)
        self.tokens += tokens
        self.kv += new

    def fork(self) -> Sequence:
        other = Sequence(self.store, self.session.fork(), scratch=self.scratch)
        other.tokens, other.kv, other.named = list(self.tokens), list(self.kv), self.named
        return other

    def crop(self, length: int) -> None:
        self.session.crop(length)
        del self.tokens[length:], self.kv[length:]

    def check(self) -> None:
        """The session's bytes are the ones it has had all the time."""
        session = self.session
        assert session.length == len(self.tokens)
        with self.store.lease(session.pages) as lease:
            pages = [lease.read(i).numpy().tobytes() for i in range(len(lease))]
        pages += [read_slot(self.store.device, slot) for slot in session.tails]
        for at, kv in enumerate(self.kv):
            page, token = divmod(at, TOKENS)
            assert of_page(pages[page], token) == kv, f"token {at} of {len(self.kv)} has changed"


def read_slot(device: Device, slot: Slot) -> bytes:
    """The bytes of a tail, read after all compute work."""
    host = device.alloc_host(PAGE)
    try:
        compute = device.compute_stream()
        device.copy(compute, [(host.range(), slot.range())])
        compute.synchronize(10.0)
        return device.host(host.range()).numpy().tobytes()
    finally:
        device.free(host)
