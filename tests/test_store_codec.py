"""Tiers that keep pages in fewer bits: what comes back by every way, the error as measured, order on the device, and
that exact and coded pages never meet."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from store_model import (
    LAYOUT,
    PAGE,
    Config,
    chain,
    close_clean,
    configs,
    device,
    open_store,
)
from test_store_machine import FaultyStoreMachine, StoreMachine, run

from kvtier.cli.main import main
from kvtier.devices.emulated import EmulatedDevice
from kvtier.errors import ConfigError, IdentityError, RaceError
from kvtier.identity import ModelIdentity
from kvtier.integrations.transformers.cache import TieredCache
from kvtier.integrations.transformers.identity import identity_of
from kvtier.integrations.transformers.layout import layout_of
from kvtier.kernels.summary import summarise_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import CodecName, LayerLayout, PageLayout
from kvtier.session.session import Session
from kvtier.store.store import TieredStore
from kvtier.tiers.codec import PageCodec
from tests.tiny_models import dynamic, forward, make, prompt

CODECS: tuple[CodecName, ...] = ("fp8", "int8", "int4")
PAIRS: tuple[tuple[CodecName, CodecName], ...] = (
    ("int8", "none"),
    ("none", "fp8"),
    ("int4", "int4"),
    ("int8", "int4"),
)
MIXED = PageLayout(
    [
        LayerLayout.attention(2, 16, "float16"),
        LayerLayout("state", state_bytes=64),
        LayerLayout.attention(2, 16, "float16", window=20),
        LayerLayout.mla(24, 6, "bfloat16"),
    ],
    8,
    True,
)


def identity_for(layout: PageLayout, kv_quantisation: str = "") -> ModelIdentity:
    return ModelIdentity(
        "toy", "", b"w" * 16, "", "float32", kv_quantisation, "", "full", layout.digest,
        layout.page_tokens,
    )  # fmt: skip


def numbers(layout: PageLayout, seed: int) -> torch.Tensor:
    """A page of random K and V, with 0 where nothing is and noise as summaries."""
    made = torch.Generator().manual_seed(seed)
    page = torch.zeros(layout.page_bytes, dtype=torch.uint8)
    for plane in layout.planes:
        for part in (plane.k, plane.v) if plane is not None else ():
            dtype = getattr(torch, part.dtype)
            values = torch.randn(part.nbytes // dtype.itemsize, generator=made).to(dtype)
            page[part.offset : part.stop] = values.view(torch.uint8)
    at, size = layout.summary_range
    page[at : at + size] = torch.randint(0, 255, (size,), generator=made, dtype=torch.uint8)
    return page


def through(layout: PageLayout, codec: str, page: torch.Tensor) -> torch.Tensor:
    """What a tier of that codec gives back."""
    if codec == "none":
        return page
    made = PageCodec(layout, codec)
    coded = torch.zeros(1, made.page_bytes, dtype=torch.uint8)
    made.encode(page[None], coded)
    back = torch.zeros_like(page)[None]
    made.decode(coded, back)
    return back[0]


def values_of(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    parts = [part for plane in layout.planes if plane is not None for part in (plane.k, plane.v)]
    return torch.cat(
        [page[p.offset : p.stop].clone().view(getattr(torch, p.dtype)).float() for p in parts]
    )


class Place:
    """A device and a folder, and stores of MIXED on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.device = EmulatedDevice()

    def store(
        self, host_codec: str, disk_codec: str, *, vram: int = 4, host: int = 4, disk: int = 1 << 20
    ) -> TieredStore:
        return TieredStore(
            MIXED,
            device=self.device,
            vram=vram * MIXED.page_bytes,
            host=host * MIXED.page_bytes,
            disk=disk,
            path=self.path if disk else None,
            host_codec=host_codec if host else "none",  # type: ignore[arg-type]
            disk_codec=disk_codec if disk else "none",  # type: ignore[arg-type]
            disk_write="write_back",
            check=True,
        )


@pytest.fixture
def place(tmp_path: Path) -> Any:
    made = Place(tmp_path / "store")
    yield made
    made.device.close()


