"""Lower bounds from bytes over bandwidth: how long a step takes to read its KV, and from which length
on KV is what it reads most of.

Decoding reads all weights once a step and all KV once a sequence, so no step can be shorter than its
bytes over the bandwidth of the memory they are in (Pope et al., "Efficiently Scaling Transformer
Inference", arXiv 2211.05102, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cost.basis import UNITS
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class Stream:
    """Bytes read once at a bandwidth.

    Attributes:
        nbytes: what is read. ms: how long that takes.
        units: the convention that the two were computed with.
    """

    nbytes: float
    ms: float
    units: str = UNITS

    @property
    def gb(self) -> float:
        """Size in 1e9 bytes."""
        return self.nbytes / 1e9

    @property
    def gib(self) -> float:
        """Size in 2**30 bytes."""
        return self.nbytes / 2**30

    def __str__(self) -> str:
        return f"{self.ms:.2f} ms for {self.gb:.2f} GB = {self.gib:.2f} GiB ({self.units})"


def stream_ms(
    bytes_per_token: float,
    tokens: float,
    streams: float = 1,
    gbs: float = 0.0,
    *,
    eta: float = 1.0,
    gibs: float = 0.0,
    weight_bytes: float = 0.0,
) -> Stream:
    """Time to read the KV of some sequences once, e.g. eight of 128k tokens of a 70B model.

    A figure printed for "320 KB a token and 128k tokens" depends on what K means: 320,000 x 128,000
    bytes take 97.81 ms eight times over at 3350 GB/s, 327,680 x 128,000 take 100.16 ms, and
    327,680 x 131,072 take 102.57 ms. The numbers given here are taken as they are.

    Args:
        bytes_per_token: KV of a token in bytes.
        tokens: length of each sequence.
        streams: sequences.
        gbs, gibs: bandwidth in 1e9 or in 2**30 bytes per second; one of them.
        eta: share of it that is reached, 0..1.
        weight_bytes: read as well, once.

    Raises:
        ConfigError: a size is negative, or not exactly one bandwidth is given.
    """
    if (gbs > 0) == (gibs > 0):
        raise ConfigError(f"bandwidth is {gbs} GB/s and {gibs} GiB/s; give one of gbs and gibs > 0")
    not_negative(
        bytes_per_token=bytes_per_token, tokens=tokens, streams=streams, weight_bytes=weight_bytes
    )
    share(eta=eta)
    nbytes = bytes_per_token * tokens * streams + weight_bytes
    rate = gbs * 1e9 if gbs else gibs * 2**30
    return Stream(nbytes, nbytes / (rate * eta) * 1e3)


def kv_step_ms(
    tokens: float, bytes_per_token: float, gbs: float, eta: float, *, streams: float = 1
) -> float:
    """Milliseconds that one more sequence of ``tokens`` adds to a decode step: its KV over the
    share ``eta`` of the bandwidth that reading it reaches."""
    return stream_ms(bytes_per_token, tokens, streams, gbs, eta=eta).ms


def crossover_tokens(weight_bytes: float, bytes_per_token: float, batch: float = 1) -> float:
    """Length from which on a step reads more KV than weights: ``T* = W / (B kv)``.

    Args:
        weight_bytes: weights read a step. bytes_per_token: KV of a token.
        batch: sequences, each that long.
    """
    not_negative(weight_bytes=weight_bytes)
    for name, value in (("bytes_per_token", bytes_per_token), ("batch", batch)):
        if not value > 0:
            raise ConfigError(f"{name} is {value}; give a number > 0")
    return weight_bytes / (bytes_per_token * batch)


def not_negative(**values: float | None) -> None:
    """ConfigError if a value is negative or no number."""
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} is {value}; give a number >= 0")


def share(**values: float | None) -> None:
    """ConfigError if a value is not in 0..1 (of an efficiency: greater than 0)."""
    for name, value in values.items():
        if value is None:
            continue
        if not 0 <= value <= 1 or (name == "eta" and value == 0):
            raise ConfigError(f"{name} is {value}; give a share between 0 and 1")
