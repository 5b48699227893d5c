"""Measures this machine for the cost model: memory, processor, disk, and the GPU if there is one.

Each step has its seconds, so the whole has an end: under two minutes, with ``quick`` under twenty
seconds. What cannot be measured is left out and named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtier.cost.measure_disk import measure_disk
from kvtier.cost.measure_host import (
    measure_attention,
    measure_memory,
    measure_step,
    measure_weights,
)
from kvtier.cost.profile import Measurement, Profile, installed_card, this_machine, today
from kvtier.cost.trials import Tick
from kvtier.errors import KvtierError
from kvtier.folders import cache_folder

#: Step -> seconds, quick and in full. Starting torch and a GPU comes on top.
SECONDS = {
    "memory": (1.5, 8.0),
    "processor": (1.0, 6.0),
    "attention": (1.5, 8.0),
    "step": (0.5, 3.0),
    "disk": (4.0, 30.0),
    "links": (2.0, 12.0),
    "GPU": (1.5, 8.0),
}

#: Told what is being measured, and the share of all that is done.
Progress = Callable[[str, float], None]


def _silent(step: str, done: float) -> None:
    pass


def calibrate(
    folder: Path | None = None, *, quick: bool = False, progress: Progress = _silent
) -> Profile:
    """Measure this machine.

    Args:
        folder: on whose disk files are written and read, about 1 GiB (192 MiB if ``quick``), removed
            afterwards; None: the cache folder.
        progress: called often.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    return _Calibration(folder or cache_folder(), quick, progress).run()


class _Calibration:
    """The steps of one run, and what they have found."""

    def __init__(self, folder: Path, quick: bool, progress: Progress) -> None:
        self.folder, self.quick, self.progress = folder, quick, progress
        self.found: list[Measurement] = []
        self.left_out: dict[str, str] = {}
        self._all = sum(self._seconds(name) for name in SECONDS)
        self._done = 0.0

    def run(self) -> Profile:
        self._step("disk", self._disk)
        self._step("memory", lambda s, tick: measure_memory(s, self.quick, tick))
        self._step("processor", lambda s, tick: measure_weights(s, self.quick, tick))
        self._step("attention", measure_attention)
        self._step("step", measure_step)
        name, nbytes = self._gpu()
        self.progress("done", 1.0)
        machine = this_machine(name, nbytes)
        return Profile(machine, today(), tuple(self.found), self.quick, self.left_out)

    def _seconds(self, name: str) -> float:
        return SECONDS[name][0 if self.quick else 1]

    def _step(self, name: str, measure: Callable[[float, Tick], list[Measurement]]) -> None:
        seconds = self._seconds(name)
        before = self._done
        self.progress(name, before / self._all)
        self.found += measure(
            seconds, lambda done: self.progress(name, (before + done * seconds) / self._all)
        )
        self._done += seconds

    def _disk(self, seconds: float, tick: Tick) -> list[Measurement]:
        found, left_out = measure_disk(self.folder, seconds, self.quick, tick)
        self.left_out |= left_out
        return found

    def _gpu(self) -> tuple[str, int]:
        """Name and memory of the first GPU; its measurements, or why there are none."""
        import torch

        if not torch.cuda.is_available():
            self.left_out["GPU"] = "there is none that torch can use"
            return "", 0
        name = torch.cuda.get_device_name(0)
        nbytes = torch.cuda.get_device_properties(0).total_memory
        try:
            self._measure_gpu(name, nbytes)
        except (KvtierError, RuntimeError) as error:
            self.left_out["GPU"] = " ".join(str(error).split())
        return name, nbytes

    def _measure_gpu(self, name: str, nbytes: int) -> None:
        from kvtier.cost.measure_card import measure_card, measure_links, measure_pageable
        from kvtier.devices import open_device

        device = open_device("cuda:0")
        try:
            links = len(self.found)
            self._step("links", lambda s, tick: measure_links(device, s * 0.7, tick))
            if len(self.found) == links:
                self.left_out["pinned copies"] = "host memory cannot be pinned here"
            self.found += measure_pageable(self._seconds("links") * 0.3, lambda done: None)
        finally:
            device.close()
        card = installed_card(name, nbytes)
        if card is None:
            self.left_out["share of the peak of VRAM"] = f"{name} is no card of the table"
        self._step("GPU", lambda s, tick: measure_card(card, s, tick))
