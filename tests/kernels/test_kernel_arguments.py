"""What the wrappers refuse, and how they choose between kernel and reference."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvtier import kernels
from kvtier.errors import ConfigError, LayoutError, OffloadWarning
from kvtier.kernels import launch, moves

PAGE_BYTES = 512


def slab(pages: int = 4) -> torch.Tensor:
    return torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8)


def table(pages: list[tuple[int, int]] | None = None, **changes: Any) -> kernels.PageTable:
    options = {"page_bytes": PAGE_BYTES, "page_tokens": 4} | changes
    slabs = options.pop("slabs", [slab()])
    return kernels.PageTable(
        slabs, [(0, 0), (0, PAGE_BYTES)] if pages is None else pages, **options
    )


def summary(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(3, 4, 2, 8, dtype=dtype)


def attend(q: torch.Tensor, pages: kernels.PageTable | None = None, **changes: Any) -> Any:
    options = {"k_start": 0, "v_start": 128, "kv_heads": 2} | changes
    return kernels.partial_attention(q, table() if pages is None else pages, **options)


def pieces(**changes: Any) -> None:
    lists = {"destinations": [64, 128], "sources": [256, 512], "sizes": [1, 2]}
    given = {name: torch.tensor(changes.pop(name, values)) for name, values in lists.items()}
    kernels.move_pieces(**given, **changes, launcher=Recorder())


half = torch.float16
byte = torch.uint8

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no slab": (lambda: table(slabs=[]), "slabs is empty"),
    "slab of floats": (lambda: table(slabs=[torch.zeros(2048)]), r"slabs\[0\] is torch.float32"),
    "slab with a stride": (lambda: table(slabs=[torch.zeros(4096, dtype=byte)[::2]]), r"slabs\[0\] has stride 2"),
    "slab misaligned": (lambda: table(slabs=[slab()[4:]]), r"slabs\[0\] begins 4 bytes after"),
    "slabs on two devices": (lambda: table(slabs=[slab(), slab().to("meta")]), r"slabs\[1\] is on meta"),
    "page in no slab": (lambda: table([(1, 0)]), r"pages\[0\] names slab 1; there are 1"),
    "page between words": (lambda: table([(0, 8)]), r"pages\[0\] begins at byte 8; it must be a multiple of 16"),
    "page past its slab": (lambda: table([(0, 3 * 512 + 16)]), r"pages\[0\]: bytes 1552 to 2064 are not inside slab 0"),
    "page before its slab": (lambda: table([(0, -16)]), r"pages\[0\]: bytes -16"),
    "too many tokens": (lambda: table(tokens=[4, 5]), r"tokens\[1\] is 5; a page holds 1 to page_tokens=4"),
    "no tokens": (lambda: table(tokens=[0, 4]), r"tokens\[0\] is 0"),
    "tokens of other pages": (lambda: table(tokens=[4]), "tokens has 1 entries for 2 pages"),
    "page_tokens": (lambda: table(page_tokens=0), "page_tokens is 0; it must be an integer >= 1"),
    "gather past the page": (lambda: kernels.gather_pages(table(), start=500, nbytes=20), "start, nbytes: bytes 500 to 520"),
    "gather nothing": (lambda: kernels.gather_pages(table(), nbytes=0), "start, nbytes: bytes 0 to 0"),
    "out of other size": (lambda: kernels.gather_pages(table(), torch.zeros(2, 8, dtype=byte)), r"out has shape \[2, 8\]; it must be \[2, 512\]"),
    "out of floats": (lambda: kernels.gather_pages(table(), torch.zeros(2, 512)), "out is of torch.float32"),
    "out elsewhere": (lambda: kernels.gather_pages(table(), torch.zeros(2, 512, dtype=byte, device="meta")), "out is on meta; it must be on cpu"),
    "out overlapping": (lambda: kernels.gather_pages(table(), torch.zeros(512, dtype=byte).expand(2, 512)), r"out has strides \[0, 1\]"),
    "blocks": (lambda: kernels.gather_pages(table(), blocks=0, launcher=Recorder()), "blocks is 0; it must be an integer >= 1"),
    "scatter twice": (lambda: kernels.scatter_pages(table([(0, 0), (0, 0)]), torch.zeros(2, 8, dtype=byte)), "table names a page twice"),
    "scatter past the page": (lambda: kernels.scatter_pages(table(), torch.zeros(2, 8, dtype=byte), start=508), "start, packed: bytes 508 to 516"),
    "scatter a vector": (lambda: kernels.scatter_pages(table(), torch.zeros(8, dtype=byte)), r"packed has shape \[8\]"),
    "pieces of floats": (lambda: pieces(destinations=[1.0, 2.0]), "destinations is of torch.float32; it must be of torch.int64"),
    "pieces as a list": (lambda: kernels.move_pieces(cast(Any, [1]), torch.zeros(1), torch.zeros(1)), "destinations is a list"),
    "pieces from fewer": (lambda: pieces(sources=[64]), r"sources has shape \[1\]; it must be \[2\]"),
    "pieces of other sizes": (lambda: pieces(sizes=[1, 2, 3]), r"sizes has shape \[3\]; it must be \[2\]"),
    "piece of negative size": (lambda: pieces(sizes=[0, -1]), r"sizes\[1\] is -1; it must be 0 or more"),
    "piece from nowhere": (lambda: pieces(sources=[64, 0]), r"sources\[1\] is 0; it must be the address"),
    "piece to nowhere": (lambda: pieces(destinations=[0, 64]), r"destinations\[0\] is 0; it must be the address"),
    "pieces without kernels": (lambda: kernels.move_pieces(*torch.zeros(3, 1, dtype=torch.int64, device="meta")), r"destinations are on meta, .* no kernels; .* kvtier\[cuda13\]"),
    "pieces largest": (lambda: pieces(largest=-1), "largest is -1; it must be an integer >= 0"),
    "pieces blocks": (lambda: pieces(blocks=0), "blocks is 0; it must be an integer >= 1"),
    "summary dtype": (lambda: kernels.summarise_pages(table(), start=0, heads=2, dim=8, dtype=torch.int8), "dtype is torch.int8"),
    "summary heads": (lambda: kernels.summarise_pages(table(), start=0, heads=0, dim=8, dtype=half), "heads is 0"),
    "summary past the page": (lambda: kernels.summarise_pages(table(), start=400, heads=2, dim=8, dtype=half), "start, heads, dim: bytes 400 to 528"),
    "summary at an odd byte": (lambda: kernels.summarise_pages(table(), start=1, heads=2, dim=8, dtype=half), "start is 1; it must be a multiple of 2"),
    "scores of other dim": (lambda: kernels.quest_scores(torch.zeros(4, 9, dtype=half), summary()), r"q has shape \[4, 9\]; it must be \[any, 8\]"),
    "scores of other dtype": (lambda: kernels.quest_scores(torch.zeros(4, 8), summary()), "q is of torch.float32; it must be of torch.float16"),
    "scores of three heads": (lambda: kernels.arkbox_scores(torch.zeros(3, 8, dtype=half), summary()), "q has 3 heads; they must be a multiple of the 2"),
    "scores of a wide head": (lambda: kernels.arkbox_scores(torch.zeros(1, 514), torch.zeros(1, 4, 1, 514)), "dim of summary is 514; it must be an integer from 1 to 512"),
    "summaries past the page": (lambda: kernels.PageSummaries(table(), 400, 2, 8, half), "start, heads, dim: bytes 400 to 528"),
    "summaries at an odd byte": (lambda: kernels.PageSummaries(table(), 1, 2, 8, half), "start is 1; it must be a multiple of 2"),
    "scores transposed": (lambda: kernels.quest_scores(torch.zeros(8, 4, dtype=half).t(), summary()), "q has strides .* must be contiguous"),
    "mass of other pages": (lambda: kernels.add_page_mass(torch.zeros(2, 3), torch.zeros(2), torch.zeros(4, dtype=torch.int32), torch.zeros(4)), r"rows has shape \[4\]; it must be \[3\]"),
    "mass rows as int64": (lambda: kernels.add_page_mass(torch.zeros(2, 3), torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(4)), "rows is of torch.int64"),
    "mass row out of range": (lambda: kernels.add_page_mass(torch.zeros(2, 3), torch.zeros(2), torch.tensor([0, 1, 4], dtype=torch.int32), torch.zeros(4)), "rows has entries from 0 to 4; mass has rows 0 to 3"),
    "mass weight": (lambda: kernels.add_page_mass(torch.zeros(2, 3), torch.zeros(2), torch.zeros(3, dtype=torch.int32), torch.zeros(4), weight=float("nan")), "weight is nan"),
    "attention heads": (lambda: attend(torch.zeros(3, 8, dtype=half)), "q has 3 heads; they must be a multiple of kv_heads=2"),
    "attention past the page": (lambda: attend(torch.zeros(2, 8, dtype=half), v_start=400), "v_start: bytes 400 to 528"),
    "attention at an odd byte": (lambda: attend(torch.zeros(2, 8, dtype=half), k_start=3), "k_start is 3; it must be a multiple of 2"),
    "attention scale": (lambda: attend(torch.zeros(2, 8, dtype=half), scale=float("inf")), "scale is inf"),
    "attention splits": (lambda: attend(torch.zeros(2, 8, dtype=half), splits=0), "splits is 0"),
    "attention elsewhere": (lambda: attend(torch.zeros(2, 8, dtype=half, device="meta")), "q is on meta; it must be on cpu"),
    "attention of integers": (lambda: attend(torch.zeros(2, 8, dtype=torch.int32)), "q is of torch.int32"),
    "merge nothing": (lambda: kernels.merge([]), "parts is empty"),
    "merge of other heads": (lambda: kernels.merge_partials(torch.zeros(2, 3, 4), torch.zeros(2, 4)), r"lses has shape \[2, 4\]; it must be \[2, 3\]"),
    "merge of halves": (lambda: kernels.merge_partials(torch.zeros(2, 3, 4, dtype=half), torch.zeros(2, 3)), "outs is of torch.float16"),
    "quantise format": (lambda: kernels.quantise_keys(torch.zeros(1, 2, 4), cast(Any, "int3")), "format is 'int3'; it must be one of fp8, int8, int4"),
    "quantise an odd width": (lambda: kernels.quantise_keys(torch.zeros(1, 2, 3), "int8"), "even number of channels"),
    "quantise a matrix": (lambda: kernels.quantise_keys(torch.zeros(2, 4), "int8"), r"x has shape \[2, 4\]; it must be \[any, any, any\]"),
    "quantise group": (lambda: kernels.quantise_values(torch.zeros(1, 2, 8), "int8", group=6), "group is 6; it must be even and divide the 8"),
    "quantise at an odd item": (lambda: kernels.quantise_keys(torch.zeros(9)[1:].view(1, 2, 4), "int8"), "x begins at an odd item"),
    "dequantise dtype": (lambda: kernels.dequantise(kernels.quantise_keys(torch.zeros(1, 2, 4), "int8"), torch.int8), "dtype is torch.int8"),
}  # fmt: skip


class Recorder:
    """A launcher that runs nothing."""

    multiprocessors = 4

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def launch(self, *launch: Any) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_name_of_the_argument(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_shape_is_a_layout_error() -> None:
    with pytest.raises(LayoutError):
        REFUSED["quantise a matrix"][0]()


def test_no_pages_is_no_launch() -> None:
    empty, recorder = table([]), Recorder()
    assert kernels.gather_pages(empty, launcher=recorder).shape == (0, PAGE_BYTES)
    kernels.scatter_pages(empty, torch.zeros(0, 8, dtype=torch.uint8), launcher=recorder)
    kernels.summarise_pages(empty, start=0, heads=2, dim=8, dtype=half, launcher=recorder)
    (out, lse), page_lse = attend(torch.zeros(4, 8, dtype=half), empty, launcher=recorder)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert page_lse.shape == (4, 0)
    kernels.move_pieces(*torch.zeros(3, 0, dtype=torch.int64), launcher=recorder)
    assert recorder.launches == []


def test_blocks_bound_the_grid() -> None:
    big = kernels.PageTable(
        [torch.zeros(64 << 16, dtype=torch.uint8)],
        [(0, n << 16) for n in range(64)],
        page_bytes=1 << 16,
        page_tokens=4,
    )
    for blocks in (1, 3, 64, 100):
        recorder = Recorder()
        kernels.gather_pages(big, blocks=blocks, launcher=recorder)
        across, down, _ = recorder.launches[0][1]
        assert 1 <= across * down <= blocks


def test_a_table_keeps_its_slabs() -> None:
    pages = table(slabs=[torch.arange(2048).to(torch.uint8)])
    assert kernels.gather_pages(pages)[1, 3] == (PAGE_BYTES + 3) % 256


def test_error_of_quantising_is_measured() -> None:
    x = torch.randn(2, 16, 8)
    exact = kernels.quantise_keys(torch.ones(1, 4, 2), "int8")
    assert exact.error.item() == 0
    coarse, fine = kernels.quantise_keys(x, "int4"), kernels.quantise_keys(x, "int8")
    assert (coarse.error > 4 * fine.error).all()
    assert coarse.nbytes < fine.nbytes + coarse.zero.numel() * 4
    lost = x.clone()
    lost[1, 3, 3] = torch.nan
    errors = kernels.quantise_keys(lost, "int8")
    assert errors.worst[1].isnan()
    assert not errors.worst[0].isnan()


def test_summaries_hold_for_what_is_attended_after_the_int8_round_trip() -> None:
    """The bound is of the keys it was computed from: of quantised ones, if those are what is attended."""
    x = torch.randn(1, 8, 16)
    back = kernels.dequantise(kernels.quantise_keys(x, "int8"), torch.float32)
    assert (back.amax(1) <= x.amax(1) + x.abs().amax(1) / 127).all()


# ----------------------------------------------------------------- the choice of kernel or reference


def test_importing_loads_neither_torch_nor_cupy() -> None:
    program = "import sys, kvtier.kernels; print(*{'torch', 'cupy', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def test_every_public_name_resolves() -> None:
    assert all(getattr(kernels, name) is not None for name in kernels.__all__)
    assert set(kernels.__all__) <= set(dir(kernels))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        kernels.nonsense  # noqa: B018


@pytest.fixture
def no_launcher() -> Iterator[None]:
    launch._cuda_launcher.cache_clear()
    yield
    launch._cuda_launcher.cache_clear()


@pytest.mark.usefixtures("no_launcher")
def test_without_cupy_one_warning_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.warns(OffloadWarning, match=r"cannot be used on cuda:0 .*cupy.*kvtier\[cuda13\]"):
        assert launch.launcher_for(torch.device("cuda", 0)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch.launcher_for(torch.device("cuda", 0)) is None


class FakeCupy(types.ModuleType):
    """What the launcher uses of CuPy, without a card: it proves the calls, not the card."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = 0
        self.cuda = types.SimpleNamespace(
            Device=lambda index: self._entered("device", index),
            Stream=object,
            ExternalStream=lambda pointer, index: self._entered("stream", pointer, index),
        )

    @contextmanager
    def _entered(self, *what: Any) -> Iterator[None]:
        self.calls.append(what)
        yield

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        assert "#include" not in code.replace("It has no #include", "")

        def get_function(name: str) -> Any:
            return lambda grid, block, values, shared_mem: self.calls.append(
                (name, grid, block, values, shared_mem)
            )

        def compile() -> None:
            self.compiled += 1

        return types.SimpleNamespace(get_function=get_function, compile=compile)