def seal(store: TieredStore, data: torch.Tensor, key: bytes, owner: str = "test") -> None:
    """A page that was written in VRAM, as a session does it, and belongs to nobody."""
    (slot,) = store.take_tails(1, owner=owner)
    with store._locked(None) as deadline:
        store._placement.upload(data, slot, deadline)
    page, _ = store.seal(
        slot, key=key, parent=None, identity=b"i" * 16,
        written=store.device.compute_stream().record(), owner=owner,
    )  # fmt: skip
    store.disown([page], owner)


def read(store: TieredStore, key: bytes, *, promote: bool = False) -> tuple[str, torch.Tensor]:
    with store.match([key], promote=promote) as lease:
        return lease.tiers()[0], lease.read(0)


# ---------------------------------------------------------------------- every way


@pytest.mark.parametrize("codec", CODECS)
def test_down_to_host_and_up_again(place: Place, codec: str) -> None:
    page, (key,) = numbers(MIXED, 1), chain(1)
    want = through(MIXED, codec, page)
    with place.store(codec, "none", disk=0) as store:
        seal(store, page, key)
        assert torch.equal(read(store, key)[1], page)
        assert store.demote(key)
        tier, got = read(store, key)
        assert (tier, torch.equal(got, want)) == ("host", True)
        tier, got = read(store, key, promote=True)
        assert (tier, torch.equal(got, want)) == ("vram", True)
        stats = store.stats()
        coded = PageCodec(MIXED, codec).page_bytes
        assert coded < MIXED.page_bytes * 0.8
        assert stats.links["vram->host"].bytes == coded + MIXED.page_bytes * 2  # and two reads
        assert stats.links["host->vram"].bytes == coded + MIXED.page_bytes  # and the upload
        error = (values_of(want, MIXED) - values_of(page, MIXED)).abs().max()
        host = stats.tiers["host"]
        assert (host.codec, host.pages_coded) == (codec, 1)
        assert host.worst_error == pytest.approx(float(error), rel=1e-6)
        assert 0 < host.relative_error < {"fp8": 0.04, "int8": 0.01, "int4": 0.2}[codec]
        assert host.used_bytes == coded
        vram = stats.tiers["vram"]
        assert (vram.codec, vram.pages_coded, vram.worst_error) == ("none", 0, 0.0)


@pytest.mark.parametrize(("host", "disk"), PAIRS)
def test_all_tiers_and_a_restart(place: Place, host: str, disk: str) -> None:
    by_vram, by_host = chain(1, 0)[0], chain(1, 1)[0]
    first, second = numbers(MIXED, 1), numbers(MIXED, 2)
    in_host = through(MIXED, host, second)
    at = {
        by_vram: through(MIXED, disk, first),
        by_host: in_host if host == disk else through(MIXED, disk, in_host),
    }
    with place.store(host, disk) as store:
        seal(store, first, by_vram)
        store.put(by_host, second, identity=b"i" * 16)
        assert torch.equal(read(store, by_host)[1], in_host)
        assert store.flush() == 0
        assert torch.equal(read(store, by_vram)[1], first)
        assert store.stats().tiers["disk"].pages_coded == (0 if disk == "none" else 2)
    with place.store(host, disk) as store:
        for key, want in at.items():
            tier, got = read(store, key)
            assert (tier, torch.equal(got, want)) == ("disk", True)
            page = store._directory.get(key)
            assert page is not None
            for plane in MIXED.planes:
                if plane is not None:
                    out = np.zeros(plane.nbytes, np.uint8)
                    store.read_disk_planes([page], plane.layer, [out])
                    assert out.tobytes() == want[plane.offset : plane.stop].numpy().tobytes()
            first_byte, size = MIXED.summary_range
            out = np.zeros(size, np.uint8)
            store.read_disk_summaries([page], [out])
            origin = first if key == by_vram else second
            assert out.tobytes() == origin[first_byte : first_byte + size].numpy().tobytes()
            tier, got = read(store, key, promote=True)
            assert (tier, torch.equal(got, want)) == ("vram", True)
    with place.store(host, disk, vram=1) as store:
        # VRAM is held, so the page comes to host memory.
        (slot,) = store.take_tails(1)
        for key, want in at.items():
            tier, got = read(store, key, promote=True)
            there = want if host == disk else through(MIXED, host, want)
            assert (tier, torch.equal(got, there)) == ("host", True)
        store.give_tails([slot], [])


