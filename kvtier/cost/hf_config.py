"""A model from a ``config.json``, and from the weights beside it where there are any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.cost.hf_fields import Fields, text_fields
from kvtier.cost.hf_layers import attention_dims, layer_kinds, layer_shapes
from kvtier.cost.hf_params import Params, count_params
from kvtier.cost.shape import ModelShape, StoredWeights
from kvtier.errors import ConfigError

#: Names in ``dtype`` and ``torch_dtype`` -> bits.
_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}

#: A safetensors header beyond this is not one (the format's own limit is 100 MB).
_MAX_HEADER = 100_000_000


def read_config(path: Path) -> ModelShape:
    """Geometry and weights of the language model that ``path`` describes.

    Sizes of weights come from the safetensors files in the same folder if they are there, else from
    the parameters that the geometry gives and the dtype or quantisation that the file names.

    Raises:
        ConfigError: no JSON, or a field is missing or wrong; names the field and the fix.
    """
    values = _load(path)
    fields = text_fields(path, values)
    try:
        return _shape(path, values, fields)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{str(path)!r} has a field of the wrong kind ({type(error).__name__}: {error}); give the "
            "config.json as the model was published with"
        ) from error


def _shape(path: Path, values: dict[str, Any], fields: Fields) -> ModelShape:
    layers = layer_shapes(fields)
    params = count_params(fields)
    heads = fields.number("heads")
    latent = fields.number("kv_lora_rank")
    kinds = layer_kinds(fields)
    attends = next((n for n, one in enumerate(layers) if one.k and not one.window), None)
    if attends is None:
        attends = next((n for n, one in enumerate(layers) if one.k), None)
    kv_heads, query_width = 0, 0
    if latent:
        nope, rope = fields.number("qk_nope_head_dim", 128), fields.number("qk_rope_head_dim", 64)
        query_width = heads * (nope + rope + fields.number("v_head_dim", nope)) // 2
    elif attends is not None:
        windowed = kinds[attends] in ("sliding", "chunked")
        kv_heads, k_dim, v_dim = attention_dims(fields, attends, windowed)
        query_width = heads * (k_dim + v_dim) // 2
    return ModelShape(
        name=_name(path, values),
        layers=layers,
        shared_params=params.shared,
        expert_params=params.experts,
        gathered_params=params.gathered,
        experts=params.expert_count,
        experts_per_token=params.experts_per_token,
        stored=_files(path.parent, params) or _by_dtype(fields, params),
        hidden=fields.need("hidden"),
        intermediate=params.active_width,
        vocab=fields.number("vocab"),
        query_width=query_width,
        kv_heads=kv_heads,
        context=fields.number("context"),
        source=f"{path.name} of {path.parent.name or path.parent} ({fields.type or 'no model_type'})",
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(
            f"{str(path)!r} is no JSON: {error}; give a model's config.json"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{str(path)!r} holds a {type(values).__name__}; give a model's config.json"
        )
    return values


def _name(path: Path, values: dict[str, Any]) -> str:
    name = values.get("_name_or_path")
    if isinstance(name, str) and name.strip("/. "):
        return name.rstrip("/").rsplit("/", 1)[-1]
    folder = path.absolute().parent.name
    return folder if path.name == "config.json" and folder else path.stem


def _by_dtype(fields: Fields, params: Params) -> StoredWeights:
    """Bytes from counts: embeddings and head in the model's dtype, the rest quantised if the file
    says so."""
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    plain = float(_DTYPE_BITS.get(dtype, 16))
    bits, method = _quantised_bits(fields)
    rest = plain if bits is None else bits
    head = float(fields.number("vocab") * fields.need("hidden"))
    inner = plain if method == "mxfp4" else rest
    return StoredWeights(
        shared=((params.shared - head) * inner + head * plain) / 8,
        experts=params.experts * rest / 8,
        gathered=params.gathered * plain / 8,
        source=f"parameters from the geometry; {method or dtype} at {rest:g} bits",
    )


def _quantised_bits(fields: Fields) -> tuple[float | None, str]:
    """Bits of a quantised weight with its scales, and the method; None if nothing is quantised."""
    config = fields.get("quantization_config")
    if not isinstance(config, dict):
        return None, ""
    method = str(config.get("quant_method", "quantised"))
    if method == "mxfp4":
        # OCP MX: an 8-bit scale per 32 values; gpt-oss quantises its experts alone.
        return 4.25, method
    if method in ("bitsandbytes", "bnb"):
        # NF4: an absmax per 64 values, itself in 8 bits where nested (QLoRA, arXiv 2305.14314).
        if config.get("load_in_8bit"):
            return 8.0, method
        return 4 + (0.127 if config.get("bnb_4bit_use_double_quant") else 0.5), method
    text = json.dumps(config).lower()
    if "nvfp4" in text:
        return 4.5, f"{method} nvfp4"
    weights = config
    groups = config.get("config_groups")
    if isinstance(groups, dict) and groups:
        weights = next(iter(groups.values())).get("weights") or config
    bits = weights.get("num_bits", weights.get("bits", weights.get("w_bit")))
    if bits is None:
        bits = 8 if "fp8" in text else None
    if bits is None:
        return None, method
    size = weights.get("group_size", weights.get("q_group_size"))
    # A 16-bit scale and a packed zero point a group (GPTQ, AWQ).
    shared = (16 + float(bits)) / size if isinstance(size, int) and size > 0 else 0.0
    return float(bits) + shared, method


# weights in files


def _files(folder: Path, params: Params) -> StoredWeights | None:
    """Sizes of the tensors in the folder's safetensors files; None if there are none."""
    index = folder / "model.safetensors.index.json"
    total, names = 0.0, ["model.safetensors"]
    if index.exists():
        values = _load(index)
        total = float((values.get("metadata") or {}).get("total_size") or 0)
        names = sorted(set((values.get("weight_map") or {}).values()))
    paths = [folder / name for name in names]
    if paths and all(path.is_file() for path in paths):
        return _grouped([one for path in paths for one in _tensors(path)])
    if not total:
        return None
    # The index alone has the sum; the groups are as the geometry has them.
    whole = params.shared + params.experts + params.gathered
    return StoredWeights(
        total * params.shared / whole,
        total * params.experts / whole,
        total * params.gathered / whole,
        source=f"total_size of {index.name}, groups in proportion to the geometry",
    )


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes from the header of a safetensors file."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _MAX_HEADER:
            raise ConfigError(f"{str(path)!r} has no safetensors header; download it again")
        text = file.read(length)
    try:
        header = json.loads(text)
        for name, one in header.items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                yield name, end - begin
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{str(path)!r} has a damaged header; download it again") from None


def _grouped(tensors: list[tuple[str, int]]) -> StoredWeights:
    sizes = {"shared": 0.0, "experts": 0.0, "gathered": 0.0, "idle": 0.0}
    untied = any("lm_head" in name or name.startswith("output.weight") for name, _ in tensors)
    for name, nbytes in tensors:
        if any(part in name for part in ("visual", "vision", "audio_tower", "mtp.")):
            group = "idle"
        elif ".experts." in name:
            group = "experts"
        elif "embed_tokens_per_layer" in name or (
            untied and any(part in name for part in ("embed_tokens", "wte.", "word_embeddings"))
        ):
            group = "gathered"
        else:
            group = "shared"
        sizes[group] += nbytes
    return StoredWeights(**sizes, source="tensors of the safetensors files")
