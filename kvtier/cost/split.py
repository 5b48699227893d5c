"""A decode step whose bytes lie in several places, one after the other.

    t = t_fixed + sum over places of bytes_i / rate_i

No part hides another, which is how layers spread over devices run (llama.cpp ``-ngl``, Accelerate's
``device_map``): a layer starts when the one before it has ended. With two places and everything else
equal that is the hyperbola ``slowdown = 1 + f (r - 1)`` of ``kvtier.cost.cliff``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtier.cost.basis import Basis
from kvtier.cost.cliff import Level, level
from kvtier.cost.slow_links import SlowLink
from kvtier.cost.streaming import not_negative, share
from kvtier.errors import ConfigError

#: One rate, or a band ``(low, high)``, in GB/s (1e9 bytes).
Rate = float | Sequence[float]


@dataclass(frozen=True)
class OffloadDecode:
    """Rate of a decode step with bytes in several places.

    Attributes:
        tps: tokens/s of one sequence, at the geometric mean where a rate is a band.
        tps_range: at the slow and at the fast ends of the bands.
        before_tps: with everything in VRAM, where that is known.
        parts: milliseconds by place.
    """

    tps: float
    tps_range: tuple[float, float]
    before_tps: float | None
    parts: Mapping[str, float]
    basis: Basis = field(repr=False)

    @property
    def seconds_per_token(self) -> float:
        return 1 / self.tps

    @property
    def slowdown(self) -> float | None:
        """Factor over everything in VRAM."""
        return self.before_tps / self.tps if self.before_tps else None

    @property
    def level(self) -> Level:
        return level(self.slowdown) if self.slowdown else "none"

    def contains(self, tps: float) -> bool:
        """Whether the link class explains a measured rate."""
        return self.tps_range[0] <= tps <= self.tps_range[1]


def offload_decode(
    *,
    fast_tps: float | None = None,
    read_gb: float | None = None,
    slow_fraction: float | None = None,
    slow_gbs: Rate | SlowLink | None = None,
    slow_kv_gb: float | None = None,
    layers: int | None = None,
    gpu_layers: int | None = None,
    layer_mb: float | None = None,
    output_mb: float = 0.0,
    output_on: Literal["cpu", "gpu"] = "gpu",
    gpu_gb: float | None = None,
    gpu_gbs: Rate | None = None,
    ram_gb: float | None = None,
    ram_gbs: Rate | SlowLink | None = None,
    disk_gb: float | None = None,
    disk_gbs: Rate | SlowLink | None = None,
    fixed_ms: float = 0.0,
) -> OffloadDecode:
    """Tokens/s of one sequence from where the bytes of a step are. Four ways to say that, and what
    belongs to different ways may be combined where it describes other bytes:

    * ``fast_tps`` with everything in VRAM, ``read_gb`` read a token, and ``slow_fraction`` of them
      at ``slow_gbs``;
    * ``fast_tps`` and ``slow_kv_gb`` of KV read at ``slow_gbs`` on top of it;
    * ``layers`` of ``layer_mb``, ``gpu_layers`` of them read at ``gpu_gbs`` and the others at
      ``slow_gbs``, and an output layer of ``output_mb`` on ``output_on``;
    * ``gpu_gb``, ``ram_gb`` and ``disk_gb`` at ``gpu_gbs``, ``ram_gbs`` and ``disk_gbs``. What is on
      disk pays ``disk_gbs`` for its whole way.

    Args:
        slow_gbs, ram_gbs, disk_gbs: a rate in GB/s, a band ``(low, high)``, or a ``SlowLink``.
        fixed_ms: launches and scheduling, on top of all.

    Raises:
        ConfigError: a value is out of range, or a rate or a size is missing.
    """
    not_negative(
        read_gb=read_gb, slow_kv_gb=slow_kv_gb, layers=layers, gpu_layers=gpu_layers,
        layer_mb=layer_mb, output_mb=output_mb, gpu_gb=gpu_gb, ram_gb=ram_gb, disk_gb=disk_gb,
        fixed_ms=fixed_ms,
    )  # fmt: skip
    share(slow_fraction=slow_fraction)
    if fast_tps is not None and not fast_tps > 0:
        raise ConfigError(f"fast_tps is {fast_tps}; give tokens/s > 0")
    given = {
        "fast_tps": fast_tps, "read_gb": read_gb, "slow_fraction": slow_fraction,
        "slow_gbs": slow_gbs, "slow_kv_gb": slow_kv_gb, "layers": layers, "gpu_layers": gpu_layers,
        "layer_mb": layer_mb, "output_mb": output_mb or None,
        "output_on": output_on if output_mb else None, "gpu_gb": gpu_gb, "gpu_gbs": gpu_gbs,
        "ram_gb": ram_gb, "ram_gbs": ram_gbs, "disk_gb": disk_gb, "disk_gbs": disk_gbs,
        "fixed_ms": fixed_ms or None,
    }  # fmt: skip
    inputs = {
        name: str(value) if isinstance(value, SlowLink) else value
        for name, value in given.items()
        if value is not None
    }
    steps: list[tuple[str, float, Rate | SlowLink | None, str]] = []
    seconds = fixed_ms / 1e3
    if fast_tps is not None:
        kept = 1.0
        if slow_fraction is not None:
            if read_gb is None:
                raise ConfigError("read_gb is missing; give the GB that a token reads")
            kept = 1 - slow_fraction
            steps.append(("slow weights", slow_fraction * read_gb, slow_gbs, "slow_gbs"))
        seconds += kept / fast_tps
    if slow_kv_gb is not None:
        steps.append(("slow KV", slow_kv_gb, slow_gbs, "slow_gbs"))
    if layers is not None:
        if gpu_layers is None or layer_mb is None:
            raise ConfigError("gpu_layers or layer_mb is missing; give both with layers")
        if gpu_layers > layers:
            raise ConfigError(f"gpu_layers is {gpu_layers} of {layers} layers; give at most all")
        if output_on not in ("cpu", "gpu"):
            raise ConfigError(f"output_on is {output_on!r}; give cpu or gpu")
        on_gpu, off_gpu = gpu_layers * layer_mb, (layers - gpu_layers) * layer_mb
        if output_on == "gpu":
            on_gpu += output_mb
        else:
            off_gpu += output_mb
        steps.append(("layers in VRAM", on_gpu / 1e3, gpu_gbs, "gpu_gbs"))
        steps.append(("layers off the card", off_gpu / 1e3, slow_gbs, "slow_gbs"))
    for name, size, rate, field_name in (
        ("VRAM", gpu_gb, gpu_gbs, "gpu_gbs"),
        ("RAM", ram_gb, ram_gbs, "ram_gbs"),
        ("disk", disk_gb, disk_gbs, "disk_gbs"),
    ):
        if size is not None:
            steps.append((name, size, rate, field_name))
    if fast_tps is None and not steps:
        raise ConfigError("nothing is read; give fast_tps, layers, or gpu_gb, ram_gb and disk_gb")

    parts = {"fixed and fast": seconds * 1e3} if seconds else {}
    likely = slowest = fastest = seconds
    links = []
    for name, size, rate, field_name in steps:
        if not size:
            continue
        low, middle, high = _band(rate, field_name)
        if isinstance(rate, SlowLink):
            links.append(str(rate))
        parts[name] = size / middle * 1e3
        likely += size / middle
        slowest += size / low
        fastest += size / high
    if not likely > 0:
        raise ConfigError("a step reads no bytes; give sizes > 0 or fast_tps")
    before = fast_tps
    if layers is not None and gpu_gbs is not None and layer_mb is not None:
        whole = (layers * layer_mb + output_mb) / 1e3 / _band(gpu_gbs, "gpu_gbs")[1]
        before = 1 / (whole + fixed_ms / 1e3)
    basis = Basis(
        inputs=inputs,
        formula="t = fixed + sum over places of bytes / rate, nothing hidden",
        link="; ".join(links) or "rates as given",
        command="llama-bench -ngl N, or kvtier stress --weights-off-card F --link KIND",
    )
    return OffloadDecode(1 / likely, (1 / slowest, 1 / fastest), before, parts, basis)


def _band(rate: Rate | SlowLink | None, name: str) -> tuple[float, float, float]:
    """Low, likely and high in GB/s."""
    if rate is None:
        raise ConfigError(f"{name} is missing; give GB/s, or a band (low, high)")
    if isinstance(rate, SlowLink):
        return rate.low / 1e9, rate.likely / 1e9, rate.high / 1e9
    low, high = (rate, rate) if isinstance(rate, int | float) else (min(rate), max(rate))
    if not low > 0:
        raise ConfigError(f"{name} is {rate}; give GB/s > 0")
    return low, (low * high) ** 0.5, high


def prefer(rates: Mapping[str, float]) -> str:
    """The placement with the most tokens/s: ``prefer({"kv_out": 1.03, "weights_out": 13.6})`` is
    ``"weights_out"``. At equal rates the first one named.

    Raises:
        ConfigError: no placement is given, or a rate is negative.
    """
    if not rates:
        raise ConfigError("no placement is given; give at least one with its tokens/s")
    not_negative(**rates)
    return max(rates, key=lambda name: rates[name])
