"""``kvtier calibrate-filters``: measure which layers of a model may choose pages for others, and store it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

DESCRIPTION = """\
Mode select:omnikv lets a few filter layers choose the pages that the layers behind them read. Which
layers are good at it differs from model to model. This decodes a text with every page read, compares
what each layer would choose with what each layer behind it attends to, chooses the filters under
which the worst served layer recalls most, and stores them under the digest of the weights:
select:omnikv finds them from then on.
"""


@dataclass(frozen=True)
class FilterOptions:
    """What ``kvtier calibrate-filters`` was asked for."""

    model: str | None
    text: Path | None
    tokens: int
    steps: int
    count: int | None
    share: float
    wait: int
    page_tokens: int
    json: bool


def add_filters(commands: Any) -> None:
    """Add the command to the main parser."""
    parser = commands.add_parser(
        "calibrate-filters",
        help="measure the filter layers that mode select:omnikv needs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--demo", action="store_true", help="SmolLM2-135M-Instruct")
    parser.add_argument(
        "--model",
        metavar="PATH_OR_NAME",
        help="local transformers folder, or a name in the hub cache",
    )
    parser.add_argument(
        "--text", metavar="F", type=Path, help="UTF-8 text to decode (default: the demo's)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=1024, help="tokens of prefill (default: 1024)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=64, help="steps to measure (default: 64)"
    )
    parser.add_argument(
        "--count", metavar="N", type=int, help="filters at most (default: a sixth of the layers)"
    )
    parser.add_argument(
        "--share",
        metavar="F",
        type=float,
        default=0.1,
        help="of the pages that a layer may read (default: 0.1)",
    )
    parser.add_argument(
        "--wait",
        metavar="N",
        type=int,
        default=1,
        help="layers behind each filter that read everything (default: 1)",
    )
    parser.add_argument("--page-tokens", metavar="N", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def filter_options(args: argparse.Namespace) -> FilterOptions:
    """Check the options. Raises ConfigError."""
    if args.demo == (args.model is not None):
        raise ConfigError("give either --demo or --model PATH_OR_NAME")
    for name, least in (("tokens", 1), ("steps", 1), ("wait", 0), ("page_tokens", 1)):
        if getattr(args, name) < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; give {least} or more"
            )
    if not 0.0 < args.share < 1.0:
        raise ConfigError(f"--share is {args.share}; give a number between 0 and 1, e.g. 0.1")
    return FilterOptions(
        args.model, args.text, args.tokens, args.steps, args.count, args.share, args.wait,
        args.page_tokens, args.json,
    )  # fmt: skip


def calibrate_filters(options: FilterOptions) -> int:
    """Run the command; the exit status."""
    from rich.console import Console
    from rich.progress import Progress

    from kvtier.attention.filters import filters_path, save_filters
    from kvtier.cli.inputs import need_transformers
    from kvtier.demo.model import demo_text, load_demo, load_folder
    from kvtier.folders import cache_folder

    need_transformers()
    from kvtier.integrations.transformers import calibrate_filters as measuring
    from kvtier.integrations.transformers.identity import identity_of

    console = Console(stderr=True)
    model, tokenizer = load_demo() if options.model is None else load_folder(options.model)
    if options.text is None:
        text = demo_text()
    else:
        try:
            text = options.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {options.text} cannot be read: {error}") from None
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    need = options.tokens + options.steps
    if ids.shape[1] < need:
        raise ConfigError(
            f"the text has {ids.shape[1]} tokens; --tokens {options.tokens} and --steps "
            f"{options.steps} need {need}"
        )
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("decoding", total=options.steps)
        filters = measuring.calibrate_filters(
            model,
            ids[:, :need],
            prefill=options.tokens,
            count=max(1, layers // 6) if options.count is None else options.count,
            share=options.share,
            wait=options.wait,
            page_tokens=options.page_tokens,
            progress=lambda done, total: progress.update(task, completed=done),
        )
    identity = identity_of(model, page_tokens=options.page_tokens)
    path = filters_path(cache_folder(), identity.weights_digest)
    save_filters(path, filters)
    if options.json:
        print(json.dumps({**asdict(filters), "path": str(path)}))
    else:
        print(
            f"{filters.model}: filter layers {filters.text}, {filters.wait} layer(s) behind each read "
            f"everything too; with {filters.share:.0%} of {filters.pages} pages a layer recalls "
            f"{filters.worst:.0%} (worst) and {filters.mean:.0%} (mean) of what its own choice would, "
            f"over {filters.steps} steps. Stored in {path}"
        )
    return 0
