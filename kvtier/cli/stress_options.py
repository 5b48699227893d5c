"""The options of ``kvtier stress``: parsed and checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.units import parse_size

if TYPE_CHECKING:
    from kvtier.cli.options import Parser
    from kvtier.devices.spec import CardSpec
    from kvtier.stress.spec import LoadSpec

DESCRIPTION = """\
Load an emulated graphics card with a model's KV cache: the real store, policies and modes of
attention, on a card that is not there. No weights are needed, only a geometry. Says how fast
decoding should be and how fast it is emulated, where the cliff begins, what was evicted, what
failed, and whether the books add up. Nothing is measured: all times are simulated.
"""

EPILOG = """\
card: a name such as rtx-4060-ti-16gb, numbers such as
  vram=16GB,bandwidth=288GB/s,flops=44T,rate=13GB/s,duplex=0.85,engines=2, or a name with numbers.
model: a name such as llama-3.1-8b, or layers=32,kv_heads=8,head_dim=128,params=8B.
sizes: bytes, or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024),
  always at full size: --scale makes the data of the run smaller and the emulated rates with it, so
  that times stay those of the full size. --no-payload runs at full size without any bytes.
mode: exact-stream (cold pages are copied), exact-split (the processor attends to them), auto (the faster of
  the two by prediction), or select:NAME,budget=10%, which reads some pages only; it may be followed by
  recent=, sinks=, dense=, scope=, prefetch= and the selector's own parameters.
locality: churn=0.2,heads=0.5,layers=0.5: share of the chosen pages that are new each step, and how many more
  pages the heads of a layer, and the layers, choose together than one alone. Queries are made up by it.
faults: copy-fail, stall, slow, alloc-fail by probability; fail-h2d, fail-d2h, stall-h2d, stall-d2h,
  slow-h2d, slow-d2h, fail-alloc at the n-th; stall-s, slow-factor, no-pin, seed.
  Example: --faults copy-fail=0.01,slow-h2d=100,seed=3

examples:
  kvtier stress --card rtx-4060-ti-16gb --contexts 8k,32k,64k
  kvtier stress --card rtx-4060-ti-16gb --weights-off-card 0.2 --link fallback --contexts 512
  kvtier stress --model llama-3.1-70b --card h100-sxm5-80gb --contexts 128k --no-payload
  kvtier stress --sweep vram --target-tps 20 --contexts 32k --kv-dtype fp8
  kvtier stress --mode select:quest,budget=10% --contexts 16k --vram 6GB --page-tokens 64 --policy mass

