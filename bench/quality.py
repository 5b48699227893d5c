"""What selection costs in quality, on SmolLM2-135M-Instruct and real texts.

Each text is prefilled densely and then fed on token by token, as it is written (teacher-forced), with attention limited to a
share of the pages. Printed for each way of choosing and each budget:

* recall: share of a layer's attention that falls on what it reads (the tail included), if it were spread over
  everything as in dense attention; mean over heads and steps, for the layers that select and for bands of them;
* KL: Kullback-Leibler divergence of the next-token distribution from that of dense attention, in nats, mean;
* ppl: perplexity over that of dense attention;
* new: of the pages read, the share that the step before did not read;
* passkey: of 15 prompts (three lengths, five depths) those in which the five digits come out. The context is
  prefilled, the question is fed token by token, as in Quest's protocol: who never saw the question cannot look back.

Beside the selectors of kvtier stand three that only know the past: ``h2o`` (attention mass added up over all steps, of what
was kept; half the budget recent), ``ema`` (decayed mass, of all pages) and ``lru`` (pages by when they last got more than
an even share, of all pages). At their first step they are given what that step attends to, in place of what they would
have seen while the prompt was read. The first two layers read everything.

Run: ``python bench/quality.py [--quick] [--json] [--resume FILE] [--write docs/quality.md]``. Each line of the table is
told as soon as it is known, and with ``--resume`` kept: a second run goes on where the first one ended. The whole takes
three quarters of an hour on two cores.
With ``--codecs`` the codecs of the lower tiers are measured instead (see ``bench/quality_codecs.py``), in some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import inspect
import itertools
import json
import math
import os
import platform
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data import topics

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.attention.budget import Budget
from kvtier.attention.filters import filters_path, load_filters
from kvtier.attention.mode import Mode, Selection
from kvtier.demo.model import demo_text, load_demo
from kvtier.folders import cache_folder
from kvtier.identity import ModelIdentity
from kvtier.integrations.transformers import TieredCache, identity_of, layout_of
from kvtier.integrations.transformers.calibrate_filters import calibrate_filters
from kvtier.selector import Query, Selector, load_selector
from kvtier.store.store import TieredStore

PAGE_TOKENS = 16
BUDGETS = (0.10, 0.25, 0.05, 0.50)
BANDS = ((2, 10), (10, 20), (20, 30))
PASSKEY_TOKENS = (1000, 2000, 4000)
PASSKEY_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
WAYS = ("window", "h2o", "ema", "lru", "quest", "arkbox", "omnikv", "oracle")


# ---------------------------------------------------------------------- ways that know the past only


class _Past(Selector):
    """Scores of pages by what they got in the steps before."""

    def __init__(self) -> None:
        self._state: dict[int, torch.Tensor] = {}

    def _grown(self, layer: int, pages: int, like: torch.Tensor) -> torch.Tensor:
        old = self._state.get(layer)
        if old is None or len(old) < pages:
            fresh = torch.zeros(pages, dtype=torch.float32, device=like.device)
            if old is not None:
                fresh[: len(old)] = old
            self._state[layer] = old = fresh
        return old

    def scores(self, query: Query) -> torch.Tensor:
        if query.layer not in self._state:
            self._state[query.layer] = query.shares().mean(0)
        state = self._grown(query.layer, query.pages, query.q)
        return state[: query.pages].expand(query.kv_heads, -1).clone()


class H2O(_Past):
    """Sum of the mass that pages got while they were read; what is not read gets none (Zhang et al., 2023)."""

    name = "h2o"

    def observe(self, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        state = self._grown(layer, page_lse.shape[1], page_lse)
        state[: page_lse.shape[1]] += (page_lse - lse[:, None]).exp().mean(0)


class _Measured(_Past):
    """Measures the true mass of all pages after each choice."""

    def scores(self, query: Query) -> torch.Tensor:
        before = super().scores(query)
        self.measure(query.layer, query.shares().mean(0))
        return before

    def measure(self, layer: int, share: torch.Tensor) -> None:
        raise NotImplementedError


class Ema(_Measured):
    """Mass decayed by 0.9 a step."""

    name = "ema"

    def measure(self, layer: int, share: torch.Tensor) -> None:
        state = self._grown(layer, len(share), share)
        self._state[layer] = state * 0.9 + share


class Lru(_Measured):
    """When a page last got more than an even share."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0

    def measure(self, layer: int, share: torch.Tensor) -> None:
        self._clock += 1
        state = self._grown(layer, len(share), share)
        state[share > 1.0 / len(share)] = float(self._clock)


