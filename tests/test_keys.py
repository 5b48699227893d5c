"""Page keys: the format, its properties, and the incremental chain."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.errors import ConfigError
from kvtier.identity import ModelIdentity
from kvtier.keys import KEY_BYTES, KeyChain, child_key, encode_extras, page_keys, root_key

ROOT = bytes(range(32))
tokens = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1)), max_size=40)
extras = st.dictionaries(st.integers(0, 45), st.binary(max_size=40), max_size=5)


def slow_keys(
    root: bytes, ids: list[int], page_tokens: int, extras: dict[int, bytes]
) -> list[bytes]:
    """The format as its docstring says it, written down once more."""
    keys, parent = [], root
    for first in range(0, len(ids) - page_tokens + 1, page_tokens):
        text = parent + struct.pack("<Q", page_tokens)
        for token in ids[first : first + page_tokens]:
            text += struct.pack("<Q", token)
        extra = b""
        for at in range(page_tokens):
            if first + at in extras:
                extra += struct.pack("<QQ", at, len(extras[first + at])) + extras[first + at]
        text += struct.pack("<Q", len(extra)) + extra
        parent = hashlib.blake2b(text, digest_size=32, person=b"kvtier.page").digest()
        keys.append(parent)
    return keys


@given(tokens, st.integers(1, 9), extras)
def test_equal_to_the_definition(
    ids: list[int], page_tokens: int, extras: dict[int, bytes]
) -> None:
    expected = slow_keys(ROOT, ids, page_tokens, extras)
    assert page_keys(ROOT, ids, page_tokens, extras) == expected
    key = ROOT
    for page, want in enumerate(expected):
        start = page * page_tokens
        key = child_key(
            key, ids[start : start + page_tokens], encode_extras(extras, start, start + page_tokens)
        )
        assert key == want


@given(tokens, tokens, st.integers(1, 5))
def test_equal_keys_mean_equal_prefixes(one: list[int], two: list[int], page_tokens: int) -> None:
    for page, (a, b) in enumerate(
        zip(page_keys(ROOT, one, page_tokens), page_keys(ROOT, two, page_tokens), strict=False)
    ):
        stop = (page + 1) * page_tokens
        assert (a == b) == (one[:stop] == two[:stop])


def test_the_identity_and_the_page_size_count() -> None:
    ids = list(range(64))
    made = [
        page_keys(ROOT, ids, 32),
        page_keys(bytes(32), ids, 32),
        page_keys(ROOT, ids, 16),
        page_keys(ROOT, [1, *ids[1:]], 32),
    ]
    flat = [key for keys in made for key in keys]
    assert len(set(flat)) == len(flat)
    assert {len(key) for key in flat} == {KEY_BYTES}


def test_an_identity_is_its_digest() -> None:
    identity = ModelIdentity("m", "", ROOT, "", "float16", "", "", "full", ROOT, 4)
    assert root_key(identity) == identity.digest
    assert page_keys(identity, range(9), 4) == page_keys(identity.digest, range(9), 4)
    with pytest.raises(ConfigError, match="page_tokens is 8, but the identity's pages have 4"):
        page_keys(identity, range(9), 8)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=30), st.integers(1, 5))
def test_arrays_of_any_kind_give_the_same_keys(ids: list[int], page_tokens: int) -> None:
    import torch

    want = page_keys(ROOT, ids, page_tokens)
    for dtype in (np.int32, np.uint32, np.int64, np.uint64, ">i8"):
        assert page_keys(ROOT, np.array(ids, dtype=dtype), page_tokens) == want
        assert page_keys(ROOT, np.repeat(np.array(ids, dtype=dtype), 2)[::2], page_tokens) == want
    for torch_dtype in (torch.int32, torch.int64):
        assert page_keys(ROOT, torch.tensor(ids, dtype=torch_dtype), page_tokens) == want
    numpy_ints: list[Any] = [np.int64(i) for i in ids]
    assert page_keys(ROOT, numpy_ints, page_tokens) == want


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, -5], "token 1 is -5; a token is an integer from 0 to"),
        ([1, 2.0], "token 1 is 2.0"),
        ([1, None], "token 1 is None"),
        ([1, "2"], "token 1 is '2'"),
        ([2**63], "token 0 is 9223372036854775808"),
        ([[1, 2]], r"token 0 is \[1, 2\]"),
        (np.array([[1, 2]]), r"token 0 is \[1, 2\]"),
        (np.array([1.0]), "token 0 is 1.0"),
        (np.array([True]), "array of bool"),
        (np.array([2**63], dtype=np.uint64), "token 0 is 9223372036854775808"),
        (np.array(3), "tokens are 3"),
        (7, "tokens are 7"),
        ("text", "of type str"),
        (b"12345678", "of type bytes"),
    ],
)
def test_what_is_no_token_is_named(ids: Any, says: str) -> None:
    chain = KeyChain(ROOT, 2)
    with pytest.raises(ConfigError, match=says):
        chain.append(ids)
    assert len(chain) == 0
    with pytest.raises(ConfigError, match=says):
        page_keys(ROOT, ids, 2)


def test_other_errors_are_named() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="page_tokens is"):
            page_keys(ROOT, [1], bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give the 32 bytes"):
        page_keys(b"short", [1], 1)
    with pytest.raises(ConfigError, match="at least one token"):
        child_key(ROOT, [])
    for extras in ({-1: b"x"}, {0: "x"}, {0.5: b"x"}):
        with pytest.raises(ConfigError, match="extra input"):
            page_keys(ROOT, [1], 1, extras)  # type: ignore[arg-type]
    chain = KeyChain(ROOT, 2)
    chain.append([1, 2, 3])
    with pytest.raises(ConfigError, match="already has 3 tokens"):
        chain.append([4], {2: b"x"})
    for bad in (-1, 4):
        with pytest.raises(ConfigError, match="the chain has 3"):
            chain.truncate(bad)
    assert len(chain) == 3


def test_extras_are_whole_tagged_and_in_their_page() -> None:
    ids = [7] * 12
    image, almost = b"i" * 32, b"i" * 31 + b"j"
    plain, first, second = (
        page_keys(ROOT, ids, 4),
        page_keys(ROOT, ids, 4, {5: image}),
        page_keys(ROOT, ids, 4, {5: almost}),
    )
    assert first[0] == plain[0]
    assert len({plain[1], first[1], second[1]}) == 3
    assert len({plain[2], first[2], second[2]}) == 3
    variants: list[dict[int, bytes]] = [
        {},
        {0: b""},
        {1: b""},
        {0: b"ab"},
        {0: b"a", 1: b"b"},
        {0: b"", 1: b"ab"},
    ]
    assert len({page_keys(ROOT, ids, 4, extra)[0] for extra in variants}) == len(variants)
    assert page_keys(ROOT, ids, 4, {12: image, 99: image}) == plain


def test_the_same_in_every_process() -> None:
    program = (
        "import json\n"
        "from kvtier.identity import AdapterIdentity, ModelIdentity\n"
        "from kvtier.keys import page_keys\n"
        "d = bytes(range(32))\n"
        "a = (AdapterIdentity(d, 0.5),)\n"
        "i = ModelIdentity('m', 'r', d, '', 'float16', '', 'x', 'full', d, 8, a, tenant='t')\n"
        "keys = page_keys(i, range(100), 8, {40: b'image', 3: b'x'})\n"
        "print(json.dumps([k.hex() for k in keys]))\n"
    )
    results = []
    for seed in ("1", "12345", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        results.append(json.loads(done.stdout))
    assert len(results[0]) == 12
    assert results[0] == results[1] == results[2]


def test_the_same_for_ever() -> None:
    """Pages on disk are found by these: a change of format makes every stored page unreachable."""
    keys = page_keys(ROOT, [0, 1, 2**63 - 1, 49151, 5], 2, {3: b"image"})
    assert [key.hex() for key in keys] == [
        "816ba1b758f302792a1daf72ac47f4d52b96b4cdb4343cccf869b5e36c454c56",
        "5b3ff1536cf66da0d3c28b1d87878e73cb40cd0db82c236356565d37078929d1",
    ]


def test_a_long_prompt_hashes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvtier.keys

    hashed = 0
    real = kvtier.keys._hash

    def counting(parent: bytes, data: Any, extra: bytes) -> bytes:
        nonlocal hashed
        hashed += len(data)
        return real(parent, data, extra)

    monkeypatch.setattr(kvtier.keys, "_hash", counting)
    chain = KeyChain(ROOT, 32)
    for start in range(0, 131072, 1024):
        chain.append(np.arange(start, start + 1024))
    assert len(chain.keys) == 4096
    assert hashed == 131072 * 8


class ChainMachine(RuleBasedStateMachine):
    """Chains that grow, fork and are cropped, against page_keys over a plain list."""

    PAGE = 4

    def __init__(self) -> None:
        super().__init__()
        self.chains = [(KeyChain(ROOT, self.PAGE), list[int](), dict[int, bytes]())]

    @rule(data=st.data(), ids=st.lists(st.integers(0, 2), max_size=11), with_extra=st.booleans())
    def append(self, data: st.DataObject, ids: list[int], with_extra: bool) -> None:
        chain, model, extras = data.draw(st.sampled_from(self.chains))
        at = data.draw(st.integers(0, 13))
        fresh = {len(model) + at: data.draw(st.binary(max_size=3))} if with_extra else None
        before = list(chain.keys)
        new = chain.append(ids, fresh)
        model += ids
        extras.update(fresh or {})
        assert before + new == page_keys(ROOT, model, self.PAGE, extras)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        chain, model, extras = data.draw(st.sampled_from(self.chains))
        if len(self.chains) < 4:
            self.chains.append((chain.fork(), list(model), dict(extras)))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        chain, model, extras = data.draw(st.sampled_from(self.chains))
        keep = data.draw(st.integers(0, len(model)))
        chain.truncate(keep)
        del model[keep:]
        for position in [p for p in extras if p >= keep]:
            del extras[position]

    @rule(data=st.data(), ids=st.lists(st.integers(0, 2), max_size=11))
    def common_prefix(self, data: st.DataObject, ids: list[int]) -> None:
        chain, model, _ = data.draw(st.sampled_from(self.chains))
        keep = data.draw(st.integers(0, len(model)))
        other = model[:keep] + ids
        expected = next(
            (i for i, (a, b) in enumerate(zip(model, other, strict=False)) if a != b),
            min(len(model), len(other)),
        )
        assert chain.common_prefix(other) == expected

    @invariant()
    def same(self) -> None:
        for chain, model, extras in self.chains:
            assert len(chain) == len(model)
            assert chain.tokens() == model
            assert chain.tokens(2, 5) == model[2:5]
            assert list(chain.keys) == page_keys(ROOT, model, self.PAGE, extras)


TestKeyChain = ChainMachine.TestCase
TestKeyChain.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