@pytest.mark.parametrize(("attribute", "reached"), [(1, True), (0, False), (None, False)])
def test_host_memory_is_reached_only_where_the_card_says_so(
    attribute: int | None, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def answer(number: int, index: int) -> int:
        asked.append((number, index))
        if attribute is None:
            raise RuntimeError("cudaErrorInvalidValue")
        return attribute

    cupy = FakeCupy()
    cupy.cuda.runtime = types.SimpleNamespace(deviceGetAttribute=answer)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    moves.reaches_host_memory.cache_clear()
    assert moves.reaches_host_memory(torch.device("cuda", 1)) is reached
    moves.reaches_host_memory.cache_clear()
    assert asked == [(91, 1)]
    assert moves.reaches_host_memory(torch.device("cpu"))


@pytest.mark.usefixtures("no_launcher")
def test_a_launch_passes_addresses_and_exact_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    properties = types.SimpleNamespace(multi_processor_count=34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    stream = types.SimpleNamespace(cuda_stream=0xABC)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    launcher = launch.launcher_for(torch.device("cuda", 1))
    assert launcher is not None
    assert launcher.multiprocessors == 34
    pages = table()
    out = kernels.gather_pages(pages, launcher=launcher)
    kernels.gather_pages(pages, launcher=launcher)
    assert cupy.compiled == 1
    assert cupy.calls[-3:-1] == [("device", 1), ("stream", 0xABC, 1)]
    name, _, block, values, shared = next(call for call in cupy.calls if "pages" in str(call[0]))
    assert (name, block, shared) == ("gather_pages_16", (launch.THREADS, 1, 1), 0)
    assert [type(value) for value in values] == [
        np.uint64, np.int32, np.int64, np.int64, np.uint64, np.int64,
    ]  # fmt: skip
    assert values[0] == pages.addresses.data_ptr()
    assert values[4] == out.data_ptr()
