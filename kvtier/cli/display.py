"""Progress of a run: bars and a live table on a terminal, one line a phase elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvtier.cli.report import tier_table

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_S = 0.25


class Display(AbstractContextManager["Display"]):
    """Shows phases of work and the tiers.

    Args:
        console: where to write; a live view if it is a terminal.
        quiet: write nothing unless ``console`` is a terminal.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = console
        self._quiet = quiet and not console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
        )
        self._live = Live(
            self._progress, console=console, auto_refresh=console.is_terminal, transient=True
        )
        self._stats: Callable[[], Any] | None = None
        self._shown = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """One line."""
        if not self._quiet:
            self._console.print(
                text, style=style or None, markup=False, highlight=False, soft_wrap=True
            )

    def watch(self, stats: Callable[[], Any]) -> None:
        """From now on show the tiers of ``stats()``."""
        self._stats = stats

    def phase(self, name: str, total: int, done: int = 0) -> Callable[[int], None]:
        """Start a phase of ``total`` tokens, ``done`` of them before it; returns the function to
        call with each number of tokens that has just been done."""
        task = self._progress.add_task(name, total=total, completed=done)
        started = time.perf_counter()
        left = total - done

        def advance(tokens: int) -> None:
            nonlocal left
            left -= tokens
            self._progress.advance(task, tokens)
            if self._console.is_terminal:
                self._refresh()
            elif left <= 0:
                self.say(
                    f"{name}: {total - done:,} tokens in {time.perf_counter() - started:.1f} s"
                )

        return advance

    def _refresh(self) -> None:
        from rich.console import Group

        now = time.monotonic()
        if self._stats is None or now - self._shown < _REFRESH_S:
            return
        self._shown = now
        stats = self._stats()
        self._live.update(Group(self._progress, tier_table(stats.tiers, stats.links)))
