"""Looking at an LMDB file as bytes, without LMDB: is its tree sound, and which pages are in it.

LMDB trusts its file: a flipped bit in a branch page makes it read outside the map, which ends the
process. So the tree is walked before the file is mapped. The format is that of LMDB 0.9 (``mdb.c``:
``MDB_page``, ``MDB_node``, ``MDB_db``, ``MDB_meta``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from lmdb import verify as lmdb_verify

_P_BRANCH = 1
_F_BIGDATA, _F_SUBDATA = 1, 2
_HEADER = 16
#: Offsets in a meta page, behind its header: page size (``mm_dbs[0].md_pad``), roots, transaction.
_META_DBS = _HEADER + 24
_DB_BYTES = 48
_DB_ROOT = 40
_META_TXN = _META_DBS + 2 * _DB_BYTES + 8
_NO_PAGE = (1 << 64) - 1
_PUNCH_HOLE = 0x02 | 0x01  # with FALLOC_FL_KEEP_SIZE


def tree_problems(path: Path) -> list[str]:
    """What is wrong with the tree of a database file that nobody writes to; empty if it is sound.

    Costs about 5 microseconds an entry. Pages that are neither used nor free are no problem.
    """
    if not path.exists() or path.stat().st_size == 0:
        return []
    try:
        found = lmdb_verify.verify(str(path), subdir=False)
    except lmdb_verify.VerifyError as error:
        return [str(error)]
    return [problem for problem in found if "a leak" not in problem]


def newest_txn(path: Path) -> int:
    """Number of the newest transaction in a sound database file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _Walk(fd).txn
    finally:
        os.close(fd)


def punch_unused(path: Path) -> None:
    """Give the pages that no tree of a sound, closed file reaches back to the file system.

    A no-op where the file system cannot.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        walk = _Walk(fd)
        size = os.fstat(fd).st_size // walk.psize
        libc = ctypes.CDLL(None, use_errno=True)
        at = 2
        for start, stop in [*walk.runs(), (size, size)]:
            if start > at:
                arguments = (
                    ctypes.c_long(at * walk.psize),
                    ctypes.c_long((start - at) * walk.psize),
                )
                if libc.fallocate(fd, _PUNCH_HOLE, *arguments) and ctypes.get_errno() not in (
                    errno.EOPNOTSUPP,
                    errno.ENOSYS,
                ):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            at = max(at, stop)
    finally:
        os.close(fd)


class _Walk:
    """The pages that the newest trees of a sound file reach, the tree of free pages included."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        first = os.pread(fd, 4096, 0)
        (self.psize,) = struct.unpack_from("<I", first, _META_DBS)
        metas = [os.pread(fd, self.psize, n * self.psize) for n in (0, 1)]
        newest = max(metas, key=lambda meta: struct.unpack_from("<Q", meta, _META_TXN)[0])
        (self.txn,) = struct.unpack_from("<Q", newest, _META_TXN)
        self._roots = [
            struct.unpack_from("<Q", newest, _META_DBS + n * _DB_BYTES + _DB_ROOT)[0]
            for n in (0, 1)
        ]

    def runs(self) -> list[tuple[int, int]]:
        """Runs ``(first, one behind the last)`` of page numbers, ascending."""
        return sorted((n, n + count) for root in self._roots for n, count in self._pages(root))

    def _pages(self, root: int) -> Iterator[tuple[int, int]]:
        todo = [] if root == _NO_PAGE else [root]
        while todo:
            number = todo.pop()
            page = os.pread(self._fd, self.psize, number * self.psize)
            yield number, 1
            flags, lower = struct.unpack_from("<HH", page, 10)
            for offset in struct.unpack_from(f"<{(lower - _HEADER) // 2}H", page, _HEADER):
                low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", page, offset)
                if flags & _P_BRANCH:
                    todo.append(low | high << 16 | node_flags << 32)
                    continue
                data = offset + 8 + key_bytes
                if node_flags & _F_BIGDATA:
                    (first,) = struct.unpack_from("<Q", page, data)
                    yield first, -(-(_HEADER + (low | high << 16)) // self.psize)
                elif node_flags & _F_SUBDATA:
                    (child,) = struct.unpack_from("<Q", page, data + _DB_ROOT)
                    if child != _NO_PAGE:
                        todo.append(child)
