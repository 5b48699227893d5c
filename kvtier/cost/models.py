"""Models by name, by file or by numbers.

``models.csv`` names a source for every row. Parameters are counted from the geometry where the row
says so, norms and biases left out.
"""

from __future__ import annotations

import csv
import difflib
import functools
import re
from importlib.resources import files
from pathlib import Path

from kvtier.cost.geometry import LayerShape
from kvtier.cost.shape import (
    KV_DTYPES,
    Q4_K_M_BITS,
    ModelShape,
    StoredWeights,
    slug,
    spread,
)
from kvtier.errors import ConfigError

__all__ = [
    "KV_DTYPES",
    "Q4_K_M_BITS",
    "ModelShape",
    "StoredWeights",
    "find_model",
    "models",
]

_NUMBERS = ("layers", "kv_heads", "head_dim", "params")
_OPTIONAL = ("active", "prefill", "sliding", "window", "experts", "experts_per_token")


#: What follows a model's name without changing its geometry.
_SUFFIX = re.compile(
    r"-(instruct|chat|it|base|hf|thinking|fp8|bf16|fp16|nvfp4|awq|gptq|int[48]|[0-9]{4})$"
)


@functools.cache
def models() -> tuple[ModelShape, ...]:
    """All models of ``models.csv``, in its order."""
    text = files("kvtier.cost").joinpath("models.csv").read_text(encoding="utf-8")
    return tuple(_row(row) for row in csv.DictReader(text.splitlines()))


@functools.cache
def _slugs() -> dict[str, ModelShape]:
    """Models by the names they are asked for."""
    text = files("kvtier.cost").joinpath("models.csv").read_text(encoding="utf-8")
    named: dict[str, ModelShape] = {}
    for row, model in zip(csv.DictReader(text.splitlines()), models(), strict=True):
        for name in (row["name"], *filter(None, row["also"].split(";"))):
            named[slug(name)] = model
    return named


def find_model(text: str | Path) -> ModelShape:
    """A model by name ("llama-3.1-8b", "Llama-3.1-8B"), by a ``config.json``, a folder with one, or
    a ``.gguf`` file, or by numbers ("layers=32,kv_heads=8,head_dim=128,params=8B").

    Raises:
        ConfigError: no such model, a file that does not tell what is needed, or numbers that are
            missing or not positive.
    """
    text = str(text)
    path = Path(text)
    if text.endswith((".json", ".gguf")) or path.is_dir() or ("/" in text and path.exists()):
        return _by_file(path)
    if "=" in text:
        return _by_numbers(text)
    by_slug = _slugs()
    # A hub id ("meta-llama/Llama-3.1-8B-Instruct") names the model after its slash.
    wanted = slug(text.rsplit("/", 1)[-1])
    name = wanted
    while name:
        if name in by_slug:
            return by_slug[name]
        shorter = _SUFFIX.sub("", name.removeprefix("meta-"))
        name = shorter if shorter != name else ""
    near = [name for name in by_slug if wanted and (name.startswith(wanted) or wanted in name)]
    near += difflib.get_close_matches(wanted, by_slug, n=4, cutoff=0.5)
    hint = ", ".join(dict.fromkeys(near[:5])) or "e.g. llama-3.1-8b"
    raise ConfigError(
        f"model {text!r} is unknown; nearest of {len(by_slug)} known models: {hint}; or give a "
        "config.json, its folder, a .gguf file, or layers=32,kv_heads=8,head_dim=128,params=8B"
    )


def _by_file(path: Path) -> ModelShape:
    if not path.exists():
        raise ConfigError(f"model {str(path)!r} does not exist; give a path that does, or a name")
    if path.is_dir():
        config = path / "config.json"
        gguf = sorted(path.glob("*.gguf"))
        if config.exists():
            path = config
        elif gguf:
            path = gguf[0]
        else:
            raise ConfigError(
                f"model folder {str(path)!r} has neither config.json nor a .gguf file; give one that has"
            )
    if path.suffix == ".gguf":
        from kvtier.cost.gguf_model import read_gguf_model

        return read_gguf_model(path)
    from kvtier.cost.hf_config import read_config

    return read_config(path)


