"""``kvtier store``: what is in a store, whether it is whole, and what of it should go."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.store_options import StoreOptions
from kvtier.cli.store_report import (
    Contents,
    as_json,
    contents_table,
    print_stats,
    sequences_table,
    stats_of,
)
from kvtier.errors import ConfigError, DiskError
from kvtier.identity import tenant_digest
from kvtier.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.tiers.disk import DiskTier
    from kvtier.tiers.disk_reader import DiskReader

EXIT_DAMAGED = 1

#: What is wrong with the folder that was named, as opposed to what goes wrong with it.
_NO_STORE = (errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT, errno.EBUSY, errno.ENOTDIR)


def store(options: StoreOptions) -> int:
    """Do what was asked for; returns the exit status.

    Raises:
        ConfigError: PATH is no store of this version, somebody else writes to it, or what was asked for is not
            in it.
        DiskError: the store is damaged as a whole, or the system refuses.
    """
    from rich.console import Console

    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200  # a table in a file or a pipe is not cut to fit a screen
    run = {
        "ls": _ls,
        "stats": _stats,
        "verify": _verify,
        "gc": _gc,
        "export": _export,
        "import": _import,
        "rm": _rm,
    }[options.action]
    try:
        return run(options, console)
    except DiskError as error:
        if error.errno in _NO_STORE:
            raise ConfigError(_told(error, options)) from error
        raise


def _told(error: DiskError, options: StoreOptions) -> str:
    if error.errno == errno.EBUSY:
        return f"{options.action} writes to {options.path}, and {error.strerror or error}"
    return f"PATH is {options.path}: {error.strerror or error}"


@contextmanager
def _reading(path: Path) -> Iterator[DiskReader]:
    """A store opened to look at, also beside a process that writes."""
    from kvtier.tiers.disk_reader import DiskReader

    _require_folder(path)
    reader = DiskReader(path)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def _writing(path: Path) -> Iterator[DiskTier]:
    """A store opened to change."""
    from kvtier.tiers.disk import DiskTier

    _require_folder(path)
    tier = DiskTier.open_existing(path)
    try:
        yield tier
    finally:
        report = tier.close()
    if report.dropped or not report.clean:
        raise DiskError(errno.EIO, f"{len(report.dropped)} changes were not written", str(path))


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"PATH is {path}, which {what}; give the folder of a store's disk tier")


@contextmanager
def _bar(console: Console, text: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; elsewhere nothing. Yields what takes "done, all"."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn(text),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# ---------------------------------------------------------------- reading


def _ls(options: StoreOptions, console: Console) -> int:
    with _reading(options.path) as reader:
        contents = Contents.read(reader, time.time_ns())
    if options.json:
        print(as_json(contents, options.sequences))
        return 0
    console.print(contents_table(contents))
    if options.sequences:
        console.print(sequences_table(contents))
    return 0


def _stats(options: StoreOptions, console: Console) -> int:
    with _reading(options.path) as reader:
        stats = stats_of(reader, options.path)
    if options.json:
        print(json.dumps(stats, indent=2))
    else:
        print_stats(stats, console)
    return 0


def _verify(options: StoreOptions, console: Console) -> int:
    from kvtier.tiers.lmdb_file import FileDamagedError

    started = time.perf_counter()
    checked = 0
    damaged: list[bytes] = []
    database: str | None = None
    try:
        with _reading(options.path) as reader, _bar(console, "verify", "pages") as advance:
            report = reader.verify(advance)
            checked, damaged = report.checked, report.damaged
            database = "; ".join(report.tree) or None
    except FileDamagedError as error:
        database = str(error)
    seconds = time.perf_counter() - started
    good = not damaged and database is None
    if options.json:
        found = {
            "ok": good,
            "checked": checked,
            "damaged": [key.hex() for key in damaged],
            "database": database,
        }
        print(json.dumps(found, indent=2))
    elif good:
        console.print(f"{checked:,} pages, every byte verified in {seconds:.1f} s: no damage")
    elif database is not None:
        console.print(f"{database}; all pages are lost, and a store that opens it starts empty")
    else:
        for key in damaged:
            console.print(f"damaged page {key.hex()}")
        console.print(
            f"{len(damaged):,} of {checked:,} pages are damaged; 'kvtier store gc' removes them, "
            "a store does so when it meets them"
        )
    return 0 if good else EXIT_DAMAGED


# ---------------------------------------------------------------- cleaning


def _gc(options: StoreOptions, console: Console) -> int:
    with _writing(options.path) as tier:
        opened = tier.stats().opened  # opening drops what it cannot use
        gone = opened.damaged + opened.ephemeral + opened.orphans
        before = tier.live_bytes + gone * tier.stored_bytes_of(tier.info.page_bytes)
        with _bar(console, "verify", "pages") as advance:
            damaged = len(tier.verify(advance).damaged)
        report = tier.gc()
        tier.flush()
        after = tier.live_bytes
    counts = {
        "damaged pages": damaged + opened.damaged,
        "pages without their prefix": report.orphans + opened.orphans,
        "pages of a session that has ended": opened.ephemeral,
        "identities without pages": report.identities,
        "readers that died": report.stale_readers,
    }
    what = ", ".join(f"{name}: {n:,}" for name, n in counts.items() if n)
    console.print(f"removed {what}" if what else "nothing to remove")
    console.print(
        f"pages took {format_size(before)}, now {format_size(after)}; the folder has "
        f"{format_size(folder_bytes(options.path))} on disk, its limit is reserved"
    )
    return 0


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take on disk."""
    if not folder.is_dir():
        return 0
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*") if path.is_file())


