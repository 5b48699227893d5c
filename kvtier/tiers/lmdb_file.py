"""One LMDB environment: its flags, its two databases, its lock, and what its errors mean.

Database ``index`` maps a page's key to its entry, ``pages`` maps the key and a piece number (2
bytes, big-endian) to a piece of the payload; both change in the same transaction. The main database
holds the record that says who made the file, and in which version.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import xxhash

from kvtier.errors import ClosedError, DeadlineExceededError, DiskError
from kvtier.units import format_size

DATA = "data.mdb"
LOCK_TABLE = "lock.mdb"
WRITER_LOCK = "writer.lock"
SCHEMA_VERSION = 1

_META_KEY = b"kvtier"
_TICK_KEY = b"tick"
_META = struct.Struct("<8sI")
_META_MAGIC = b"kvtierdb"
_OWNED = b"kvtier\n"
_MAX_READERS = 254
_PIECE = struct.Struct(">H")

#: What LMDB raises when the file itself is wrong, as opposed to the system refusing something.
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
    lmdb.CursorFullError,
)


class FileDamagedError(DiskError):
    """The database file is not readable as a whole."""


class ForeignFileError(DiskError):
    """The database does not say that it belongs to a disk tier."""


def disk_error(error: BaseException, doing: str, path: str | os.PathLike[str]) -> DiskError:
    """``error`` of LMDB or the system as a DiskError that says what was being done, where, and what
    helps.
    """
    code = getattr(error, "errno", None) or getattr(error, "code", None) or 0
    code = code if isinstance(code, int) and code > 0 else errno.EIO
    remedy = {
        errno.ENOSPC: "free space on that file system or lower the tier's capacity",
        errno.EDQUOT: "raise the quota or lower the tier's capacity",
        errno.EACCES: "give this user write access or choose another folder",
        errno.EPERM: "give this user write access or choose another folder",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.ENOENT: "the folder was moved or removed; close the tier and open it again",
    }.get(code, "check the device and its free space; later writes are tried again")
    if isinstance(error, DAMAGE):
        remedy = "the database is damaged; close the tier and delete the folder (it is a cache)"
    return DiskError(code, f"{doing} failed ({error}); {remedy}", os.fspath(path))


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
            owner = os.pread(self._fd, 64, 0).decode("ascii", "replace").partition("\n")[0]
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
        #: Whether a tier of this library made the folder's database, so that it may delete it.
        self.owned = _OWNED in os.pread(self._fd, 64, 0)
        self._write(_OWNED if self.owned else b"")

    def _write(self, mark: bytes) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n%b" % (os.getpid(), mark), 0)

    def claim(self) -> None:
        """Note that the database in the folder is a disk tier's."""
        self.owned = True
        self._write(_OWNED)

    def release(self) -> None:
        """Give the right back, also on behalf of forked children that inherited it. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


class _Gate:
    """Lets readers in side by side, and one owner alone: unmapping under a reader would kill the
    process.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._cond = threading.Condition()
        self._inside = 0
        self._shut = False

    def __enter__(self) -> None:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._shut, self._patience_s):
                raise DeadlineExceededError(
                    f"the disk tier was not readable again within {self._patience_s:.1f} s"
                )
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._cond:
            self._inside -= 1
            self._cond.notify_all()

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """Keeps new readers waiting and waits for those inside, at most ``timeout_s``."""
        with self._cond:
            self._shut = True
        try:
            with self._cond:
                if not self._cond.wait_for(lambda: self._inside == 0, max(0.0, timeout_s)):
                    raise DeadlineExceededError(
                        f"{self._inside} reads did not end within {timeout_s:.1f} s"
                    )
            yield
        finally:
            with self._cond:
                self._shut = False
                self._cond.notify_all()


