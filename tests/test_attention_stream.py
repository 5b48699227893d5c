"""``ExactStream`` against concatenated tensors, and the order of its copies and its work."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import kvtier.attention.staging as staging_module  # noqa: E402
import kvtier.attention.stream as stream_module  # noqa: E402
from kvtier.attention.stream import ExactStream  # noqa: E402
from kvtier.attention.window import Row  # noqa: E402
from kvtier.devices.emulated import EmulatedDevice  # noqa: E402
from kvtier.errors import ConfigError, DeviceOOMError, LayoutError, RaceError  # noqa: E402
from kvtier.identity import ModelIdentity  # noqa: E402
from kvtier.layout import LayerLayout, PageLayout  # noqa: E402
from kvtier.session.session import Session  # noqa: E402
from kvtier.store.store import TieredStore  # noqa: E402

FULL = LayerLayout.attention(2, 4, "float32")
LAYERS = {
    "full": FULL,
    "small": LayerLayout.attention(1, 3, "bfloat16"),  # 6 bytes a token: no alignment to rely on
    "window": LayerLayout.attention(2, 4, "float32", window=5),
    "wide": LayerLayout.attention(1, 8, "float16", window=19),
    "latent": LayerLayout.mla(6, 2, "float32"),
    "none": LayerLayout("none"),
}


def identity(layout: PageLayout) -> ModelIdentity:
    return ModelIdentity(
        model="m", revision="", weights_digest=b"w" * 32, weights_quantisation="", kv_dtype="x",
        kv_quantisation="", rope="", attention="a", layout_digest=layout.digest, page_tokens=layout.page_tokens,
    )  # fmt: skip


class Batch:
    """Sequences of random KV in a store, and the same KV as plain tensors."""

    def __init__(
        self,
        store: TieredStore,
        pads: list[int],
        stream: type[ExactStream] = ExactStream,
        seed: int = 0,
        columns: int = 64,
    ) -> None:
        self.store, self.pads = store, pads
        self.layout = store.layout
        self.sessions = [Session(store, identity(store.layout)) for _ in pads]
        self.stream = stream(store, columns=columns)
        self.generator = torch.Generator().manual_seed(seed)
        self.columns = 0
        self.plain: dict[tuple[int, int], torch.Tensor] = {}

    def values(self, layer: int, side: int, count: int) -> torch.Tensor:
        plane = self.layout.plane(layer)
        part = (plane.k, plane.v)[side]
        shape = (len(self.pads), part.heads, count, part.dim)
        return torch.randn(shape, generator=self.generator).to(getattr(torch, part.dtype))

    def step(self, count: int, ids: bool = False) -> None:
        """Feed ``count`` columns and compare what each layer sees."""
        before, columns = self.columns, self.columns + count
        news = [max(0, columns - max(pad, before)) for pad in self.pads]
        for session in self.sessions:
            session.seal()
        for session, new in zip(self.sessions, news, strict=True):
            session.reserve(new)
        rows = [
            Row(s.lease()[0], s.tails, min(pad, columns), s.length, new, count - new)
            for s, pad, new in zip(self.sessions, self.pads, news, strict=True)
        ]
        self.stream.begin(rows, before, columns)
        for layer in self.stream.layers:
            new_kv = [self.values(layer, side, count) for side in (0, 1)]
            seen = self.stream.update(layer, *new_kv)
            width = self.layout.layers[layer].window
            start = 0 if width is None else max(before - width + 1, 0)
            for side in (0, 1):
                for row, pad in enumerate(self.pads):
                    new_kv[side][row, :, : max(0, pad - before)] = 0
                old = self.plain.get((layer, side))
                now = new_kv[side] if old is None else torch.cat([old, new_kv[side]], dim=2)
                self.plain[layer, side] = now
                assert torch.equal(seen[side], now[:, :, start:])
        at, event = self.stream.end()
        for number, (session, new) in enumerate(zip(self.sessions, news, strict=True)):
            session.rest(at, event)
            if new:
                first = session.length
                tokens = [number * 1000 + n for n in range(first, first + new)] if ids else None
                session.extend(new, tokens)
        self.columns = columns

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.stream.close()


@contextlib.contextmanager
def a_store(
    layers: list[LayerLayout], *, page: int = 4, vram: int = 6, host: int = 3, disk: int = 4 << 20
) -> Iterator[TieredStore]:
    layout = PageLayout(layers, page)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        device = EmulatedDevice(vram_bytes=16 << 20)
        stack.callback(device.close)
        store = TieredStore(
            layout, device=device, vram=vram * layout.page_bytes, host=host * layout.page_bytes,
            disk=disk, path=folder if disk else None, check=True, durability="relaxed",
        )  # fmt: skip
        stack.callback(store.close)
        yield store
        stats = store.stats()
        assert (stats.leases, stats.owners) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4).filter(
        lambda x: set(x) != {"none"}
    ),
    pads=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    page=st.sampled_from([1, 3, 4]),
    counts=st.lists(st.sampled_from([1, 1, 1, 2, 5, 7]), min_size=2, max_size=9),
    vram=st.integers(0, 4),
    host=st.integers(0, 4),
    demotions=st.integers(0, 2**16),
)
def test_what_layers_see_is_what_was_appended(
    names: list[str],
    pads: list[int],
    page: int,
    counts: list[int],
    vram: int,
    host: int,
    demotions: int,
) -> None:
    pads = [pad - min(pads) for pad in pads]
    # Room for the largest step and little more, so that older pages go down.
    need = len(pads) * (max(counts) // page + 2)
    with a_store([LAYERS[name] for name in names], page=page, vram=need + vram, host=host) as store:
        batch = Batch(store, pads, seed=demotions)
        dice = random.Random(demotions)
        try:
            for count in counts:
                batch.step(count)
                for session in batch.sessions:
                    for sealed in session.pages:
                        if dice.random() < 0.3:
                            session._end_lease()
                            store.demote(sealed.key)
        finally:
            batch.close()


def test_pages_in_all_tiers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would prove little if all pages stayed in VRAM."""
    with a_store([FULL] * 3, vram=4, host=3) as store:
        batch = Batch(store, [0])
        for _ in range(16):
            batch.step(3)
        tiers = set(batch.sessions[0].lease()[0].tiers())
        assert tiers == {"vram", "host", "disk"}
        batch.close()


