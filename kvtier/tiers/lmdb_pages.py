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
from typing import NamedTuple

from lmdb import verify as lmdb_verify

_P_BRANCH = 1
_F_BIGDATA, _F_SUBDATA = 1, 2
_HEADER = 16
#: Offsets in a page's header: flags and the end of the list of entries; the start of the first entry.
_FLAGS, _UPPER = 10, 14
_NODE_HEADER = 8
_PAGE_NUMBER = 8
#: Offsets in a meta page, behind its header: page size (``mm_dbs[0].md_pad``), roots, transaction.
_META_DBS = _HEADER + 24
_DB_BYTES = 48
_DB_ROOT = 40
_META_TXN = _META_DBS + 2 * _DB_BYTES + 8
_NO_PAGE = (1 << 64) - 1
_PUNCH_HOLE = 0x02 | 0x01  # with FALLOC_FL_KEEP_SIZE


def tree_problems(path: Path) -> list[str]:
    """What is wrong with the tree of a database file that nobody writes to; empty if it is sound.

    Costs some microseconds an entry. Pages that are neither used nor free are no problem.
    """
    if not path.exists() or path.stat().st_size == 0:
        return []
    try:
        found = lmdb_verify.verify(str(path), subdir=False)
    except lmdb_verify.VerifyError as error:
        return [str(error)]
    return [problem for problem in found if "a leak" not in problem] or _torn_pages(path)


def _torn_pages(path: Path) -> list[str]:
    """Pages of a tree that is sound otherwise, whose entries do not lie end to end: the length of one is wrong, and
    LMDB would move its neighbours by that when it is removed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        walk = _Walk(fd)
        return [f"page {number}: its entries overlap" for number in walk.torn()]
    except (struct.error, OverflowError) as error:
        return [f"an entry leaves its page: {error}"]
    finally:
        os.close(fd)


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
        found: list[tuple[int, int]] = []
        for number, page in self._pages():
            found.append((number, number + 1))
            for node in self._nodes(page):
                if node.flags & _F_BIGDATA and not node.branch:
                    (first,) = struct.unpack_from("<Q", page, node.data)
                    found.append((first, first - (-(_HEADER + node.nbytes) // self.psize)))
        return sorted(found)

    def torn(self) -> Iterator[int]:
        """Numbers of pages whose entries do not fill the room from the first one's start to the page's end."""
        for number, page in self._pages():
            (at,) = struct.unpack_from("<H", page, _UPPER)
            for node in sorted(self._nodes(page)):
                if node.offset != at:
                    break
                # Entries begin at even places.
                at = node.stop + node.stop % 2
            if at != self.psize:
                yield number

    def _pages(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and bytes of the pages of all trees, but for those of large values."""
        todo = [root for root in self._roots if root != _NO_PAGE]
        while todo:
            number = todo.pop()
            page = os.pread(self._fd, self.psize, number * self.psize)
            yield number, page
            for node in self._nodes(page):
                if node.branch:
                    todo.append(node.child)
                elif node.flags & _F_SUBDATA:
                    (child,) = struct.unpack_from("<Q", page, node.data + _DB_ROOT)
                    if child != _NO_PAGE:
                        todo.append(child)

    @staticmethod
    def _nodes(page: bytes) -> Iterator[_Node]:
        flags, lower = struct.unpack_from("<HH", page, _FLAGS)
        branch = bool(flags & _P_BRANCH)
        for offset in struct.unpack_from(f"<{(lower - _HEADER) // 2}H", page, _HEADER):
            low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", page, offset)
            yield _Node(offset, low, high, node_flags, key_bytes, branch)


class _Node(NamedTuple):
    """An entry of a page: lengths and flags as they stand there."""

    offset: int
    low: int
    high: int
    flags: int
    key_bytes: int
    branch: bool

    @property
    def nbytes(self) -> int:
        """Of a leaf's value."""
        return self.low | self.high << 16

    @property
    def child(self) -> int:
        """Of a branch: the page below."""
        return self.nbytes | self.flags << 32

    @property
    def data(self) -> int:
        """Where the value, or the number of its page, begins."""
        return self.offset + _NODE_HEADER + self.key_bytes

    @property
    def stop(self) -> int:
        """Where the entry ends."""
        if self.branch:
            return self.data
        return self.data + (_PAGE_NUMBER if self.flags & _F_BIGDATA else self.nbytes)
