"""``--profile FILE|none`` of the commands that predict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.cost.profile import Profile


def add_profile_option(add: Callable[..., Any]) -> None:
    """Add ``--profile`` to a parser or group."""
    add(
        "--profile", metavar="FILE|none",
        help="measurements to use (default: those of kvtier calibrate, if they are of this machine)",
    )  # fmt: skip


def chosen_profile(text: str | None, command: str) -> Profile | None:
    """The profile that ``--profile`` names, by default that of this machine. A default that cannot be
    used is one line on stderr; one that was named is used, whatever machine it is of.

    Raises:
        ConfigError: the file that was named cannot be used.
    """
    if text == "none":
        return None
    from kvtier.cost.profile import load_profile, own_profile

    if text is not None:
        if "\0" in text or not text:
            raise ConfigError(f"--profile is {text!r}; give a file, or none")
        try:
            return load_profile(Path(text))
        except ConfigError as error:
            raise ConfigError(f"--profile: {error}") from error
    profile, note = own_profile()
    if note:
        from kvtier.cli.options import stderr

        stderr(f"kvtier {command}: note: {note}")
    return profile


def profile_words(profile: Profile | None, measured: list[str], table: list[str]) -> str:
    """Which constants were measured, when and where, and which come from a table."""
    where = "" if profile is None else f" ({profile.words})"
    told = f"measured{where}: {', '.join(measured)}; " if measured else ""
    told += f"from a table: {', '.join(table)}" if table else "nothing from a table"
    return told
