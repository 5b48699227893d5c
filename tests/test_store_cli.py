"""``kvtier store``: what it prints, what it changes, what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from test_session_file import IDENTITY, LAYOUT, TOKENS, page

from kvtier.cli.main import main
from kvtier.identity import AdapterIdentity, ModelIdentity, tenant_digest
from kvtier.keys import page_keys
from kvtier.tiers.disk import DiskTier

PLAIN = replace(IDENTITY, adapters=(), tenant="")
OTHER = replace(
    IDENTITY, model="other", adapters=(AdapterIdentity(b"b" * 16, 2.0),), tenant="somebody else"
)
PAYLOADS = ("slab", "inline")


def open_tier(folder: Path, payload: str = "inline", **options: Any) -> DiskTier:
    return DiskTier(
        folder,
        layout_digest=LAYOUT.digest,
        page_bytes=LAYOUT.page_bytes,
        plane_ranges=[(p.offset, p.nbytes) for p in LAYOUT.planes if p is not None],
        capacity_bytes=2 << 20,
        payload=payload,  # type: ignore[arg-type]
        layout_info=LAYOUT.describe(),
        **options,
    )


def fill(tier: DiskTier, identity: ModelIdentity, tokens: list[int]) -> list[bytes]:
    keys = page_keys(identity, tokens, LAYOUT.page_tokens)
    tier.describe_identity(identity.digest, identity.describe_openly())
    for depth, key in enumerate(keys):
        parent = keys[depth - 1] if depth else None
        tier.put(key, parent=parent, depth=depth, identity=identity.digest, data=page(key))
    tier.flush()
    return keys


def has(folder: Path, key: bytes) -> bool:
    with open_tier(folder, payload=None) as tier:  # type: ignore[arg-type]
        out = np.zeros(LAYOUT.page_bytes, np.uint8)
        found = tier.read(key, out)
        assert not found or (out == page(key)).all()
        return found


@pytest.fixture(params=PAYLOADS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three identities: 5 pages with an adapter, 7 in two sequences of 5, 2 of another model."""
    folder = tmp_path / "store"
    with open_tier(folder, request.param) as tier:
        fill(tier, IDENTITY, TOKENS)
        fill(tier, PLAIN, TOKENS)
        fill(tier, PLAIN, [*TOKENS[:12], *range(8)])
        fill(tier, OTHER, TOKENS[:8])
    return folder


class Run:
    """``kvtier store`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object, status: int = 0) -> str:
        got = main(["store", *map(str, args)])
        out, err = self._capsys.readouterr()
        assert got == status, (out, err)
        if status == 2:
            assert not out
            assert err.count("\n") == 1, f"more than one line: {err}"
            assert "Traceback" not in err
        return err if status == 2 else out

    def json(self, *args: object, status: int = 0) -> Any:
        return json.loads(self(*args, "--json", status=status))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


# ---------------------------------------------------------------- reading


def test_ls_says_what_is_there(folder: Path, run: Run) -> None:
    found = run.json("ls", folder)
    assert found["pages"] == 14
    by_model = {(i["model"], i["salt"]): i for i in found["identities"]}
    adapted, plain = by_model["toy", tenant_digest("somebody")], by_model["toy", ""]
    other = by_model["other", tenant_digest("somebody else")]
    assert [i["pages"] for i in (adapted, plain, other)] == [5, 7, 2]
    assert [i["sequences"] for i in (adapted, plain, other)] == [1, 2, 1]
    assert adapted["adapters"] == [{"digest": (b"a" * 16).hex(), "scale": 0.5}]
    assert plain["adapters"] == []
    assert all(0 <= i["unused_s"] <= i["age_s"] < 300 for i in found["identities"])
    assert sum(i["bytes"] for i in found["identities"]) == found["bytes"] >= 14 * LAYOUT.page_bytes
    text = run("ls", folder)
    assert "toy@1" in text
    assert "somebody" not in text
    assert tenant_digest("somebody")[8:20] in text
    assert "616161616161 x 0.5" in text
    sequences = run.json("ls", folder, "--sequences")["sequences"]
    assert sorted(s["pages"] for s in sequences) == [2, 5, 5, 5]
    assert page_keys(IDENTITY, TOKENS, 4)[-1].hex() in [s["last_key"] for s in sequences]
    assert page_keys(OTHER, TOKENS[:8], 4)[-1].hex()[:24] in run("ls", folder, "--sequences")


def test_hits_are_counted_over_restarts(folder: Path, run: Run) -> None:
    key = page_keys(OTHER, TOKENS[:8], 4)[0]
    assert has(folder, key)
    assert has(folder, key)
    by_model = {i["model"]: i for i in run.json("ls", folder)["identities"]}
    assert by_model["other"]["hits"] == 2


def test_stats(folder: Path, run: Run) -> None:
    stats = run.json("stats", folder)
    assert (stats["pages"], stats["sequences"], stats["identities"]) == (14, 4, 3)
    assert stats["page_bytes"] == LAYOUT.page_bytes
    assert stats["page_tokens"] == 4
    assert stats["layers"] == len(LAYOUT.layers)
    assert stats["payload_bytes"] == 14 * LAYOUT.page_bytes <= stats["charged_bytes"]
    assert stats["on_disk_bytes"] <= stats["limit_bytes"] == 2 << 20
    assert "2.00 MiB" in run("stats", folder)


def flip(folder: Path, key: bytes) -> None:
    """One bit of a page's payload."""
    what = page(key)[:64].tobytes()
    for path in folder.iterdir():
        raw = path.read_bytes()
        if what in raw:
            with open(path, "r+b") as file:
                file.seek(raw.rindex(what))
                file.write(bytes([what[0] ^ 1]))
            return
    raise AssertionError("the page is in no file")


