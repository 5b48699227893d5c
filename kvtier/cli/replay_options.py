"""The options of ``kvtier replay``: parsed and checked before anything is read."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli.options import Parser
from kvtier.errors import ConfigError
from kvtier.units import parse_size

DESCRIPTION = """\
Replay a request trace through residency policies: first how much there is to gain at each size,
then what each policy reaches. Uses the same policy objects as the live store.
"""

EPILOG = """\
traces: kvtier's own (store.record, KVTIER_TRACE), Mooncake and Qwen-Bailian JSON lines, KV events of
vLLM (msgpack or JSON lines), kv-cache-tester sessions (a file or a folder), CSV of time,key,size; gzip
by content. A block counts as a prefix hit if all earlier blocks of its request are there too; a raw
hit is one that is there when the request's walk reaches it.

sizes: bytes, or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).

exit status: 0 done, 1 no size reaches --target-hit, 2 wrong options or a bad trace, 130 interrupted.
"""

DEFAULT_SIZES = "1%,5%,10%,25%"


@dataclass(frozen=True)
class ReplayOptions:
    """What ``kvtier replay`` was asked for."""

    trace: Path
    format: str
    skip_bad: int
    page_tokens: int | None
    block_tokens: int | None
    session_gap_s: float
    policies: tuple[str, ...]
    shares: tuple[float, ...]
    pages: tuple[int, ...]
    tiers: dict[str, int]
    host_write: str
    disk_write: str
    page_bytes: int | None
    order: str | None
    leaf_first: bool
    headroom: bool
    find: float | None
    machines: int | None
    router: str
    overflow_per_min: float | None
    shared_pages: int
    model: str | None
    gpu: str | None
    kv_dtype: str
    weight_bits: float
    workers: int | None
    json: bool
    plot: Path | None


def add_replay(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``replay`` command to the main parser."""
    replay = commands.add_parser(
        "replay",
        help="replay a request trace through residency policies",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    replay.add_argument("trace", metavar="TRACE", help="trace file, or folder of sessions")
    what = replay.add_argument_group("trace")
    what.add_argument("--format", metavar="F", default="auto", help="by default told by content")
    what.add_argument(
        "--skip-bad", metavar="N", default="0", help="leave out up to N bad records (default: 0)"
    )
    what.add_argument(
        "--page-tokens", metavar="N", help="tokens of a block, where the trace does not say"
    )
    what.add_argument("--block-tokens", metavar="N", help="merge blocks to N tokens")
    what.add_argument(
        "--session-gap", metavar="S", default="60",
        help="seconds between the starts of kv-cache-tester sessions (default: 60)",
    )  # fmt: skip
    how = replay.add_argument_group("policies and sizes")
    how.add_argument(
        "--policies", metavar="P,...", default="lru",
        help="NAME, NAME:key=value,... or module:Class, separated by commas (default: lru)",
    )  # fmt: skip
    how.add_argument(
        "--sizes", metavar="X%,...",
        help="one tier of these shares of all unique blocks (default: "
        + DEFAULT_SIZES.replace("%", "%%") + ")",
    )  # fmt: skip
    how.add_argument("--pages", metavar="N,...", help="one tier of so many blocks")
    for tier in ("vram", "host", "disk"):
        how.add_argument(f"--{tier}", metavar="SIZE", help=f"all tiers at once: the size of {tier}")
    for tier, mode in (("host", "write_back"), ("disk", "write_through")):
        how.add_argument(
            f"--{tier}-write", metavar="MODE", default=mode, choices=("write_back", "write_through"),
            help=f"write_back or write_through, as the store's (default: {mode})",
        )  # fmt: skip
    how.add_argument(
        "--page-bytes", metavar="SIZE", help="bytes of a block, where neither trace nor --model say"
    )
    how.add_argument(
        "--order", choices=("tail", "head"),
        help="in which order the blocks of a request count as used (default: tail first)",
    )  # fmt: skip
    how.add_argument(
        "--leaf-first", action="store_true",
        help="one tier: never evict a block before those behind it, as a store's last tier does",
    )  # fmt: skip
    how.add_argument(
        "--no-headroom", action="store_true", help="do not replay lru and the optimum as well"
    )
    how.add_argument(
        "--find-size", action="store_true", help="find the smallest tier that reaches --target-hit"
    )
    how.add_argument("--target-hit", metavar="R", help="a prefix hit ratio, such as 0.8")
    many = replay.add_argument_group("several machines")
    many.add_argument("--machines", metavar="N", help="so many machines of --sizes or --pages each")
    many.add_argument(
        "--router", metavar="R", default="hash",
        help="hash, least-loaded or round-robin (default: hash)",
    )  # fmt: skip
    many.add_argument(
        "--overflow", metavar="N/min",
        help="a machine passes requests beyond so many a minute to the least loaded one",
    )  # fmt: skip
    many.add_argument(
        "--shared-pages", metavar="N", default="0",
        help="also with a tier of N blocks that all machines share",
    )  # fmt: skip
    cost = replay.add_argument_group("predicted times")
    cost.add_argument("--model", metavar="M", help="a model such as llama-3.1-8b")
    cost.add_argument("--gpu", metavar="CARD", help="a card such as rtx-4090")
    cost.add_argument("--kv-dtype", metavar="T", default="bf16", help="default: bf16")
    cost.add_argument("--weight-bits", metavar="B", default="16", help="default: 16")
    out = replay.add_argument_group("output")
    out.add_argument("--workers", metavar="N", help="processes (default: by the work)")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    out.add_argument(
        "--plot", metavar="FILE", help="miss-ratio curves, to a file that ends in .svg or .html"
    )


def replay_options(args: argparse.Namespace) -> ReplayOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    from kvtier.policy import load_policy

    policies = tuple(dict.fromkeys(split_policies(args.policies)))
    for spec in policies:
        try:
            load_policy(spec, leaf_first=False)
        except ConfigError as error:
            raise ConfigError(f"--policies: {error}") from error
    tiers = {
        tier: parse_size(getattr(args, tier), f"--{tier}")
        for tier in ("vram", "host", "disk")
        if getattr(args, tier) is not None
    }
    given = [f"--{n}" for n in ("sizes", "pages") if getattr(args, n) is not None]
    given += [f"--{tier}" for tier in tiers][:1]
    if len(given) > 1:
        raise ConfigError(
            f"{given[0]} and {given[1]} exclude each other; give one way to say sizes"
        )
    if tiers and not any(tiers.values()):
        raise ConfigError("all of --vram, --host and --disk are 0; give one tier a size")
    options = ReplayOptions(
        trace=Path(args.trace),
        format=args.format,
        skip_bad=_whole(args, "skip_bad", 0),
        page_tokens=None if args.page_tokens is None else _whole(args, "page_tokens", 1),
        block_tokens=None if args.block_tokens is None else _whole(args, "block_tokens", 1),
        session_gap_s=_real(args, "session_gap", 0.0),
        policies=policies,
        shares=_shares(args.sizes or DEFAULT_SIZES) if args.pages is None and not tiers else (),
        pages=_pages(args.pages) if args.pages is not None else (),
        tiers=tiers,
        host_write=args.host_write,
        disk_write=args.disk_write,
        page_bytes=None if args.page_bytes is None else _bytes(args.page_bytes),
        order=args.order,
        leaf_first=args.leaf_first,
        headroom=not args.no_headroom,
        find=_target(args),
        machines=None if args.machines is None else _whole(args, "machines", 1),
        router=args.router,
        overflow_per_min=None if args.overflow is None else _rate(args.overflow),
        shared_pages=_whole(args, "shared_pages", 0),
        model=args.model,
        gpu=args.gpu,
        kv_dtype=args.kv_dtype,
        weight_bits=_real(args, "weight_bits", 0.0),
        workers=None if args.workers is None else _whole(args, "workers", 1),
        json=args.json,
        plot=None if args.plot is None else Path(args.plot),
    )
    _check(args, options, given)
    return options


def _check(args: argparse.Namespace, options: ReplayOptions, given: list[str]) -> None:
    """Combinations that make no sense."""
    from kvtier.replay.machines import ROUTERS
    from kvtier.replay.plot import plot_kind
    from kvtier.trace.read import FORMATS

    if options.format not in ("auto", *FORMATS):
        raise ConfigError(f"--format is {options.format!r}; known are auto, {', '.join(FORMATS)}")
    if options.router not in ROUTERS:
        raise ConfigError(f"--router is {options.router!r}; known are {', '.join(ROUTERS)}")
    if (options.model is None) != (options.gpu is None):
        there, missing = ("--gpu", "--model") if options.model is None else ("--model", "--gpu")
        raise ConfigError(f"{there} without {missing} predicts nothing; give both")
    if options.machines is None:
        for name, default in (("router", "hash"), ("overflow", None), ("shared_pages", "0")):
            if getattr(args, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')} is for --machines; give that too")
    elif options.tiers or options.find is not None or options.leaf_first:
        other = next(
            name
            for name, on in (
                ("--vram, --host and --disk", options.tiers),
                ("--find-size", options.find is not None),
                ("--leaf-first", options.leaf_first),
            )
            if on
        )
        raise ConfigError(f"--machines does not go with {other}; give --sizes or --pages")
    if options.find is not None and given:
        raise ConfigError(f"--find-size looks for the size itself; leave out {given[0]}")
    if options.leaf_first and options.tiers:
        raise ConfigError("--leaf-first is for one tier; with several the last one always is")
    if not options.tiers and (args.host_write, args.disk_write) != ("write_back", "write_through"):
        raise ConfigError("--host-write and --disk-write are for --vram, --host and --disk")
    if options.plot is not None:
        if options.tiers or options.machines is not None or options.find is not None:
            raise ConfigError("--plot draws hits over sizes; give --sizes or --pages")
        plot_kind(options.plot)


def split_policies(text: str) -> list[str]:
    """``lru,mq:queues=4,lifetime=9`` -> two policies: an item ``key=value`` without a name of its own
    belongs to the one before, and what is in parentheses is not split."""
    from kvtier.plugins import split_list

    specs: list[str] = []
    for item in (part.strip() for part in split_list(text, f"--policies {text}")):
        if not item:
            raise ConfigError(f"--policies is {text!r}; name policies separated by commas")
        name, equals, _ = item.partition("=")
        if equals and ":" not in name and specs:
            specs[-1] += f",{item}"
        else:
            specs.append(item)
    return specs


def _whole(args: argparse.Namespace, name: str, least: int) -> int:
    text = getattr(args, name)
    option = f"--{name.replace('_', '-')}"
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{option} is {text!r}, not a whole number") from None
    if not least <= value <= 1 << 53:
        raise ConfigError(f"{option} is {value}; it must be at least {least}")
    return value


def _real(args: argparse.Namespace, name: str, least: float) -> float:
    text = getattr(args, name)
    option = f"--{name.replace('_', '-')}"
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{option} is {text!r}, not a number") from None
    if not least <= value < math.inf:
        raise ConfigError(f"{option} is {text}; it must be at least {least:g}")
    return value


def _bytes(text: str) -> int:
    size = parse_size(text, "--page-bytes")
    if not size:
        raise ConfigError("--page-bytes is 0; a block has at least one byte")
    return size


def _shares(text: str) -> tuple[float, ...]:
    shares = []
    for item in text.split(","):
        number = item.strip().removesuffix("%")
        try:
            share = float(number) / 100
        except ValueError:
            share = math.nan
        if not item.strip().endswith("%") or not 0 < share <= 1:
            raise ConfigError(
                f"--sizes: {item.strip()!r} is not a share of the unique blocks above 0% and up to 100%; "
                f"give such as {DEFAULT_SIZES}, or --pages"
            )
        shares.append(share)
    return tuple(dict.fromkeys(shares))


def _pages(text: str) -> tuple[int, ...]:
    pages = []
    for item in text.split(","):
        try:
            count = int(item)
        except ValueError:
            raise ConfigError(f"--pages: {item.strip()!r} is not a whole number") from None
        if not 1 <= count <= 1 << 53:
            raise ConfigError(f"--pages: a tier of {count} blocks; give at least 1")
        pages.append(count)
    return tuple(dict.fromkeys(pages))


def _rate(text: str) -> float:
    number = text.strip().removesuffix("/min")
    try:
        rate: Any = float(number)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"--overflow is {text!r}; give requests a minute above 0, such as 30/min")
    return rate


def _target(args: argparse.Namespace) -> float | None:
    if not args.find_size:
        if args.target_hit is not None:
            raise ConfigError("--target-hit is for --find-size; give that too")
        return None
    if args.target_hit is None:
        raise ConfigError("--find-size needs --target-hit, such as 0.8")
    value = _real(args, "target_hit", 0.0)
    if not 0 < value <= 1:
        raise ConfigError(f"--target-hit is {args.target_hit}; it must be above 0 and at most 1")
    return value
