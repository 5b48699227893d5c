"""Sequences of random KV that an ``AttentionEngine`` decodes, beside the same KV as plain tensors."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from kvtier.attention.engine import AttentionEngine
from kvtier.attention.mode import Mode
from kvtier.attention.window import Row
from kvtier.devices.emulated import EmulatedDevice
from kvtier.identity import ModelIdentity
from kvtier.layout import LayerLayout, PageLayout
from kvtier.session.session import Session
from kvtier.store.store import TieredStore

FULL = LayerLayout.attention(2, 4, "float32")
SLIDING = LayerLayout.attention(2, 4, "float32", window=5)
#: Query heads for each KV head.
GROUP = 2


def identity(layout: PageLayout) -> ModelIdentity:
    return ModelIdentity(
        model="m", revision="", weights_digest=b"w" * 32, weights_quantisation="", kv_dtype="x",
        kv_quantisation="", rope="", attention="a", layout_digest=layout.digest, page_tokens=layout.page_tokens,
    )  # fmt: skip


@contextlib.contextmanager
def a_store(
    layers: list[LayerLayout],
    *,
    page: int = 4,
    vram: int = 6,
    host: int = 3,
    disk: int = 4 << 20,
    **options: Any,
) -> Iterator[TieredStore]:
    """A store with summaries; its books are zero in the end, and so is the device's memory."""
    layout = PageLayout(layers, page, summaries=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        device = EmulatedDevice(vram_bytes=16 << 20)
        stack.callback(device.close)
        store = TieredStore(
            layout, device=device, vram=vram * layout.page_bytes, host=host * layout.page_bytes,
            disk=disk, path=folder if disk else None, check=True, durability="relaxed", **options,
        )  # fmt: skip
        stack.callback(store.close)
        yield store
        stats = store.stats()
        assert (stats.leases, stats.owners) == (0, 0)
        store.close()
        assert (device.used_bytes, device.host_bytes) == (0, 0)


class PagedBatch:
    """Rows of which each step is compared with dense attention, where the mode is exact or reads everything.

    Args:
        pads: padding before each row.
        wild: factor on the queries; logits of dozens from 20 on.
    """

    def __init__(
        self,
        store: TieredStore,
        mode: Mode,
        pads: list[int],
        *,
        engine: type[AttentionEngine] = AttentionEngine,
        seed: int = 0,
        wild: float = 1.0,
        exact: bool = True,
    ) -> None:
        self.store, self.pads, self.wild, self.exact = store, pads, wild, exact
        self.layout = store.layout
        self.engine = engine(store, mode)
        self.sessions = [Session(store, identity(store.layout)) for _ in pads]
        self.generator = torch.Generator().manual_seed(seed)
        self.columns = 0
        self.worst = 0.0
        #: (layer, row) -> K and V of its tokens, ``[heads, tokens, dim]``.
        self.plain: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def begin(self, count: int) -> None:
        """Start a step of ``count`` columns."""
        before, columns = self.columns, self.columns + count
        self.news = [max(0, columns - max(pad, before)) for pad in self.pads]
        for session in self.sessions:
            session.seal()
        self.engine.prepare([session.pages for session in self.sessions], count)
        for session, new in zip(self.sessions, self.news, strict=True):
            session.reserve(new)
        rows = [
            Row(s.lease()[0], s.tails, min(pad, columns), s.length, new, count - new)
            for s, pad, new in zip(self.sessions, self.pads, self.news, strict=True)
        ]
        self.engine.begin(rows, before, columns)

    def layer(self, layer: int, count: int) -> None:
        """Append to a layer and read it."""
        heads, dim = self.layout.plane(layer).k.heads, self.layout.plane(layer).k.dim
        k, v = (self.random(len(self.pads), heads, count, dim) for _ in range(2))
        for row, new in enumerate(self.news):
            old = self.plain.get((layer, row), (k[row, :, :0], v[row, :, :0]))
            cut = slice(count - new, count)
            self.plain[layer, row] = (
                torch.cat([old[0], k[row, :, cut]], 1),
                torch.cat([old[1], v[row, :, cut]], 1),
            )
        self.engine.update(layer, k, v)
        if not self.engine.reads_in_place(layer):
            return
        q = self.random(len(self.pads), heads * GROUP, dim) * self.wild
        out = self.engine.attend(layer, q, None)
        for row, length in enumerate(session.length for session in self.sessions):
            keys, values = self.plain[layer, row]
            if not length and not keys.shape[1]:
                assert not out[row].any()
            elif self.exact:
                want = dense(q[row], keys, values)
                self.worst = max(self.worst, float((out[row] - want).abs().max()))

    def end(self, *, ids: bool = True) -> None:
        at, event = self.engine.end()
        for number, (session, new) in enumerate(zip(self.sessions, self.news, strict=True)):
            session.rest(at, event)
            if new:
                first = session.length
                tokens = [number * 1000 + n for n in range(first, first + new)] if ids else None
                session.extend(new, tokens)

    def step(self, count: int = 1, *, ids: bool = True) -> None:
        self.begin(count)
        for layer in range(len(self.layout.layers)):
            self.layer(layer, count)
        self.end(ids=ids)
        self.columns += count

    def drop_down(self, dice: Any, share: float) -> None:
        """Demote some of the sealed pages, once or twice."""
        for session in self.sessions:
            for page in session.pages:
                while dice.random() < share and self.store.demote(page.key):
                    pass

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.engine.close()


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention in float64: ``[heads, dim]`` over ``[kv_heads, tokens, dim]``."""
    heads, dim = q.shape
    grouped = q.double().view(keys.shape[0], -1, dim)
    scores = grouped @ keys.double().transpose(1, 2) / dim**0.5
    return (scores.softmax(-1) @ values.double()).view(heads, dim).to(q.dtype)
