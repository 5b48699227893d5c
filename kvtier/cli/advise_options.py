"""The options of ``kvtier advise``: parsed and checked. No torch, no device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cli.plan_options import MOST_SEQUENCES, named, positive, tokens, whole
from kvtier.cli.profile_option import add_profile_option, chosen_profile
from kvtier.errors import ConfigError
from kvtier.units import parse_size

if TYPE_CHECKING:
    from kvtier.cli.options import Parser
    from kvtier.cost.advice import Advice
    from kvtier.cost.hosted import Hosted
    from kvtier.cost.profile import Profile

DESCRIPTION = """\
Which mix of caching, prefix reuse and retrieval meets a workload with a card, RAM and disk: time to first
token, tokens/s, requests a minute that can be sustained and bytes per tier for each, the best first; and
what the same prompts would find and cost in the prompt cache of a hosted API.
"""

EPILOG = """\
workload: a session sends --turns requests, each beginning with the whole of the one before and all with
  the same --shared tokens; --prompt is the longest, the last. With retrieval a request has the shared
  tokens and --retrieved others.
goals: the requests a minute, and --ttft and --rate if given; what is missed is named.
sizes: bytes, or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).
gpu, model: as for kvtier plan (kvtier plan --list-gpus, --list-models).

examples:
  kvtier advise --model llama-3.1-8b --gpu rtx-4090 --ram 64GiB --disk 500GiB --prompt 16k --shared 4k \\
    --sessions 200 --requests 20 --turns 10 --ttft 1 --rate 20
  kvtier advise --model qwen3-8b --gpu rtx-4060-ti-16gb --ram 32GiB --prompt 32k --turns 5 --json

