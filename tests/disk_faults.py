"""Errors of the disk on demand: at every call with which a disk tier writes, reads or syncs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lmdb
import pytest

from kvtier.tiers import slab_file
from kvtier.tiers.disk import DiskTier

Strike = Callable[[str], None]


class FaultyTransaction:
    """A write transaction that asks ``strike`` before each put, delete and commit."""

    def __init__(self, txn: lmdb.Transaction, strike: Strike) -> None:
        self._txn, self._strike = txn, strike

    def put(self, *args: Any, **kwargs: Any) -> bool:
        self._strike("put")
        return self._txn.put(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> bool:
        self._strike("delete")
        return self._txn.delete(*args, **kwargs)

    def commit(self) -> None:
        try:
            self._strike("commit")
        except BaseException:
            self._txn.abort()
            raise
        self._txn.commit()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)


def lmdb_error(cls: type[lmdb.Error], text: str, code: int) -> lmdb.Error:
    error = cls(text)
    with suppress(AttributeError, TypeError):
        error.code = code  # type: ignore[attr-defined]
    return error


class DiskFaults:
    """Fails one call, counted from when it is armed, whatever call that is."""

    def __init__(self) -> None:
        self._left = 0
        self._error: Exception | None = None
        self._paused = False
        #: What was struck.
        self.struck: list[str] = []

    def arm(self, error: Exception, after: int) -> None:
        self._error, self._left = error, after

    def disarm(self) -> None:
        self._error = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No call counts."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def strike(self, where: str) -> None:
        if self._error is None or self._paused:
            return
        if self._left:
            self._left -= 1
            return
        error, self._error = self._error, None
        if isinstance(error, lmdb.Error) and where.startswith("p") and where != "put":
            error = OSError(5, "Input/output error")  # LMDB's errors do not come from a slab file
        self.struck.append(where)
        raise error

    def watch(self, tier: DiskTier) -> None:
        """Ask at each transaction of a tier."""
        begin = tier._file.begin_write

        def faulty() -> Any:
            self.strike("begin")
            return FaultyTransaction(begin(), self.strike)

        tier._file.begin_write = faulty  # type: ignore[method-assign]

    @contextmanager
    def system_calls(self) -> Iterator[None]:
        """Ask at each call on a slab file."""

        def before(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def asked(*args: Any) -> Any:
                self.strike(name)
                return call(*args)

            return asked

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slab_file, "_pwrite", before("pwrite", slab_file._pwrite))
            patch.setattr(slab_file, "_pread", before("pread", slab_file._pread))
            patch.setattr(os, "fdatasync", before("pdatasync", os.fdatasync))
            yield
