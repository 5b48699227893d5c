"""What a folder says about itself, so that it can be opened by somebody who does not know its
layout.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import DiskError
from kvtier.tiers.lmdb_file import DATA, LmdbFile
from kvtier.tiers.payload import Payload

NOTE = b"folder"


@dataclass(frozen=True)
class FolderInfo:
    """The geometry of a folder, as stored in it.

    Attributes:
        layout_digest: digest of the page layout.
        page_bytes, plane_ranges: see ``DiskTier``.
        payload: where the bytes are, ``slab`` or ``inline``.
        capacity_bytes: the limit it was last opened with.
        slot_bytes, segment_bytes: of the slab files; 0 for ``inline``.
        layout_info: the layout in readable form, if the writer gave it.
    """

    layout_digest: bytes
    page_bytes: int
    plane_ranges: tuple[tuple[int, int], ...]
    payload: Payload
    capacity_bytes: int
    slot_bytes: int
    segment_bytes: int
    layout_info: Mapping[str, Any]

    def encode(self) -> bytes:
        """As stored."""
        fields = {**vars(self), "layout_digest": self.layout_digest.hex()}
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def decode(cls, text: bytes | None) -> FolderInfo | None:
        """From what ``encode`` gave; ``None`` if it is not that."""
        try:
            fields = json.loads(text or b"")
            fields["layout_digest"] = bytes.fromhex(fields["layout_digest"])
            fields["plane_ranges"] = tuple((int(a), int(n)) for a, n in fields["plane_ranges"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError):
            return None


def read_info(file: LmdbFile) -> FolderInfo | None:
    """The geometry stored in an open folder."""
    return FolderInfo.decode(file.note(NOTE))


def require_info(file: LmdbFile) -> FolderInfo:
    """The geometry stored in an open folder; DiskError if it has none."""
    info = read_info(file)
    if info is None:
        raise DiskError(
            errno.EINVAL,
            "the folder does not say what pages it holds; open it once with the store that uses it",
            str(file.folder),
        )
    return info


def require_store(folder: Path) -> int:
    """Bytes of a folder's database. DiskError if it has none."""
    try:
        size = (folder / DATA).stat().st_size
    except OSError:
        size = 0
    if not size:
        raise DiskError(errno.ENOENT, "the folder holds no store", str(folder))
    return size
