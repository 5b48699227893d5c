"""Sequences as safetensors files: what others read of them, and what comes back."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvtier.errors import ConfigError, IdentityError, LayoutError, PageLostError
from kvtier.identity import AdapterIdentity, ModelIdentity
from kvtier.keys import page_keys
from kvtier.layout import LayerLayout, PageLayout
from kvtier.store import archive
from kvtier.store.archive import export_session, import_session, sequence_to

#: Every kind of layer and dtype: grouped heads, a window, a latent, none, 4 and 8 bits.
LAYOUT = PageLayout(
    [
        LayerLayout.attention(2, 8, "bfloat16"),
        LayerLayout.attention(1, 4, "float32", window=8),
        LayerLayout.mla(6, 2, "float16"),
        LayerLayout("none"),
        LayerLayout("full", 2, 4, "float8_e4m3fn", 2, 6, "float8_e5m2"),
        LayerLayout("full", 1, 6, "int4", 1, 6, "int8"),
    ],
    page_tokens=4,
)
TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
IDENTITY = ModelIdentity(
    model="toy",
    revision="1",
    weights_digest=b"w" * 16,
    weights_quantisation="",
    kv_dtype="mixed",
    kv_quantisation="",
    rope="",
    attention="full",
    layout_digest=LAYOUT.digest,
    page_tokens=LAYOUT.page_tokens,
    adapters=(AdapterIdentity(b"a" * 16, 0.5),),
    tenant="somebody",
)
TOKENS = list(range(100, 100 + 4 * 5))
RANGES = [(plane.offset, plane.nbytes) for plane in LAYOUT.planes if plane is not None]


class Memory:
    """Stands for a disk tier: pages by key."""

    def __init__(self, layout: PageLayout = LAYOUT, room: int = 100) -> None:
        self.pages: dict[bytes, np.ndarray] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.known: dict[bytes, Any] = {}
        self.info = SimpleNamespace(layout_digest=layout.digest)
        self.live_capacity_bytes = room * 1000
        self.flushed = False

    @property
    def live_bytes(self) -> int:
        return 1000 * len(self.pages)

    def stored_bytes_of(self, nbytes: int) -> int:
        return 1000

    def __contains__(self, key: bytes) -> bool:
        return key in self.pages

    def put(
        self, key: bytes, *, parent: bytes | None, depth: int, identity: bytes, data: Any
    ) -> Any:
        assert identity == IDENTITY.digest
        assert (depth == 0) == (parent is None)
        assert parent is None or parent in self.pages
        self.pages[key], self.parents[key] = data.copy(), parent
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_pages(self, keys: Sequence[bytes], outs: Sequence[np.ndarray]) -> list[bool]:
        for key, out in zip(keys, outs, strict=True):
            if key in self.pages:
                out[:] = self.pages[key]
        return [key in self.pages for key in keys]

    def describe_identity(self, digest: bytes, about: Any) -> None:
        self.known[digest] = about

    def flush(self) -> None:
        self.flushed = True


def page(key: bytes, layout: PageLayout = LAYOUT) -> np.ndarray:
    """A page that is zero where nothing is stored."""
    out = np.zeros(layout.page_bytes, np.uint8)
    for plane in layout.planes:
        if plane is not None:
            raw = hashlib.shake_128(key + bytes([plane.layer])).digest(plane.nbytes)
            out[plane.offset : plane.stop] = np.frombuffer(raw, np.uint8)
    return out


def source() -> tuple[Memory, list[Any]]:
    memory = Memory()
    chain: list[Any] = []
    for key in page_keys(IDENTITY, TOKENS, 4):
        parent = chain[-1].key if chain else None
        memory.pages[key], memory.parents[key] = page(key), parent
        chain.append(SimpleNamespace(key=key, parent=parent, depth=len(chain)))
    return memory, chain


def export(path: Path, memory: Memory, chain: list[Any], **options: Any) -> int:
    options = {"identity": IDENTITY.describe(), "ranges": RANGES, **options}
    return asyncio.run(
        export_session(memory, chain, path, layout=LAYOUT, page_bytes=LAYOUT.page_bytes, **options)
    )


def back(path: Path, memory: Memory, **options: Any) -> archive.Imported:
    options = {"page_bytes": LAYOUT.page_bytes, "ranges": RANGES, **options}
    return asyncio.run(import_session(memory, path, **options))  # type: ignore[arg-type]


@pytest.fixture(params=[1 << 20, LAYOUT.page_bytes * 2])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages at once, and two at a time."""
    monkeypatch.setattr(archive, "_GROUP_BYTES", request.param)


