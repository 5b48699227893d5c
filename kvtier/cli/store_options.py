"""The options of ``kvtier store``: parsed and checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.cli.options import Parser

DESCRIPTION = """\
Look into the disk tier of a store, check it, clean it, and carry sequences in and out.

ls, stats, verify and export only read, and work while another process has the store open. gc, rm and
import write: they need the store for themselves.
"""

EPILOG = """\
exit status: 0 done, 1 damage found or failed, 2 wrong options or no such store, 130 interrupted.
"""

ACTIONS = {
    "ls": "models, adapters, pages, bytes, age and hits",
    "stats": "sizes, limits and counts of the whole store",
    "verify": "read every page and check it; exit status 1 if one is damaged",
    "gc": "drop what is of no use any more and give its space back",
    "export": "write a sequence to a safetensors file",
    "import": "store the sequence of an exported file",
    "rm": "remove pages by model, adapter, age or salt",
}

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True)
class StoreOptions:
    """What ``kvtier store`` was asked for; what an action does not take is empty.

    Attributes:
        older_than_s: only pages that were last used longer ago, in seconds.
        key, identity: beginning of a page's key, of an identity's digest, in hexadecimal.
        every: ``rm --all``.
    """

    action: str
    path: Path
    file: Path | None = None
    model: str | None = None
    adapter: str | None = None
    salt: str | None = None
    older_than_s: float | None = None
    key: str | None = None
    identity: str | None = None
    tokens: Path | None = None
    every: bool = False
    sequences: bool = False
    force: bool = False
    dry_run: bool = False
    yes: bool = False
    json: bool = False


def add_store(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the ``store`` command to the main parser."""
    from kvtier.cli.options import Parser

    store = commands.add_parser(
        "store",
        help="look into a store on disk: ls, stats, verify, gc, export, import, rm",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = store.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    made = {}
    for name, text in ACTIONS.items():
        made[name] = action = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        action.add_argument("path", metavar="PATH", type=Path, help="folder of the disk tier")
    for name in ("export", "import"):
        made[name].add_argument("file", metavar="FILE", type=Path, help="the safetensors file")
    for name in ("ls", "stats", "verify"):
        made[name].add_argument("--json", action="store_true", help="one JSON object on stdout")
    made["ls"].add_argument(
        "--sequences", action="store_true", help="list each stored sequence and its last key"
    )
    add = made["export"].add_argument
    add("--key", metavar="HEX", help="key of the sequence's last page; its beginning is enough")
    add("--identity", metavar="HEX", help="the only sequence of this identity")
    add("--tokens", metavar="JSON", type=Path, help="file with the token ids, to go with the pages")
    add("--force", action="store_true", help="overwrite FILE")
    add = made["rm"].add_argument
    add("--model", metavar="NAME", help="pages of this model")
    add("--adapter", metavar="HEX", help="pages made with this adapter (its digest), or 'none'")
    add("--salt", metavar="TEXT", help="pages of this tenant")
    add("--older-than", metavar="AGE", help="not used for this long: 30m, 12h, 7d")
    add("--all", action="store_true", dest="every", help="every page")
    add("--dry-run", action="store_true", help="only say what would go")
    add("--yes", action="store_true", help="do not ask")


def store_options(args: argparse.Namespace) -> StoreOptions:
    """Checked options.

    Raises:
        ConfigError: names the option, its value and what to give instead.
    """
    if args.action is None:
        raise ConfigError(
            f"no action given; use one of {', '.join(ACTIONS)}, see 'kvtier store --help'"
        )
    values = {name: value for name, value in vars(args).items() if name != "command"}
    age = values.pop("older_than", None)
    options = StoreOptions(**values, older_than_s=None if age is None else _seconds(age))
    if options.action == "rm":
        chosen = (options.model, options.adapter, options.salt, options.older_than_s)
        if options.every == any(value is not None for value in chosen):
            raise ConfigError(
                "rm needs to know what goes: --model, --adapter, --salt, --older-than (pages that meet "
                "all that are given), or --all alone for every page"
            )
        if options.adapter not in (None, "none"):
            _hex("--adapter", options.adapter)
    if options.action == "export":
        if (options.key is None) == (options.identity is None):
            raise ConfigError(
                "export needs --key or --identity to know the sequence; "
                "'kvtier store ls --sequences' lists them"
            )
        _hex("--key" if options.key else "--identity", options.key or options.identity)
        assert options.file is not None
        if options.file.exists() and not options.force:
            raise ConfigError(f"{options.file} exists; give another name or --force")
        if not options.file.parent.is_dir():
            raise ConfigError(
                f"the folder {options.file.parent} of FILE does not exist; make it first"
            )
    return options


def _hex(name: str, text: str | None) -> None:
    if not text or not re.fullmatch(r"[0-9a-f]{4,64}", text):
        raise ConfigError(f"{name} is {text!r}; give 4 to 64 hexadecimal digits, as ls prints them")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if match is None:
        raise ConfigError(
            f"--older-than is {text!r}; give a number and s, m, h, d or w, such as 7d"
        )
    return float(match.group(1)) * _UNITS[match.group(2)]
