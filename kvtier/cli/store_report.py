"""What a store holds, by identity and by sequence, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.store_options import StoreOptions
from kvtier.errors import ConfigError
from kvtier.identity import TENANT_DIGEST
from kvtier.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtier.tiers.disk import DiskTier
    from kvtier.tiers.disk_pages import DiskEntry
    from kvtier.tiers.disk_reader import DiskReader

_SHORT = 12


@dataclass
class Group:
    """Pages of one identity, or of one sequence. Times in nanoseconds since the epoch.

    Attributes:
        about: the identity as it was described; empty if it never was.
        last: key of the sequence's last page; of no use for an identity.
    """

    identity: bytes
    about: Mapping[str, Any]
    last: bytes = b""
    pages: int = 0
    sequences: int = 0
    nbytes: int = 0
    hits: int = 0
    oldest_ns: int = 0
    used_ns: int = 0

    def add(self, entry: DiskEntry) -> None:
        self.pages += 1
        self.nbytes += entry.stored_bytes
        self.hits += entry.hits
        self.oldest_ns = min(self.oldest_ns or entry.created_ns, entry.created_ns)
        self.used_ns = max(self.used_ns, entry.used_ns, entry.created_ns)

    @property
    def model(self) -> str:
        revision = self.about.get("revision")
        return self.about.get("model", "?") + (f"@{revision}" if revision else "")

    @property
    def adapters(self) -> str:
        return ", ".join(
            f"{adapter['digest'][:_SHORT]} x {adapter['scale']:g}"
            for adapter in self.about.get("adapters", [])
        )

    @property
    def salt(self) -> str:
        return self.about.get("tenant", "").removeprefix(TENANT_DIGEST)[:_SHORT]

    def as_dict(self, now_ns: int) -> dict[str, Any]:
        return {
            "identity": self.identity.hex(),
            "model": self.about.get("model"),
            "revision": self.about.get("revision"),
            "adapters": self.about.get("adapters"),
            "salt": self.about.get("tenant"),
            "pages": self.pages,
            "bytes": self.nbytes,
            "hits": self.hits,
            "age_s": (now_ns - self.oldest_ns) / 1e9,
            "unused_s": (now_ns - self.used_ns) / 1e9,
        }


@dataclass
class Contents:
    """All pages of a store, counted.

    Attributes:
        groups: by identity, most bytes first.
        leaves: the stored sequences, each as long as it goes; pages that several share count in each.
        keys: all keys.
    """

    now_ns: int
    groups: list[Group] = field(default_factory=list)
    leaves: list[Group] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    @classmethod
    def read(cls, pages: DiskReader | DiskTier, now_ns: int) -> Contents:
        identities = pages.identities()
        entries = {entry.key: entry for entry in pages.entries()}
        groups: dict[bytes, Group] = {}
        parents = {entry.parent for entry in entries.values()}
        leaves: list[Group] = []
        for entry in entries.values():
            about = identities.get(entry.identity) or {}
            group = groups.setdefault(entry.identity, Group(entry.identity, about))
            group.add(entry)
            if entry.key in parents:
                continue
            group.sequences += 1
            leaf = Group(entry.identity, about, last=entry.key, sequences=1)
            at: DiskEntry | None = entry
            while at is not None:
                leaf.add(at)
                at = entries.get(at.parent) if at.parent is not None else None
            leaves.append(leaf)
        return cls(
            now_ns,
            sorted(groups.values(), key=lambda group: -group.nbytes),
            sorted(leaves, key=lambda leaf: -leaf.used_ns),
            list(entries),
        )

    def find(self, options: StoreOptions) -> bytes:
        """The key of the last page that ``--key`` or ``--identity`` means.

        Raises:
            ConfigError: there is none, or more than one.
        """
        if options.key is not None:
            name, wanted = "--key", options.key
            found = [key for key in self.keys if key.hex().startswith(wanted)]
        else:
            name, wanted = "--identity", options.identity or ""
            found = [leaf.last for leaf in self.leaves if leaf.identity.hex().startswith(wanted)]
        if len(found) != 1:
            some = ", ".join(key.hex()[:16] for key in found[:4])
            what = f"{len(found)} ({some}, ...); give more of --key" if found else "none"
            raise ConfigError(
                f"{name} is {wanted}; the sequences that it means are {what}: "
                "see 'kvtier store ls --sequences'"
            )
        return found[0]


def as_json(contents: Contents, sequences: bool) -> str:
    """The object that ``ls --json`` prints."""
    found: dict[str, Any] = {
        "pages": sum(group.pages for group in contents.groups),
        "bytes": sum(group.nbytes for group in contents.groups),
        "identities": [
            {**group.as_dict(contents.now_ns), "sequences": group.sequences}
            for group in contents.groups
        ],
    }
    if sequences:
        found["sequences"] = [
            {**leaf.as_dict(contents.now_ns), "last_key": leaf.last.hex()}
            for leaf in contents.leaves
        ]
    return json.dumps(found, indent=2)


def contents_table(contents: Contents) -> Table:
    """One row an identity."""
    table = _table(
        "identity",
        "model",
        "adapters",
        "salt",
        "sequences",
        "pages",
        "bytes",
        "age",
        "unused",
        "hits",
    )
    for group in contents.groups:
        table.add_row(
            group.identity.hex()[:_SHORT],
            group.model,
            group.adapters or "-",
            group.salt or "-",
            f"{group.sequences:,}",
            f"{group.pages:,}",
            format_size(group.nbytes),
            _age(contents.now_ns - group.oldest_ns),
            _age(contents.now_ns - group.used_ns),
            f"{group.hits:,}",
        )
    return table


def sequences_table(contents: Contents) -> Table:
    """One row a sequence, last used first."""
    table = _table("last key", "identity", "model", "pages", "bytes", "age", "unused", "hits")
    for leaf in contents.leaves:
        table.add_row(
            leaf.last.hex()[: 2 * _SHORT],
            leaf.identity.hex()[:_SHORT],
            leaf.model,
            f"{leaf.pages:,}",
            format_size(leaf.nbytes),
            _age(contents.now_ns - leaf.oldest_ns),
            _age(contents.now_ns - leaf.used_ns),
            f"{leaf.hits:,}",
        )
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        numeric = name in ("sequences", "pages", "bytes", "age", "unused", "hits")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    return table


def _age(ns: int) -> str:
    seconds = ns / 1e9
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def stats_of(reader: DiskReader, path: Path) -> dict[str, Any]:
    """What ``stats`` says, sizes in bytes."""
    info = reader.info
    contents = Contents.read(reader, 0)
    files = [file.lstat() for file in path.rglob("*") if file.is_file()]
    layout = dict(info.layout_info or {})
    return {
        "payload": info.payload,
        "page_bytes": info.page_bytes,
        "page_tokens": layout.get("page_tokens"),
        "layers": len(layout["layers"]) if "layers" in layout else None,
        "layout": info.layout_digest.hex(),
        "codec": layout.get("codec", "none"),
        "limit_bytes": info.capacity_bytes,
        "on_disk_bytes": sum(512 * file.st_blocks for file in files),
        "files": len(files),
        "pages": sum(group.pages for group in contents.groups),
        "payload_bytes": sum(group.pages for group in contents.groups) * info.page_bytes,
        "charged_bytes": sum(group.nbytes for group in contents.groups),
        "identities": len(contents.groups),
        "sequences": len(contents.leaves),
        "hits": sum(group.hits for group in contents.groups),
    }


def print_stats(stats: dict[str, Any], console: Console) -> None:
    """One line a fact."""
    for name, value in stats.items():
        if value is None:
            continue
        text = f"{value:,}" if isinstance(value, int) else str(value)
        if name.endswith("_bytes"):
            name, text = name.removesuffix("_bytes"), format_size(value)
        console.print(f"{name.replace('_', ' '):14} {text}")
