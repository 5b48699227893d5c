"""Memory, streams and events: one contract (``base``), a real card (``cuda``) and an emulated one (``emulated``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.devices.base import Device


def open_device(spec: str = "auto") -> Device:
    """A device from ``cuda``, ``cuda:N``, ``emulated``, ``emulated:CARD`` or ``auto`` (CUDA if there is one).

    CARD is a name, numbers, or both: ``emulated:rtx-4060-ti-16gb,link=fallback``; see
    ``kvtier.devices.spec``.

    Raises:
        ConfigError: an unknown kind or card, or CUDA where there is none.
    """
    import torch

    kind, _, rest = spec.partition(":")
    if kind == "auto" and not rest:
        kind = "cuda" if torch.cuda.is_available() else "emulated"
    if kind == "cuda":
        from kvtier.devices.cuda import CudaDevice

        return CudaDevice(rest or "0")
    if kind == "emulated":
        from kvtier.devices.emulated import EmulatedDevice

        return EmulatedDevice(rest) if rest else EmulatedDevice()
    raise ConfigError(
        f"device {spec!r} is unknown; use auto, cuda, cuda:N, emulated or emulated:CARD"
    )
