"""``kvtier COMMAND``: finds the command, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from kvtier.cli.advise_options import add_advise, advise_options
from kvtier.cli.calibrate import add_calibrate, calibrate, calibrate_options
from kvtier.cli.filters import add_filters, filter_options
from kvtier.cli.options import Parser, add_run, option_names, reject_unknown, run_options, stderr
from kvtier.cli.plan_options import add_plan, plan_options
from kvtier.cli.replay_options import add_replay, replay_options
from kvtier.cli.store_options import add_store, store_options
from kvtier.cli.stress_options import add_stress, stress_options
from kvtier.errors import ConfigError, KvtierError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def _plan(args: argparse.Namespace) -> int:
    options = plan_options(args)
    from kvtier.cli.plan import plan

    return plan(options)


def _advise(args: argparse.Namespace) -> int:
    options = advise_options(args)
    from kvtier.cli.advise import advise

    return advise(options)


def _calibrate(args: argparse.Namespace) -> int:
    _quiet_libraries()
    return calibrate(calibrate_options(args))


def _filters(args: argparse.Namespace) -> int:
    options = filter_options(args)
    _quiet_libraries()
    from kvtier.cli.filters import calibrate_filters

    return calibrate_filters(options)


def _stress(args: argparse.Namespace) -> int:
    options = stress_options(args)
    from kvtier.cli.stress import stress

    return stress(options)


def _replay(args: argparse.Namespace) -> int:
    options = replay_options(args)
    from kvtier.cli.replay import replay

    return replay(options)


def _store(args: argparse.Namespace) -> int:
    options = store_options(args)
    from kvtier.cli.store import store

    return store(options)


def _run(args: argparse.Namespace) -> int:
    options = run_options(args)
    _quiet_libraries()
    from kvtier.cli.run import run

    return run(options)


#: In the order of ``--help``: name, what adds it to the parser, what runs it. Nothing heavy is imported before
#: the options of a command have been checked.
COMMANDS: tuple[tuple[str, Callable[[Any], None], Callable[[argparse.Namespace], int]], ...] = (
    ("plan", add_plan, _plan),
    ("advise", add_advise, _advise),
    ("run", add_run, _run),
    ("stress", add_stress, _stress),
    ("replay", add_replay, _replay),
    ("store", add_store, _store),
    ("calibrate", add_calibrate, _calibrate),
    ("calibrate-filters", add_filters, _filters),
)


def _quiet_libraries() -> None:
    """Read by OpenMP and huggingface_hub when they are loaded, which has not happened yet."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def build_parser() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser, and the parsers of the commands by name."""
    parser = Parser(
        prog="kvtier",
        description="A language model's KV cache in three tiers: VRAM, host RAM, disk.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for _, add, _ in COMMANDS:
        add(commands)
    return parser, dict(commands.choices)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (``sys.argv[1:]`` by default); returns the exit status."""
    parser, commands = build_parser()
    try:
        args, extras = parser.parse_known_args(argv)
    except SystemExit as error:
        return int(error.code or 0)
    if args.command is None:
        names = ", ".join(commands)
        stderr(f"kvtier: error: no command given; use one of {names}, see 'kvtier --help'")
        return EXIT_USAGE
    name = f"kvtier {args.command}"
    try:
        reject_unknown(extras, option_names(commands[args.command]), args.command)
        return next(run for command, _, run in COMMANDS if command == args.command)(args)
    except ConfigError as error:
        stderr(f"{name}: error: {_one_line(error)}")
        return EXIT_USAGE
    except KvtierError as error:
        stderr(f"{name}: {type(error).__name__}: {_one_line(error)}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        stderr(f"{name}: interrupted; pages that the disk acknowledged are kept for the next run")
        return EXIT_INTERRUPTED


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