def test_others_read_the_tensors(tmp_path: Path, groups: None) -> None:
    memory, chain = source()
    path = tmp_path / "a.safetensors"
    nbytes = export(path, memory, chain, tokens=TOKENS)
    assert path.stat().st_size == nbytes
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    with safe_open(path, "pt") as file:
        about = file.metadata()
        assert json.loads(about["identity"])["model"] == "toy"
        assert json.loads(about["tokens"]) == TOKENS
        assert [bytes.fromhex(key) for key in json.loads(about["keys"])] == [r.key for r in chain]
        names = [f"layers.{layer}.{part}" for layer in (0, 1, 2, 4, 5) for part in "kv"]
        assert sorted(file.keys()) == sorted(names)
        for plane in LAYOUT.planes:
            if plane is None:
                continue
            for name, part in (("k", plane.k), ("v", plane.v)):
                tensor = file.get_tensor(f"layers.{plane.layer}.{name}")
                raw = b"".join(
                    memory.pages[r.key][part.offset : part.stop].tobytes() for r in chain
                )
                assert tensor.view(torch.uint8).numpy().tobytes() == raw
                if part.dtype in TORCH:
                    assert tensor.dtype == TORCH[part.dtype]
                if part.dtype == "int4":
                    assert tensor.shape == (5, part.nbytes)
                else:
                    assert tensor.shape == (20, part.heads, part.dim)


def test_a_sequence_comes_back(tmp_path: Path, groups: None) -> None:
    memory, chain = source()
    export(tmp_path / "a", memory, chain)
    other = Memory()
    assert back(tmp_path / "a", other) == archive.Imported(5, 0, 5 * LAYOUT.page_bytes)
    assert other.flushed
    assert other.pages.keys() == memory.pages.keys()
    assert all((other.pages[key] == memory.pages[key]).all() for key in memory.pages)
    assert other.parents == memory.parents
    assert ModelIdentity.from_description(other.known[IDENTITY.digest]) == IDENTITY
    assert back(tmp_path / "a", other).stored == 0
    del other.pages[chain[-1].key]
    assert back(tmp_path / "a", other).stored == 1


def test_the_salt_itself_need_not_be_in_the_file(tmp_path: Path) -> None:
    memory, chain = source()
    export(tmp_path / "a", memory, chain, identity=IDENTITY.describe_openly())
    assert b"somebody" not in (tmp_path / "a").read_bytes()
    assert back(tmp_path / "a", Memory()).stored == 5


def test_what_lies_behind_the_layers_goes_with_them(tmp_path: Path) -> None:
    size = LAYOUT.page_bytes + 64
    memory, chain = source()
    memory.pages = {
        key: np.concatenate([data, np.frombuffer(key * 2, np.uint8)])
        for key, data in memory.pages.items()
    }
    ranges = [*RANGES, (LAYOUT.page_bytes, 64)]
    asyncio.run(
        export_session(
            memory,
            chain,
            tmp_path / "a",
            layout=LAYOUT,
            identity=IDENTITY.describe(),
            page_bytes=size,
            ranges=ranges,
        )
    )
    with safe_open(tmp_path / "a", "np") as file:
        assert file.get_tensor("extra.0").shape == (5, 64)
    other = Memory()
    back(tmp_path / "a", other, page_bytes=size, ranges=ranges)
    assert all((other.pages[key] == memory.pages[key]).all() for key in memory.pages)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, groups: None) -> None:
    memory, chain = source()
    del memory.pages[chain[3].key]
    with pytest.raises(PageLostError, match=r"page 3 .*nothing was exported"):
        export(tmp_path / "a", memory, chain)
    with pytest.raises(ConfigError, match="tokens are not those"):
        export(tmp_path / "a", memory, chain, tokens=TOKENS[::-1])
    assert not list(tmp_path.iterdir())


def test_a_sequence_is_found_by_its_last_page() -> None:
    _, chain = source()
    assert sequence_to(iter(chain), chain[2].key) == chain[:3]
    with pytest.raises(ConfigError, match="not in the store"):
        sequence_to(iter(chain), b"x" * 32)
    with pytest.raises(ConfigError, match="missing"):
        sequence_to(iter(chain[1:]), chain[2].key)


