"""The options of ``kvtier run``: parsed and checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from kvtier.errors import ConfigError
from kvtier.layout import CodecName
from kvtier.units import parse_size

DEMO_STORE = Path("kvtier-demo")

RUN_DESCRIPTION = """\
Generate from a long prompt while its KV cache lives in three tiers: VRAM, host RAM and a database
on disk. Decoding is greedy. A second run with the same --store finds the prompt there and computes
only what is missing.
"""

RUN_EPILOG = """\
sizes: bytes, or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).

--verify generates once more with transformers' DynamicCache and compares every token and every
logit. The last bits of a float depend on how many tokens go through the model at once, so the
comparison makes the same forward calls: prefill in chunks that end at multiples of the chunk size
and, for what came from the store, the calls of the run that computed it (runs.json in the store
directory), cut back to the restored length. The largest difference must then be exactly 0.0.
With --mode exact-split, which adds up attention in another order, it may be 1e-3 (float32; 32 units
of the last place in other dtypes). With --mode select:... there is nothing to compare: it leaves
pages out.

modes: exact-stream gathers all pages in VRAM, exact-split has the CPU read those in host RAM.
select:NAME,budget=B reads a part of the pages at each step and may change what comes out; NAME is
quest, arkbox, omnikv, window or oracle, B is 10%, 64pages, 2048tokens or 512MiB. See
docs/attention.md for its other options.

--host-codec and --disk-codec keep pages in fewer bits, and not bit for bit: results may change, and
depend on which pages have been in that tier. The error is measured page by page and printed. Such
pages are never mixed with exact ones. --verify cannot hold with them; --demo leaves it out then.

exit status: 0 done, 1 failed or --verify found a difference, 2 wrong options, 130 interrupted.
"""


@dataclass(frozen=True)
class RunOptions:
    """What ``kvtier run`` was asked for. A size of None is a share of the prompt's KV (demo)."""

    demo: bool
    model: str | None
    prompt_file: Path | None
    prompt_tokens: int | None
    vram: int | None
    host: int | None
    disk: int | None
    store: Path | None
    max_new_tokens: int
    page_tokens: int
    chunk: int
    policy: str
    mode: str
    device: str
    verify: bool
    json: bool
    host_codec: CodecName = "none"
    disk_codec: CodecName = "none"

    @property
    def lossy(self) -> str:
        """The options that keep pages in fewer bits, as they were given; empty if there are none."""
        given = (("--host-codec", self.host_codec), ("--disk-codec", self.disk_codec))
        return " ".join(f"{name} {codec}" for name, codec in given if codec != "none")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # "-2GB" is a wrong size, about which its option has more to say than "expected one argument".
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; give one such as 32"
        ) from None