# ---------------------------------------------------------------------- what is measured


class Meter(Selector):
    """Asks another selector, and measures what its choice recalls."""

    name = "meter"

    def __init__(self, inner: Selector, sums: Sums) -> None:
        self.inner = inner
        self.sums = sums
        self._true: dict[int, torch.Tensor] = {}
        self._last: dict[int, torch.Tensor] = {}

    def dense_layers(self, layers: int) -> frozenset[int]:
        return self.inner.dense_layers(layers)

    def source(self, layer: int) -> int:
        # Asked anew in each layer, so that what each one recalls can be measured.
        return layer

    def scores(self, query: Query) -> torch.Tensor:
        true = self._true[query.layer] = query.shares()
        return self.inner.scores(replace(query, shares=lambda: true))

    def observe(self, layer: int, page_lse: torch.Tensor, lse: torch.Tensor) -> None:
        self.inner.observe(layer, page_lse, lse)
        true = self._true.pop(layer, None)
        if true is None:
            return
        read = page_lse > -torch.inf
        missed = float((true * ~read).sum(1).mean())
        self.sums.recall.setdefault(layer, []).append(1.0 - missed)
        last = self._last.get(layer)
        if last is not None:
            width = last.shape[1]
            fresh = int(read[:, :width].logical_and(~last).sum() + read[:, width:].sum())
            self.sums.new.append(fresh / max(1, int(read.sum())))
        self._last[layer] = read


@dataclass
class Sums:
    """Of one way and budget, over texts."""

    recall: dict[int, list[float]]
    new: list[float]
    kl: list[float]
    loss: list[float]
    dense_loss: list[float]


@dataclass(frozen=True)
class Row:
    """One line of the table; ``None`` where nothing was measured."""

    way: str
    budget: float
    recall: float | None
    bands: tuple[float | None, ...]
    kl: float
    ppl: float
    new: float | None
    passkey: int | None


def way_factory(way: str, filters: str) -> Callable[[], Selector]:
    """What makes selectors of one way."""
    past: dict[str, Callable[[], Selector]] = {"h2o": H2O, "ema": Ema, "lru": Lru}
    if way in past:
        return past[way]
    return load_selector(f"omnikv:filters={filters}" if way == "omnikv" else way)


def mode_of(way: str, budget: float, filters: str, sums: Sums | None = None) -> Mode:
    make = way_factory(way, filters)
    recent = 0.5 if way == "h2o" else Selection.recent
    selection = Selection(
        way,
        make if sums is None else functools.partial(_metered, make, sums),
        Budget(budget, "share"),
        recent=recent,
        dense=frozenset({0, 1}),
        scope="head",
        prefetch="none",
    )
    return Mode("select", f"select:{way}", selection)


def _metered(make: Callable[[], Selector], sums: Sums) -> Selector:
    return Meter(make(), sums)


# ---------------------------------------------------------------------- runs


#: Tokens of a passkey's context that are fed one by one, so that who only knows the past has seen a step before the
#: question begins.
WARM_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """How much to run."""

    ways: tuple[str, ...] = WAYS
    budgets: tuple[float, ...] = BUDGETS
    prefill: int = 2048
    steps: int = 16
    passkey_tokens: tuple[int, ...] = PASSKEY_TOKENS
    passkey_depths: tuple[float, ...] = PASSKEY_DEPTHS
    passkey_budgets: tuple[float, ...] = (0.10,)


QUICK = Plan(
    ways=("window", "h2o", "quest", "arkbox", "omnikv", "oracle"),
    budgets=(0.10,),
    prefill=1024,
    steps=24,
    passkey_tokens=(1000,),
    passkey_depths=(0.3, 0.7),
    passkey_budgets=(0.10,),
)


#: With ``--codecs``.
CODECS = Plan(passkey_tokens=(1000, 2000))
CODECS_QUICK = Plan(
    budgets=(), prefill=1024, steps=16, passkey_tokens=(1000,), passkey_depths=(0.3, 0.7)
)


@dataclass(frozen=True)
class Result:
    """The rows, the passkeys that dense attention finds, and the filter layers used."""

    rows: list[Row]
    dense_passkey: int
    filters: str