@pytest.mark.parametrize(("host", "disk"), PAIRS)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tail_is_filled_from_coded_pages(place: Place, host: str, disk: str, tier: str) -> None:
    page, (key,) = numbers(MIXED, 3), chain(1)
    with place.store(host, disk, host=4 if tier == "host" else 0) as store:
        seal(store, page, key)
        assert store.demote(key)
        assert read(store, key)[0] == tier
        (slot,) = store.take_tails(1)
        known = store._directory.get(key)
        assert known is not None
        store.fill_tail(slot, known)
        want = through(MIXED, host if tier == "host" else disk, page)
        assert torch.equal(slot.range().raw(), want)
        store.give_tails([slot], [])


def test_a_page_with_no_number_is_reported(place: Place) -> None:
    page, (key,) = numbers(MIXED, 4), chain(1)
    page[:2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    with place.store("int8", "none", disk=0) as store:
        store.put(key, page)
        host = store.stats().tiers["host"]
        assert (host.worst_error, host.relative_error) == (float("inf"), float("inf"))


def test_a_failed_copy_leaves_the_page_where_it_was(place: Place) -> None:
    page, (key,) = numbers(MIXED, 5), chain(1)
    with place.store("int8", "none", disk=0) as store:
        seal(store, page, key)
        place.device.faults.fail_copy("d2h", 1)
        assert not store.demote(key)
        assert torch.equal(read(store, key)[1], page)
        assert store.stats().tiers["host"].pages_coded == 0
        assert store.demote(key)
        place.device.faults.fail_copy("h2d", 1)
        assert read(store, key, promote=True)[0] == "host"
        assert read(store, key, promote=True)[0] == "vram", "the failed copy's memory was not used"
        assert torch.equal(read(store, key)[1], through(MIXED, "int8", page))


def test_a_page_that_cannot_be_coded_for_lack_of_vram_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, (key,) = numbers(MIXED, 6), chain(1)

    def launch(stream: Any, name: str, *_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(f"{name} needs more")

    with place.store("int8", "none", disk=0) as store:
        seal(store, page, key)
        monkeypatch.setattr(place.device, "launch", launch)
        assert not store.demote(key)
        assert torch.equal(read(store, key)[1], page)
        assert store.stats().links["vram->host"].failed == 1
        monkeypatch.undo()
        assert store.demote(key)


# ---------------------------------------------------------------------- any interleaving


def float_page(key: bytes) -> torch.Tensor:
    return numbers(LAYOUT, int.from_bytes(key[:4], "little"))


@functools.lru_cache(maxsize=512)
def reachable(key: bytes, codecs: frozenset[str]) -> frozenset[bytes]:
    """All that a page can become on its ways between tiers."""
    known = {float_page(key).numpy().tobytes()}
    fresh = set(known)
    while fresh and len(known) < 64:
        made = {
            through(LAYOUT, codec, torch.frombuffer(bytearray(page), dtype=torch.uint8))
            .numpy()
            .tobytes()
            for page in fresh
            for codec in codecs
        }
        fresh = made - known
        known |= fresh
    return frozenset(known)


class CodedStoreMachine(StoreMachine):
    """The store against a dict, with codecs."""

    @initialize(
        config=configs(), host=st.sampled_from(CODECS), disk=st.sampled_from(get_args(CodecName))
    )
    def begin(self, config: Config, host: CodecName, disk: CodecName) -> None:  # type: ignore[override]
        self.config = replace(
            config,
            host_codec=host if config.host else "none",
            disk_codec=disk if config.disk else "none",
        )
        self.device = device()
        self.reopen()

    def page(self, key: bytes) -> bytes:
        return float_page(key).numpy().tobytes()

    def good(self, key: bytes, got: bytes) -> bool:
        return got in reachable(
            key, frozenset({self.config.host_codec, self.config.disk_codec} - {"none"})
        )


class FaultyCodedStoreMachine(CodedStoreMachine, FaultyStoreMachine):
    """The same, while copies and writes fail and records rot."""


@pytest.mark.parametrize("machine", [CodedStoreMachine, FaultyCodedStoreMachine])
def test_store_with_codecs_against_a_dict(machine: type[StoreMachine]) -> None:
    run(machine, 25, 30)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [CodedStoreMachine, FaultyCodedStoreMachine])
def test_store_with_codecs_against_a_dict_for_long(machine: type[StoreMachine]) -> None:
    run(machine, 1000, 60)


# ---------------------------------------------------------------------- order on the device


def astray(on: EmulatedDevice, kernels: tuple[str, ...] = ("encode", "decode")) -> None:
    """Let codecs' kernels run on a stream that nothing orders."""
    launch = on.launch

    def elsewhere(stream: Any, name: str, kernel: Any, **ranges: Any) -> None:
        if name.startswith(kernels):
            stream = on.stream("astray")
        launch(stream, name, kernel, **ranges)

    on.launch = elsewhere  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["down", "up"])