def add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``run`` command to the main parser."""
    run = commands.add_parser(
        "run",
        help="generate from a long prompt with a tiered KV cache",
        description=RUN_DESCRIPTION,
        epilog=RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = run.add_argument_group("what to run")
    what.add_argument(
        "--demo",
        action="store_true",
        help="SmolLM2-135M-Instruct on a shipped text of 4,187 tokens, with "
        "VRAM and host RAM for a third of its KV each, and --verify",
    )
    what.add_argument(
        "--model",
        metavar="PATH_OR_NAME",
        help="local transformers folder, or a name in the local hub cache",
    )
    what.add_argument(
        "--prompt-file", metavar="F", type=Path, help="UTF-8 text, used as it is (no chat template)"
    )
    what.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=_count,
        help="use only the first N tokens of the prompt",
    )
    what.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=_count,
        default=32,
        help="tokens to generate (default: 32)",
    )
    tiers = run.add_argument_group("tiers")
    tiers.add_argument(
        "--vram", metavar="SIZE", help="limit of the VRAM tier, without the staging buffer"
    )
    tiers.add_argument("--host", metavar="SIZE", help="limit of the host RAM tier; 0 for none")
    tiers.add_argument("--disk", metavar="SIZE", help="limit of the disk tier; 0 for none")
    tiers.add_argument(
        "--store",
        metavar="DIR",
        type=Path,
        help=f"directory of the disk tier (--demo: ./{DEMO_STORE})",
    )
    for tier in ("host", "disk"):
        tiers.add_argument(
            f"--{tier}-codec",
            metavar="C",
            default="none",
            help=f"how the {tier} tier keeps pages: {', '.join(get_args(CodecName))} (default: none)",
        )
    tiers.add_argument(
        "--policy",
        metavar="P",
        default="lru",
        help="which pages stay: NAME, NAME:key=value,... or module:Class (default: lru)",
    )
    tiers.add_argument(
        "--mode",
        metavar="M",
        default="exact-stream",
        help="how decoding reads pages: exact-stream (default), exact-split, auto (the faster of "
        "the two, as predicted) or select:NAME,budget=...; see below",
    )
    tiers.add_argument(
        "--page-tokens", metavar="N", type=_count, default=32, help="tokens in a page (default: 32)"
    )
    tiers.add_argument(
        "--chunk",
        metavar="N",
        type=_count,
        default=512,
        help="tokens per prefill call (default: 512, less if half the VRAM tier holds less)",
    )
    tiers.add_argument(
        "--device",
        metavar="D",
        default="auto",
        help="cuda, cuda:N, emulated:CARD such as emulated:rtx-4060-ti-16gb, or auto (default)",
    )
    out = run.add_argument_group("output")
    out.add_argument(
        "--verify", action="store_true", help="compare with transformers' own cache; see below"
    )
    out.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")


def run_options(args: argparse.Namespace) -> RunOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    from kvtier.policy import load_policy

    sizes = {name: _size(args, name) for name in ("vram", "host", "disk")}
    if not args.demo:
        _require(
            args.model, "--model", "a local transformers folder, or --demo for the shipped one"
        )
        _require(args.prompt_file, "--prompt-file", "a text file, or --demo for the shipped one")
        for name, size in sizes.items():
            _require(
                size,
                f"--{name}",
                "a size such as 512MiB" + ("" if name == "vram" else ", or 0 for none"),
            )
    store = args.store or (DEMO_STORE if args.demo else None)
    if sizes["disk"] != 0:
        _require(store, "--store", "the directory of the disk tier, or --disk 0")
    if store is not None and store.exists() and not store.is_dir():
        raise ConfigError(f"--store is {store}, which is not a directory; give another path")
    if args.prompt_file is not None and not args.prompt_file.is_file():
        raise ConfigError(
            f"--prompt-file is {args.prompt_file}, which is not a file; give the path of a text"
        )
    for name, least in (
        ("max_new_tokens", 1),
        ("page_tokens", 1),
        ("chunk", 1),
        ("prompt_tokens", 2),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    try:
        load_policy(args.policy, leaf_first=True)
    except ConfigError as error:
        raise ConfigError(f"--policy: {error}") from error
    mode = _mode(args.mode)
    selects = mode.startswith("select:")
    if selects and args.verify:
        raise ConfigError(
            f"--verify compares with attention over all pages, and --mode {mode} leaves some out; use "
            "exact-stream or exact-split, or leave --verify out"
        )
    for tier in ("host", "disk"):
        codec = getattr(args, f"{tier}_codec")
        if codec not in get_args(CodecName):
            raise ConfigError(
                f"--{tier}-codec is {codec!r}; use one of {', '.join(get_args(CodecName))}"
            )
        if codec != "none" and sizes[tier] == 0:
            raise ConfigError(
                f"--{tier}-codec is {codec} with --{tier} 0, which is no tier; leave one out"
            )
    options = RunOptions(
        demo=args.demo,
        model=args.model,
        prompt_file=args.prompt_file,
        prompt_tokens=args.prompt_tokens,
        store=store,
        max_new_tokens=args.max_new_tokens,
        page_tokens=args.page_tokens,
        chunk=args.chunk,
        policy=args.policy,
        mode=mode,
        device=args.device,
        verify=args.verify,
        json=args.json,
        host_codec=args.host_codec,
        disk_codec=args.disk_codec,
        **sizes,
    )
    if options.lossy and options.verify:
        raise ConfigError(
            f"--verify demands equal bits, which {options.lossy} does not keep; leave one out"
        )
    return replace(options, verify=args.verify or (args.demo and not options.lossy and not selects))


def reject_unknown(extras: list[str], known: list[str], command: str) -> None:
    """Raises ConfigError for the first argument that no option took."""
    if not extras:
        return
    first = extras[0].partition("=")[0]
    if not first.startswith("-"):
        raise ConfigError(
            f"unexpected argument {first!r}; options start with --, see 'kvtier {command} --help'"
        )
    near = difflib.get_close_matches(first, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"see 'kvtier {command} --help'"
    raise ConfigError(f"unknown option {first}; {hint}")


def _mode(text: str) -> str:
    """A mode that can be. Filters of omnikv are looked up when the model is known."""
    from kvtier.attention.mode import parse_mode

    if text == "auto":
        return text
    name, *items = text.split(",")
    given = any(item.startswith("filters=") for item in items)
    parse_mode(f"{text},filters=1" if name == "select:omnikv" and not given else text)
    return text


def _size(args: argparse.Namespace, name: str) -> int | None:
    text = getattr(args, name)
    return None if text is None else parse_size(text, f"--{name}")


def _require(value: object, option: str, fix: str) -> None:
    if value is None:
        raise ConfigError(f"{option} is missing; give {fix}")


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """All ``--options`` of a parser and of its subcommands."""
    names: list[str] = []
    for action in parser._actions:
        names += [name for name in action.option_strings if name.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                names += option_names(below)
    return names


def stderr(message: str) -> None:
    """One line for people."""
    print(message, file=sys.stderr, flush=True)