exit status: 0 done, 1 a context failed or its books do not add up, 2 wrong options, 130 interrupted.
"""


@dataclass(frozen=True)
class StressOptions:
    """What ``kvtier stress`` was asked for: a load for each KV dtype, and what to do with it."""

    loads: tuple[LoadSpec, ...]
    target_tps: float | None
    trace: Path | None
    plot: Path | None
    json: bool


def add_stress(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``stress`` command to the main parser."""
    stress = commands.add_parser(
        "stress",
        help="load an emulated card and find where it gets slow",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = stress.add_argument_group("load")
    add = what.add_argument
    add("--card", metavar="CARD", default="rtx-4060-ti-16gb", help="default: rtx-4060-ti-16gb")
    add("--model", metavar="MODEL", default="llama-3.1-8b", help="default: llama-3.1-8b")
    add("--contexts", metavar="N,..", default="512,2k,8k,32k", help="tokens a sequence, k = 1024")
    add("--sessions", metavar="N", default="1", help="sequences decoded together (default: 1)")
    add("--policy", metavar="P", default="lru", help="which pages stay in VRAM (default: lru)")
    add("--mode", metavar="M", default="exact-stream", help="how decoding reads pages; see below")
    add("--locality", metavar="L", default="0.2", help="what a selector looks for; see below")
    add("--duration", metavar="D", default="16", help="steps a context, or virtual time such as 2s")
    add("--faults", metavar="F,..", help="what goes wrong; see below")
    add("--kv-dtype", metavar="T,..", default="bf16", help="bf16, fp8, int8, int4; one load each")
    add("--weight-bits", metavar="B", default="4.9", help="bits a weight (default: 4.9, Q4_K_M)")
    tiers = stress.add_argument_group("memory")
    add = tiers.add_argument
    add("--vram", metavar="SIZE", help="VRAM to use in all (default: the card's less a margin)")
    add("--host", metavar="SIZE", default="64GB", help="host RAM tier (default: 64GB)")
    add("--disk", metavar="SIZE", default="0", help="disk tier, in a temporary folder (default: 0)")
    add("--weights-off-card", metavar="F", default="0", help="share of the weights behind the link")
    add("--link", metavar="KIND", help="pinned (default), pageable or fallback")
    add("--page-tokens", metavar="N", default="256", help="tokens in a page (default: 256)")
    add("--chunk", metavar="N", default="4096", help="tokens of a prefill step (default: 4096)")
    add("--scale", metavar="F", default="1/128", help="size of the run's data (default: 1/128)")
    add("--no-payload", action="store_true", help="full size without bytes")
    add("--check", action="store_true", help="recount all books after every call (slow)")
    out = stress.add_argument_group("question and output")
    add = out.add_argument
    add("--sweep", metavar="WHAT", help="vram: the smallest card that meets --target-tps")
    add("--target-tps", metavar="R", help="tokens/s for --sweep")
    add("--trace-out", metavar="FILE", type=Path, help="Chrome trace JSON of the run")
    add("--plot", metavar="FILE", type=Path, help="tokens/s over context: .svg, .html or .png")
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")


def stress_options(args: argparse.Namespace) -> StressOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    from kvtier.attention.mode import parse_mode
    from kvtier.cli.chart import check_chart_path
    from kvtier.cost.churn import parse_locality
    from kvtier.cost.models import KV_DTYPES, find_model
    from kvtier.policy import load_policy
    from kvtier.stress.spec import FaultPlan, LoadSpec, parse_duration, parse_faults

    mode = args.mode.strip()
    try:
        if mode != "auto":
            parse_mode(mode)
    except ConfigError as error:
        raise ConfigError(f"--mode: {error}") from error
    try:
        locality = parse_locality(args.locality)
    except ConfigError as error:
        raise ConfigError(f"--locality: {error}") from error
    if args.sweep not in (None, "vram"):
        raise ConfigError(f"--sweep is {args.sweep!r}; use vram")
    if (args.sweep is None) != (args.target_tps is None):
        given, missing = ("--target-tps", "--sweep vram")
        if args.sweep:
            given, missing = "--sweep", "--target-tps RATE"
        raise ConfigError(f"{given} is given alone; add {missing}")
    if args.sweep and args.vram is not None:
        raise ConfigError("--vram is given with --sweep vram, which searches it; leave one out")
    try:
        load_policy(args.policy, leaf_first=True)
    except ConfigError as error:
        raise ConfigError(f"--policy: {error}") from error
    disk = parse_size(args.disk, "--disk")
    if disk and args.no_payload:
        raise ConfigError(
            f"--disk is {args.disk} with --no-payload, which has no bytes to write; leave one out"
        )
    dtypes = [name.strip() for name in args.kv_dtype.split(",")]
    for name in dtypes:
        if name not in KV_DTYPES:
            raise ConfigError(f"--kv-dtype is {name!r}; use {', '.join(KV_DTYPES)}")
    card = _card(args)
    try:
        model = find_model(args.model)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from error
    try:
        faults = parse_faults(args.faults) if args.faults else FaultPlan()
    except ConfigError as error:
        raise ConfigError(f"--faults: {error}") from error
    try:
        duration = parse_duration(args.duration)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error
    page = _count(args.page_tokens, "--page-tokens", 2)
    contexts = _contexts(args.contexts)
    if min(contexts) < page:
        raise ConfigError(
            f"--contexts has {min(contexts)}, less than a page of {page} tokens; give more, or a smaller --page-tokens"
        )
    _writable(args.trace_out, "--trace-out")
    if args.plot is not None:
        check_chart_path(args.plot)
    loads = tuple(
        LoadSpec(
            card=card,
            model=model,
            contexts=contexts,
            sessions=_count(args.sessions, "--sessions", 1),
            policy=args.policy,
            mode=mode,
            locality=locality,
            duration=duration,
            kv_dtype=dtype,
            weight_bits=_number(args.weight_bits, "--weight-bits", 1.0, 32.0, "4.9"),
            weights_off=_number(args.weights_off_card, "--weights-off-card", 0.0, 1.0, "0.2"),
            vram=None if args.vram is None else parse_size(args.vram, "--vram"),
            host=parse_size(args.host, "--host"),
            disk=disk,
            page_tokens=page,
            chunk=_count(args.chunk, "--chunk", 1),
            scale=_scale(args.scale),
            payload=not args.no_payload,
            faults=faults,
            check=args.check,
        )
        for dtype in dtypes
    )
    target = args.target_tps
    return StressOptions(
        loads=loads,
        target_tps=None if target is None else _number(target, "--target-tps", 1e-9, 1e9, "20"),
        trace=args.trace_out,
        plot=args.plot,
        json=args.json,
    )


def _card(args: argparse.Namespace) -> CardSpec:
    from kvtier.devices.spec import parse_card

    text = args.card
    if args.link is not None:
        if re.search(r"(^|,)\s*link\s*=", text):
            raise ConfigError(f"--link is {args.link}, but --card gives a link too; leave one out")
        text = f"{text},link={args.link}"
        if args.link not in ("pinned", "pageable", "fallback"):
            raise ConfigError(f"--link is {args.link!r}; use pinned, pageable or fallback")
    try:
        return parse_card(text)
    except ConfigError as error:
        raise ConfigError(f"--card: {error}") from error


def _contexts(text: str) -> tuple[int, ...]:
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*([kK]?)\s*", item)
        if match is None or not int(match[1]):
            raise ConfigError(
                f"--contexts has {item!r}; give tokens such as 8192 or 8k, with commas between"
            )
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(sorted(set(found)))


def _count(text: str, option: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(f"{option} is {text!r}; give a whole number >= {least}")
    return value


def _number(text: str, option: str, least: float, most: float, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(
            f"{option} is {text!r}; give a number from {least:g} to {most:g}, e.g. {example}"
        )
    return value


def _scale(text: str) -> float:
    """``1/128`` or ``0.01``."""
    top, _, bottom = text.partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise ConfigError(
            f"--scale is {text!r}; give a share of the full size such as 1/128 or 0.01"
        )
    return value


def _writable(path: Path | None, option: str) -> None:
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(
            f"{option} is {path}, but there is no folder {path.parent}; make it first"
        )
