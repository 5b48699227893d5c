"""What codecs of the lower tiers cost in quality: part of ``bench/quality.py``, as ``--codecs``.

The pages of a prefix are computed once, exactly, and stored in one store for each codec, so that every one of them has been
coded and decoded once. Then the text is fed on token by token over them, with dense attention and with pages chosen by
Quest at the budgets of the other table; the tokens fed are exact. KL and perplexity are those against dense attention
over the exact pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from kvtier.attention.mode import Mode
from kvtier.identity import ModelIdentity
from kvtier.keys import page_keys
from kvtier.layout import CodecName
from kvtier.store.store import TieredStore

CODECS: tuple[CodecName, ...] = ("none", "fp8", "int8", "int4")
WAY = "quest"

#: A budget's mode; ``None``: dense attention.
ModeOf = Callable[[float | None], Mode | str]


class Bench(Protocol):
    """What is needed of ``quality.Bench``."""

    store: TieredStore
    identity: ModelIdentity
    plan: Any

    def texts(self) -> dict[str, torch.Tensor]: ...
    def passkeys(self) -> Any: ...
    def dense(self, name: str, ids: torch.Tensor) -> torch.Tensor: ...
    def feed(
        self,
        ids: torch.Tensor,
        prefill: int,
        mode: Mode | str,
        kept: tuple[TieredStore, ModelIdentity] | None = None,
    ) -> torch.Tensor: ...
    def tell(self, line: str) -> None: ...


@dataclass(frozen=True)
class CodecRow:
    """One line of the table: a codec at a budget (1.0: dense attention).

    Attributes:
        size: bytes of a page over those of an exact one.
        worst, error: largest absolute error of a value, and relative error, over all pages.
    """

    codec: str
    budget: float
    size: float
    worst: float
    error: float
    kl: float
    ppl: float
    passkey: int


def run_codecs(
    bench: Bench,
    mode_of: ModeOf,
    budgets: Sequence[float | None],
    step: Callable[[CodecRow], None],
) -> list[CodecRow]:
    """All rows; of each codec those of all budgets, dense attention first. ``step`` is told each."""
    rows = []
    trials = list(bench.passkeys())
    bench.tell("exact pages")
    for ids, context, _ in trials:
        bench.feed(ids[:, : context + 1], context, "exact-stream")
    for codec in CODECS:
        with TieredStore(
            bench.store.layout,
            device="emulated",
            vram=bench.store.sizes["vram"],
            host="6GiB",
            host_codec=codec,
        ) as store:
            kept = store, replace(bench.identity, kv_quantisation=store.kv_quantisation)
            for budget in budgets:
                bench.tell(f"{codec} at {1.0 if budget is None else budget:.0%}")
                kl: list[float] = []
                loss: list[float] = []
                for name, ids in bench.texts().items():
                    want = bench.dense(name, ids)
                    take(bench, kept, ids, bench.plan.prefill)
                    got = bench.feed(ids, bench.plan.prefill, mode_of(budget), kept)
                    kl += (want.exp() * (want - got)).sum(-1).tolist()[:-1]
                    following = ids[0, bench.plan.prefill + 1 :, None]
                    losses = (want - got)[:-1].gather(1, following)[:, 0]
                    loss += losses.tolist()
                right = 0
                for ids, context, answer in trials:
                    take(bench, kept, ids, context)
                    logs = bench.feed(ids, context, mode_of(budget), kept)
                    right += torch.equal(logs[-1 - len(answer) : -1].argmax(-1), answer)
                tier = store.stats().tiers["host"]
                slots = store._placement.slots["host"]
                rows.append(
                    CodecRow(
                        codec,
                        1.0 if budget is None else budget,
                        slots.page_bytes / store.layout.page_bytes,
                        tier.worst_error,
                        tier.relative_error,
                        sum(kl) / len(kl),
                        math.exp(sum(loss) / len(loss)),
                        right,
                    )
                )
                step(rows[-1])
    return rows


def take(
    bench: Bench, kept: tuple[TieredStore, ModelIdentity], ids: torch.Tensor, prefill: int
) -> None:
    """Store the exact pages of a prefix, which the bench has, under the keys of another identity."""
    store, identity = kept
    tokens = ids[0, :prefill].tolist()
    page_tokens = store.layout.page_tokens
    theirs = page_keys(bench.identity, tokens, page_tokens)
    mine = page_keys(identity, tokens, page_tokens)
    with bench.store.match(theirs, promote=False) as lease:
        assert len(lease) == len(theirs), "the exact pages are not there"
        for index, key in enumerate(mine):
            if not store.contains(key):
                parent = mine[index - 1] if index else None
                store.put(key, lease.read(index), parent=parent, identity=identity.digest)


HEAD = ("codec", "page", "largest error", "relative", "budget", "KL", "ppl", "passkey")


def cells(row: CodecRow, trials: int) -> list[str]:
    return [
        row.codec,
        f"{row.size:.0%}",
        f"{row.worst:.3g}",
        f"{row.error:.2%}",
        "dense" if row.budget == 1.0 else f"{row.budget:.0%} {WAY}",
        f"{row.kl:.5f}",
        f"{row.ppl:.4f}",
        f"{row.passkey}/{trials}",
    ]


def as_data(rows: Sequence[CodecRow]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(row) for row in rows]
