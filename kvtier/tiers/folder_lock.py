"""The right to write to a folder, and what is noted beside it: who holds it, and how the last one
left."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kvtier.errors import DiskError
from kvtier.tiers.lmdb_file import disk_error

WRITER_LOCK = "writer.lock"
_NOTE_BYTES = 64
_OWNED = b"kvtier\n"
_CLEAN = b"closed\n"


def writer_of(folder: Path) -> int | None:
    """Process that writes to a folder, as far as its note says and the process is alive."""
    try:
        text = (folder / WRITER_LOCK).read_bytes()
        pid = int(text.partition(b"\n")[0])
        if _CLEAN in text:
            return None
        os.kill(pid, 0)
    except PermissionError:
        return pid
    except (OSError, ValueError):
        return None
    return pid


class FolderLock:
    """The right to write to a folder, held by one tier of one process at a time (``flock``).

    Raises:
        DiskError: somebody else holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WRITER_LOCK
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(error, "opening the writer lock", self._path) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, _NOTE_BYTES, 0).decode("ascii", "replace").partition("\n")[0]
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise disk_error(error, "locking the folder", self._path) from error
            who = "this process" if owner == str(os.getpid()) else f"process {owner}"
            raise DiskError(
                errno.EBUSY,
                f"the folder is in use by {who}; close that tier (or end that process and the "
                "children it forked), or give each tier a folder of its own",
                str(folder),
            ) from None
        try:
            note = os.pread(self._fd, _NOTE_BYTES, 0)
            #: Whether a tier of this library made the folder's database, so that it may delete it.
            self.owned = _OWNED in note
            #: Whether the last tier was closed in good order.
            self.clean = _CLEAN in note
            self._write(_OWNED if self.owned else b"")
        except OSError as error:
            self.release()
            raise disk_error(error, "writing the writer lock", self._path) from error

    def _write(self, mark: bytes) -> None:
        # Of one length, so that it can be written over when the disk is full.
        os.pwrite(self._fd, (b"%d\n%b" % (os.getpid(), mark)).ljust(_NOTE_BYTES), 0)

    def claim(self) -> None:
        """Note that the database in the folder is a disk tier's."""
        self.owned = True
        self._write(_OWNED)

    def release(self, *, clean: bool = False) -> None:
        """Give the right back, also on behalf of forked children that inherited it. Idempotent.

        Args:
            clean: everything was written and closed.
        """
        if self._fd >= 0:
            if clean and self.owned:
                with suppress(OSError):
                    self._write(_OWNED + _CLEAN)
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1
