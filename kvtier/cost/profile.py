"""What was measured on this machine: stored by ``kvtier calibrate``, used by ``kvtier plan``.

A profile is a JSON file with the date, the machine (processor, cores, memory, GPU, kernel; nothing that
names an owner) and the measurements, each with its band and how it was made. It replaces constants of
``kvtier.cost.constants`` where it applies: those of the processor, the memory and the disk on the
machine it was measured on, those of a card only for that card.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.cost.constants import DEFAULTS, Constant, Constants
from kvtier.cost.prefill import vram_constant
from kvtier.devices.cards import Card, cards
from kvtier.errors import ConfigError
from kvtier.folders import cache_folder
from kvtier.processors import processors

#: Raised when the fields or the meaning of a measurement change.
FORMAT = 1

#: A profile is a few KiB; more is another file.
MOST_BYTES = 1 << 20

#: Measurement -> the constants that it replaces. ``{vram}`` is the efficiency of the card's kind of memory.
HOST_CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "cpu_weights": ("dram_bw",),
    "cpu_share": ("cpu_efficiency", "server_cpu_efficiency"),
    "cpu_attention": ("cpu_attention_bw", "server_cpu_attention_bw"),
    "disk_read": ("disk_bw",),
}
CARD_CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "pinned_h2d": ("pinned_bw",),
    "pageable_h2d": ("pageable_bw",),
    "vram_share": ("{vram}",),
    "gpu_step": ("step_s",),
}


def default_path() -> Path:
    """``profile.json`` in the user's cache folder."""
    return cache_folder() / "profile.json"


@dataclass(frozen=True)
class Machine:
    """What identifies a machine well enough to tell another kind of machine.

    Attributes:
        cpu: model of the processor. cores: that this process may use. memory_bytes: of the host.
        gpu: name of the first GPU, empty if there is none. gpu_bytes: its memory.
        kernel: of the operating system.
    """

    cpu: str
    cores: int
    memory_bytes: int
    gpu: str = ""
    gpu_bytes: int = 0
    kernel: str = ""

    @property
    def words(self) -> str:
        """For people."""
        gpu = f", {self.gpu}" if self.gpu else ", no GPU"
        return f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB{gpu}"

    def same_host(self, other: Machine) -> bool:
        """Whether measurements of one tell about the other. A kernel may be updated, some memory may
        be reserved, and a GPU is compared where its numbers are used."""
        near = 0.9 <= self.memory_bytes / max(1, other.memory_bytes) <= 1.1
        return self.cpu == other.cpu and self.cores == other.cores and near


def this_machine(gpu: str = "", gpu_bytes: int = 0) -> Machine:
    """The machine that runs this. Asks no driver, so the GPU is what the caller knows."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=processors(),
        memory_bytes=pages,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        kernel=f"{platform.system()} {platform.release()}",
    )


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


@dataclass(frozen=True)
class Measurement:
    """One measured number: the median of some trials, and the band of four fifths of them.

    Attributes:
        unit: "bytes/s", "s", "share of peak".
        how: what was done, so that another program can be compared.
    """

    name: str
    value: float
    unit: str
    how: str
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.low or self.value, self.high or self.value
        if not (0 < low <= self.value <= high < math.inf):
            raise ConfigError(
                f"measurement {self.name} is {self.value!r} in {low!r} to {high!r} {self.unit}; it "
                "must be a positive number inside its band"
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)


def middle(name: str, trials: Iterable[float], unit: str, how: str) -> Measurement:
    """The median of ``trials``, with the band that a tenth of them is below and a tenth above."""
    found = sorted(trials)
    tenth = len(found) // 10
    return Measurement(name, found[len(found) // 2], unit, how, found[tenth], found[-1 - tenth])


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    Attributes:
        date: ISO date and time, UTC. quick: made in less time.
        left_out: what could not be measured -> why.
    """

    machine: Machine
    date: str
    measurements: tuple[Measurement, ...]
    quick: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Measurement | None:
        """The measurement of that name, None if it was left out."""
        return next((one for one in self.measurements if one.name == name), None)

    @property
    def words(self) -> str:
        """``2026-11-30 on AMD EPYC, 2 cores, 24 GiB, no GPU``."""
        return f"{self.date[:10]} on {self.machine.words}"

    @property
    def card(self) -> Card | None:
        """The measured GPU, if it is a card of the table."""
        return installed_card(self.machine.gpu, self.machine.gpu_bytes)

    def applies_to(self, card: Card) -> bool:
        """Whether the measurements of the GPU are of ``card``."""
        measured = self.card
        return measured is not None and measured.slug == card.slug

    def constants(self, card: Card | None = None, base: Constants = DEFAULTS) -> Constants:
        """``base`` with what was measured here in the place of table values.

        Args:
            card: that is planned with; what was measured on another stays out.
        """
        found: dict[str, Constant | float] = {}
        for name, targets in self.replaced(card).items():
            one = self.get(name)
            assert one is not None
            source = f"{one.how}; {self.words}"
            for target in targets:
                unit = base.get_constant(target).unit
                found[target] = Constant(target, one.value, unit, source, True, one.low, one.high)
        return base.measured(found)

    def replaced(self, card: Card | None = None) -> dict[str, tuple[str, ...]]:
        """Measurement -> the constants that it takes the place of in a plan with ``card``."""
        names = dict(HOST_CONSTANTS)
        if card is not None and self.applies_to(card):
            kind = vram_constant(card)
            names |= {n: tuple(c.format(vram=kind) for c in cs) for n, cs in CARD_CONSTANTS.items()}
        return {one.name: names[one.name] for one in self.measurements if one.name in names}

    def summary(self, card: Card | None = None) -> dict[str, Any]:
        """For the JSON of a plan: whose profile it is, and which constants it gave."""
        return {
            "date": self.date,
            "quick": self.quick,
            "machine": asdict(self.machine),
            "gives": sorted(name for names in self.replaced(card).values() for name in names),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "date": self.date,
            "quick": self.quick,
            "machine": asdict(self.machine),
            "measurements": [asdict(one) for one in self.measurements],
            "left_out": dict(self.left_out),
        }


