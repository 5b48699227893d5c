"""``kvtier COMMAND``: finds the command, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvtier.cli.advise_options import add_advise, advise_options
from kvtier.cli.calibrate import add_calibrate, calibrate, calibrate_options
from kvtier.cli.options import Parser, add_run, option_names, reject_unknown, run_options, stderr
from kvtier.cli.plan_options import add_plan, plan_options
from kvtier.cli.stress_options import add_stress, stress_options
from kvtier.errors import ConfigError, KvtierError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser, and the parsers of the commands by name."""
    parser = Parser(
        prog="kvtier",
        description="A language model's KV cache in three tiers: VRAM, host RAM, disk.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    add_plan(commands)
    add_advise(commands)
    add_calibrate(commands)
    add_run(commands)
    add_stress(commands)
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
        if args.command == "plan":
            planned = plan_options(args)
            from kvtier.cli.plan import plan

            return plan(planned)
        if args.command == "advise":
            asked = advise_options(args)
            from kvtier.cli.advise import advise

            return advise(asked)
        if args.command == "calibrate":
            # as kvtier run has it; read by OpenMP when torch is loaded
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            return calibrate(calibrate_options(args))
        if args.command == "stress":
            checked = stress_options(args)
            from kvtier.cli.stress import stress

            return stress(checked)
        options = run_options(args)
        # read by OpenMP and huggingface_hub when they are loaded, which has not happened yet
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from kvtier.cli.run import run

        return run(options)
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