def test_verify_finds_damage_and_gc_removes_it(folder: Path, run: Run) -> None:
    assert "14 pages, every byte verified" in run("verify", folder)
    assert run.json("verify", folder) == {
        "ok": True,
        "checked": 14,
        "damaged": [],
        "database": None,
    }
    key = page_keys(OTHER, TOKENS[:8], 4)[1]
    flip(folder, key)
    found = run.json("verify", folder, status=1)
    assert found == {"ok": False, "checked": 14, "damaged": [key.hex()], "database": None}
    assert f"damaged page {key.hex()}" in run("verify", folder, status=1)
    assert "removed damaged pages: 1" in run("gc", folder)
    assert run.json("verify", folder)["checked"] == 13
    assert not has(folder, key)


def test_verify_finds_a_damaged_database(folder: Path, run: Run) -> None:
    with open(folder / "data.mdb", "r+b") as file:
        file.write(b"\xff" * 8192)
    found = run.json("verify", folder, status=1)
    assert not found["ok"]
    assert "damaged" in found["database"]
    assert "damaged" in run("verify", folder, status=1)


#: Runs each command in one other process; prints status and stderr of each as JSON.
ELSEWHERE = """
import contextlib, io, json, sys
from kvtier.cli.main import main
done = []
for args in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["store", *args])
    done.append([status, err.getvalue()])
print(json.dumps(done))
"""


