"""A card and its link as text: by name, by numbers, or a name with some numbers changed."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import cast, get_args

from kvtier.devices.cards import DEFAULT_CARD, Card, LinkKind, LinkModel, find_card
from kvtier.errors import ConfigError
from kvtier.units import parse_size

#: Fields of a specification and an example of each.
FIELDS = {
    "vram": "16GB",
    "bandwidth": "288GB/s",
    "flops": "44T",
    "link": "pinned",
    "rate": "13GB/s",
    "pcie": "4x8",
    "duplex": "0.85",
    "engines": "2",
}


@dataclass(frozen=True)
class CardSpec:
    """A card, the kind of its link to host memory, and the times of copies over it."""

    card: Card
    kind: LinkKind
    link: LinkModel


def parse_card(text: str) -> CardSpec:
    """``rtx-4060-ti-16gb``, ``rtx-4060-ti-16gb,link=fallback`` or ``vram=16GB,bandwidth=288GB/s,...``.

    Fields: ``vram`` (size), ``bandwidth`` (of its memory), ``flops`` (dense bf16, "44T"), ``link``
    (pinned, pageable, fallback), ``rate`` (large copies over that kind of link, one way), ``pcie``
    ("4x8", from which rates follow where none is given), ``duplex`` (rate of each direction while
    both are busy, 0..1), ``engines`` (copy engines: 1 or 2). A card without a name needs ``vram``,
    ``bandwidth``, and ``rate`` or ``pcie``.

    Raises:
        ConfigError: an unknown card, field or value; names the field and gives an example.
    """
    name, fields = _split(text)
    base = find_card(name) if name else None
    rate = _rate(fields, "rate")
    kind = cast(LinkKind, fields.get("link", "pinned"))
    if kind not in get_args(LinkKind):
        raise ConfigError(
            f"card field link is {kind!r}; use one of {', '.join(get_args(LinkKind))}"
        )
    card = _card(base, fields, rate, kind)
    link = card.link_model(kind, rate)
    if "duplex" in fields:
        link = replace(link, duplex=_number(fields, "duplex"))
    if "engines" in fields:
        engines = _number(fields, "engines")
        if engines not in (1, 2):
            raise ConfigError(f"card field engines is {fields['engines']!r}; use 1 or 2")
        link = replace(link, engines=int(engines))
    return CardSpec(card, kind, link)


def _split(text: str) -> tuple[str, dict[str, str]]:
    items = [item.strip() for item in text.split(",")]
    name = items.pop(0) if "=" not in items[0] else ""
    fields: dict[str, str] = {}
    for item in items:
        field, sep, value = (part.strip() for part in item.partition("="))
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(FIELDS)}"
            raise ConfigError(f"card field {field!r} is unknown; {hint}")
        if not sep or not value:
            raise ConfigError(f"card field {field} has no value; give e.g. {field}={FIELDS[field]}")
        if field in fields:
            raise ConfigError(f"card field {field} is given twice; give it once")
        fields[field] = value
    return name, fields


def _card(base: Card | None, fields: dict[str, str], rate: float | None, kind: LinkKind) -> Card:
    if base is None:
        for field in ("vram", "bandwidth"):
            if field not in fields:
                raise ConfigError(
                    f"a card by numbers needs the field {field}, e.g. {field}={FIELDS[field]}; or "
                    f"begin with a name, such as {DEFAULT_CARD}"
                )
        if rate is None and "pcie" not in fields:
            raise ConfigError(
                "a card by numbers needs the field rate or pcie, e.g. rate=13GB/s or pcie=4x8"
            )
    changes: dict[str, object] = {}
    if "vram" in fields:
        changes["vram_bytes"] = parse_size(fields["vram"], "card field vram")
    if "bandwidth" in fields:
        changes["memory_bandwidth"] = _rate(fields, "bandwidth")
    if "flops" in fields:
        changes["bf16_flops"] = _number(fields, "flops")
    if "pcie" in fields:
        match = re.fullmatch(r"([1-6])\.?0?x([0-9]+)", fields["pcie"])
        if match is None:
            raise ConfigError(
                f"card field pcie is {fields['pcie']!r}; give generation and lanes, e.g. 4x8"
            )
        changes |= {
            "pcie_gen": int(match[1]),
            "pcie_lanes": int(match[2]),
            "pinned_rate": None,
            "unified": False,
        }
    if rate is not None and (kind == "pinned" or (base is None and "pcie" not in fields)):
        changes["pinned_rate"] = rate
    if base is not None:
        return replace(base, **changes)  # type: ignore[arg-type]
    return Card(name="card by numbers", source="given by numbers", **changes)  # type: ignore[arg-type]


def _number(fields: dict[str, str], field: str) -> float:
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(?:FLOPS?)?(?:/S)?", fields[field].upper()
    )
    value = float(match[1]) * 1000.0 ** " KMGTP".index(match[2] or " ") if match else 0.0
    if value <= 0:
        raise ConfigError(
            f"card field {field} is {fields[field]!r}; give a number > 0, e.g. {FIELDS[field]}"
        )
    return value


def _rate(fields: dict[str, str], field: str) -> float | None:
    """Bytes per second; None if the field is not given."""
    text = fields.get(field)
    if text is None:
        return None
    try:
        value = parse_size(re.sub(r"\s*/\s*s(ec)?$", "", text), field)
    except ConfigError:
        value = 0
    if value <= 0:
        raise ConfigError(f"card field {field} is {text!r}; give e.g. {field}={FIELDS[field]}")
    return float(value)