def rewrite(path: Path, change: Any) -> None:
    """Change the header of a file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def of_another_layout(header: Any) -> None:
    other = PageLayout([LayerLayout.attention(1, 4, "float16")], page_tokens=4)
    header["__metadata__"]["layout"] = json.dumps(other.describe())
    header["__metadata__"]["identity"] = json.dumps({"digest": IDENTITY.digest.hex()})
    del header["__metadata__"]["tokens"]


def with_other_identity(header: Any) -> None:
    about = json.loads(header["__metadata__"]["identity"])
    about["tenant"] = "somebody else"
    header["__metadata__"]["identity"] = json.dumps(about)


def with_keys_swapped(header: Any) -> None:
    keys = json.loads(header["__metadata__"]["keys"])
    header["__metadata__"]["keys"] = json.dumps([keys[1], keys[0], *keys[2:]])


def without_tokens_and_keys_swapped(header: Any) -> None:
    del header["__metadata__"]["tokens"]
    with_keys_swapped(header)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_another_layout, "another|of layout .* same model geometry"),
        (with_other_identity, "does not give the digest"),
        (with_keys_swapped, "not those of its tokens"),
        (without_tokens_and_keys_swapped, "damaged: page 0"),
        (
            lambda h: h["__metadata__"].update(format="kvtier-session/9"),
            "format 'kvtier-session/9'",
        ),
        (lambda h: h["__metadata__"].update(checksums="[]"), "checksums"),
        (lambda h: h["__metadata__"].update(keys="{"), "metadata cannot be read"),
        (lambda h: h.pop("__metadata__"), "format None"),
        (lambda h: h.pop("layers.1.k"), "tensor layers.1.k is None"),
        (lambda h: h["layers.1.k"].update(dtype="F16"), "must be F32"),
        (lambda h: h["layers.1.k"].update(data_offsets=[0, 8]), "must be F32"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    memory, chain = source()
    export(tmp_path / "a", memory, chain, tokens=TOKENS)
    rewrite(tmp_path / "a", change)
    other = Memory()
    with pytest.raises(ConfigError, match=says):
        back(tmp_path / "a", other)
    assert not other.pages


def test_a_store_of_another_layout_or_without_room_is_refused(tmp_path: Path) -> None:
    memory, chain = source()
    export(tmp_path / "a", memory, chain)
    with pytest.raises(ConfigError, match="same model geometry"):
        back(tmp_path / "a", Memory(PageLayout([LayerLayout.attention(1, 4, "int8")])))
    with pytest.raises(ConfigError, match="make room"):
        back(tmp_path / "a", Memory(room=4))
    with pytest.raises(ConfigError, match="cannot be read"):
        back(tmp_path / "nothing", Memory())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_an_error_or_harmless(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    """Any byte flipped, or the file cut anywhere: an error, or every page as it was."""
    folder = tmp_path_factory.mktemp("damage")
    memory, chain = source()
    export(folder / "a", memory, chain, tokens=TOKENS)
    raw = bytearray((folder / "a").read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del raw[at:]
    (folder / "a").write_bytes(raw)
    other = Memory()
    with suppress(ConfigError):
        back(folder / "a", other)
    for key, got in other.pages.items():
        assert (got == memory.pages[key]).all()


# ---------------------------------------------------------------- descriptions


def test_descriptions_come_back() -> None:
    assert PageLayout.from_description(json.loads(json.dumps(LAYOUT.describe()))) == LAYOUT
    about = json.loads(json.dumps(IDENTITY.describe()))
    assert ModelIdentity.from_description(about) == IDENTITY


@pytest.mark.parametrize("field", ["page_tokens", "layers", "digest"])
def test_an_altered_layout_is_refused(field: str) -> None:
    about = LAYOUT.describe()
    del about[field]
    with pytest.raises(LayoutError):
        PageLayout.from_description(about)
    with pytest.raises(LayoutError, match="altered"):
        PageLayout.from_description({**LAYOUT.describe(), "page_tokens": 8})


@pytest.mark.parametrize("field", list(IDENTITY.describe()))
def test_an_altered_identity_is_refused(field: str) -> None:
    about = IDENTITY.describe()
    del about[field]
    with suppress(IdentityError):  # a field that has its default may be left out
        assert ModelIdentity.from_description(about) == IDENTITY
    with pytest.raises(IdentityError):
        ModelIdentity.from_description({**IDENTITY.describe(), field: "deadbeef" * 4})