def test_coding_out_of_order_is_a_race(way: str) -> None:
    on = device()
    store = TieredStore(LAYOUT, device=on, vram=4 * PAGE, host=4 * PAGE, host_codec="int8")
    keys = chain(3)
    for parent, key in zip([None, *keys], keys, strict=False):
        store.put(key, float_page(key), parent=parent)
    if way == "down":
        store.prefetch(keys)
        with store._locked(None):
            for key in keys:
                page = store._directory.get(key)
                assert page is not None
                store._placement.drop_copy(page, page.copies["host"], evicted=True)
    astray(on)
    move = (lambda: store.demote(keys[2])) if way == "down" else (lambda: store.prefetch(keys))
    with pytest.raises(RaceError, match="encode" if way == "down" else "decode"):
        move()


def test_scratch_memory_is_given_back(tmp_path: Path) -> None:
    on = device()
    config = Config(2, 3, 8, host_codec="int8", disk_codec="int4")

    store = open_store(config, on, tmp_path / "store")
    assert on.used_bytes == 2 * max(PageCodec(LAYOUT, c).page_bytes for c in ("int8", "int4"))
    close_clean(store)


# ---------------------------------------------------------------------- attention


def tiered(
    where: EmulatedDevice,
    model: Any,
    path: Path,
    host_codec: CodecName,
    disk_codec: CodecName,
    **sizes: int,
) -> TieredStore:
    layout = layout_of(model, page_tokens=8, summaries=True)
    sizes = {"vram": 10, "host": 40, "disk": 8 << 20} | sizes
    return TieredStore(
        layout,
        device=where,
        vram=sizes["vram"] * layout.page_bytes,
        host=sizes["host"] * layout.page_bytes,
        disk=sizes["disk"],
        path=path,
        host_codec=host_codec if sizes["host"] else "none",
        disk_codec=disk_codec,
        check=True,
    )


def steps(model: Any, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    return torch.stack(
        [forward(model, cache, ids[:, n : n + 1])[:, -1] for n in range(start, ids.shape[1])], 1
    )


def dense_over(
    model: Any, pages: list[torch.Tensor], layout: PageLayout, ids: torch.Tensor
) -> torch.Tensor:
    """Dense attention over these pages' K and V, and then the tokens behind them."""
    cache = dynamic(model)
    for plane in layout.planes:
        assert plane is not None
        sides = []
        for part in (plane.k, plane.v):
            rows = torch.stack([page[part.offset : part.stop] for page in pages])
            shape = (1, len(pages) * layout.page_tokens, part.heads, part.dim)
            values = rows.view(getattr(torch, part.dtype)).view(shape)
            sides.append(values.transpose(1, 2).contiguous())
        cache.update(*sides, plane.layer)
    return steps(model, cache, ids, len(pages) * layout.page_tokens)


MODES = (
    "exact-stream",
    "exact-split",
    "select:quest,budget=100%",
    "select:quest,budget=100%,scope=layer,prefetch=random",
)


@pytest.mark.parametrize("host", [40, 0])
@pytest.mark.parametrize("mode", MODES)
def test_attention_reads_what_the_codec_left(tmp_path: Path, mode: str, host: int) -> None:
    model = make("llama", attention="sdpa")
    where, path = EmulatedDevice(), tmp_path / "store"
    # No more steps than a page has tokens: a page that is sealed would go down, and come back changed.
    ids = prompt(1, 128)["input_ids"]
    with tiered(where, model, path, "int4", "int4", vram=40, host=host) as store:
        layout = store.layout
        with TieredCache(model, store) as cache:
            forward(model, cache, ids[:, :120])
            cache.seal()
            keys = [page.key for page in cache._sessions[0].pages]
        with store.match(keys) as lease:
            assert set(lease.tiers()) == {"vram"}
            exact = [lease.read(n) for n in range(len(lease))]
    pages = [through(layout, "int4", page) for page in exact]
    want = dense_over(model, pages, layout, ids)
    assert (want - dense_over(model, exact, layout, ids)).abs().max() > 1e-2
    with (
        tiered(where, model, path, "int4", "int4", vram=9, host=host) as store,
        TieredCache(model, store, mode=mode) as cache,
    ):
        assert cache.load_prefix(ids[:, :121]) == 120
        got = steps(model, cache, ids, 120)
        assert store.stats().tiers["vram"].pages < 12
    # Restored pages are int4 wherever they are now, so all modes see the same.
    assert (got - want).abs().max() <= 1e-4
    assert where.used_bytes == 0
    where.close()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((k, m) for k in ("llama", "gemma3") for m in (*MODES[:2], "select:quest,budget=4pages")),
        ("deepseek", "exact-stream"),
    ],
)
def test_modes_stay_near_dense_attention(tmp_path: Path, kind: str, mode: str) -> None:
    model = make(kind, attention="sdpa")
    where = EmulatedDevice()
    ids = prompt(1, 150)["input_ids"]
    near = []
    for host, disk in (("none", "none"), ("int8", "fp8")):
        with (
            tiered(where, model, tmp_path / host, host, disk, host=6) as store,  # type: ignore[arg-type]
            TieredCache(model, store, mode=mode) as cache,
        ):
            for start in range(0, 120, 24):
                forward(model, cache, ids[:, start : start + 24])
            near.append(steps(model, cache, ids, 120))
            cache.flush()
            assert store.stats().tiers["host"].pages
    scale = near[0].std()
    error = (near[1] - near[0]).abs()
    assert 0 < error.mean() < 0.1 * scale
    where.close()


