"""One LMDB environment: its flags, its databases, and what its errors mean.

Database ``index`` maps a page's place (the number of its put, 8 bytes, big-endian) to its entry,
``pages`` maps the place and a piece number (2 bytes, big-endian) to a piece of an inline payload,
``use`` maps the place to the page's last use, ``notes`` holds sealed texts (the folder's geometry,
descriptions of identities, the policy's state). What belongs together changes in one transaction.
The main database holds the record that says who made the file, and in which version, and the number
of the last put.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from kvtier.errors import ClosedError, DiskError
from kvtier.tiers.gate import Gate
from kvtier.tiers.lmdb_pages import newest_txn
from kvtier.tiers.map_place import MapPlaces
from kvtier.units import format_size

DATA = "data.mdb"
LOCK_TABLE = "lock.mdb"
SCHEMA_VERSION = 3

_META_KEY = b"kvtier"
_TICK_KEY = b"tick"
_LAST_KEY = b"last"
_META = struct.Struct("<8sI")
_META_MAGIC = b"kvtierdb"
_MAX_READERS = 254
_PIECE = struct.Struct(">H")
_LAST = struct.Struct("<Q")

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
    if isinstance(error, (*DAMAGE, lmdb.BadTxnError)):
        remedy = "the database is damaged; close the tier and delete the folder (it is a cache)"
    return DiskError(code, f"{doing} failed ({error}); {remedy}", os.fspath(path))


class LmdbFile:
    """An open environment. Write transactions belong to the thread that began them; reads may be
    anywhere.

    Raises:
        FileDamagedError: the file is not readable as a database.
        ForeignFileError: it holds something, but not a disk tier's first record.
        DiskError: the system refuses, or the storage version is another one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes: int,
        durable: bool,
        patience_s: float = 30.0,
        read_only: bool = False,
    ) -> None:
        self.folder = folder
        self.path = folder / DATA
        self.map_bytes = map_bytes
        self._durable = durable
        self._read_only = read_only
        self._synced_txn = 0
        self._last_txn = 0
        #: How often it was opened: another file may have taken the place of the one before.
        self.opened = 0
        self._patience_s = patience_s
        self._gate = Gate(patience_s)
        self._env: lmdb.Environment | None = None
        #: Reads values past the page cache; changes with the map.
        self.places = MapPlaces(None)
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
                max_dbs=4,
                max_spare_txns=8,
                lib_version=0,
                readonly=self._read_only,
                create=not self._read_only,
            )
            self._env.reader_check()
            self._require_whole_file()
            self._require_own_lock_table()
            self._require_own_schema()
            self.index, self.pages, self.use, self.notes = (
                self._env.open_db(name, create=not self._read_only)
                for name in (b"index", b"pages", b"use", b"notes")
            )
            stat = os.stat(self.path)
            self._last_txn = self._env.info()["last_txnid"]
            # A commit of a process that was killed may be in the page cache alone.
            if not self._read_only:
                self.sync()
        except DAMAGE as error:
            self._drop_env()
            raise FileDamagedError(f"{self.path} is damaged: {error}") from error
        except (lmdb.Error, OSError) as error:
            self._drop_env()
            if isinstance(error, DiskError):
                raise
            raise disk_error(error, "opening the database", self.path) from error
        self._file_id = (stat.st_dev, stat.st_ino)
        self.opened += 1
        self.places = MapPlaces(self.path, self.psize, self.env.info()["map_size"])

    def _drop_env(self) -> None:
        self.places.close()
        if self._env is not None:
            self._env.close()
            self._env = None

    def _require_whole_file(self) -> None:
        # A map beyond the file's end would raise SIGBUS at the first read.
        need, have = self.used_bytes, os.stat(self.path).st_size
        if have < need:
            raise FileDamagedError(f"{self.path} is cut off: it has {have} bytes and needs {need}")

    def _require_own_lock_table(self) -> None:
        # A process that still reads a file that was replaced since keeps its lock table in use,
        # and LMDB believes the table. A commit may lie between the two looks.
        if abs(self.env.info()["last_txnid"] - newest_txn(self.path)) > 2:
            raise DiskError(
                errno.EBUSY,
                "its lock table belongs to an older database, which a process still reads; end that "
                "process, or try again once it has noticed",
                str(self.folder),
            )

    def _require_own_schema(self) -> None:
        env = self.env
        with env.begin() as txn:
            raw = txn.get(_META_KEY)
        entries = env.stat()["entries"]
        if raw is None:
            if entries or self._read_only:
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
                "the database could not be opened again; the next read or write tries it",
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
        if self._env is None and not self._closed:
            self._restore()
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
        last = self.env.info()["last_txnid"]
        if last != self._last_txn:
            # Without metasync the last meta page is synced by the next commit.
            self._synced_txn = last if self._durable else max(self._synced_txn, last - 1)
            self._last_txn = last

    def begin_write(self) -> lmdb.Transaction:
        """The one place where write transactions come from."""
        return self.env.begin(write=True)

    @property
    def last_txn(self) -> int:
        """Number of the last transaction that was committed."""
        return self._last_txn

    @property
    def synced_txn(self) -> int:
        """The oldest transaction that a power cut now could bring back."""
        return self._synced_txn

    def oldest_reader(self) -> int | None:
        """Number of the oldest snapshot that anybody reads, in any process; ``None`` for nobody."""
        return min((txn for _, txn in self._readers()), default=None)

    def old_readers(self) -> list[int]:
        """Processes that read a snapshot older than the last."""
        return sorted({pid for pid, txn in self._readers() if txn < self._last_txn})

    def _readers(self) -> list[tuple[int, int]]:
        rows = [line.split() for line in self.env.readers().splitlines()[1:]]
        return [(int(row[0]), int(row[2])) for row in rows if len(row) == 3 and row[2] != "-"]

    def note(self, name: bytes) -> bytes | None:
        """A sealed text; ``None`` if it was never written, or is damaged."""
        with self.reading() as txn:
            return unseal(name, txn.get(name, db=self.notes))

    def set_note(self, txn: lmdb.Transaction, name: bytes, text: bytes | None) -> None:
        """Write a text; ``None`` removes it."""
        if text is None:
            txn.delete(name, db=self.notes)
        else:
            txn.put(name, xxhash.xxh3_128_digest(name + b"\0" + text) + text, db=self.notes)

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

    def append(self, txn: lmdb.Transaction, db: Any, place: bytes, value: Any) -> None:
        """Write a value that is not there yet, under the largest key of its table so far: LMDB then
        fills leaves to the end. Only damage leaves a larger key.
        """
        if not txn.put(place, value, db=db, append=True):
            txn.put(place, value, db=db)

    def set_last_put(self, txn: lmdb.Transaction, sequence: int) -> None:
        """Note the number of the last put, behind which the next ones are counted. It may be that
        of a page which is gone: readers know by the number what they have not seen.
        """
        body = _LAST.pack(sequence)
        txn.put(_LAST_KEY, body + xxhash.xxh3_64_digest(body))

    def last_put(self) -> int:
        """The number of the last put; 0 if there was none, or the note is damaged."""
        with self.reading() as txn:
            raw = bytes(txn.get(_LAST_KEY, b""))
        body = raw[: _LAST.size]
        good = len(raw) == _LAST.size + 8 and raw[_LAST.size :] == xxhash.xxh3_64_digest(body)
        return int(_LAST.unpack(body)[0]) if good else 0

    def remove(self, txn: lmdb.Transaction, place: bytes) -> None:
        """Remove a page, whatever number of pieces it has."""
        txn.delete(place, db=self.index)
        txn.delete(place, db=self.use)
        self.remove_pieces(txn, place)

    def pieces(self, txn: lmdb.Transaction, place: bytes) -> Iterator[tuple[bytes, Any]]:
        """Keys and values of a page's inline payload."""
        number = 0
        while (value := txn.get(key := place + _PIECE.pack(number), db=self.pages)) is not None:
            yield key, value
            number += 1

    def remove_pieces(self, txn: lmdb.Transaction, place: bytes) -> None:
        """Remove the payload of a page."""
        number = 0
        while txn.delete(place + _PIECE.pack(number), db=self.pages):
            number += 1

    def sync(self) -> None:
        """Make everything that was committed durable."""
        last = self._last_txn
        self.env.sync(True)
        self._synced_txn = max(self._synced_txn, last)

    @property
    def replaced(self) -> bool:
        """Whether another file has taken this one's place, or it is gone."""
        try:
            self._require_same_file()
        except OSError:
            return True
        return False

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
        """Close and open again: LMDB refuses everything after it failed to write its meta page, and
        another process may have put a new file in place.
        """
        with self._gate.alone(timeout_s):
            self._drop_env()
            self._open()

    def _restore(self) -> None:
        """Open again after an attempt to reopen has failed."""
        with self._gate.alone(self._patience_s):
            if self._env is None and not self._closed:
                self._open()

    def follow_size(self, timeout_s: float) -> None:
        """Map all of a file that another process has made larger."""
        with self._gate.alone(timeout_s):
            self.env.set_mapsize(0)
            self.places.close()
            self.places = MapPlaces(self.path, self.psize, self.env.info()["map_size"])

    def close(self, timeout_s: float) -> None:
        """Close once no read is going on. Raises DeadlineExceededError; then it stays open.
        Idempotent.
        """
        with self._gate.alone(timeout_s):
            self._closed = True
            self._drop_env()


def unseal(name: bytes, raw: bytes | memoryview | None) -> bytes | None:
    """The text of a note from its stored bytes; ``None`` if it is not what was stored."""
    raw = b"" if raw is None else bytes(raw)
    text = raw[16:]
    good = len(raw) >= 16 and raw[:16] == xxhash.xxh3_128_digest(name + b"\0" + text)
    return text if good else None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
