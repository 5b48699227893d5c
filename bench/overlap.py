"""Copy/compute overlap of exact-stream attention on the emulated card.

The real store, sessions and ``ExactStream`` decode one sequence of which a share lies in host
memory. K and V of a sealed page are pieces of 0.5 MiB or more. For each share the step is compared
with the longer of its copies and its kernels, each alone:

    overlap = max(copy, compute) / step

Without any overlap it would be max / (copy + compute), shown beside it. All times are simulated.
Run: ``python bench/overlap.py``; exit status 1 if the overlap is under ``--least`` anywhere.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from kvtier.cost.decode import STEP_S
from kvtier.cost.models import find_model
from kvtier.devices.spec import parse_card
from kvtier.stress.load import StepTimes, run_context
from kvtier.stress.plan import LoadPlan
from kvtier.stress.spec import Duration, LoadSpec
from kvtier.units import format_size

CARD = "rtx-4060-ti-16gb"
MODEL = "llama-3.1-8b"
CONTEXT = 16384
PAGE_TOKENS = 256


@dataclass(frozen=True)
class Row:
    """One share of pages in host memory: milliseconds of a step and of its parts."""

    cold: int
    pages: int
    copy_ms: float
    compute_ms: float
    step_ms: float

    @property
    def overlap(self) -> float:
        return max(self.copy_ms, self.compute_ms) / self.step_ms

    @property
    def serial(self) -> float:
        return max(self.copy_ms, self.compute_ms) / (self.copy_ms + self.compute_ms)


def measure(cold_share: float, *, steps: int = 8, context: int = CONTEXT) -> Row:
    """Decode with about that share of the pages in host memory."""
    spec = LoadSpec(
        card=parse_card(CARD),
        model=find_model(MODEL),
        contexts=(context,),
        duration=Duration(steps, None),
        page_tokens=PAGE_TOKENS,
        vram=1 << 40,
    )
    roomy = LoadPlan(spec, context)
    pages = round(roomy.pages * (1 - cold_share)) + spec.sessions
    rest = roomy.vram - roomy.tier
    plan = LoadPlan(
        LoadSpec(**{**spec.__dict__, "vram": rest + pages * roomy.layout.page_bytes}), context
    )
    times: list[StepTimes] = []
    result = run_context(plan, steps=times.append)
    assert result.ok, (result.error, result.books)
    # The first step makes room for a new page, which is not what is asked here.
    steady = times[1:]
    count = len(steady)
    return Row(
        cold=result.cold_pages,
        pages=result.pages,
        copy_ms=sum(t.h2d_s for t in steady) / count * 1e3,
        compute_ms=sum(t.compute_s for t in steady) / count * 1e3,
        step_ms=sum(t.seconds for t in steady) / count * 1e3 - STEP_S * 1e3,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--least", type=float, default=0.95)
    args = parser.parse_args()
    model = find_model(MODEL)
    part = model.layout("bf16", PAGE_TOKENS).plane(0).k.nbytes
    print(
        f"{model.name} at {CONTEXT:,} tokens on an emulated {CARD}, K and V of a page "
        f"{format_size(part)} each; milliseconds a decode step, simulated"
    )
    print("cold pages     copy   compute      step   overlap   (none would be)")
    worst = 1.0
    for share in (0.25, 0.4, 0.5, 0.6, 0.75, 0.95):
        row = measure(share, steps=args.steps)
        worst = min(worst, row.overlap)
        print(
            f"{row.cold:4d} of {row.pages:3d} {row.copy_ms:8.2f}  {row.compute_ms:8.2f}  "
            f"{row.step_ms:8.2f}   {row.overlap:7.1%}   {row.serial:7.1%}"
        )
    print(f"least overlap {worst:.1%}, wanted {args.least:.0%}")
    return 0 if worst >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
