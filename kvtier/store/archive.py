"""Export of a stored sequence to a session file, and import (see ``kvtier.store.session_file``).

Both need memory for some pages, not for the file. The file is read and written through aiofiles, the
store in a thread, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import ConfigError, KvtierError, PageLostError
from kvtier.keys import page_keys
from kvtier.layout import PageLayout
from kvtier.store.session_file import LENGTH, SessionFile, data_at, header, tensors_of

if TYPE_CHECKING:
    from kvtier.tiers.disk import DiskTier
    from kvtier.tiers.record import DiskRecord

_HEADER_MAX = 100 << 20  # the limit of the safetensors library
_GROUP_BYTES = 64 << 20

Progress = Callable[[int, int], None]
Bytes = npt.NDArray[np.uint8]


class Pages(Protocol):
    """What is exported from: ``DiskTier`` and ``DiskReader`` are it."""

    def read_pages(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[bool]: ...


def sequence_to(records: Iterator[DiskRecord], last: bytes) -> list[DiskRecord]:
    """The pages of a sequence, first page first, up to the one with key ``last``.

    Raises:
        ConfigError: that page is not there, or one before it.
    """
    by_key = {record.key: record for record in records}
    chain: list[DiskRecord] = []
    at: bytes | None = last
    while at is not None:
        record = by_key.get(at)
        if record is None:
            what = (
                "is not in the store"
                if not chain
                else "is missing, and pages that follow it are there"
            )
            raise ConfigError(f"page {at.hex()} {what}; see 'kvtier store ls --sequences'")
        chain.append(record)
        at = record.parent
    return chain[::-1]


async def export_session(
    pages: Pages,
    chain: Sequence[DiskRecord],
    path: Path,
    *,
    layout: PageLayout,
    identity: Mapping[str, Any],
    page_bytes: int,
    ranges: Sequence[tuple[int, int]],
    tokens: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a sequence to ``path``; every page is verified first. Returns the bytes of the file.

    The file appears under its name when it is whole and on disk.

    Args:
        chain: the pages, first page first (see ``sequence_to``).
        identity: description of the model identity, at least its ``digest``.
        page_bytes, ranges: as in ``tensors_of``.
        tokens: token ids of all pages, if known.
        progress: called with tensors done and tensors in all.

    Raises:
        ConfigError: the tokens are not those of the pages' keys.
        PageLostError: a page is damaged or went meanwhile; nothing is left behind.
    """
    import aiofiles

    keys = tuple(record.key for record in chain)
    session = SessionFile(
        layout,
        dict(identity),
        keys,
        ("0" * 32,) * len(keys),
        None if tokens is None else tuple(tokens),
    )
    if tokens is not None and page_keys(
        session.identity_digest, tokens, layout.page_tokens
    ) != list(keys):
        raise ConfigError("the tokens are not those of the pages; their keys differ")
    tensors = tensors_of(layout, len(keys), page_bytes, ranges)
    head = header(session, tensors)
    sums = [xxhash.xxh3_128(key) for key in keys]
    partial = path.with_name(path.name + ".partial")
    group = max(1, _GROUP_BYTES // page_bytes)
    buffer = np.empty((min(group, len(keys)), page_bytes), np.uint8)
    starts: list[int] = []
    at = len(head)
    for tensor in tensors:
        starts.append(at)
        at += tensor.nbytes * len(keys)
    try:
        async with aiofiles.open(partial, "wb", opener=_private) as file:
            await file.truncate(at)
            for first in range(0, len(keys), group):
                some = keys[first : first + group]
                outs = list(buffer[: len(some)])
                good = await asyncio.to_thread(pages.read_pages, some, outs)
                if not all(good):
                    raise PageLostError(
                        f"page {first + good.index(False)} of the sequence is damaged or was evicted; "
                        "nothing was exported"
                    )
                for tensor, start in zip(tensors, starts, strict=True):
                    part = buffer[: len(some), tensor.offset : tensor.offset + tensor.nbytes]
                    data = np.ascontiguousarray(part)
                    for index, row in enumerate(data, first):
                        sums[index].update(row.data)
                    await file.seek(start + first * tensor.nbytes)
                    await file.write(data.data)
                if progress is not None:
                    progress(first + len(some), len(keys))
            digests = tuple(state.hexdigest() for state in sums)
            await file.seek(0)
            await file.write(
                header(
                    SessionFile(layout, session.identity, keys, digests, session.tokens), tensors
                )
            )
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    return at


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


async def read_header(path: Path) -> tuple[SessionFile, dict[str, Any], int]:
    """What a session file holds, its tensors by name, and where their data begins.

    Raises:
        ConfigError: it is no session file.
    """
    import aiofiles

    try:
        async with aiofiles.open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = await file.read(LENGTH.size)
            length = LENGTH.unpack(raw)[0] if len(raw) == LENGTH.size else 0
            if not 2 <= length <= min(_HEADER_MAX, size):
                raise ConfigError(f"{path} is no safetensors file")
            entries = json.loads(await file.read(length))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, KvtierError):
            raise
        raise ConfigError(f"{path} is no safetensors file: its header is not JSON") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} is no safetensors file: its header is not an object")
    return SessionFile.parse(entries.pop("__metadata__", {}), path), entries, LENGTH.size + length


