"""``kvtier calibrate``: measures this machine and stores the profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.cli.options import Parser
    from kvtier.cost.profile import Measurement, Profile

DESCRIPTION = """\
Measure this machine for the cost model: memory, processor, disk, and the GPU with its link if there is
one. Takes under two minutes, with --quick under twenty seconds, and stores a profile that kvtier plan and
kvtier advise use in the place of table values. Let nothing else run meanwhile.
"""

EPILOG = """\
The profile holds the date, the kind of machine and the numbers; nothing that names an owner.

exit status: 0 done, 2 wrong options or a folder that cannot be written, 130 interrupted.
"""

_UNITS = {"bytes/s": (1e9, "GB/s"), "s": (1e-6, "us"), "share of peak": (0.01, "%")}


@dataclass(frozen=True)
class CalibrateOptions:
    """What ``kvtier calibrate`` was asked for."""

    store: Path | None
    profile: Path
    quick: bool
    json: bool


def add_calibrate(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``calibrate`` command to the main parser."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, so that plan and advise use its numbers",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--store", metavar="DIR", type=Path,
        help="measure the disk of this folder, e.g. the one of kvtier run --store (default: the cache "
        "folder)",
    )  # fmt: skip
    add("--quick", action="store_true", help="under twenty seconds, wider bands")
    add(
        "--profile", metavar="FILE", type=Path,
        help="where to store it (default: $XDG_CACHE_HOME/kvtier/profile.json)",
    )  # fmt: skip
    add("--json", action="store_true", help="the profile on stdout, nothing else")


def calibrate_options(args: argparse.Namespace) -> CalibrateOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    from kvtier.cost.profile import default_path

    for option, path in (("--store", args.store), ("--profile", args.profile)):
        if path is not None and "\0" in str(path):
            raise ConfigError(f"{option} is {str(path)!r}; a path has no zero bytes")
    if args.store is not None and args.store.exists() and not args.store.is_dir():
        raise ConfigError(f"--store is {args.store}, which is not a directory; give a directory")
    profile = args.profile or default_path()
    if profile.is_dir():
        raise ConfigError(f"--profile is {profile}, which is a directory; give a file")
    return CalibrateOptions(args.store, profile, args.quick, args.json)


def calibrate(options: CalibrateOptions) -> int:
    """Measure, store and print; returns the exit status.

    Raises:
        ConfigError: a folder cannot be written.
    """
    from rich.console import Console

    from kvtier.cost.calibrate import calibrate as measure
    from kvtier.cost.profile import store_profile

    with _Bar(Console(stderr=True)) as bar:
        profile = measure(options.store, quick=options.quick, progress=bar.update)
    store_profile(profile, options.profile)
    if options.json:
        print(json.dumps(profile.to_json() | {"path": str(options.profile)}, indent=2))
    else:
        render(profile, options.profile, Console())
    return 0


class _Bar:
    """A bar on a terminal, one line a step elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("measuring {task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._live = console.is_terminal
        self._task = self._bar.add_task("", total=1.0)
        self._say: Callable[..., None] = console.print
        self._step = ""

    def __enter__(self) -> _Bar:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._bar.stop()

    def update(self, step: str, done: float) -> None:
        if self._live:
            self._bar.update(self._task, description=step, completed=done)
        elif step != self._step and step != "done":
            self._say(f"measuring {step} ({done:.0%} done)", markup=False, highlight=False)
        self._step = step


def render(profile: Profile, path: Path, console: Console) -> None:
    """The table of measurements, with what each replaces in the cost model."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    replaced = profile.replaced(profile.card)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("measured", "value", "band", "replaces"):
        side = "right" if title in ("value", "band") else "left"
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for one in profile.measurements:
        names = replaced.get(one.name, ())
        table.add_row(one.name, _value(one, one.value), _band(one), names[0] if names else "-")
    say(f"{profile.machine.words}, {profile.machine.kernel}, {profile.date}")
    console.print(table)
    for what, why in profile.left_out.items():
        say(f"left out: {what}: {why}")
    say(f"stored in {path}; kvtier plan and kvtier advise use it")


def _value(one: Measurement, value: float) -> str:
    scale, unit = _UNITS[one.unit]
    return (
        f"{value / scale:,.3g} {unit}" if value / scale < 1000 else f"{value / scale:,.0f} {unit}"
    )


def _band(one: Measurement) -> str:
    scale, _ = _UNITS[one.unit]
    return f"{one.low / scale:.3g}-{one.high / scale:.3g}"