@pytest.mark.parametrize("mode", ["exact-stream", "select:quest,budget=6pages,dense=none"])
def test_streaming_out_of_order_is_a_race(tmp_path: Path, mode: str) -> None:
    model = make("llama", attention="sdpa")
    where = EmulatedDevice()
    ids = prompt(1, 130)["input_ids"]
    store = tiered(where, model, tmp_path / "store", "int8", "int8")
    cache = TieredCache(model, store, mode=mode)
    for start in range(0, 120, 24):
        forward(model, cache, ids[:, start : start + 24])
    astray(where, ("decode layer",))
    with pytest.raises(RaceError, match="decode layer"):
        forward(model, cache, ids[:, 120:121])


def test_summaries_are_those_of_the_exact_keys(tmp_path: Path) -> None:
    model = make("llama")
    where = EmulatedDevice()
    ids = prompt(1, 130)["input_ids"]
    with tiered(where, model, tmp_path / "store", "int4", "int4", vram=40) as store:
        with TieredCache(model, store) as cache:
            forward(model, cache, ids[:, :120])
            cache.seal()
            keys = [page.key for page in cache._sessions[0].pages]
        layout = store.layout
        with store.match(keys) as lease:
            exact = torch.stack([lease.read(n) for n in range(len(lease))])
    with (
        tiered(where, model, tmp_path / "store", "int4", "int4", vram=12) as store,
        TieredCache(model, store, mode="select:quest,budget=4pages") as cache,
    ):
        assert cache.load_prefix(ids[:, :121]) == 120
        forward(model, cache, ids[:, 120:121])
        index = cache._engine.paged._indexes[0]  # type: ignore[union-attr]
        places = [(0, n * layout.page_bytes) for n in range(len(exact))]
        table = PageTable(
            [exact.view(-1)], places, page_bytes=layout.page_bytes, page_tokens=layout.page_tokens
        )
        for plane in layout.planes:
            assert plane is not None
            want = summarise_pages(
                table, start=plane.k.offset, heads=plane.k.heads, dim=plane.k.dim,
                dtype=torch.float32,
            )  # fmt: skip
            got = index.layer(plane.layer).gather()
            assert torch.equal(got.reshape(-1), want.reshape(-1))


# ---------------------------------------------------------------------- never mixed


