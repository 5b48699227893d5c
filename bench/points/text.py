"""Numbers, cards and models out of the free text of published measurements."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

from kvtier.cost.models import ModelShape, find_model
from kvtier.devices.cards import Card, cards
from kvtier.errors import ConfigError

#: Bits a weight takes, by the words that name a format; the first that is found counts.
FORMATS = (
    (r"nvfp4|mxfp4", 4.5),
    (r"iq2", 2.7),
    (r"q2", 2.6),
    (r"q3", 3.9),
    (r"q4|int4|awq|gptq|\bq4\b", 4.9),
    (r"q5", 5.7),
    (r"q6", 6.6),
    (r"q8", 8.5),
    (r"fp8|int8", 8.0),
    (r"fp32|float32", 32.0),
    (r"bf16|fp16|float16|f16", 16.0),
)

#: Names that the table has under another one, of the same geometry.
SAME_GEOMETRY = {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-70b": "llama-2-70b",
    "miqu-70b": "llama-2-70b",
    "llama-7b": "llama-2-7b",
    "llama-8b": "llama-3.1-8b",
    "llama-13b": "llama-2-13b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.8-27b": "qwen3.5-27b",
}

#: Peak bandwidth of the host memory that a processor drives, in bytes/s, from its data sheet.
PROCESSORS = {
    "i7-8700": 41.6e9,
    "i5-12400f": 76.8e9,
    "5950x": 51.2e9,
    "4600h": 51.2e9,
    "epyc 7742": 204.8e9,
    "8480": 307.2e9,
}

#: Watts that a card takes without a limit, from its data sheet.
BOARD_POWER = {
    "RTX 3080 10GB": 320,
    "RTX 3090": 350,
    "RTX 3090 Ti": 450,
    "RTX 4070": 200,
    "RTX 4090": 450,
    "RTX 5090": 575,
}

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


def number(text: str | None) -> float | None:
    """The number a field begins with (after "~" or "REJECT"); None if it begins with none."""
    match = re.match(rf"\s*(?:REJECT\s+)?[~<]?\s*{NUMBER}\s*(k\b)?", text or "")
    if not match:
        return None
    return float(match.group(1).replace(",", "")) * (1000 if match.group(2) else 1)


def find(pattern: str, text: str) -> float | None:
    """The first number that ``pattern`` captures anywhere in the text."""
    match = re.search(pattern, text, re.IGNORECASE)
    return float(match.group(1).replace(",", "")) if match else None


def count_of(text: str) -> int:
    """Leading "2x" of a list of cards."""
    match = re.match(r"\s*(\d+)x\s", text)
    return int(match.group(1)) if match else 1


def harmonic(values: list[float]) -> float | None:
    """Rate of equal parts that are read one after the other at these rates."""
    return len(values) / sum(1 / v for v in values) if values else None


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(NUMBER, text or "")]


@functools.cache
def card_of(text: str) -> Card | None:
    """The card of the table whose name has all words of ``text``; of several the SXM module,
    else the fastest. A memory
    size that the table writes otherwise is not a reason to miss it."""
    text = re.sub(r"^\s*\d+x\s+", "", text).split(",")[0]
    text = re.sub(r"\b\d+ W\b|\(.*?\)|NVIDIA|GeForce", "", text)
    words = [w for w in re.split(r"[\s\-_]+", text.lower()) if w and not w.startswith("hbm")]
    for wanted in (words, [w for w in words if not re.fullmatch(r"\d+gb", w)]):
        # The whole name, else one that has these words: "H100 80GB" is the SXM card.
        names = {card: card.name.lower().split() for card in cards()}
        exact = [card for card in names if names[card] == wanted]
        some = exact or [
            card
            for card in names
            if wanted and set(wanted) <= {w.strip("()") for w in names[card]}
            and not {"ti", "super", "laptop"} & (set(names[card]) - set(wanted))
        ]  # fmt: skip
        if some:
            return max(some, key=lambda card: ("SXM" in card.name, card.memory_bandwidth))
    return None


@functools.cache
def model_of(text: str) -> ModelShape | None:
    """The model of the table that ``text`` names, whatever its quantisation; None if there is none."""
    name = re.sub(r"([a-z])(\d)", r"\1-\2", text, count=1) if ":" in text else text
    name = re.sub(r"\(.*?\)", " ", name.lower().replace(":", "-"))
    drop = (
        r"\b(ud|q\d\w*|iq\d\w*|k|xl|fp8|fp16|bf16|f16|fp32|nvfp4|int\d|kv|vllm|coder|instruct|"
        r"qat|awq|gptq|\+)(?=\b|_|$)"
    )
    words = re.sub(drop, " ", name)
    words = re.sub(r"[^a-z0-9.]+", "-", words).strip("-")
    # From the longest run of words on: what follows a name is rarely part of it.
    parts = words.split("-")
    for end in range(len(parts), 0, -1):
        slug = "-".join(parts[:end])
        slug = re.sub(r"^qwen-(\d)", r"qwen\1", slug)
        try:
            return find_model(SAME_GEOMETRY.get(slug, slug))
        except ConfigError:
            continue
    return None


def bits_of(text: str) -> float | None:
    """Bits a weight takes by the format that ``text`` names."""
    for pattern, bits in FORMATS:
        if re.search(pattern, text, re.IGNORECASE):
            return bits
    return None


def params_of(text: str) -> float | None:
    """Parameters that a name promises: "OPT-6.7B" -> 6.7e9."""
    billions = find(r"(\d+(?:\.\d+)?)B\b", text)
    return billions * 1e9 if billions else None


def dram_peak(text: str) -> float | None:
    """Peak bandwidth of host memory in bytes/s, as stated, from channels and type, or from the
    processor's data sheet; None if the text tells none of it."""
    stated = find(rf"{NUMBER} GB/s (?:peak|assumed)", text)
    if stated:
        return stated * 1e9
    kind = find(r"DDR\d-(\d+)", text)
    channels = find(r"(\d+)[ -]channel", text)
    if channels is None and re.search(r"\bdual\b", text, re.IGNORECASE):
        channels = 2
    if kind and channels:
        return kind * 1e6 * 8 * channels
    for name, peak in PROCESSORS.items():
        if name in text.lower():
            return peak
    return None


def is_server(card: Card | None, host: str) -> bool:
    """Whether the host is a server: by its text, or because such a card is in one."""
    if re.search(r"epyc|xeon|server|8 channel|12 channel", host, re.IGNORECASE):
        return True
    return bool(card and re.match(r"(A100|H100|H200|B200|B300|MI3|H20)", card.name))


def clock_share(card: Card, text: str) -> float:
    """What a power limit ("245 W") leaves of the clock: power grows with clock times voltage
    squared, and voltage with the clock, so its cube root; 1 without a limit."""
    limit, full = find(r"(\d+) W\b", text), BOARD_POWER.get(card.name)
    return min(1.0, (limit / full) ** (1 / 3)) if limit and full else 1.0


def band(text: str) -> tuple[float, float] | None:
    """ "3000-8000" -> (3000, 8000)."""
    match = re.match(rf"\s*{NUMBER}\s*-\s*{NUMBER}", text or "")
    if not match:
        return None
    low, high = (float(part.replace(",", "")) for part in match.groups())
    return low, high


def middle(ends: tuple[float, float]) -> float:
    return math.sqrt(ends[0] * ends[1])


def dense(params: float) -> ModelShape:
    """A model of that many parameters of which nothing else is known."""
    base = find_model("opt-30b")
    return replace(base, name=f"{params / 1e9:g}B dense", shared_params=params, gathered_params=0.0)
