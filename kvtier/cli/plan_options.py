"""The options of ``kvtier plan``: parsed and checked. No torch, no device."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from kvtier.cli.profile_option import add_profile_option, chosen_profile
from kvtier.errors import ConfigError
from kvtier.layout import CodecName
from kvtier.units import parse_size

if TYPE_CHECKING:
    from kvtier.cli.options import Parser
    from kvtier.cost.coded import Codecs
    from kvtier.cost.plan import Plan
    from kvtier.cost.shape import ModelShape

DESCRIPTION = """\
How fast a model will decode on a card before it runs: what fits, tokens/s at several contexts with
their band, what is slow and why, and what to do instead with the rate predicted for it.
"""

EPILOG = """\
model: a name (--list-models), a config.json or its folder, a .gguf file, or
  layers=32,kv_heads=8,head_dim=128,params=8B.
gpu: a name (--list-gpus), numbers such as vram=16GB,bandwidth=288GB/s,flops=44T,pcie=4x8, or a name
  with numbers.
sizes: bytes, or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).
link: pinned (copies from page-locked memory), pageable (ordinary memory), fallback (the driver pages
  VRAM out), cpu (the processor computes where the bytes are), disk.
mode: kv-stream (KV off the card is copied for every token), kv-cpu (the processor attends to it),
  select (a step reads 2,048 tokens; not exact), or as kvtier run has them: exact-stream, exact-split,
  select:NAME,budget=B. Without it, link and placement decide.

examples:
  kvtier plan --model llama-3.1-8b --gpu rtx-4060-ti-16gb --weights-off-card 0.2 --link fallback
  kvtier plan --model llama-3.1-8b --gpu rtx-4060-ti-16gb --context 128k --kv-dtype fp8
  kvtier plan --model qwen3-8b --gpu rtx-4090 --claimed-tps 400
  kvtier plan --model llama-3.1-8b --gpu rtx-4060-ti-16gb --sweep context --plot cliff.svg

