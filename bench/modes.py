"""Tokens/s and bytes over the link of each mode of attention on an emulated card, beside the prediction.

Two tables, never one number. (A) matched batch: the same model, card, context and number of sequences in each mode;
no gain here comes from more of them. (B) largest batch: each mode at the most sequences that run, with the batch in the
same row, and the gain taken apart into what reading less (or slower) does at the reference's batch and what more
sequences do. The reference keeps all KV in VRAM and reads it once (mode ``vram`` of the cost model, predicted).

All times are simulated, of decoding only: no prefill, no end-to-end rate. ``select`` keeps all KV and is not exact; its
quality is ``bench/quality.py``'s. Run: ``python bench/modes.py [--quick] [--json]``; exit status 1 if a prediction is
further than ``--within`` from the emulated card.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict, dataclass, replace

import torch

from kvtier.cost.batches import largest_batch, matched_batch
from kvtier.cost.models import find_model
from kvtier.cost.modes import decode_estimate
from kvtier.cost.workload import Mode, Workload
from kvtier.devices.spec import parse_card
from kvtier.errors import ConfigError, OffloadWarning
from kvtier.stress.in_place import selection_of
from kvtier.stress.load import run_context
from kvtier.stress.plan import LoadPlan
from kvtier.stress.spec import Duration, LoadSpec

CARD = "rtx-4060-ti-16gb"
MODEL = "llama-3.1-8b"
PAGE_TOKENS = 64
SELECT = "select:quest,budget=10%,dense=none"
MODES = ("exact-stream", "exact-split", SELECT)
LINKS = ("pinned", "pageable", "fallback")
SHARES = (1.0, 0.75, 0.5, 0.25)
COST_MODE: dict[str, Mode] = {
    "exact-stream": "kv-stream",
    "exact-split": "kv-cpu",
    "select": "select",
}


@dataclass(frozen=True)
class Row:
    """One mode on one link with one share of the KV in VRAM.

    Attributes:
        kv_in_vram: share. batch: sequences.
        tps, predicted: tokens/s of all sequences, emulated and by ``decode_estimate``.
        over_link: bytes a step from host memory to VRAM. recalled_planes: planes a layer and sequence chose that were
            not in VRAM, emulated and predicted.
        gain, from_reading, from_batch: against all KV in VRAM, predicted, at its own batch.
        exact: whether all KV is read.
        failed: why it did not run.
    """

    mode: str
    link: str
    kv_in_vram: float
    batch: int
    tps: float
    predicted: float
    over_link: float
    gain: float
    from_reading: float
    from_batch: float
    exact: bool
    failed: str = ""

    @property
    def deviation(self) -> float:
        return self.predicted / self.tps - 1 if self.tps else 0.0


def load(mode: str, link: str, context: int, batch: int, steps: int, share: float) -> LoadPlan:
    """A load of which ``share`` of the pages are in VRAM."""
    spec = LoadSpec(
        card=parse_card(f"{CARD},link={link}"),
        model=find_model(MODEL),
        contexts=(context,),
        sessions=batch,
        policy="lru" if mode == "exact-stream" else "mass",
        mode=mode,
        duration=Duration(steps, None),
        page_tokens=PAGE_TOKENS,
        vram=1 << 44,
    )
    roomy = LoadPlan(spec, context)
    pages = round(roomy.pages * share) + batch * (2 if share == 1.0 else 1)
    vram = roomy.vram - roomy.tier + pages * roomy.layout.page_bytes
    return LoadPlan(replace(spec, vram=vram), context)


def work_of(plan: LoadPlan) -> Workload:
    """The load as the cost model takes it."""
    work = replace(
        plan.outlook.work,
        weight_bits=plan.spec.weight_bits,
        kv_off=plan.cold_pages / plan.pages,
        hot_passes=3.0 if plan.mode.kind == "exact-stream" else 1.0,
        page_tokens=PAGE_TOKENS,
    )
    if plan.mode.selection is not None:
        work = replace(work, selection=selection_of(plan, plan.mode.selection))
    return work


def emulate(plan: LoadPlan) -> tuple[float, float, str]:
    """(tokens/s, bytes over the link a step, why it failed)."""
    result = run_context(plan)
    if not result.ok:
        return 0.0, 0.0, result.error or "; ".join(result.books)
    return result.emulated_tps, result.moved["host->vram"] / max(1, result.steps), ""


def matched(mode: str, link: str, share: float, context: int, batch: int, steps: int) -> Row:
    plan = load(mode, link, context, batch, steps, share)
    work = work_of(plan)
    kind = COST_MODE[plan.mode.kind]
    row = matched_batch(work, [kind], constants=plan.outlook.constants)[0]
    tps, moved, failed = emulate(plan)
    return Row(
        mode, link, share, batch, tps, row.estimate.tps, moved, row.gain, row.gain, 1.0, row.estimate.exact, failed
    )  # fmt: skip


def largest(mode: str, link: str, share: float, context: int, room: int, steps: int) -> Row:
    """The mode at the most sequences whose KV in VRAM takes no more than ``room`` whole sequences."""
    batch = round(room / share)
    plan = load(mode, link, context, batch, steps, share)
    work = replace(work_of(plan), batch=room)
    kind = COST_MODE[plan.mode.kind]
    pool = room * work.model.sequence_bytes(context, work.kv_dtype) * (1 + 1e-9)
    row = largest_batch(work, [kind], pool_bytes=pool, constants=plan.outlook.constants)[0]
    same = row.from_reading
    estimate = decode_estimate(replace(work, batch=batch), kind, constants=plan.outlook.constants)
    tps, moved, failed = emulate(plan)
    gain = estimate.tps / row.reference.tps
    return Row(
        mode, link, share, batch, tps, estimate.tps, moved, gain, same, gain / same, estimate.exact, failed
    )  # fmt: skip


def table(rows: list[Row], *, batches: bool) -> str:
    lines = [
        "| mode | link | KV in VRAM | batch | tokens/s | predicted | dev. | MB over the link a step | of all in VRAM |"
        + (" reading | batch |" if batches else "")
        + " |",
    ]
    lines[0] = lines[0].removesuffix(" |") if lines[0].endswith("| |") else lines[0]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    for r in rows:
        if r.failed:
            lines.append(
                f"| {r.mode} | {r.link} | {r.kv_in_vram:.0%} | {r.batch} | failed: {r.failed} |"
            )
            continue
        lines.append(
            f"| {r.mode}{'' if r.exact else ' (not exact)'} | {r.link} | {r.kv_in_vram:.0%} | {r.batch} | {r.tps:.1f} | "
            f"{r.predicted:.1f} | {r.deviation:+.1%} | {r.over_link / 1e6:.1f} | {r.gain:.2f}x |"
            + (f" {r.from_reading:.2f}x | {r.from_batch:.2f}x |" if batches else "")
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer shares, 4,096 tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--within", type=float, default=0.10, help="largest deviation allowed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    context, steps = (4096, 9) if args.quick else (16384, 17)
    shares = (1.0, 0.5) if args.quick else SHARES
    room = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        first = [
            matched(mode, link, share, context, 1, steps)
            for mode in MODES
            for share in shares
            for link in (LINKS if share < 1 else LINKS[:1])
        ]
        second = [
            largest(mode, "pinned", share, context, room, steps)
            for mode in MODES
            for share in ((1.0, 0.5) if args.quick else (1.0, 0.5, 0.25))
        ]
    rows = first + second
    far = [row for row in rows if row.failed or abs(row.deviation) > args.within]
    if args.json:
        tables = {
            name: [{**asdict(row), "deviation": row.deviation} for row in part]
            for name, part in (("matched_batch", first), ("largest_batch", second))
        }
        note = "simulated on an emulated card, decoding only"
        print(
            json.dumps(
                {"card": CARD, "model": MODEL, "context": context, **tables, "note": note}, indent=2
            )
        )
    else:
        print(
            f"{MODEL} at {context:,} tokens on an emulated {CARD}, pages of {PAGE_TOKENS} tokens, decoding only\n"
        )
        print(f"A. Matched batch\n\n{table(first, batches=False)}\n")
        print(
            f"B. Largest batch, VRAM for the KV of {room} whole sequences\n\n{table(second, batches=True)}\n"
        )
        print(
            f"largest deviation {max(abs(r.deviation) for r in rows):.1%}, {len(far)} beyond {args.within:.0%}"
        )
    return 1 if far else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"modes: {error}")