class Log:
    """What has been measured so far, kept in a file if one is given.

    Raises:
        SystemExit: the file is of another plan.
    """

    def __init__(self, plan: Plan, path: Path | None = None) -> None:
        self.path = path
        #: All that rows depend on; which ways are run is no part of it.
        self._plan = json.loads(json.dumps({**asdict(plan), "ways": None, "budgets": None}))
        self.rows: dict[tuple[str, float], Row] = {}
        self.dense_passkey: int | None = None
        self.filters: str | None = None
        if path is None or not path.exists():
            return
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["plan"] != self._plan:
            raise SystemExit(f"{path} is of another plan; delete it or give another file")
        self.dense_passkey, self.filters = values["dense_passkey"], values["filters"]
        for each in values["rows"]:
            row = Row(**{**each, "bands": tuple(each["bands"])})
            self.rows[row.way, row.budget] = row

    def save(self) -> None:
        if self.path is None:
            return
        values = {
            "plan": self._plan,
            "dense_passkey": self.dense_passkey,
            "filters": self.filters,
            "rows": [asdict(row) for row in self.rows.values()],
        }
        work = self.path.with_suffix(".tmp")
        work.write_text(json.dumps(values, indent=1), encoding="utf-8")
        os.replace(work, self.path)


class Bench:
    """The model, a store for its pages, and dense results to compare with.

    Args:
        plan: how much to run.
        tell: called with a line on what is being done.
    """

    def __init__(self, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> None:
        self.plan = plan
        self.tell = tell
        self.model, self.tokenizer = load_demo()
        self.keyword = (
            "cache"
            if "cache" in inspect.signature(self.model.forward).parameters
            else "past_key_values"
        )
        layout = layout_of(self.model, PAGE_TOKENS, summaries=True)
        room = 400 * layout.page_bytes
        self.store = TieredStore(layout, device="emulated", vram=room, host="6GiB")
        self.identity = identity_of(self.model, layout=layout)
        self._dense: dict[str, torch.Tensor] = {}
        self._texts: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def ids(self, text: str) -> torch.Tensor:
        found: torch.Tensor = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        return found

    def texts(self) -> dict[str, torch.Tensor]:
        """Prose, documentation and code, ``[1, prefill + steps + 1]`` each."""
        if self._texts:
            return self._texts
        need = self.plan.prefill + self.plan.steps + 1
        sources = {
            "prose": demo_text(),
            # The language reference and a module of the standard library, where Python is installed.
            "docs": topics.topics["compound"],
            "code": Path(inspect.getfile(textwrap)).read_text(encoding="utf-8"),
        }
        found = {name: self.ids(text)[:, :need] for name, text in sources.items()}
        for name, ids in found.items():
            if ids.shape[1] < need:
                raise SystemExit(f"the {name} text has {ids.shape[1]} tokens; {need} are needed")
        self._texts = found
        return found

    def feed(
        self,
        ids: torch.Tensor,
        prefill: int,
        mode: Mode | str,
        kept: tuple[TieredStore, ModelIdentity] | None = None,
    ) -> torch.Tensor:
        """Log-probabilities after each token from ``prefill`` on, ``[steps, vocabulary]``, with all before prefilled
        densely, or from the store and under the identity ``kept``."""
        store, identity = kept or (self.store, self.identity)
        with TieredCache(self.model, store, identity=identity, mode=mode) as cache:
            have = cache.load_prefix(ids[:, : prefill + 1])
            if prefill - have == 1:
                # One token would be a step of decoding.
                cache.crop(-1)
                have -= 1
            with torch.inference_mode():
                for start in range(have, prefill, 512):
                    self._forward(cache, ids[:, start : min(start + 512, prefill)])
                steps = [
                    self._forward(cache, ids[:, n : n + 1])[0, -1].float().log_softmax(-1)
                    for n in range(prefill, ids.shape[1])
                ]
        return torch.stack(steps)

    def _forward(self, cache: TieredCache, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, logits_to_keep=1, **{self.keyword: cache}).logits
        return logits

    def dense(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        if name not in self._dense:
            self._dense[name] = self.feed(ids, self.plan.prefill, "exact-stream")
        return self._dense[name]

    def measure(self, way: str, budget: float, filters: str) -> Sums:
        sums = Sums({}, [], [], [], [])
        for name, ids in self.texts().items():
            want = self.dense(name, ids)
            got = self.feed(ids, self.plan.prefill, mode_of(way, budget, filters, sums))
            sums.kl += (want.exp() * (want - got)).sum(-1).tolist()[:-1]
            following = ids[0, self.plan.prefill + 1 :]
            for logs, losses in ((got, sums.loss), (want, sums.dense_loss)):
                losses += (-logs[:-1].gather(1, following[:, None])[:, 0]).tolist()
        return sums

    # ------------------------------------------------------------------ passkey

    def passkeys(self) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """(prompt ids with question and answer, tokens of context, answer ids) of each trial."""
        filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
        unit = self.ids(filler).shape[1]
        for tokens in self.plan.passkey_tokens:
            for number, depth in enumerate(self.plan.passkey_depths):
                key = str(10000 + (tokens * 7919 + number * 104729) % 90000)
                count = max(1, (tokens - 60) // unit)
                before = round(count * depth)
                context = (
                    "There is an important piece of information hidden in this text. Find it and remember it. "
                    + filler * before
                    + f"The pass key is {key}. Remember it. {key} is the pass key. "
                    + filler * (count - before)
                )
                start = self.ids(context)
                question = self.ids("What is the pass key? The pass key is")
                answer = self.ids(f" {key}")
                yield torch.cat([start, question, answer], 1), start.shape[1], answer[0]

    def passkey(self, mode: Callable[[], Mode | str]) -> int:
        """Trials in which every token of the answer is the likeliest one."""
        right = 0
        for ids, context, answer in self.passkeys():
            logs = self.feed(ids, context - WARM_TOKENS, mode())
            best = logs[-1 - len(answer) : -1].argmax(-1)
            right += torch.equal(best, answer)
        return right

    # ------------------------------------------------------------------ all

    def run(self, log: Log, step: Callable[[Row], None] = lambda row: None) -> Result:
        """The whole table; what is in ``log`` is not measured again."""
        if log.filters is None:
            log.filters = self.filters()
            log.save()
        if log.dense_passkey is None:
            self.tell("passkeys with dense attention")
            log.dense_passkey = self.passkey(lambda: "exact-stream")
            log.save()
        rows = []
        # Budget by budget: a run that is cut short then has compared all ways at some.
        for budget, way in itertools.product(self.plan.budgets, self.plan.ways):
            row = log.rows.get((way, budget))
            if row is None:
                self.tell(f"{way} at {budget:.0%}")
                sums = self.measure(way, budget, log.filters)
                keys = None
                if budget in self.plan.passkey_budgets:
                    keys = self.passkey(functools.partial(mode_of, way, budget, log.filters))
                row = log.rows[way, budget] = row_of(way, budget, sums, keys)
                log.save()
            rows.append(row)
            step(row)
        rows.sort(key=lambda row: (self.plan.ways.index(row.way), row.budget))
        return Result(rows, log.dense_passkey, log.filters)

    def filters(self) -> str:
        """Calibrated on a part of the prose that is not measured; stored ones are used."""
        found = load_filters(filters_path(cache_folder(), self.identity.weights_digest))
        if found is None:
            self.tell("calibrating filters")
            ids = self.ids(demo_text())[:, -1100:]
            found = calibrate_filters(self.model, ids, prefill=1024, count=5)
        return found.text


def row_of(way: str, budget: float, sums: Sums, passkey: int | None) -> Row:
    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    everything = [x for values in sums.recall.values() for x in values]
    bands = tuple(
        mean([x for layer, values in sums.recall.items() if low <= layer < high for x in values])
        for low, high in BANDS
    )
    kl, loss, dense = mean(sums.kl), mean(sums.loss), mean(sums.dense_loss)
    assert kl is not None
    assert loss is not None
    assert dense is not None
    return Row(
        way, budget, mean(everything), bands, kl, math.exp(loss - dense), mean(sums.new), passkey
    )


# ---------------------------------------------------------------------- output


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


HEAD = (
    "way",
    "budget",
    "recall",
    *(f"layers {low}-{high - 1}" for low, high in BANDS),
    "KL",
    "ppl",
    "new",
    "passkey",
)


def cells(row: Row, trials: int) -> list[str]:
    return [
        row.way,
        f"{row.budget:.0%}",
        number(row.recall, ".3f"),
        *(number(x, ".3f") for x in row.bands),
        number(row.kl, ".4f"),
        number(row.ppl, ".3f"),
        number(row.new, ".1%"),
        "-" if row.passkey is None else f"{row.passkey}/{trials}",
    ]


def markdown(result: Result, plan: Plan) -> str:
    """The page that ``--write`` writes, up to what people have written below its table."""
    trials = len(plan.passkey_tokens) * len(plan.passkey_depths)
    lines = [
        "# What selection costs in quality",
        "",
        f"Printed by `python bench/quality.py` on {datetime.date.today().isoformat()}, "
        f"{os.cpu_count()} CPUs ({platform.machine()}), torch {torch.__version__}. Model: SmolLM2-135M-Instruct "
        f"in float32, pages of {PAGE_TOKENS} tokens, one list of pages a KV head, the first two layers dense. "
        f"Three texts (prose, documentation, code), {plan.prefill} tokens of prefill and {plan.steps} "
        f"teacher-forced steps each. omnikv: filter layers {result.filters}. Dense attention finds {result.dense_passkey} of "
        f"{trials} passkeys.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
    ]
    lines += ["| " + " | ".join(cells(row, trials)) + " |" for row in result.rows]
    return "\n".join(lines) + "\n"


def tell_row(head: Sequence[str], row: Sequence[str]) -> None:
    pairs = zip(head, row, strict=True)
    print(" ".join(f"{name} {cell}" for name, cell in pairs), file=sys.stderr, flush=True)


def codecs(plan: Plan, console: Console, *, as_json: bool) -> int:
    """``--codecs``."""
    # Beside this file; loaded late, for it is of no use without the option.
    from quality_codecs import HEAD, WAY, as_data, cells, run_codecs

    began = time.monotonic()
    budgets = (None, *sorted(plan.budgets))
    steps = len(plan.passkey_tokens) * len(plan.passkey_depths)
    with (
        Progress(console=console, disable=not console.is_terminal) as progress,
        Bench(plan) as bench,
    ):
        task = progress.add_task("codecs", total=None)
        bench.tell = lambda line: progress.update(task, description=line)
        rows = run_codecs(
            bench,
            lambda b: "exact-stream" if b is None else mode_of(WAY, b, ""),
            budgets,
            lambda row: tell_row(HEAD, cells(row, steps)),
        )
    if as_json:
        print(json.dumps({"rows": as_data(rows)}))
        return 0
    table = Table(title=f"codecs ({time.monotonic() - began:.0f} s)")
    for name in HEAD:
        table.add_column(name, justify="left" if name == "codec" else "right")
    for row in rows:
        table.add_row(*cells(row, steps))
    console.print(table)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What selection costs in quality.")
    parser.add_argument("--quick", action="store_true", help="one budget, few steps (minutes)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table into a Markdown page"
    )
    parser.add_argument(
        "--resume", metavar="FILE", type=Path, help="keep what is measured there, and go on from it"
    )
    parser.add_argument(
        "--codecs", action="store_true", help="what codecs of the lower tiers cost, instead"
    )
    parser.add_argument("--ways", help=f"some of {','.join(WAYS)}")
    args = parser.parse_args(argv)
    if args.codecs and (args.ways or args.write):
        parser.error("--codecs has a table of its own; leave out --ways and --write")
    plan = QUICK if args.quick else Plan()
    if args.ways:
        unknown = [way for way in args.ways.split(",") if way not in WAYS]
        if unknown:
            parser.error(f"--ways has {unknown[0]!r}; use some of {', '.join(WAYS)}")
        plan = replace(plan, ways=tuple(args.ways.split(",")))
    warnings.simplefilter("ignore", FutureWarning)
    console = Console(stderr=args.json)
    if args.codecs:
        return codecs(CODECS_QUICK if args.quick else CODECS, console, as_json=args.json)
    began = time.monotonic()
    trials = len(plan.passkey_tokens) * len(plan.passkey_depths)
    log = Log(plan, args.resume)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("selecting", total=len(plan.ways) * len(plan.budgets))
        with Bench(plan, lambda line: progress.update(task, description=line)) as bench:

            def step(row: Row) -> None:
                progress.advance(task)
                tell_row(HEAD, cells(row, trials))

            result = bench.run(log, step)
    if args.write is not None:
        args.write.write_text(markdown(result, plan), encoding="utf-8")
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    table = Table(
        title=f"quality ({time.monotonic() - began:.0f} s; dense finds {result.dense_passkey}/{trials} "
        "passkeys)"
    )
    for name in HEAD:
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in result.rows:
        table.add_row(*cells(row, trials))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