# ---------------------------------------------------------------------- order


def filled(store: TieredStore) -> Batch:
    batch = Batch(store, [0])
    for _ in range(12):
        batch.step(4)
    return batch


def test_the_next_layer_is_fetched_before_this_one_computes() -> None:
    with a_store([FULL] * 5, vram=4, host=20, disk=0) as store:
        batch = filled(store)
        device = store.device
        order: list[str] = []
        copy, use = device.copy, device.use

        def spy_copy(stream: Any, parts: Any) -> None:
            if stream.name == "h2d":
                order.append("fetch")
            copy(stream, parts)

        def spy_use(stream: Any, name: str, **ranges: Any) -> None:
            order.append(name)
            use(stream, name, **ranges)

        device.copy, device.use = spy_copy, spy_use  # type: ignore[method-assign]
        batch.step(1)
        assert order == [
            "step", "fetch", "fetch", "layer 0", "fetch", "layer 1", "fetch", "layer 2", "fetch", "layer 3", "layer 4",
        ]  # fmt: skip
        device.copy, device.use = copy, use  # type: ignore[method-assign]
        batch.close()


def test_fetching_overlaps_with_computing() -> None:
    """In virtual time, the planes of the next layer travel while this layer's attention runs."""
    big = LayerLayout.attention(8, 64, "float32")
    with a_store([big] * 4, page=16, vram=3, host=20, disk=0) as store:
        batch = Batch(store, [0])
        for _ in range(10):
            batch.step(16)
        device = store.device
        assert isinstance(device, EmulatedDevice)
        device.synchronize(10.0)
        device.trace.clear()
        batch.step(1)
        device.synchronize(10.0)
        work = [x for x in device.trace if x.name.startswith("layer")]
        copies = [x for x in device.trace if x.name == "h2d"]
        assert len(work) == len(copies) == 4
        for layer in (1, 2):
            # The copy for the layer after was under way or over before this layer's work ended.
            assert copies[layer + 1].start_s < work[layer].end_s
        batch.close()


def mutants() -> list[Any]:
    """Every wait of the two modules, with what is left when it is taken out."""
    found = []
    for module in (stream_module, staging_module):
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        for match in re.finditer(r"^( *)(\S.*\.(?:wait|synchronize)\(.*\))$", source, re.MULTILINE):
            changed = source[: match.start()] + match[1] + "pass" + source[match.end() :]
            found.append(pytest.param(module.__name__, changed, id=match[2]))
    return found