def _by_numbers(text: str) -> ModelShape:
    known = (*_NUMBERS, *_OPTIONAL)
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in known:
            raise ConfigError(f"model field {name!r} is unknown; use {', '.join(known)}")
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", number.upper())
        value = float(match[1]) * 1000.0 ** " KMBT".index(match[2] or " ") if match else 0.0
        whole = name not in ("params", "active", "prefill")
        if value <= 0 or (whole and value != int(value)):
            raise ConfigError(f"model field {name} is {number!r}; give a number > 0, e.g. 8B or 32")
        values[name] = value
    missing = [name for name in _NUMBERS if name not in values]
    if missing:
        raise ConfigError(f"model field {missing[0]} is missing; give {', '.join(_NUMBERS)}")
    at = values.get
    for one, other in (("sliding", "window"), ("experts", "experts_per_token")):
        if (one in values) != (other in values):
            raise ConfigError(
                f"model field {other if one in values else one} is missing; give both"
            )
    if at("sliding", 0) > values["layers"]:
        raise ConfigError(f"model field sliding is {at('sliding'):g}; it must be at most layers")
    params, active = values["params"], at("active", 0.0)
    if active > params or at("prefill", 0.0) > params:
        raise ConfigError(f"model field active or prefill is more than params ({params:g})")
    if "experts" in values and not active:
        raise ConfigError("model field active is missing; experts need it, e.g. active=3B")
    width = int(values["kv_heads"] * values["head_dim"])
    sliding = int(at("sliding", 0))
    full = [LayerShape("full", width, width)] * int(values["layers"] - sliding)
    short = []
    if sliding:
        short = [LayerShape("sliding", width, width, int(values["window"]))] * sliding
    experts, used = int(at("experts", 0)), int(at("experts_per_token", 0))
    routed = 0.0
    if experts:
        if not used < experts:
            raise ConfigError(f"model field experts_per_token is {used}; give fewer than {experts}")
        # params = shared + routed and active = shared + routed * used / experts
        routed = (params - active) / (1 - used / experts)
    elif active and active < params:
        # Nothing says how a batch shares them: as if each weight were an expert of its own.
        experts, used = 10**6, max(1, round(10**6 * active / params))
        routed = params
    return ModelShape(
        name="model by numbers",
        layers=spread(full, short),
        shared_params=params - routed,
        expert_params=routed,
        experts=experts,
        experts_per_token=used,
        prefill_params=at("prefill", 0.0),
        kv_heads=int(values["kv_heads"]),
    )


def _layers(row: dict[str, str]) -> tuple[LayerShape, ...]:
    """Layers of a row. Which of them are full is not in the table: they are spread evenly."""

    def number(key: str) -> int:
        return int(row[key] or 0)

    width = number("kv_heads") * number("head_dim")
    window, state = number("window"), number("state_bytes")
    extra = float(row["extra_bytes"] or 0)
    latent, _, rope = row["latent_plus_rope"].partition("+")
    full = LayerShape("full", width, width, extra_bytes=extra)
    if latent:
        full = LayerShape("latent", int(latent), int(rope), extra_bytes=extra)
    rest: list[LayerShape] = []
    if number("sliding_layers"):
        rest += [LayerShape("sliding", width, width, window)] * number("sliding_layers")
    for part in filter(None, row["compress"].split("+")):
        count, rate = (int(one) for one in part.split("x"))
        # Entries of DeepSeek V4's rate 4 are found through an indexer, whose keys are kept too.
        keys = extra if rate == 4 else 0.0
        rest += [LayerShape("compressed", width, 0, window, rate, keys)] * count
    others = number("layers") - number("full_layers") - len(rest)
    if others:
        kept = LayerShape("state", state_bytes=state // others) if state else LayerShape("none")
        rest += [kept] * others
    return spread([full] * number("full_layers"), rest)


def _row(row: dict[str, str]) -> ModelShape:
    def number(key: str) -> int:
        return int(row[key] or 0)

    def billions(key: str) -> float:
        return float(row[key] or 0) * 1e9

    experts = billions("expert_params_b")
    gathered = billions("gathered_params_b")
    if row["tied_embeddings"] == "0":
        gathered += float(number("vocab") * number("hidden"))
    params, idle = billions("params_b"), billions("idle_params_b")
    stored = None
    if row["stored_gb"]:
        shared, routed, rows = (float(part) * 1e9 for part in row["stored_gb"].split("+"))
        stored = StoredWeights(shared, routed, rows, source=row["source_params"])
    return ModelShape(
        name=row["name"],
        layers=_layers(row),
        shared_params=params - experts - gathered - idle,
        expert_params=experts,
        gathered_params=gathered,
        idle_params=idle,
        experts=number("experts"),
        experts_per_token=number("experts_per_token"),
        prefill_params=billions("prefill_params_b"),
        stored=stored,
        hidden=number("hidden"),
        intermediate=number("intermediate"),
        vocab=number("vocab"),
        query_width=number("query_width"),
        kv_heads=0 if row["latent_plus_rope"] else number("kv_heads"),
        source=f"geometry: {row['source']}; parameters: {row['source_params']}",
    )
