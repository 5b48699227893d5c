"""ModelIdentity: different things have different digests, equal things equal ones."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest

from kvtier.errors import IdentityError
from kvtier.identity import AdapterIdentity, ModelIdentity

A, B, C = bytes(range(16)), bytes(range(1, 17)), bytes(range(2, 34))

FIELDS: dict[str, Any] = {
    "model": "llama",
    "revision": "r1",
    "weights_digest": A,
    "weights_quantisation": "",
    "kv_dtype": "bfloat16",
    "kv_quantisation": "",
    "rope": "default theta=1e5",
    "attention": "full",
    "layout_digest": B,
    "page_tokens": 32,
}


def identity(**changes: Any) -> ModelIdentity:
    return ModelIdentity(**(FIELDS | changes))


def test_every_field_counts() -> None:
    changes: list[dict[str, Any]] = [
        {"model": "llama2"},
        {"revision": "r2"},
        {"weights_digest": C},
        {"weights_quantisation": "gptq"},
        {"kv_dtype": "float16"},
        {"kv_quantisation": "fp8"},
        {"rope": "default theta=1e6"},
        {"attention": "sliding 512"},
        {"layout_digest": C},
        {"page_tokens": 16},
        {"adapters": (AdapterIdentity(A, 1.0),)},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "tensor_parallel_rank": 1},
        {"layout_version": 7},
        {"tenant": "x"},
    ]
    assert {name for change in changes for name in change} == {
        f.name for f in dataclasses.fields(ModelIdentity)
    }
    digests = {identity(**change).digest for change in [{}, *changes]}
    assert len(digests) == 1 + len(changes)
    assert all(len(digest) == 32 for digest in digests)


def test_adapters_are_a_set_of_contents_with_scales() -> None:
    half, one, other = AdapterIdentity(A, 0.5), AdapterIdentity(A, 1.0), AdapterIdentity(B, 1.0)
    base = identity()
    assert identity(adapters=(one, other)).digest == identity(adapters=(other, one)).digest
    assert identity(adapters=(one, other)) == identity(adapters=(other, one))
    assert identity(adapters=(AdapterIdentity(A, 0.0),)).digest == base.digest
    assert (
        identity(adapters=(AdapterIdentity(A, -0.0), one)).digest
        == identity(adapters=(one,)).digest
    )
    assert identity(adapters=(AdapterIdentity(A, 1),)) == identity(adapters=(one,))
    different = [
        (),
        (half,),
        (one,),
        (other,),
        (half, half),
        (one, one),
        (half, other),
        (one, other),
        (half, one),
    ]
    assert len({identity(adapters=a).digest for a in different}) == len(different)


def test_scales_may_change_places_only_with_their_adapters() -> None:
    first = identity(adapters=(AdapterIdentity(A, 0.5), AdapterIdentity(B, 1.0)))
    second = identity(adapters=(AdapterIdentity(A, 1.0), AdapterIdentity(B, 0.5)))
    assert first.digest != second.digest


def test_the_name_is_no_substitute_for_the_content() -> None:
    assert (
        identity(model="same", weights_digest=A).digest
        != identity(model="same", weights_digest=B).digest
    )


def test_nothing_slides_from_one_field_into_another() -> None:
    """10^5 random identities from a few values that are built to run into each other."""
    rng = random.Random(5)
    text = [
        "",
        "a",
        "b",
        "ab",
        "aa",
        "s",
        "tenant",
        "a\0",
        "\0a",
        "a\x01\0\0\0\0\0\0\0",
        "é",
        "\ud800",
        "sa",
    ]
    digests = [A, B, C, A + B, B + A, b"revision" * 2, b"tenant\0\0" * 2]
    names = [f.name for f in dataclasses.fields(ModelIdentity)]
    seen: dict[bytes, ModelIdentity] = {}

    def draw() -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in names:
            if name in ("model", "kv_dtype", "attention"):
                values[name] = rng.choice(text[1:])
            elif name in ("weights_digest", "layout_digest"):
                values[name] = rng.choice(digests)
            elif name == "adapters":
                some = range(rng.choice([0, 0, 1, 2]))
                values[name] = tuple(
                    AdapterIdentity(rng.choice(digests), rng.choice([0.0, 0.5, 1, 2])) for _ in some
                )
            elif name == "tensor_parallel_rank":
                values[name] = rng.randrange(2)
            elif name in ("page_tokens", "layout_version", "tensor_parallel_size"):
                values[name] = rng.choice([2, 16, 32])
            else:
                values[name] = rng.choice(text)
        return values

    groups = [
        ["model", "kv_dtype", "attention"],
        ["revision", "rope", "tenant", "weights_quantisation"],
    ]
    groups += [["weights_digest", "layout_digest"], ["page_tokens", "layout_version"]]
    count = 0
    while count < 100_000:
        values = draw()
        swapped = dict(values)
        one, two = rng.sample(rng.choice(groups), 2)
        swapped[one], swapped[two] = values[two], values[one]
        for fields in (values, swapped):
            made = ModelIdentity(**fields)
            assert seen.setdefault(made.digest, made) == made
            count += 1
    # And equal digests only for equal identities: as many digests as there are identities.
    assert len(seen) == len(set(seen.values()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": ""}, "field model is missing"),
        ({"weights_digest": b""}, "field weights_digest is missing.*not shared"),
        ({"weights_digest": b"short"}, "weights_digest is b'short'"),
        ({"weights_digest": "text"}, "weights_digest"),
        ({"layout_digest": b""}, "layout_digest is missing"),
        ({"kv_dtype": ""}, "kv_dtype is missing"),
        ({"attention": ""}, "attention is missing"),
        ({"rope": None}, "rope is missing"),
        ({"tenant": b"x"}, "tenant is b'x'"),
        ({"page_tokens": 0}, "page_tokens is 0: give an integer >= 1"),
        ({"page_tokens": 1.0}, "page_tokens is 1.0"),
        ({"page_tokens": True}, "page_tokens is True"),
        ({"page_tokens": 2**63}, "page_tokens is"),
        ({"layout_version": 0}, "layout_version is 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_rank": -1}, "tensor_parallel_rank is -1"),
        ({"tensor_parallel_rank": 2, "tensor_parallel_size": 2}, "below tensor_parallel_size = 2"),
        ({"adapters": ("name",)}, "adapters is 'name'"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(IdentityError, match=says):
        identity(**changes)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, "1", None, True, 10**400])
def test_a_scale_is_a_finite_number(scale: Any) -> None:
    with pytest.raises(IdentityError, match="adapter scale"):
        AdapterIdentity(A, scale)


@pytest.mark.parametrize("digest", [b"", b"short", "name"])
def test_an_adapter_needs_its_content(digest: Any) -> None:
    with pytest.raises(IdentityError, match="adapter digest"):
        AdapterIdentity(digest, 1.0)


def test_describe_is_json_and_names_every_field() -> None:
    made = identity(adapters=(AdapterIdentity(A, 0.5),))
    back = json.loads(json.dumps(made.describe()))
    assert set(back) == {f.name for f in dataclasses.fields(ModelIdentity)} | {"digest"}
    assert back["digest"] == made.digest.hex()
    assert back["adapters"] == [{"digest": A.hex(), "scale": 0.5}]


def test_the_digest_is_the_same_for_ever() -> None:
    """Pages on disk are found by it: a change of this value makes every stored page unreachable."""
    made = identity(
        adapters=(AdapterIdentity(A, 0.5), AdapterIdentity(C, 2)), tenant="t", layout_version=1
    )
    assert made.digest.hex() == "54d595c566ebd6a6ae77401ef4e31483088a7de5cab5bab168edbce4980bf6be"