def streamed(kind: type[ExactStream]) -> None:
    """Pages in all tiers; staging and bounce memory change hands with every layer."""
    with a_store([FULL] * 4, vram=3, host=3) as store:
        batch = Batch(store, [0], kind)
        for _ in range(14):
            batch.step(3)
        batch.close()


def two_streams(kind: type[ExactStream]) -> None:
    """All in VRAM, so that nothing but the steps themselves orders one compute stream behind the other."""
    with a_store([FULL] * 3, vram=30, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        batch = Batch(store, [0], kind)
        for count, stream in ((2, one), (1, two), (1, one)):  # no page is sealed
            with store.device.on(stream):
                batch.step(count)
        batch.close()


def handed_on(kind: type[ExactStream]) -> None:
    """Slots that one stream gives back are written on another."""
    with a_store([FULL], vram=30, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        first, second = Batch(store, [0], kind), Batch(store, [0], kind)
        with store.device.on(one):
            first.step(3)
            first.sessions[0].close()
        with store.device.on(two):
            second.step(3)
        second.close()
        first.close()


def shared(kind: type[ExactStream]) -> None:
    """Pages that one stream has just written are read on another, by a second sequence."""
    with a_store([FULL], vram=30, host=0, disk=0) as store:
        one, two = store.device.stream("one"), store.device.stream("two")
        first, second = Batch(store, [0], kind), Batch(store, [0], kind)
        with store.device.on(one):
            first.step(8)
            second.sessions[0].close()
            second.sessions = [first.sessions[0].fork()]
        with store.device.on(two):
            second.columns, second.plain = first.columns, dict(first.plain)
            second.step(1)
        first.close()
        second.close()


def cross_traffic(kind: type[ExactStream]) -> None:
    for scenario in (streamed, two_streams, handed_on, shared):
        scenario(kind)


@pytest.mark.parametrize("scenario", [streamed, two_streams, handed_on, shared])
def test_no_races(scenario: Any) -> None:
    scenario(ExactStream)


@pytest.mark.parametrize(("name", "source"), mutants())
def test_every_wait_is_needed(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = types.ModuleType(name)
    mutant.__file__ = "mutant"
    monkeypatch.setitem(sys.modules, name, mutant)
    exec(compile(source, "mutant", "exec"), mutant.__dict__)
    if name == stream_module.__name__:
        kind = mutant.ExactStream
    else:
        monkeypatch.setattr(stream_module, "Staging", mutant.Staging)
        kind = ExactStream
    with pytest.raises(RaceError):
        cross_traffic(kind)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "bad",
    [
        lambda k: k.to(torch.bfloat16),
        lambda k: k[:, :1],
        lambda k: k[..., :2],
        lambda k: k[:, :, :2],
        lambda k: torch.cat([k, k]),
        lambda k: k.to("meta"),
    ],
    ids=["dtype", "heads", "dim", "tokens", "rows", "device"],
)
def test_tensors_that_do_not_fit(bad: Any) -> None:
    with a_store([FULL], disk=0) as store:
        batch = Batch(store, [0])
        session = batch.sessions[0]
        session.reserve(3)
        batch.stream.begin([Row(session.lease()[0], session.tails, 0, 0, 3, 0)], 0, 3)
        good = batch.values(0, 0, 3)
        for pair in ((bad(good), good), (good, bad(good))):
            with pytest.raises(LayoutError, match="layer 0"):
                batch.stream.update(0, *pair)
        batch.close()


def test_rows_that_end_at_different_columns() -> None:
    with a_store([FULL], disk=0) as store:
        batch = Batch(store, [0])
        session = batch.sessions[0]
        session.reserve(3)
        with pytest.raises(ConfigError, match="column 3"):
            batch.stream.begin([Row(session.lease()[0], session.tails, 0, 0, 3, 0)], 0, 4)
        batch.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_staging_memory_that_is_not_to_be_had(nth: int) -> None:
    with a_store([FULL], disk=0) as store:
        device = store.device
        assert isinstance(device, EmulatedDevice)
        batch = Batch(store, [0], columns=0)
        batch.step(3)
        used = device.used_bytes - batch.stream.staging.nbytes
        device.faults.fail_alloc(nth)
        with pytest.raises(DeviceOOMError):
            batch.step(6)
        assert device.used_bytes == used
        for session in batch.sessions:
            session._end_lease()
        batch.step(6)
        batch.close()