@dataclass(frozen=True)
class Imported:
    """What an import did: pages stored, pages that were there already, bytes stored."""

    stored: int
    known: int
    nbytes: int


async def import_session(
    tier: DiskTier,
    path: Path,
    *,
    page_bytes: int,
    ranges: Sequence[tuple[int, int]],
    progress: Progress | None = None,
) -> Imported:
    """Store the pages of a session file, each verified before it is; durable when this returns.

    Pages that are there already are kept. If the import fails, the pages stored so far are a prefix of the
    sequence, each of them good.

    Raises:
        ConfigError: it is no session file, of another page layout, damaged, or too large for the free room.
    """
    import aiofiles

    session, entries, start = await read_header(path)
    if session.layout.digest != tier.info.layout_digest:
        raise ConfigError(
            f"{path} has pages of layout {session.layout.digest.hex()}, the store of "
            f"{tier.info.layout_digest.hex()}; import it into a store of the same model geometry"
        )
    keys = session.keys
    tensors = tensors_of(session.layout, len(keys), page_bytes, ranges)
    offsets = [data_at(path, entries.get(tensor.name), tensor, len(keys)) for tensor in tensors]
    size = path.stat().st_size
    if any(
        start + at + tensor.nbytes * len(keys) > size
        for at, tensor in zip(offsets, tensors, strict=True)
    ):
        raise ConfigError(f"{path} is cut off: it has {size} bytes")
    new = [index for index, key in enumerate(keys) if key not in tier]
    need = len(new) * tier.stored_bytes_of(page_bytes)
    if tier.live_bytes + need > tier.live_capacity_bytes:
        raise ConfigError(
            f"{len(new)} pages need {need} bytes and {tier.live_capacity_bytes - tier.live_bytes} are free; "
            "make room with 'kvtier store rm', or raise the store's limit"
        )
    if session.identity.keys() - {"digest"}:
        tier.describe_identity(session.identity_digest, session.identity)
    group = max(1, _GROUP_BYTES // page_bytes)
    stored = 0
    async with aiofiles.open(path, "rb") as file:
        for first in range(0, len(keys), group):
            some = keys[first : first + group]
            data = np.zeros((len(some), page_bytes), np.uint8)
            sums = [xxhash.xxh3_128(key) for key in some]
            for tensor, at in zip(tensors, offsets, strict=True):
                await file.seek(start + at + first * tensor.nbytes)
                raw = await file.read(len(some) * tensor.nbytes)
                if len(raw) != len(some) * tensor.nbytes:
                    raise ConfigError(f"{path} is cut off")
                part = np.frombuffer(raw, np.uint8).reshape(len(some), tensor.nbytes)
                data[:, tensor.offset : tensor.offset + tensor.nbytes] = part
                for state, row in zip(sums, part, strict=True):
                    state.update(row.data)
            for index, state in enumerate(sums, first):
                if state.hexdigest() != session.checksums[index]:
                    raise ConfigError(
                        f"{path} is damaged: page {index} does not match its checksum"
                    )
            waiting = [
                tier.put(
                    key,
                    parent=keys[index - 1] if index else None,
                    depth=index,
                    identity=session.identity_digest,
                    data=data[index - first],
                )
                for index, key in enumerate(some, first)
                if key not in tier
            ]
            for future in waiting:
                await asyncio.wrap_future(future)
            stored += len(waiting)
            if progress is not None:
                progress(first + len(some), len(keys))
    await asyncio.to_thread(tier.flush)
    return Imported(stored, len(keys) - stored, stored * page_bytes)