def _rm(options: StoreOptions, console: Console) -> int:
    with _reading(options.path) as reader:
        chosen = _chosen(options, reader)
    nbytes = sum(entry.stored_bytes for entry in chosen.values())
    what = f"{len(chosen):,} pages, {format_size(nbytes)}"
    if not chosen or options.dry_run:
        console.print(
            f"would remove {what}" if options.dry_run else "no page is meant; nothing to do"
        )
        return 0
    if not options.yes and not _confirmed(f"remove {what} from {options.path}?"):
        console.print("nothing was removed")
        return 0
    with _writing(options.path) as tier:
        # Again, in the store as it is now that nobody else can change it.
        chosen = _chosen(options, tier)
        gone = tier.delete_where(lambda entry: entry.key in chosen)
    console.print(f"removed {len(gone):,} pages; their space is used again by later ones")
    return 0


def _chosen(options: StoreOptions, pages: DiskReader | DiskTier) -> dict[bytes, Any]:
    """The pages that are meant, and those that follow them, by key."""
    identities = pages.identities()
    before_ns = time.time_ns() - int((options.older_than_s or 0.0) * 1e9)
    chosen: dict[bytes, Any] = {}
    for entry in sorted(pages.entries(), key=lambda entry: entry.depth):
        about = identities.get(entry.identity) or {}
        adapters = [adapter["digest"] for adapter in about.get("adapters", [])]
        meant = (
            (options.model is None or about.get("model") == options.model)
            and (
                options.salt is None
                or about.get("tenant") in (options.salt, tenant_digest(options.salt))
            )
            and (options.adapter is None or _has_adapter(adapters, options.adapter, about))
            and (options.older_than_s is None or max(entry.used_ns, entry.created_ns) < before_ns)
        )
        if meant or entry.parent in chosen:
            chosen[entry.key] = entry
    return chosen


def _has_adapter(adapters: list[str], wanted: str, about: dict[str, Any]) -> bool:
    if wanted == "none":
        return bool(about) and not adapters
    return any(digest.startswith(wanted) for digest in adapters)


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is nobody to ask; say --yes, or look with --dry-run")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# ---------------------------------------------------------------- carrying


def _export(options: StoreOptions, console: Console) -> int:
    from kvtier.layout import PageLayout
    from kvtier.store.archive import export_session, sequence_to

    assert options.file is not None
    tokens = _tokens(options.tokens) if options.tokens is not None else None
    with _reading(options.path) as reader:
        _require_exact(reader)
        chain = sequence_to(reader.records(), Contents.read(reader, 0).find(options))
        digest = chain[-1].identity
        identity = reader.identities().get(digest) or {"digest": digest.hex()}
        layout = PageLayout.from_description(_layout_info(reader))
        with _bar(console, "export", "pages") as advance:
            nbytes = asyncio.run(
                export_session(
                    reader,
                    chain,
                    options.file,
                    layout=layout,
                    identity=identity,
                    page_bytes=reader.info.page_bytes,
                    ranges=reader.info.plane_ranges,
                    tokens=tokens,
                    progress=advance,
                )
            )
    console.print(
        f"{len(chain):,} pages of {layout.page_tokens} tokens in {options.file}, {format_size(nbytes)}"
    )
    return 0


def _require_exact(pages: DiskReader | DiskTier) -> None:
    codec = dict(pages.info.layout_info or {}).get("codec")
    if codec is not None:
        raise ConfigError(
            f"the store keeps pages in {codec}; session files have exact ones, so use a store without a codec"
        )


def _layout_info(reader: DiskReader) -> dict[str, Any]:
    info = dict(reader.info.layout_info or {})
    if not info:
        raise ConfigError(
            "the store does not describe its page layout; open it once with the program that uses it"
        )
    return info


def _tokens(path: Path) -> list[int]:
    try:
        tokens = json.loads(path.read_text())
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError("no list of integers")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokens is {path}: {error}; give a JSON list of token ids") from error
    return tokens


def _import(options: StoreOptions, console: Console) -> int:
    from kvtier.store.archive import import_session

    assert options.file is not None
    with _writing(options.path) as tier:
        _require_exact(tier)
        with _bar(console, "import", "pages") as advance:
            done = asyncio.run(
                import_session(
                    tier,
                    options.file,
                    page_bytes=tier.info.page_bytes,
                    ranges=tier.info.plane_ranges,
                    progress=advance,
                )
            )
    console.print(
        f"stored {done.stored:,} pages, {format_size(done.nbytes)}; {done.known:,} were there already"
    )
    return 0