exit status: 0 done (also if nothing meets the goals), 2 wrong options.
"""


@dataclass(frozen=True)
class AdviseOptions:
    """What ``kvtier advise`` was asked for."""

    advice: Advice
    hosted: Hosted
    profile: Profile | None
    json: bool


def add_advise(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``advise`` command to the main parser."""
    parser = commands.add_parser(
        "advise",
        help="which mix of caching, prefix reuse and retrieval meets a workload",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what there is").add_argument
    add("--model", metavar="NAME|PATH", help="name, config.json, folder, .gguf file, or numbers")
    add("--gpu", metavar="NAME", help="card by name or by numbers")
    add("--vram", metavar="SIZE", help="memory of the card to use (default: what the card leaves)")
    add(
        "--ram",
        "--host",
        metavar="SIZE",
        dest="ram",
        default="0",
        help="host RAM for KV (default: 0)",
    )
    add("--disk", metavar="SIZE", default="0", help="disk for KV (default: 0)")
    add("--kv-dtype", metavar="D", default="bf16", help="bf16, fp8, int8, ... (default: bf16)")
    add(
        "--weights-dtype", "--bits", metavar="D", dest="weights_dtype",
        help="q4_k_m, bf16, ..., or bits a weight (default: as stored, else q4_k_m)",
    )  # fmt: skip
    add = parser.add_argument_group("workload").add_argument
    add("--prompt", metavar="N", help="tokens of a session's longest prompt, k = 1024")
    add("--shared", metavar="N", default="0", help="of the prefix that all share (default: 0)")
    add("--sessions", metavar="N", default="1", help="alive together (default: 1)")
    add("--requests", metavar="R", default="1", help="a minute, of all sessions (default: 1)")
    add("--turns", metavar="N", default="1", help="requests of a session (default: 1)")
    add("--output", metavar="N", default="256", help="tokens of an answer (default: 256)")
    add(
        "--retrieved", metavar="N",
        help="tokens that retrieval puts in place of what is not shared (default: a quarter of it)",
    )  # fmt: skip
    add = parser.add_argument_group("goals").add_argument
    add("--ttft", metavar="S", help="seconds to the first token, at most, in the mean")
    add("--rate", metavar="TPS", help="tokens/s of a request, at least")
    add = parser.add_argument_group("prompt cache of a hosted API").add_argument
    add("--cache-minimum", metavar="N", default="1024", help="tokens from which on (default: 1024)")
    add("--cache-step", metavar="N", default="128", help="in steps of so many (default: 128)")
    add("--cache-discount", metavar="F", default="0.9", help="off a cached token (default: 0.9)")
    add("--cache-surcharge", metavar="F", default="0.25", help="on a written one (default: 0.25)")
    add("--machine-rate", metavar="R", default="15", help="requests a minute on one prefix that a machine takes (default: 15)")  # fmt: skip
    add(
        "--cache-idle",
        metavar="MIN",
        default="5",
        help="minutes until a machine forgets (default: 5)",
    )
    add = parser.add_argument_group("output").add_argument
    add_profile_option(add)
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")


def advise_options(args: argparse.Namespace) -> AdviseOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    from kvtier.cost.advice import Means, advise
    from kvtier.cost.constants import DEFAULTS
    from kvtier.cost.demand import Demand
    from kvtier.cost.hosted import hosted
    from kvtier.cost.kv_dtype import kv_dtype
    from kvtier.cost.mix import Goals
    from kvtier.cost.models import find_model
    from kvtier.cost.prompt_cache import PromptCache
    from kvtier.cost.weight_dtype import weight_bits
    from kvtier.devices.spec import parse_card

    for option, value, example in (
        ("--model", args.model, "llama-3.1-8b, or see kvtier plan --list-models"),
        ("--gpu", args.gpu, "rtx-4060-ti-16gb, or see kvtier plan --list-gpus"),
        ("--prompt", args.prompt, "16k, the tokens of a prompt"),
    ):
        if value is None:
            raise ConfigError(f"{option} is missing; give e.g. {example}")
    model = named("--model", lambda: find_model(args.model))
    card = named("--gpu", lambda: parse_card(args.gpu)).card
    named("--kv-dtype", lambda: kv_dtype(args.kv_dtype))
    bits = None
    if args.weights_dtype is not None:
        bits = weight_bits(args.weights_dtype, "--weights-dtype")
    prompt = tokens(args.prompt, "--prompt")
    shared = 0 if args.shared.strip() == "0" else tokens(args.shared, "--shared")
    if shared >= prompt:
        raise ConfigError(
            f"--shared is {args.shared!r} of a --prompt of {prompt:,} tokens; give less than the prompt"
        )
    retrieved = None if args.retrieved is None else tokens(args.retrieved, "--retrieved")
    if retrieved is not None and retrieved > prompt - shared:
        raise ConfigError(
            f"--retrieved is {args.retrieved!r}, more than the {prompt - shared:,} tokens that are not "
            "shared; give fewer"
        )
    output = tokens(args.output, "--output")
    if model.context and prompt + output > model.context:
        raise ConfigError(
            f"--prompt and --output are {prompt + output:,} tokens, but {model.name} reads "
            f"{model.context:,}; give fewer"
        )
    vram = None if args.vram is None else parse_size(args.vram, "--vram")
    if vram == 0:
        raise ConfigError("--vram is 0; give the memory to use, e.g. 12GiB")
    demand = Demand(
        prompt=prompt,
        shared=shared,
        sessions=whole(args.sessions, "--sessions", 1, MOST_SEQUENCES),
        requests=_most(args.requests, "--requests", "20", 1e6),
        turns=whole(args.turns, "--turns", 1, 10_000),
        output=output,
        retrieved=retrieved,
    )
    goals = Goals(
        None if args.ttft is None else positive(args.ttft, "--ttft", "1.5"),
        None if args.rate is None else positive(args.rate, "--rate", "20"),
    )
    cache = PromptCache(
        minimum=whole(args.cache_minimum, "--cache-minimum", 0, 2**27),
        step=whole(args.cache_step, "--cache-step", 1, 2**27),
        discount=_fraction(args.cache_discount, "--cache-discount", 1.0),
        write_surcharge=_fraction(args.cache_surcharge, "--cache-surcharge", 100.0),
        machine_rate=_most(args.machine_rate, "--machine-rate", "15", 1e6),
        idle_minutes=_most(args.cache_idle, "--cache-idle", "5", 1e6),
    )
    profile = chosen_profile(args.profile, "advise")
    advice = advise(
        model,
        Means(card, parse_size(args.ram, "--ram"), parse_size(args.disk, "--disk"), vram),
        demand,
        goals,
        kv_dtype=args.kv_dtype,
        weight_bits=bits,
        constants=DEFAULTS if profile is None else profile.constants(card),
    )
    return AdviseOptions(advice, hosted(demand, cache), profile, args.json)


def _most(text: str, option: str, example: str, most: float) -> float:
    value = positive(text, option, example)
    if not 1 / most <= value <= most:
        raise ConfigError(
            f"{option} is {text!r}; give a number from {1 / most:g} to {most:g}, e.g. {example}"
        )
    return value


def _fraction(text: str, option: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise ConfigError(f"{option} is {text!r}; give a share from 0 to {most:g}, e.g. 0.25")
    return value
