"""Damage to the files of a folder, one after the other, each on a fresh copy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import disk_child
import lmdb

#: One of ``flip`` (file, offset, mask), ``truncate`` (file, length), ``unlink`` (file), ``copy`` (from, file),
#: ``swap`` (file, offset, offset, length), ``entries`` (table, [[key, value or None], ...] in hexadecimal).
Damage = dict[str, list[Any]]


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name, without LMDB's reader table."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock.mdb"}


def restore(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def compact(folder: Path) -> None:
    """Leave no old copy of anything in the database file."""
    copy = folder / "copy"
    copy.mkdir()
    with lmdb.open(str(folder), max_dbs=16, lib_version=0) as env:
        env.copy(str(copy), compact=True)
    os.replace(copy / "data.mdb", folder / "data.mdb")
    copy.rmdir()


def tables(folder: Path) -> dict[str, list[tuple[bytes, bytes]]]:
    """The entries of each of the environment's databases; the main one is ``""``."""
    with lmdb.open(str(folder), max_dbs=16, lib_version=0) as env:
        with env.begin() as txn:
            main = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        found: dict[str, list[tuple[bytes, bytes]]] = {}
        for key, _ in main:
            try:
                table = env.open_db(key, create=False)
            except lmdb.Error:
                continue
            with env.begin() as txn:
                found[key.decode()] = [(bytes(k), bytes(v)) for k, v in txn.cursor(db=table)]
        found[""] = [(key, value) for key, value in main if key.decode("latin1") not in found]
        return found


def apply(folder: Path, damage: Damage) -> None:
    ((how, what),) = damage.items()
    if how == "flip":
        name, at, mask = what
        with open(folder / name, "r+b") as file:
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ mask]))
    elif how == "swap":
        name, first, second, nbytes = what
        with open(folder / name, "r+b") as file:
            a = os.pread(file.fileno(), nbytes, first)
            b = os.pread(file.fileno(), nbytes, second)
            os.pwrite(file.fileno(), b, first)
            os.pwrite(file.fileno(), a, second)
    elif how == "truncate":
        os.truncate(folder / what[0], what[1])
    elif how == "unlink":
        (folder / what[0]).unlink()
    elif how == "copy":
        shutil.copyfile(what[0], folder / what[1])
    else:
        table, changes = what
        with lmdb.open(str(folder), max_dbs=16, lib_version=0) as env:
            db = env.open_db(table.encode(), create=False) if table else None
            with env.begin(write=True, db=db) as txn:
                for key, value in changes:
                    if value is None:
                        txn.delete(bytes.fromhex(key))
                    else:
                        txn.put(bytes.fromhex(key), bytes.fromhex(value))


def run(folder: str, *, origin: str, damages: list[Damage], check: dict[str, Any]) -> None:
    """For each damage: a copy of ``origin`` in ``folder``, the damage, and one line with what
    ``disk_child.check`` finds."""
    files = contents(Path(origin))
    for damage in damages:
        restore(Path(folder), files)
        apply(Path(folder), damage)
        print(json.dumps(disk_child.check(folder, check)), flush=True)