class LmdbFile:
    """An open environment. Write transactions belong to the thread that began them; reads may be
    anywhere.

    Raises:
        FileDamagedError: the file is not readable as a database.
        ForeignFileError: it holds something, but not a disk tier's first record.
        DiskError: the system refuses, or the storage version is another one.
    """

    def __init__(
        self, folder: Path, *, map_bytes: int, durable: bool, patience_s: float = 30.0
    ) -> None:
        self.folder = folder
        self.path = folder / DATA
        self.map_bytes = map_bytes
        self._durable = durable
        self._gate = _Gate(patience_s)
        self._env: lmdb.Environment | None = None
        self._closed = False
        self._open()

    def _open(self) -> None:
        try:
            # sync stays on and writemap off: without them a power cut breaks the tree itself, and a
            # full disk kills the process. readahead stays on: values are many pages long.
            self._env = lmdb.open(
                str(self.folder),
                map_size=self.map_bytes,
                metasync=self._durable,
                mode=0o600,
                max_readers=_MAX_READERS,
                max_dbs=2,
                max_spare_txns=8,
                lib_version=0,
            )
            self._env.reader_check()
            self._require_whole_file()
            self._require_own_schema()
            self.index = self._env.open_db(b"index")
            self.pages = self._env.open_db(b"pages")
            stat = os.stat(self.path)
        except DAMAGE as error:
            self._drop_env()
            raise FileDamagedError(f"{self.path} is damaged: {error}") from error
        except (lmdb.Error, OSError) as error:
            self._drop_env()
            if isinstance(error, DiskError):
                raise
            raise disk_error(error, "opening the database", self.path) from error
        self._file_id = (stat.st_dev, stat.st_ino)

    def _drop_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _require_whole_file(self) -> None:
        # A map beyond the file's end would raise SIGBUS at the first read.
        need, have = self.used_bytes, os.stat(self.path).st_size
        if have < need:
            raise FileDamagedError(f"{self.path} is cut off: it has {have} bytes and needs {need}")

    def _require_own_schema(self) -> None:
        env = self.env
        with env.begin() as txn:
            raw = txn.get(_META_KEY)
        entries = env.stat()["entries"]
        if raw is None:
            if entries:
                raise ForeignFileError(
                    errno.EEXIST,
                    "the folder holds another program's database; choose another folder",
                    str(self.path),
                )
            body = _META.pack(_META_MAGIC, SCHEMA_VERSION)
            with env.begin(write=True) as txn:
                txn.put(_META_KEY, body + xxhash.xxh3_64_digest(body))
            return
        body = raw[: _META.size]
        if len(raw) != _META.size + 8 or raw[_META.size :] != xxhash.xxh3_64_digest(body):
            raise FileDamagedError(
                f"{self.path} is damaged: its first record does not match its checksum"
            )
        magic, version = _META.unpack(body)
        if magic != _META_MAGIC or version != SCHEMA_VERSION:
            raise DiskError(
                errno.EPROTONOSUPPORT,
                f"the folder has storage version {version}, this kvtier reads {SCHEMA_VERSION}; "
                "use the kvtier that wrote it, another folder, or delete this one (it is a cache)",
                str(self.path),
            )

    @property
    def env(self) -> lmdb.Environment:
        """The environment; ClosedError after ``close``, DiskError between a failed and a successful
        ``reopen``.
        """
        if self._env is None:
            if self._closed:
                raise ClosedError(f"the disk tier at {self.folder} is closed")
            raise DiskError(
                errno.EIO,
                "the database could not be opened again; the next write tries it",
                str(self.path),
            )
        return self._env

    @property
    def is_open(self) -> bool:
        """Whether there is an environment."""
        return self._env is not None

    @property
    def psize(self) -> int:
        """Bytes of a map page."""
        return self.env.stat()["psize"]

    @property
    def used_bytes(self) -> int:
        """File size up to the last map page that was ever used."""
        return (self.env.info()["last_pgno"] + 1) * self.psize

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        """A snapshot; values are views that end with it. ClosedError while the file is closed."""
        with self._gate, self.env.begin(buffers=True) as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction]:
        """A transaction that is committed at the end, or has changed nothing if anything raises."""
        self._require_same_file()
        txn = self.begin_write()
        try:
            yield txn
            txn.commit()
        except BaseException:
            with suppress(lmdb.Error):
                txn.abort()
            raise

    def begin_write(self) -> lmdb.Transaction:
        """The one place where write transactions come from."""
        return self.env.begin(write=True)

    def _require_same_file(self) -> None:
        # Writes to an unlinked file succeed and vanish at close.
        stat = os.stat(self.path)
        if (stat.st_dev, stat.st_ino) != self._file_id:
            raise FileNotFoundError(
                errno.ENOENT, "another file has taken its place", str(self.path)
            )

    def tick(self) -> None:
        """Two small commits, after which pages freed before them are free to use."""
        for _ in range(2):
            with suppress(lmdb.MapFullError), self.writing() as txn:
                txn.put(_TICK_KEY, time.monotonic_ns().to_bytes(8, "little"))

    def remove(self, txn: lmdb.Transaction, key: bytes) -> None:
        """Remove a page, whatever number of pieces it has."""
        txn.delete(key, db=self.index)
        number = 0
        while txn.delete(key + _PIECE.pack(number), db=self.pages):
            number += 1

    def sync(self) -> None:
        """Make everything that was committed durable."""
        self.env.sync(True)

    def reserve(self) -> None:
        """Allocate the whole map on disk, so that "no space" comes now and never in a transaction.

        Raises:
            DiskError: the file system has not got the room. The file keeps its size.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.fstat(fd).st_size
            try:
                os.posix_fallocate(fd, 0, self.map_bytes)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    return
                os.ftruncate(fd, before)
                raise disk_error(
                    error, f"reserving {format_size(self.map_bytes)}", self.path
                ) from error
            os.fsync(fd)
        finally:
            os.close(fd)

    def reopen(self, timeout_s: float) -> None:
        """Close and open again: LMDB refuses everything after it failed to write its meta page."""
        with self._gate.alone(timeout_s):
            self._drop_env()
            self._open()

    def close(self, timeout_s: float) -> None:
        """Close once no read is going on. Raises DeadlineExceededError; then it stays open.
        Idempotent.
        """
        with self._gate.alone(timeout_s):
            self._closed = True
            self._drop_env()


def piece_key(key: bytes, number: int) -> bytes:
    """Key of a piece in the database ``pages``."""
    return key + _PIECE.pack(number)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