def elsewhere(*commands: tuple[object, ...]) -> list[tuple[int, str]]:
    texts = json.dumps([[str(arg) for arg in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, texts], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_reading_works_beside_a_writer_and_writing_says_who(folder: Path, tmp_path: Path) -> None:
    last = page_keys(OTHER, TOKENS[:8], 4)[-1].hex()
    reads = [
        ("ls", folder),
        ("stats", folder),
        ("verify", folder),
        ("export", folder, tmp_path / "a", "--key", last),
        ("rm", folder, "--all", "--dry-run"),
    ]
    writes = [("gc", folder), ("rm", folder, "--all", "--yes"), ("import", folder, tmp_path / "a")]
    with open_tier(folder, payload=None) as tier:  # type: ignore[arg-type]
        done = elsewhere(*reads, *writes)
        assert [status for status, _ in done] == [0] * len(reads) + [2] * len(writes), done
        for _, text in done[len(reads) :]:
            assert f"in use by process {os.getpid()}" in text
            assert text.count("\n") == 1
        assert len(tier) == 14


# ---------------------------------------------------------------- removing


@pytest.mark.parametrize(
    ("chosen", "gone"),
    [
        (["--model", "toy"], 12),
        (["--model", "nothing"], 0),
        (["--adapter", (b"a" * 16).hex()], 5),
        (["--adapter", "62626262"], 2),
        (["--adapter", "none"], 7),
        (["--salt", "somebody"], 5),
        (["--salt", ""], 7),
        (["--model", "toy", "--salt", "somebody"], 5),
        (["--older-than", "0s"], 14),
        (["--older-than", "7d"], 0),
        (["--all"], 14),
    ],
)
def test_rm_removes_what_is_meant(folder: Path, run: Run, chosen: list[str], gone: int) -> None:
    assert f"would remove {gone} pages" in run("rm", folder, *chosen, "--dry-run")
    assert run.json("stats", folder)["pages"] == 14
    text = run("rm", folder, *chosen, "--yes")
    assert f"removed {gone} pages" in text if gone else "no page is meant" in text
    assert run.json("stats", folder)["pages"] == 14 - gone
    assert run.json("verify", folder)["ok"]


def test_rm_takes_what_follows_an_old_page(folder: Path, run: Run) -> None:
    """Age counts from the last use; a page whose prefix goes is of no use to anybody."""
    with open_tier(folder, payload=None) as tier:  # type: ignore[arg-type]
        keys = page_keys(IDENTITY, TOKENS, 4)
        assert tier.read(keys[-1], np.zeros(LAYOUT.page_bytes, np.uint8))
    assert "would remove 14 pages" in run("rm", folder, "--older-than", "0s", "--dry-run")


def test_rm_asks_before_it_removes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    assert "--yes" in run("rm", folder, "--model", "toy", status=2)
    for answer, left in ((b"n\n", 14), (b"\n", 14), (b"y\n", 2)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        with monkeypatch.context() as patch, os.fdopen(theirs) as terminal:
            patch.setattr(sys, "stdin", terminal)
            assert main(["store", "rm", str(folder), "--model", "toy"]) == 0
        os.close(ours)
        assert "remove 12 pages" in capsys.readouterr().err
        assert run.json("stats", folder)["pages"] == left


def test_gc_drops_what_nobody_can_find(folder: Path, run: Run) -> None:
    with open_tier(folder, payload=None) as tier:  # type: ignore[arg-type]
        tier.delete([page_keys(PLAIN, TOKENS, 4)[0]]).result(30)
    text = run("gc", folder)
    assert "pages without their prefix: 6" in text
    assert run("gc", folder).startswith("nothing to remove")
    assert run.json("stats", folder)["pages"] == 7
    assert run.json("verify", folder)["ok"]


# ---------------------------------------------------------------- export and import


def test_a_session_goes_out_and_comes_back(folder: Path, tmp_path: Path, run: Run) -> None:
    keys = page_keys(IDENTITY, TOKENS, 4)
    out, tokens = tmp_path / "session.safetensors", tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    text = run("export", folder, out, "--key", keys[-1].hex()[:12], "--tokens", tokens)
    assert "5 pages of 4 tokens" in text
    with safe_open(out, "np") as file:
        assert json.loads(file.metadata()["tokens"]) == TOKENS
        k = file.get_tensor("layers.1.k")
        part = LAYOUT.planes[1].k  # type: ignore[union-attr]
        assert k.tobytes() == b"".join(page(key)[part.offset : part.stop].tobytes() for key in keys)
    run("rm", folder, "--salt", "somebody", "--yes")
    assert not has(folder, keys[0])
    assert "stored 5 pages" in run("import", folder, out)
    assert all(has(folder, key) for key in keys)
    assert "stored 0 pages, 0 B; 5 were there" in run("import", folder, out)
    by_salt = {i["salt"]: i for i in run.json("ls", folder)["identities"]}
    assert by_salt[tenant_digest("somebody")]["pages"] == 5
    assert run.json("verify", folder)["ok"]


def test_export_by_identity_needs_one_sequence(folder: Path, tmp_path: Path, run: Run) -> None:
    run("export", folder, tmp_path / "a", "--identity", OTHER.digest.hex())
    assert "2 (" in run(
        "export", folder, tmp_path / "b", "--identity", PLAIN.digest.hex(), status=2
    )
    assert "none" in run("export", folder, tmp_path / "b", "--key", "00000000", status=2)
    assert "--force" in run(
        "export", folder, tmp_path / "a", "--identity", OTHER.digest.hex(), status=2
    )
    run("export", folder, tmp_path / "a", "--identity", OTHER.digest.hex(), "--force")
    flip(folder, page_keys(OTHER, TOKENS[:8], 4)[0])
    with pytest.raises(AssertionError, match="damaged"):
        run("export", folder, tmp_path / "c", "--identity", OTHER.digest.hex())
    assert not (tmp_path / "c").exists()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ls"], "PATH"),
        ([], "no action"),
        (["lsx", "."], "invalid choice"),
        (["ls", "{}/nowhere"], "does not exist"),
        (["ls", "{}"], "no store"),
        (["verify", "{}"], "no store"),
        (["gc", "{}"], "no store"),
        (["ls", "{}/file"], "is not a folder"),
        (["rm", "{}"], "--all"),
        (["rm", "{}", "--all", "--model", "m"], "--all alone"),
        (["rm", "{}", "--older-than", "7"], "such as 7d"),
        (["rm", "{}", "--adapter", "name"], "hexadecimal"),
        (["rm", "{}", "--modl", "m"], "did you mean --model"),
        (["export", "{}", "{}/a"], "--key or --identity"),
        (["export", "{}", "{}/a", "--key", "xyz"], "hexadecimal"),
        (["export", "{}", "{}/no/a", "--key", "abcd"], "does not exist"),
        (["import", "{}", "{}/a"], "no store"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, run: Run, args: list[str], says: str
) -> None:
    (tmp_path / "file").write_text("")
    assert says in run(*[arg.replace("{}", str(tmp_path)) for arg in args], status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "a tool made something"


@contextmanager
def main_table(folder: Path) -> Iterator[lmdb.Transaction]:
    with lmdb.open(str(folder), max_dbs=16, lib_version=0) as env, env.begin(write=True) as txn:
        yield txn


def test_another_version_is_refused_with_the_remedy(folder: Path, run: Run) -> None:
    with main_table(folder) as txn:
        raw = txn.get(b"kvtier")
        body = raw[:8] + (99).to_bytes(4, "little")
        txn.put(b"kvtier", body + xxhash.xxh3_64_digest(body))
    for args in (["ls", folder], ["gc", folder]):
        assert "version 99" in run(*args, status=2)


def test_a_file_that_is_no_session_is_refused(folder: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "a").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"{}" + b" " * 30)
    assert "format None" in run("import", folder, tmp_path / "a", status=2)
    (tmp_path / "a").write_bytes(b"not a file of tensors")
    assert "no safetensors file" in run("import", folder, tmp_path / "a", status=2)
    assert "cannot be read" in run("import", folder, tmp_path / "b", status=2)
