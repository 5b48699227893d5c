"""Geometries of well-known models: what a page holds, and which weights a decoded token reads.

``models.csv`` names a source for every row. Parameters are counted from the geometry where the row
says so, norms and biases left out. A token reads all active weights but the rows of the embedding
table, which are gathered; where the table is also the output head (``tied_embeddings``), it is read.
"""

from __future__ import annotations

import csv
import difflib
import functools
import math
import re
from dataclasses import dataclass
from importlib.resources import files

from kvtier.errors import ConfigError
from kvtier.layout import LayerLayout, PageLayout

#: KV dtype of a load -> element type of the layout, elements a byte holds. Two int4 share a uint8.
KV_DTYPES: dict[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 1),
    "fp8": ("float8_e4m3fn", 1),
    "int8": ("int8", 1),
    "int4": ("uint8", 2),
}

#: Bits a weight takes in llama.cpp's Q4_K_M: 4.92 GB for 8.03e9 parameters.
Q4_K_M_BITS = 4.9

_NUMBERS = ("layers", "kv_heads", "head_dim", "params")


@dataclass(frozen=True)
class ModelShape:
    """A model by its sizes.

    Attributes:
        full, sliding, states: layers with full attention, with a window, with a recurrent state.
        window: tokens of a sliding layer, 0 if there are none.
        kv_heads, head_dim: of K and V each; 0 for MLA.
        latent, rope: MLA's compressed latent and shared rope key; 0 otherwise.
        params, active_params: weights in all, and those one token is computed with.
        gathered_params: weights of an embedding table that is not the output head.
        state_bytes: recurrent state of a sequence in 16 bits, all layers.
        source: where the numbers come from.
    """

    name: str
    full: int
    params: float
    kv_heads: int = 0
    head_dim: int = 0
    sliding: int = 0
    window: int = 0
    states: int = 0
    latent: int = 0
    rope: int = 0
    active_params: float = 0.0
    gathered_params: float = 0.0
    state_bytes: int = 0
    source: str = "given by numbers"

    @property
    def slug(self) -> str:
        """The name as an option: "llama-3.1-8b"."""
        return _slug(self.name)

    @property
    def attention_layers(self) -> int:
        return self.full + self.sliding

    def weight_bytes(self, bits: float) -> float:
        """All weights at ``bits`` each."""
        return self.params * bits / 8

    def read_bytes(self, bits: float, sequences: int = 1) -> float:
        """Weights that a decode step of ``sequences`` reads. Of a mixture of experts: at most as
        many as if no two sequences shared an expert."""
        active = min(self.params, (self.active_params or self.params) * sequences)
        return max(0.0, active - self.gathered_params) * bits / 8

    def part_elements(self, dtype: str) -> tuple[int, int]:
        """Elements of K and of V that a token adds in one layer, as the layout counts them."""
        packed = KV_DTYPES[dtype][1]
        k, v = (self.latent, self.rope) if self.latent else (self.kv_heads * self.head_dim,) * 2
        if k % packed or v % packed:
            raise ConfigError(
                f"{self.name} has {k} and {v} elements of K and V, not whole bytes in {dtype}"
            )
        return k // packed, v // packed

    def divisor(self, dtype: str, wanted: float) -> int:
        """The number nearest to ``wanted`` by which K and V of a token can be divided evenly."""
        common = math.gcd(*self.part_elements(dtype))
        fits = [n for n in range(1, common + 1) if common % n == 0]
        return min(fits, key=lambda n: abs(math.log(n / wanted)))

    def layout(self, dtype: str, page_tokens: int, divisor: int = 1) -> PageLayout:
        """The pages of this model, with K and V of a token ``divisor`` times smaller.

        Which layers are sliding is not in the table: the full ones are spread evenly.
        """
        element = KV_DTYPES[dtype][0]
        k, v = (n // divisor for n in self.part_elements(dtype))

        def layer(window: int | None) -> LayerLayout:
            kind = "latent" if self.latent else "full" if window is None else "sliding"
            return LayerLayout(kind, 1, k, element, 1, v, element, window)  # type: ignore[arg-type]

        total = self.full + self.sliding + self.states
        layers = []
        for n in range(total):
            if (n + 1) * self.full // total > n * self.full // total:
                layers.append(layer(None))
            elif self.sliding:
                layers.append(layer(self.window))
            else:
                layers.append(
                    LayerLayout("state", state_bytes=self.state_bytes // self.states // divisor)
                )
        return PageLayout(layers, page_tokens)


@functools.cache
def models() -> tuple[ModelShape, ...]:
    """All models of ``models.csv``, in its order."""
    text = files("kvtier.cost").joinpath("models.csv").read_text(encoding="utf-8")
    return tuple(_row(row) for row in csv.DictReader(text.splitlines()))


def find_model(text: str) -> ModelShape:
    """A model by name ("llama-3.1-8b", "Llama-3.1-8B") or by numbers
    ("layers=32,kv_heads=8,head_dim=128,params=8B").

    Raises:
        ConfigError: no such model, or numbers that are missing or not positive.
    """
    if "=" in text:
        return _by_numbers(text)
    by_slug = {model.slug: model for model in models()}
    wanted = _slug(text)
    if wanted in by_slug:
        return by_slug[wanted]
    near = [slug for slug in by_slug if wanted and (slug.startswith(wanted) or wanted in slug)]
    near += difflib.get_close_matches(wanted, by_slug, n=4, cutoff=0.5)
    hint = ", ".join(dict.fromkeys(near[:5])) or "e.g. llama-3.1-8b"
    raise ConfigError(
        f"model {text!r} is unknown; nearest of {len(by_slug)} known models: {hint}; or give "
        "layers=32,kv_heads=8,head_dim=128,params=8B"
    )


def _by_numbers(text: str) -> ModelShape:
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in _NUMBERS:
            raise ConfigError(f"model field {name!r} is unknown; use {', '.join(_NUMBERS)}")
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", number.upper())
        value = float(match[1]) * 1000.0 ** " KMBT".index(match[2] or " ") if match else 0.0
        if value <= 0 or (name != "params" and value != int(value)):
            raise ConfigError(f"model field {name} is {number!r}; give a number > 0, e.g. 8B or 32")
        values[name] = value
    missing = [name for name in _NUMBERS if name not in values]
    if missing:
        raise ConfigError(f"model field {missing[0]} is missing; give {', '.join(_NUMBERS)}")
    return ModelShape(
        name="model by numbers",
        full=int(values["layers"]),
        params=values["params"],
        kv_heads=int(values["kv_heads"]),
        head_dim=int(values["head_dim"]),
    )


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _row(row: dict[str, str]) -> ModelShape:
    def number(key: str) -> int:
        return int(row[key]) if row[key] else 0

    latent, _, rope = row["latent_plus_rope"].partition("+")
    full, sliding = number("full_layers"), number("sliding_layers")
    embedding = number("vocab") * number("hidden")
    # Only where the count of parameters told how often the table is in them.
    gathered = embedding if row["tied_embeddings"] == "0" else 0
    state_bytes = number("state_bytes")
    states = number("layers") - full - sliding
    return ModelShape(
        name=row["name"],
        full=full,
        params=float(row["params_b"]) * 1e9,
        kv_heads=0 if latent else number("kv_heads"),
        head_dim=number("head_dim"),
        sliding=sliding,
        window=number("window"),
        states=states,
        latent=int(latent or 0),
        rope=int(rope or 0),
        active_params=float(row["active_params_b"]) * 1e9,
        gathered_params=float(gathered),
        state_bytes=state_bytes if states else 0,
        source=f"geometry: {row['source']}; parameters: {row['source_params']}",
    )
