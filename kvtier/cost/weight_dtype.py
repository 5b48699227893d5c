"""What a weight takes by the name of its format, scales and other metadata included.

Bits of a whole model, embeddings and output head as the format keeps them: a "4-bit" model takes
4.5 to 5. Small models take more, since those tables stay at 6 to 8 bits.
"""

from __future__ import annotations

import difflib

from kvtier.errors import ConfigError

#: Name -> bits a weight. Of the K-quants: llama.cpp's quantize README, Llama-3.1-8B; of the others:
#: block size and scale of the format.
WEIGHT_DTYPES: dict[str, float] = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "q8_0": 8.5,
    "q6_k": 6.57,
    "q5_k_m": 5.7,
    "q5_0": 5.5,
    "q4_k_m": 4.9,
    "q4_0": 4.64,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "awq": 4.16,
    "gptq": 4.16,
    "int4": 4.16,
    "q3_k_m": 4.0,
    "q2_k": 3.2,
}


def weight_bits(text: str, what: str = "weights dtype") -> float:
    """Bits of a format by name, ``q4_k_m``, or by number, ``4.9``.

    Raises:
        ConfigError: no such format, or a number out of 1..32.
    """
    name = text.strip().lower().replace("-", "_")
    aliases = {"f16": "fp16", "f32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    name = aliases.get(name, name)
    if name in WEIGHT_DTYPES:
        return WEIGHT_DTYPES[name]
    try:
        bits = float(text)
    except ValueError:
        near = difflib.get_close_matches(name, WEIGHT_DTYPES, n=3, cutoff=0.5)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        raise ConfigError(
            f"{what} {text!r} is unknown{hint}; use bits such as 4.9, or {', '.join(WEIGHT_DTYPES)}"
        ) from None
    if not 1.0 <= bits <= 32.0:
        raise ConfigError(f"{what} is {text!r}; give bits a weight from 1 to 32, e.g. 4.9")
    return bits
