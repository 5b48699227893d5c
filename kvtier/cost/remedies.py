"""What would make a load fit: smaller in one way at a time, or on more memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvtier.cost.budget import Budget, Remedy
from kvtier.cost.kv_dtype import kv_dtype
from kvtier.devices.cards import Card, cards
from kvtier.units import format_size

#: Formats of weights to propose, the best first: name, bits with metadata of an 8B model as a whole
#: (llama.cpp quantize README, Llama-3.1-8B).
WEIGHT_FORMATS = (
    ("Q8_0", 8.5),
    ("Q6_K", 6.57),
    ("Q5_K_M", 5.7),
    ("Q4_K_M", 4.9),
    ("Q3_K_M", 4.0),
    ("Q2_K", 3.2),
)
_KV_FORMATS = ("fp8", "q8_0", "int4", "nvfp4")


def remedies(budget: Budget) -> list[Remedy]:
    """Changes that make ``budget`` fit, each checked by it: fewer tokens, another KV dtype, fewer
    sequences, smaller weights, the next larger card, more cards, a part off the card. Two at once
    where no single one is enough."""
    if budget.fits:
        return []
    single = [one for one in _proposals(budget) if budget.changed(**one.change).fits]
    return single or list(_pairs(budget))


def _proposals(budget: Budget) -> Iterator[Remedy]:
    longest = max(budget.lengths)
    context = budget.longest_context()
    if context:
        yield Remedy(
            "context",
            f"{context:,} tokens a sequence, {longest - context:,} fewer than {longest:,}",
            {"tokens": context, "mean": False},
        )
    for name in _KV_FORMATS:
        smaller = kv_dtype(name).element_bits < budget.dtype.element_bits
        if smaller and budget.changed(dtype=name).fits:
            saved = budget.part("kv") - budget.changed(dtype=name).part("kv")
            yield Remedy(
                "kv_dtype",
                f"KV in {kv_dtype(name).describe()}, {format_size(saved)} less a GPU",
                {"dtype": name},
            )
            break
    count = budget.max_sequences()
    if count and count < budget.sequences:
        yield Remedy(
            "sequences",
            f"{count} sequences of {longest:,} tokens instead of {budget.sequences}",
            {"sequences": count, "tokens": longest, "mean": False},
        )
    bits = budget.model.native_bits if budget.weight_bits is None else budget.weight_bits
    for name, less in WEIGHT_FORMATS:
        if less < bits - 0.05 and budget.changed(weight_bits=less).fits:
            saved = budget.part("weights") - budget.changed(weight_bits=less).part("weights")
            yield Remedy(
                "weights",
                f"weights in {name} ({less:g} bits instead of {bits:.3g}), {format_size(saved)} less "
                "a GPU",
                {"weight_bits": less},
            )
            break
    if card := _next_card(budget):
        yield Remedy("card", f"{budget.gpus} x {_named(card)}", {"vram": card})
    for gpus in (2, 4, 8):
        if gpus > budget.gpus and budget.changed(gpus=gpus).fits:
            yield Remedy("gpus", f"{gpus} of these GPUs by tensor parallelism", {"gpus": gpus})
            break
    for kind in ("weights_off", "kv_off"):
        percent = _percent_off(budget, kind)
        if percent is not None:
            what = kind.removesuffix("_off")
            yield Remedy(kind, _off_text(percent, what), {kind: percent / 100})


def _pairs(budget: Budget) -> Iterator[Remedy]:
    """What fits when one change does not do it: larger and more cards, or KV and weights off."""
    for gpus in (2, 4, 8):
        more = budget.changed(gpus=gpus)
        card = _next_card(more) if gpus > budget.gpus else None
        if card:
            change: dict[str, object] = {"vram": card, "gpus": gpus}
            yield Remedy("card", f"{gpus} x {_named(card)}, by tensor parallelism", change)
            break
    percent = _percent_off(budget.changed(kv_off=1.0), "weights_off")
    if percent is not None:
        change = {"kv_off": 1.0, "weights_off": percent / 100}
        yield Remedy("weights_off", f"all KV and {_off_text(percent, 'weights')}", change)


def _percent_off(budget: Budget, kind: str) -> int | None:
    """Smallest percentage of the weights or the KV whose absence makes it fit."""
    held = budget.part(kind.removesuffix("_off"))
    if not held:
        return None
    now = getattr(budget, kind)
    # Staging memory depends on the share too, so step on from what the bytes alone would need.
    first = math.ceil(100 * (now + (1 - now) * max(0.0, -budget.free) / held))
    fits = (n for n in range(max(1, first), 101) if budget.changed(**{kind: n / 100}).fits)
    return next(fits, None)


def _off_text(percent: int, what: str) -> str:
    return f"{percent} % of the {what} off the card, which decodes slower"


def _named(card: Card) -> str:
    return f"{card.name} with {card.vram_bytes / 2**30:.0f} GiB"


def _next_card(budget: Budget) -> Card | None:
    """The smallest known card on which it fits, larger than the one there is."""
    larger = sorted(
        (card for card in cards() if card.vram_bytes > budget.capacity and not card.unified),
        key=lambda card: card.vram_bytes,
    )
    return next((card for card in larger if budget.changed(vram=card).fits), None)