exit status: 0 done, 2 wrong options.
"""

LINKS = ("pinned", "pageable", "fallback", "cpu", "disk")

_Found = TypeVar("_Found")

#: Beyond these a load is a typing error.
MOST_TOKENS = 2**27
MOST_SEQUENCES = 2**16


@dataclass(frozen=True)
class PlanOptions:
    """What ``kvtier plan`` was asked for; ``plan`` is None for the two lists."""

    plan: Plan | None
    list_models: bool
    list_gpus: bool
    plot: Path | None
    json: bool


def add_plan(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``plan`` command to the main parser."""
    plan = commands.add_parser(
        "plan",
        help="how fast it will be, what fits, and what would be better",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = plan.add_argument_group("what to run")
    add = what.add_argument
    add("--model", metavar="NAME|PATH", help="name, config.json, folder, .gguf file, or numbers")
    add("--gpu", metavar="NAME", help="card by name or by numbers")
    add("--context", metavar="N", help="tokens a sequence, k = 1024 (default: a table of several)")
    add("--sequences", metavar="N", default="1", help="decoded together (default: 1)")
    add(
        "--kv-dtype", metavar="D", default="bf16", help="bf16, fp8, int8, int4, ... (default: bf16)"
    )
    add(
        "--weights-dtype", "--bits", metavar="D", dest="weights_dtype",
        help="q4_k_m, bf16, ..., or bits a weight (default: as stored, else q4_k_m)",
    )  # fmt: skip
    add("--mode", metavar="M", help="kv-stream, kv-cpu or select, or a mode of kvtier run")
    where = plan.add_argument_group("where it lies")
    add = where.add_argument
    add("--weights-off-card", metavar="F", help="share of the weights, 0..1 or 20%%, or a size")
    add("--kv-off-card", metavar="F", help="share of the KV, or a size")
    add("--link", metavar="KIND", default="pinned", help=f"{', '.join(LINKS)} (default: pinned)")
    add("--disk-prefix", action="store_true", help="prompts are restored from a disk tier")
    for tier in ("host", "disk"):
        add(
            f"--{tier}-codec",
            metavar="C",
            default="none",
            help=f"how the {tier} tier keeps pages: {', '.join(get_args(CodecName))} (default: none)",
        )
    add("--vram", metavar="SIZE", help="memory to use (default: what the card leaves)")
    add("--page-tokens", metavar="N", default="16", help="tokens in a page (default: 16)")
    add(
        "--buffers",
        metavar="B,..",
        help="graphs=0,cuda_context=400MiB,workspace=..,slack=..,other=..",
    )
    out = plan.add_argument_group("question and output")
    add = out.add_argument
    add("--claimed-tps", metavar="X", help="check a claimed rate against the roofline")
    add("--sweep", metavar="WHAT", help="context: the rate over the context, and its cliff")
    add("--plot", metavar="FILE", type=Path, help="tokens/s over context: .svg, .html or .png")
    add("--list-models", action="store_true", help="the models that have a name")
    add("--list-gpus", action="store_true", help="the cards that have a name")
    add_profile_option(add)
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    if args.list_models or args.list_gpus:
        return PlanOptions(None, args.list_models, args.list_gpus, None, args.json)
    from kvtier.cli.chart import check_chart_path

    if args.sweep not in (None, "context"):
        raise ConfigError(f"--sweep is {args.sweep!r}; use context")
    if args.plot is not None:
        check_chart_path(args.plot)
    return PlanOptions(_plan(args), False, False, args.plot, args.json)


def _plan(args: argparse.Namespace) -> Plan:
    from kvtier.cli.plan_mode import plan_mode
    from kvtier.cost.buffers import parse_buffers
    from kvtier.cost.coded import pages_of
    from kvtier.cost.constants import DEFAULTS
    from kvtier.cost.kv_dtype import kv_dtype
    from kvtier.cost.models import find_model
    from kvtier.cost.outlook import Load
    from kvtier.cost.plan import Plan, sweep_contexts, table_contexts
    from kvtier.cost.weight_dtype import weight_bits
    from kvtier.devices.spec import parse_card

    for option, value, example in (
        ("--model", args.model, "llama-3.1-8b, or see --list-models"),
        ("--gpu", args.gpu, "rtx-4060-ti-16gb, or see --list-gpus"),
    ):
        if value is None:
            raise ConfigError(f"{option} is missing; give e.g. {example}")
    model = named("--model", lambda: find_model(args.model))
    spec = named("--gpu", lambda: parse_card(args.gpu))
    named("--kv-dtype", lambda: kv_dtype(args.kv_dtype))
    bits = None
    if args.weights_dtype is not None:
        bits = weight_bits(args.weights_dtype, "--weights-dtype")
    if args.link not in LINKS:
        raise ConfigError(f"--link is {args.link!r}; use {', '.join(LINKS)}")
    page_tokens = whole(args.page_tokens, "--page-tokens", 1, 2**16)
    mode, selects = plan_mode(
        args.mode, lambda: pages_of(model, args.kv_dtype, page_tokens), model.kv_heads
    )
    context = None if args.context is None else tokens(args.context, "--context")
    count = whole(args.sequences, "--sequences", 1, MOST_SEQUENCES)
    shown = table_contexts(context, model.context)
    at = context or shown[-1]
    kv = count * model.sequence_bytes(at, args.kv_dtype)
    buffers = args.buffers
    profile = chosen_profile(args.profile, "plan")
    load = Load(
        model=model,
        card=spec.card,
        context=at,
        sequences=count,
        kv_dtype=args.kv_dtype,
        weight_bits=bits,
        weights_off=share(
            args.weights_off_card, "--weights-off-card", model.weight_bytes(bits), "weights"
        ),
        kv_off=share(args.kv_off_card, "--kv-off-card", kv, f"KV at {at:,} tokens"),
        link=args.link,
        mode=mode,
        selects=selects,
        vram=None if args.vram is None else _vram(args.vram),
        page_tokens=page_tokens,
        buffers=None if buffers is None else named("--buffers", lambda: parse_buffers(buffers)),
        disk_prefix=args.disk_prefix,
        codecs=_codecs(args, model, page_tokens),
        constants=DEFAULTS if profile is None else profile.constants(spec.card),
    )
    if mode == "select" and args.link in ("cpu", "disk") and load.kv_off:
        raise ConfigError(
            f"--mode select needs --link pinned, pageable or fallback, not {args.link}"
        )
    sweep = sweep_contexts(context or 0, model.context) if args.sweep or args.plot else ()
    claimed = args.claimed_tps
    return Plan(
        asked=load,
        contexts=shown,
        one=context is not None,
        sweep=sweep,
        profile=profile,
        claimed_tps=None if claimed is None else positive(claimed, "--claimed-tps", "40"),
    )


def _codecs(args: argparse.Namespace, model: ModelShape, page_tokens: int) -> Codecs:
    from kvtier.cost.coded import codecs_for

    names = {"host": args.host_codec, "disk": args.disk_codec}
    for tier, codec in names.items():
        if codec not in get_args(CodecName):
            raise ConfigError(
                f"--{tier}-codec is {codec!r}; use one of {', '.join(get_args(CodecName))}"
            )
    if names["host"] != "none" and args.link in ("fallback", "disk"):
        raise ConfigError(
            f"--host-codec is {args.host_codec} with --link {args.link}, where no KV is in a host tier; leave one out"
        )
    if names["disk"] != "none" and args.link != "disk" and not args.disk_prefix:
        raise ConfigError(
            f"--disk-codec is {args.disk_codec}, but nothing is on disk; add --disk-prefix or --link disk"
        )
    for tier, codec in names.items():
        named(
            f"--{tier}-codec",
            lambda tier=tier, codec=codec: codecs_for(  # type: ignore[misc]
                model, args.kv_dtype, page_tokens, **{tier: codec}
            ),
        )
    return codecs_for(model, args.kv_dtype, page_tokens, **names)


def named(option: str, find: Callable[[], _Found]) -> _Found:
    """``find()``, its errors with the option in front."""
    try:
        return find()
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _vram(text: str) -> int:
    size = parse_size(text, "--vram")
    if size == 0:
        raise ConfigError("--vram is 0; give the memory to use, e.g. 12GiB")
    return size


def share(text: str | None, option: str, whole_bytes: float, what: str) -> float:
    """A share, ``0.2`` or ``20%``, or a size, as a share of ``whole_bytes``; 0 for None.

    Raises:
        ConfigError: not a number, negative, above 1, or a size above all there is.
    """
    if text is None:
        return 0.0
    number = re.fullmatch(r"\s*([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*", text)
    if number is not None:
        value = float(number[1]) / (100 if number[2] else 1)
        if not 0.0 <= value <= 1.0:
            raise ConfigError(
                f"{option} is {text!r}; a share lies between 0 and 1 (or 0% and 100%), and a size has "
                "a unit, e.g. 0.2 or 2GB"
            )
        return value
    try:
        size = parse_size(text, option)
    except ConfigError:
        raise ConfigError(
            f"{option} is {text!r}; give a share such as 0.2, or a size such as 2GB"
        ) from None
    if size > whole_bytes:
        raise ConfigError(
            f"{option} is {text!r}, more than all of the {what} ({whole_bytes / 1e9:.2f} GB); give less, "
            "or a share from 0 to 1"
        )
    return size / whole_bytes if whole_bytes else 0.0


def tokens(text: str, option: str) -> int:
    """``8192`` or ``8k``."""
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*([kKmM]?)\s*", text)
    value = int(match[1]) * {"": 1, "k": 1024, "m": 2**20}[match[2].lower()] if match else 0
    if not 1 <= value <= MOST_TOKENS:
        raise ConfigError(
            f"{option} is {text!r}; give tokens from 1 to {MOST_TOKENS:,}, such as 8192 or 8k"
        )
    return value


def whole(text: str, option: str, least: int, most: int) -> int:
    """A whole number in a range."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ConfigError(f"{option} is {text!r}; give a whole number from {least} to {most:,}")
    return value


def positive(text: str, option: str, example: str) -> float:
    """A finite number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e12:
        raise ConfigError(f"{option} is {text!r}; give a number > 0, e.g. {example}")
    return value