def test_an_identity_of_another_codec_is_refused() -> None:
    exact = identity_for(LAYOUT)
    with TieredStore(
        LAYOUT, device="emulated", vram=4 * PAGE, host=4 * PAGE, host_codec="int8"
    ) as store:
        assert store.kv_quantisation.startswith("host int8 (K ")
        with pytest.raises(
            IdentityError, match="pages kept exactly, the store keeps them host int8"
        ):
            Session(store, exact)
        coded = replace(exact, kv_quantisation=store.kv_quantisation)
        assert coded.digest != exact.digest
        Session(store, coded).close()
    with TieredStore(LAYOUT, device="emulated", vram=4 * PAGE, host=4 * PAGE) as store:
        assert store.kv_quantisation == ""
        with pytest.raises(IdentityError, match="the store keeps them exactly"):
            Session(store, coded)


def test_a_cache_takes_the_stores_codec_into_its_identity(tmp_path: Path) -> None:
    model = make("llama")
    where = EmulatedDevice()
    layout = layout_of(model, page_tokens=8, summaries=True)
    exact = identity_of(model, layout=layout)
    with tiered(where, model, tmp_path / "store", "int8", "fp8") as store:
        with TieredCache(model, store) as one, TieredCache(model, store, identity=exact) as two:
            assert one.identity == two.identity != exact
            assert one.identity.kv_quantisation == store.kv_quantisation
            assert one.load_prefix(prompt(1, 40)["input_ids"]) == 0  # checks the identity again
            coded = one.identity
    with (
        tiered(where, model, tmp_path / "other", "none", "none") as store,
        pytest.raises(IdentityError, match="kept host int8"),
    ):
        TieredCache(model, store, identity=coded)
    where.close()


@pytest.mark.parametrize(("before", "after"), [("none", "int8"), ("int8", "fp8"), ("int8", "none")])
def test_a_folder_of_another_codec_is_refused(place: Place, before: str, after: str) -> None:
    (key,) = chain(1)
    with place.store("none", before) as store:
        store.put(key, numbers(MIXED, 1), identity=b"i" * 16)
    with pytest.raises(ConfigError, match=r"holds 1 pages of another layout.*or codec"):
        place.store("none", after)
    assert (place.device.used_bytes, place.device.host_bytes) == (0, 0)
    with place.store("none", before) as store:
        assert store.contains(key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_codec": "zip"}, r"host_codec: codec 'zip' is unknown; use none, fp8, int8, int4"),
        ({"disk_codec": ""}, r"disk_codec: codec '' is unknown"),
        ({"disk_codec": "int8"}, r"disk_codec is int8, but there is no disk tier"),
        (
            {"host_codec": "int8", "host": 100},
            r"host is 100 bytes, but one page .* takes \d+ bytes",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"vram": 4 * PAGE, "host": 4 * PAGE}
    with pytest.raises(ConfigError, match=message):
        TieredStore(LAYOUT, device="emulated", **(sizes | options))


def test_layouts_that_cannot_be_coded_are_refused() -> None:
    layout = PageLayout([LayerLayout.attention(2, 16, "float8_e4m3fn")], 8)
    with pytest.raises(ConfigError, match=r"host_codec: layer 0 has 32 channels of float8_e4m3fn"):
        TieredStore(layout, device="emulated", vram="1MiB", host="1MiB", host_codec="int8")
    with pytest.raises(ConfigError, match="only counts"):
        TieredStore(
            LAYOUT, device=EmulatedDevice(payload=False), vram="1MiB", host="1MiB",
            host_codec="int8",
        )  # fmt: skip


def test_tools_name_the_codec(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (key,) = chain(1)
    with place.store("none", "int4") as store:
        store.put(key, numbers(MIXED, 1), identity=b"i" * 16)
    assert main(["store", "stats", str(place.path)]) == 0
    assert "int4 (K a channel and page" in capsys.readouterr().out
    file = str(place.path.parent / "x.safetensors")
    assert main(["store", "export", str(place.path), file, "--key", key.hex()]) == 2
    assert "keeps pages in int4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-codec", "zip"], "--host-codec is 'zip'; use one of none, fp8, int8, int4"),
        (["--disk-codec", "int8", "--verify"], "--verify demands equal bits"),
        (["--host-codec", "int8", "--host", "0"], "--host-codec is int8 with --host 0"),
    ],
)
def test_run_refuses(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["run", "--demo", *options]) == 2
    assert message in capsys.readouterr().err