def installed_card(name: str, nbytes: int) -> Card | None:
    """The card of the table that a driver calls ``name`` and that has about ``nbytes`` of memory: there
    are two RTX 4060 Ti, and the driver says "NVIDIA H200" of the "H200 SXM 141GB"."""
    words = set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "geforce", "hbm2", "hbm2e"}
    # Only the SXM boards of the H100 have HBM3; the driver does not say SXM.
    without = {"pcie"} if "hbm3" in words else set()
    words -= {"hbm3", "hbm3e"}
    near = [
        card
        for card in cards()
        if words
        and words <= set(card.slug.split("-"))
        and not without & set(card.slug.split("-"))
        and 0.9 <= nbytes / card.vram_bytes <= 1.02
    ]
    # The plainest name: an RTX 4070 is no RTX 4070 Super.
    least = min((len(card.slug.split("-")) for card in near), default=0)
    plain = [card for card in near if len(card.slug.split("-")) == least]
    return plain[0] if len(plain) == 1 else None


def today() -> str:
    """Now, as a profile dates itself."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def store_profile(profile: Profile, path: Path) -> None:
    """Write it, so that a reader sees the old file or the new one, never a part.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(profile.to_json(), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"profile {path} cannot be written: {error.strerror}; give another with --profile FILE"
        ) from error


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: it cannot be read, is not a profile, or is one of another format.
    """
    fix = "run kvtier calibrate again, or give --profile none"
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error.strerror}; {fix}") from error
    try:
        if len(raw) > MOST_BYTES:
            raise ValueError("it is larger than 1 MiB")
        data = json.loads(raw)
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("it has no field format")
        if data["format"] == FORMAT:
            return _profile(data)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"profile {path} is damaged ({_reason(error)}); {fix}") from error
    raise ConfigError(
        f"profile {path} has format {data['format']!r}, this version reads {FORMAT}; {fix}"
    )


def own_profile(path: Path | None = None) -> tuple[Profile | None, str]:
    """The profile of this machine, and one line where there is one that is not used."""
    path = default_path() if path is None else path
    if not path.exists():
        return None, ""
    try:
        profile = load_profile(path)
    except ConfigError as error:
        return None, f"not used: {error}"
    here = this_machine()
    if not profile.machine.same_host(here):
        return None, (
            f"not used: profile {path} is of another machine ({profile.machine.words}; this is "
            f"{here.cpu}, {here.cores} cores, {here.memory_bytes / 2**30:.0f} GiB); run kvtier calibrate"
        )
    return profile, ""


def _profile(data: Mapping[str, Any]) -> Profile:
    machine = Machine(**data["machine"])
    for name, kind in (
        ("cpu", str),
        ("cores", int),
        ("memory_bytes", int),
        ("gpu", str),
        ("gpu_bytes", int),
    ):
        if not isinstance(getattr(machine, name), kind):
            raise ValueError(f"machine.{name} is {getattr(machine, name)!r}")
    if not isinstance(data["date"], str) or not isinstance(data["left_out"], dict):
        raise ValueError("date or left_out has another type")
    found = []
    for one in data["measurements"]:
        if not all(isinstance(one[key], str) for key in ("name", "unit", "how")):
            raise ValueError(f"measurement {one.get('name')!r} has a field of another type")
        if not all(isinstance(one[key], int | float) for key in ("value", "low", "high")):
            raise ValueError(f"measurement {one['name']} is no number")
        found.append(Measurement(**one))
    if len({one.name for one in found}) < len(found):
        raise ValueError("a measurement is there twice")
    return Profile(machine, data["date"], tuple(found), bool(data["quick"]), dict(data["left_out"]))


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"field {error.args[0]} is missing"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return " ".join(str(error).split()) or type(error).__name__
