"""What selectors choose: never more than the budget, nothing better than the oracle; and the choice of filter layers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.attention.choice import Choice, Chooser
from kvtier.attention.filters import (
    Filters,
    RecallMeter,
    choose_filters,
    filters_path,
    load_filters,
    save_filters,
    with_filters,
)
from kvtier.attention.mode import parse_mode
from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.kernels.summary import PageSummaries, summarise_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import LayerLayout, PageLayout
from kvtier.selector import Query, Selector, load_selector
from tests.paged_batch import identity

TOKENS, DIM = 4, 8
SELECTORS = (
    "quest",
    "quest,reduce=max",
    "arkbox",
    "arkbox,reduce=mean",
    "window",
    "omnikv,filters=0,wait=0",
)


class Case:
    """Random keys of one layer and one query."""

    def __init__(self, seed: int, pages: int, kv_heads: int, group: int, wild: float) -> None:
        made = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(pages, TOKENS, kv_heads, DIM, generator=made) * wild
        self.q = torch.randn(kv_heads * group, DIM, generator=made)
        raw = torch.empty(self.keys.nbytes + 16, dtype=torch.uint8)
        slab = raw[-raw.data_ptr() % 16 :][: self.keys.nbytes]
        slab.view(torch.float32).view_as(self.keys).copy_(self.keys)
        size = self.keys[0].nbytes
        table = PageTable(
            [slab], [(0, n * size) for n in range(pages)], page_bytes=size, page_tokens=TOKENS
        )
        made_of = {"heads": kv_heads, "dim": DIM, "dtype": torch.float32}
        found = summarise_pages(table, start=0, **made_of)
        each = found[0].nbytes
        store = torch.empty(pages * each + 16, dtype=torch.uint8)
        slab = store[-store.data_ptr() % 16 :][: pages * each]
        slab.copy_(found.view(torch.uint8).view(-1))
        places = [(0, n * each) for n in range(pages)]
        table = PageTable([slab], places, page_bytes=each, page_tokens=TOKENS)
        self.summaries = PageSummaries(table, 0, **made_of)
        grouped = self.q.view(kv_heads, group, DIM)
        logits = torch.einsum("hgd,pthd->hgpt", grouped, self.keys) / DIM**0.5
        self.page_lse = logits.logsumexp(-1).view(kv_heads * group, pages)
        tail = torch.randn(kv_heads * group, generator=made) * wild
        self.lse = torch.logaddexp(self.page_lse.logsumexp(-1), tail)
        self.shares = (self.page_lse - self.lse[:, None]).exp()
        self.layout = PageLayout(
            [LayerLayout.attention(kv_heads, DIM, "float32")] * 2, TOKENS, True
        )

    def query(self, layer: int = 1) -> Query:
        pages, _, kv_heads, _ = self.keys.shape
        return Query(layer, self.q, DIM**-0.5, kv_heads, pages, self.summaries, lambda: self.shares)

    def choose(self, mode: str) -> Choice:
        selection = parse_mode(mode).selection
        assert selection is not None
        chooser = Chooser(selection, [0, 1], self.layout)
        chooser.resize(1)
        chooser.begin([len(self.keys)], [1])
        chooser.observe(0, 0, self.page_lse, self.lse)
        return chooser.choose(0, 1, self.query)

    def recall(self, choice: Choice) -> float:
        """Attention mass of the sealed pages that is read, mean over the query heads."""
        lists = choice.lists.expand(self.keys.shape[2], -1)
        group = len(self.q) // self.keys.shape[2]
        read = self.shares.gather(1, lists.repeat_interleave(group, 0))
        return float(read.sum(1).mean())


cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    pages=st.integers(4, 24),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    wild=st.sampled_from([0.1, 1.0, 8.0]),
)


@settings(deadline=None, max_examples=60)
@given(
    case=cases,
    budget=st.integers(3, 24),
    scope=st.sampled_from(["head", "layer"]),
    sinks=st.integers(0, 5),
    recent=st.sampled_from(["0%", "50%", "100%", "9"]),
)
def test_the_oracle_recalls_most_at_every_budget(
    case: Case, budget: int, scope: str, sinks: int, recent: str
) -> None:
    rest = f"budget={budget}pages,scope={scope},sinks={sinks},recent={recent},dense=0"
    pages = len(case.keys)
    if budget - 1 >= pages:
        return
    best = case.choose(f"select:oracle,{rest}")
    for name in SELECTORS:
        choice = case.choose(f"select:{name},{rest}")
        for each in (best, choice):
            lists = each.lists.tolist()
            assert len(lists) == (1 if scope == "layer" else case.keys.shape[2])
            assert {len(x) for x in lists} == {budget - 1}  # and the tail
            assert all(x == sorted(set(x)) for x in lists)
            assert each.places == sorted({place for x in lists for place in x})
            first = min(sinks, budget - 2)
            assert all(x[:first] == list(range(first)) for x in lists)
            last = max(1, (budget - 1) // 2) if recent == "50%" else 0
            last = min(last, budget - 1 - first)
            assert all(x[len(x) - last :] == list(range(pages - last, pages)) for x in lists)
        assert case.recall(best) >= case.recall(choice) - 1e-5


@settings(deadline=None, max_examples=30)
@given(case=cases)
def test_more_budget_recalls_more(case: Case) -> None:
    recalled = [
        case.recall(case.choose(f"select:oracle,budget={n}pages,dense=0,recent=0%,sinks=0"))
        for n in range(3, len(case.keys) + 1)
    ]
    assert all(b >= a - 1e-6 for a, b in itertools.pairwise(recalled))


class Broken(Selector):
    """Gives NaN for every second page."""

    name = "broken"

    def __init__(self, *, columns: int = 0) -> None:
        self.columns = columns

    def scores(self, query: Query) -> torch.Tensor:
        scores = torch.arange(query.pages, dtype=torch.float32).expand(query.kv_heads, -1).clone()
        scores[:, ::2] = torch.nan
        return scores[:, self.columns :]


def test_third_party_selectors_by_module_and_class() -> None:
    case = Case(0, 12, 2, 2, 1.0)
    choice = case.choose(f"select:{__name__}:Broken,budget=6pages,dense=0,recent=0%")
    assert choice.lists.tolist() == [[0, 5, 7, 9, 11]] * 2  # NaN is no large number
    with pytest.raises(ConfigError, match=r"'broken' gave scores of shape \[2, 9\].*\[2, 12\]"):
        case.choose(f"select:{__name__}:Broken,budget=6pages,dense=0,columns=3")
    with pytest.raises(ConfigError, match="not a subclass"):
        load_selector(f"{__name__}:Case")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_selector("kvtier.nothing:Selector")
    with pytest.raises(ConfigError, match="columns='x' is not of type int"):
        load_selector(f"{__name__}:Broken:columns=x")
    with pytest.raises(ConfigError, match="budget twice"):
        parse_mode("select:quest,budget=3pages,budget=4pages")


# ---------------------------------------------------------------------- filter layers


def brute_force(recall: torch.Tensor, count: int, wait: int, first: int) -> tuple[float, float]:
    """(least recall, sum over all layers) of the best choice, by trying all."""
    layers = recall.shape[0]
    best = (-1.0, 0.0)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(first, layers), size):
            close = any(b <= a + wait for a, b in itertools.pairwise(chosen))
            if close or chosen[0] > max(first, layers // 4):
                continue
            best = max(best, worth(recall, chosen, wait))
    return best


def worth(recall: torch.Tensor, chosen: tuple[int, ...], wait: int) -> tuple[float, float]:
    layers = recall.shape[0]
    values = [
        x
        for at, stop in zip(chosen, (*chosen[1:], layers), strict=True)
        for x in recall[at, at + wait + 1 : stop].tolist()
    ]
    return min(values, default=1.0), round(sum(values) + layers - len(values), 9)


@settings(deadline=None, max_examples=150)
@given(
    layers=st.integers(2, 9),
    steps=st.sampled_from([3, 1000]),  # with few values there are ties
    seed=st.integers(0, 2**16),
    wait=st.integers(0, 2),
    data=st.data(),
)
def test_filters_are_the_best_that_there_are(
    layers: int, steps: int, seed: int, wait: int, data: Any
) -> None:
    made = torch.Generator().manual_seed(seed)
    recall = torch.randint(0, steps + 1, (layers, layers), generator=made).double() / steps
    count = data.draw(st.integers(1, layers))
    first = data.draw(st.integers(0, layers - 1))
    chosen, least, mean = choose_filters(recall, count, wait=wait, first=first)
    assert worth(recall, chosen, wait) == pytest.approx(brute_force(recall, count, wait, first))
    assert least == worth(recall, chosen, wait)[0]
    assert least <= mean <= 1.0


@pytest.mark.parametrize(("count", "first"), [(0, 1), (9, 1), (2, -1), (2, 8)])
def test_filters_out_of_range(count: int, first: int) -> None:
    with pytest.raises(ConfigError, match=r"give 1 to 8|layers 0 to 7"):
        choose_filters(torch.rand(8, 8), count, first=first)


def test_recall_is_that_of_the_filters_pages() -> None:
    meter = RecallMeter(2, 0.25)
    # Layer 0 looks at page 0, layer 1 at page 1 and a little at page 0: one page may be read.
    meter.step([torch.tensor([[0.9, 0.0, 0.1, 0.0]]), torch.tensor([[0.2, 0.8, 0.0, 0.0]])])
    assert torch.allclose(
        meter.recall(), torch.tensor([[1.0, 0.25], [0.0, 1.0]], dtype=torch.float64)
    )
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        RecallMeter(2, 1.0)


FILTERS = Filters("m", (1, 4), 2, 0.5, 0.75, 0.1, 64, 10, "2026-11-30")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvtier.attention.filters.cache_folder", lambda: tmp_path)
    return tmp_path


def test_stored_filters_are_used(folder: Path) -> None:
    who = identity(PageLayout([LayerLayout.attention(1, 8, "float32")], 4))
    mode = "select:omnikv,budget=10%"
    assert with_filters(mode, who) == mode
    with pytest.raises(ConfigError, match="kvtier calibrate-filters"):
        parse_mode(with_filters(mode, who))
    path = filters_path(folder, who.weights_digest)
    save_filters(path, FILTERS)
    assert load_filters(path) == FILTERS
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert with_filters(mode, who) == f"{mode},filters=1+4,wait=2"
    selection = parse_mode(with_filters(mode, who)).selection
    assert selection is not None
    assert selection.make().dense_layers(8) == {0, 1, 2, 3, 4, 5, 6}
    # What is given goes before what is stored.
    for own in (f"{mode},filters=2", "exact-split", "select:omnikvish,budget=10%"):
        assert with_filters(own, who) == own
    assert with_filters(f"{mode},wait=0", who) == f"{mode},wait=0,filters=1+4"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "wait"}),
        lambda text: json.dumps(json.loads(text) | {"layers": ["a"]}),
        lambda text: json.dumps(json.loads(text) | {"layers": []}),
        lambda text: json.dumps(json.loads(text) | {"layers": 4}),
        lambda text: json.dumps(json.loads(text) | {"wait": -1}),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
    ],
)
def test_a_damaged_calibration_is_told_with_its_path(
    folder: Path, damage: Callable[[str], str]
) -> None:
    path = filters_path(folder, b"w" * 32)
    save_filters(path, FILTERS)
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{path.name}.*calibrate again"):
        load_filters(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --demo or --model"),
        (["--demo", "--model", "x"], "either --demo or --model"),
        (["--demo", "--share", "1"], "--share is 1.0"),
        (["--demo", "--steps", "0"], "--steps is 0"),
        (["--demo", "--wait", "-1"], "--wait is -1"),
        (["--demo", "--bogus"], "--bogus"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_options_of_the_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["calibrate-filters", *arguments])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
