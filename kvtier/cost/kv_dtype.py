"""What an element of the KV cache takes, the scales it needs included.

A quantised element is ``bits`` wide and shares a scale, and perhaps a zero point, with the others of
its group, so it takes ``bits + (scale_bits + zero_bits) / group`` bits. Group sizes differ between
engines; the ones here are llama.cpp's where nothing else is said, and any can be given instead:
``int4:group=64,zero=16``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError


@dataclass(frozen=True)
class KVDtype:
    """A format of the KV cache.

    Attributes:
        name: as people write it.
        bits: of a stored value.
        group: values that share a scale; 0: one scale a tensor, whose bytes do not count.
        scale_bits, zero_bits: of a group's scale and zero point.
        source: where group and scale come from.
    """

    name: str
    bits: float
    group: int = 0
    scale_bits: int = 0
    zero_bits: int = 0
    source: str = "the element type"

    def __post_init__(self) -> None:
        for what in ("bits", "group", "scale_bits", "zero_bits"):
            value = getattr(self, what)
            if value < (1 if what == "bits" else 0):
                raise ConfigError(f"KV dtype {self.name}: {what} is {value}; give a number >= 0")
        if not self.group and (self.scale_bits or self.zero_bits):
            raise ConfigError(
                f"KV dtype {self.name}: a scale of {self.scale_bits} bits needs a group size; add "
                "group=32"
            )

    @property
    def element_bits(self) -> float:
        """Bits of an element, its share of scale and zero point included."""
        shared = self.scale_bits + self.zero_bits
        return self.bits + (shared / self.group if self.group else 0.0)

    @property
    def element_bytes(self) -> float:
        return self.element_bits / 8

    def describe(self) -> str:
        """``int8 (8.5 bits: 8 + a 16-bit scale per 32 values)``."""
        if not self.group:
            return f"{self.name} ({self.bits:g} bits)"
        zero = f" and a {self.zero_bits}-bit zero point" if self.zero_bits else ""
        return (
            f"{self.name} ({self.element_bits:g} bits: {self.bits:g} + a {self.scale_bits}-bit "
            f"scale{zero} per {self.group} values)"
        )


_GGML = "ggml block formats: 32 values and a 16-bit scale (and minimum, in the _1 formats)"
_FP8 = "vLLM and TensorRT-LLM: one scale a tensor"

_DTYPES = (
    KVDtype("fp32", 32),
    KVDtype("bf16", 16),
    KVDtype("fp16", 16),
    KVDtype("fp8", 8, source=_FP8),
    KVDtype("int8", 8, 32, 16, source="as ggml's q8_0"),
    KVDtype("int4", 4, 32, 16, source="as ggml's q4_0"),
    KVDtype("nvfp4", 4, 16, 8, source="NVIDIA NVFP4: an e4m3 scale per 16 values"),
    KVDtype("mxfp4", 4, 32, 8, source="OCP microscaling formats: an e8m0 scale per 32 values"),
    KVDtype("q8_0", 8, 32, 16, source=_GGML),
    KVDtype("q5_1", 5, 32, 16, 16, source=_GGML),
    KVDtype("q5_0", 5, 32, 16, source=_GGML),
    KVDtype("q4_1", 4, 32, 16, 16, source=_GGML),
    KVDtype("q4_0", 4, 32, 16, source=_GGML),
    KVDtype("iq4_nl", 4, 32, 16, source=_GGML),
    KVDtype("int2", 2, 32, 16, 16, source="KIVI (arXiv 2402.02750): scale and zero per 32 values"),
)
_BY_NAME = {dtype.name: dtype for dtype in _DTYPES}
_ALIASES = {
    "float32": "fp32", "f32": "fp32", "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16", "f16": "fp16", "half": "fp16",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "e4m3": "fp8", "e5m2": "fp8", "f8": "fp8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "fp8_e4m3fn": "fp8",
    "i8": "int8", "i4": "int4", "fp4": "nvfp4",
}  # fmt: skip
_FIELDS = {"group": "group", "scale": "scale_bits", "zero": "zero_bits"}


def kv_dtypes() -> tuple[KVDtype, ...]:
    """All formats that have a name."""
    return _DTYPES


def kv_dtype(text: str | KVDtype) -> KVDtype:
    """A format by name, ``"int8"``, or with another group: ``"int4:group=64,scale=16,zero=16"``.

    Raises:
        ConfigError: no such format, or a group that is not a whole number.
    """
    if isinstance(text, KVDtype):
        return text
    name, _, fields = text.strip().lower().partition(":")
    found = _BY_NAME.get(_ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*_BY_NAME, *_ALIASES], n=3, cutoff=0.5)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        raise ConfigError(f"KV dtype {name!r} is unknown{hint}; use {', '.join(_BY_NAME)}")
    changes: dict[str, int] = {}
    for field in filter(None, fields.split(",")):
        what, _, value = (part.strip() for part in field.partition("="))
        if what not in _FIELDS or not value.isdecimal():
            raise ConfigError(
                f"KV dtype {text!r}: {field!r} is not a field; give group=N, scale=BITS or zero=BITS, "
                f"e.g. {name}:group=64"
            )
        changes[_FIELDS[what]] = int(value)
    if not changes:
        return found
    return replace(found, name=text.strip().lower(), source="given", **changes)
