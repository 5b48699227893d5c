"""Rows of ``ttft_points.csv``: time to the first token of a prompt, computed or loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from kvtier.cost.constants import Constants
from kvtier.cost.lint import Verdict, load_plausibility, prefill_plausibility
from kvtier.cost.models import ModelShape
from kvtier.cost.prefill import prefill_flops, prefill_time
from kvtier.cost.restore import Chain, restore_or_recompute
from kvtier.devices.cards import Card
from points.outcome import Outcome, unusable
from points.text import (
    band,
    bits_of,
    card_of,
    clock_share,
    count_of,
    find,
    middle,
    model_of,
    number,
)

Row = Mapping[str, str]


def predict(row: Row, constants: Constants) -> list[Outcome]:
    """Milliseconds from nothing (``cold``) and from a tier (``warm``), where the row has them."""
    found = []
    for kind in ("cold", "warm"):
        text = row[f"{kind}_ttft_ms"]
        key = f"{row['model'][:20]} {row['prompt_tokens']} {kind}, {row['source'][:20]}"
        ends = band(text)
        measured = middle(ends) if ends else number(text)
        if measured:
            found.append(_one(row, key, kind, measured, constants))
        elif kind == "cold":
            found.append(unusable(key, "cold_ttft_ms is not stated"))
    return found


def _one(row: Row, key: str, kind: str, measured: float, constants: Constants) -> Outcome:
    tokens = number(row["prompt_tokens"])
    if not tokens:
        return unusable(key, "prompt_tokens is not stated")
    card, gpus = card_of(row["hardware"]), count_of(row["hardware"])
    if card is None:
        return unusable(key, f"{row['hardware']!r} is not in the table of cards")
    model = model_of(row["model"])
    verdict = _lint(row, kind, measured, tokens, card, gpus, model, constants)
    if verdict is not None and not verdict.plausible:
        return Outcome(key, "flagged", "ms", measured, why=verdict.text)
    if model is None:
        return unusable(key, f"the geometry of {row['model']!r} is not in the table of models")
    if model.count("full", "sliding", "latent") and not model.query_width:
        return unusable(key, f"the attention of {model.name} is not described by its table row")
    if card.bf16_flops is None:
        return unusable(key, f"the FLOPS of {card.name} are not in the table of cards")
    bits = bits_of(row["model"]) or (4.9 if ":" in row["model"] else 16.0)
    if kind == "cold":
        clock = clock_share(card, row["hardware"])
        card = replace(card, bf16_flops=card.bf16_flops * clock)
        seconds = prefill_time(
            model, card, tokens, weight_bits=bits, gpus=gpus, constants=constants
        )
        rule = f"prefill, {gpus} x {card.name}"
    else:
        chain = _chain(row["warm_tier"])
        if isinstance(chain, str):
            return unusable(key, chain)
        seconds = restore_or_recompute(
            model, card, int(tokens), chain=chain, weight_bits=bits, constants=constants
        ).load
        rule = f"load, {chain}"
    return Outcome(
        key, "point", "ms", measured, seconds.value * 1e3, seconds.low * 1e3, seconds.high * 1e3,
        rule,
    )  # fmt: skip


def _chain(tier: str) -> Chain | str:
    """The way from the tier that answered, or why it is not known."""
    in_ram = re.search(r"\bRAM\b|host|pinned", tier)
    on_disk = re.search(r"disk|nvme|ssd|file", tier, re.IGNORECASE)
    if bool(in_ram) == bool(on_disk):
        return f"the tier that answered is {tier!r}: not one of RAM and disk"
    return Chain("host") if in_ram else Chain("disk")


def _lint(
    row: Row, kind: str, measured: float, tokens: float, card: Card, gpus: int,
    model: ModelShape | None, constants: Constants,
) -> Verdict | None:  # fmt: skip
    """The claim against the peak of the bus or of the card; of a model without a name, against the
    largest that the card holds."""
    seconds = measured / 1e3
    if kind == "warm":
        if model is None:
            return None
        nbytes = model.sequence_bytes(tokens, "int4" if "int4" in row["model"] else "bf16")
        stated = find(r"([\d.]+) KB/token measured", row["note"])
        if stated:
            nbytes = stated * 1e3 * tokens
        return load_plausibility(nbytes=nbytes, claimed_s=seconds, peak_bw=card.bus_rate)
    if card.bf16_flops is None:
        return None
    # Units for 4-bit weights multiply up to eight times as fast as bf16 ones.
    peak = card.bf16_flops * gpus * 8
    if model is not None:
        flops = prefill_flops(model, tokens).total
        return prefill_plausibility(tokens=tokens, claimed_s=seconds, peak_flops=peak, flops=flops)
    if "unnamed" in row["model"]:
        return prefill_plausibility(
            tokens=tokens, claimed_s=seconds, peak_flops=card.bf16_flops * gpus,
            vram_bytes=float(card.vram_bytes * gpus), constants=constants,
        )  # fmt: skip
    return None
