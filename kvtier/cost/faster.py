"""What would decode faster than a load as it is placed, each with its predicted rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvtier.cost.coded import Codecs
from kvtier.cost.outlook import Load
from kvtier.cost.remedies import WEIGHT_FORMATS
from kvtier.cost.warning import Remedy
from kvtier.units import format_size

#: A remedy is worth a line if it is this much faster.
WORTH = 1.15

#: The shortest context that is proposed.
LEAST_CONTEXT = 256
_KV_DTYPES = ("fp8", "int4")

#: In words, the options that do it, and the load with it.
Proposal = tuple[str, str, Load]


def faster(load: Load) -> list[Remedy]:
    """What would decode faster, the fastest first; at least one."""
    tps = load.estimate.tps
    found = {
        what: Remedy(what, how, other.estimate.tps)
        for what, how, other in load.proposals()
        if other.estimate.tps >= WORTH * tps
    }
    if found:
        return sorted(found.values(), key=lambda one: -one.predicted_tps)
    need = format_size(load.resident.budget.used)
    return [Remedy(f"a card that holds all of it ({need})", "", load.estimate.baseline_tps)]


def proposals(load: Load) -> Iterator[Proposal]:
    """Everything that could be done."""
    resident = load.resident
    if resident.fits:
        yield "everything in VRAM, where it fits", "--weights-off-card 0 --kv-off-card 0", resident
    else:
        yield from _smaller(load)
    if load.kv_off and load.link != "cpu":
        yield (
            "split attention: the processor attends to the KV in host RAM",
            "--link cpu",
            replace(load, link="cpu", mode=None, disk_off=0.0),
        )
    tokens = load.work.selection.tokens
    if load.kv_off and load.context > tokens and load.mode != "select":
        link = load.link if load.link in ("pinned", "pageable", "fallback") else "pinned"
        yield (
            f"selection of {tokens:,} tokens a step (not exact)",
            "--mode select",
            replace(load, mode="select", link=link),
        )
    if load.link in ("pageable", "fallback", "disk") or (load.link == "cpu" and load.kv_off):
        yield (
            "pinned host memory",
            "--link pinned",
            replace(load, link="pinned", mode=None, disk_off=None),
        )
    if load.weights_off and load.link != "cpu":
        yield (
            "let the processor compute the layers that are off the card",
            "--link cpu",
            replace(load, link="cpu", mode=None),
        )
    yield from _other_placement(load)


def _smaller(load: Load) -> Iterator[Proposal]:
    """What makes everything fit."""
    resident = load.resident
    for name, less in WEIGHT_FORMATS:
        other = replace(resident, weight_bits=less)
        if less < load.bits - 0.05 and other.fits:
            yield f"weights in {name}, all in VRAM", f"--weights-dtype {name.lower()}", other
            break
    for name in _KV_DTYPES:
        if load.model.token_bytes(name) >= load.model.token_bytes(load.kv_dtype):
            continue
        # No codec takes KV of 8 or 4 bits.
        other = replace(resident, kv_dtype=name, codecs=Codecs())
        option = f"--kv-dtype {name}" + (" and no codec" if load.codecs else "")
        if other.fits:
            yield f"KV in {name}, all in VRAM", option, other
            break
        placed = other.placed() if load.kv_off else None
        if placed is not None:
            yield f"KV in {name}", option, placed
    context = resident.budget.longest_context()
    if context and LEAST_CONTEXT <= context < load.context:
        yield (
            f"a context of {context:,} tokens, all in VRAM",
            f"--context {context}",
            replace(resident, context=context),
        )
    if load.sequences > 1:
        count = resident.budget.max_sequences()
        if count and count < load.sequences:
            yield (
                f"{count} sequences at a time, all in VRAM",
                f"--sequences {count}",
                replace(resident, sequences=count),
            )


def _other_placement(load: Load) -> Iterator[Proposal]:
    """KV off the card in the place of weights, or the other way round."""
    if bool(load.weights_off) == bool(load.kv_off) or load.resident.fits:
        return
    if load.weights_off:
        other, what, option = load.resident.with_off("kv_off"), "KV", "--kv-off-card"
    else:
        other, what, option = load.resident.with_off("weights_off"), "weights", "--weights-off-card"
    if other is not None:
        share = other.kv_off or other.weights_off
        yield f"{share:.0%} of the {what} off the card instead", f"{option} {share:g}", other
