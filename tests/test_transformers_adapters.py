"""LoRA: pages are never served under other adapters or scales than those that they were computed with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_models as tiny  # noqa: E402
from tiny_models import Place, assert_same, dynamic, forward, generate, make, prompt  # noqa: E402

from kvtier.devices.emulated import EmulatedDevice  # noqa: E402
from kvtier.errors import IdentityError, UnsupportedModelError  # noqa: E402
from kvtier.integrations.transformers.cache import TieredCache  # noqa: E402
from kvtier.integrations.transformers.identity import identity_of  # noqa: E402
from kvtier.store.store import TieredStore  # noqa: E402

PROMPTS = 10


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    device = EmulatedDevice(vram_bytes=64 << 20)
    yield Place(tmp_path / "kv", device)
    device.close()


def lora() -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"]
    )


def fill(model: Any, name: str, seed: int) -> None:
    """Random weights for an adapter, whose B is zero at first."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        if f".{name}." in path:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2


def adapted(seeds: dict[str, int]) -> Any:
    names = list(seeds)
    model = peft.get_peft_model(make(), lora(), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora())
    for name, seed in seeds.items():
        fill(model, name, seed)
    return model.eval()


def switch(model: Any, name: str | None, scale: float = 1.0) -> None:
    """Activate one adapter at ``scale`` times its own scaling, or none."""
    from peft.tuners.lora.layer import LoraLayer

    if name is None:
        model.base_model.disable_adapter_layers()
        return
    model.base_model.enable_adapter_layers()
    model.set_adapter(name)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_scale(name, scale)


def ids_of(number: int) -> torch.Tensor:
    return prompt(1, 25, seed=number)["input_ids"]


def fill_store(model: Any, store: TieredStore) -> None:
    for number in range(PROMPTS):
        with TieredCache(model, store) as cache:
            forward(model, cache, ids_of(number))
    assert store.flush() == 0


def hits(model: Any, store: TieredStore) -> int:
    """Prompts of which something is found under the state that the model is in now."""
    found = 0
    for number in range(PROMPTS):
        with TieredCache(model, store) as cache:
            found += cache.load_prefix(ids_of(number)) > 0
    return found


STATES: list[tuple[str | None, float]] = [
    ("red", 1.0),
    ("red", 0.5),
    ("blue", 1.0),
    ("blue", 0.5),
    (None, 1.0),
]


def test_never_a_page_of_another_adapter_or_scale(place: Place) -> None:
    model = adapted({"red": 1, "blue": 2})
    with place.store(model, vram=8, host=8) as store:
        for before, state in enumerate(STATES):
            switch(model, *state)
            assert hits(model, store) == 0, f"{state} found pages of {STATES[:before]}"
            fill_store(model, store)
            assert hits(model, store) == PROMPTS
    # And after a restart, whatever the order.
    with place.store(model, vram=8, host=8) as store:
        for state in reversed(STATES):
            switch(model, *state)
            assert hits(model, store) == PROMPTS
        switch(model, "red", 0.25)
        assert hits(model, store) == 0


def test_scale_zero_is_the_base_model(place: Place) -> None:
    model = adapted({"red": 1, "blue": 2})
    switch(model, "blue", 0.0)
    with place.store(model, vram=8, host=8) as store:
        fill_store(model, store)
        switch(model, "red", 0.0)
        assert hits(model, store) == PROMPTS
        switch(model, None)
        assert hits(model, store) == PROMPTS
        plain = make()
        assert hits(plain, store) == PROMPTS


def test_the_same_name_with_other_content_after_a_restart(place: Place) -> None:
    with place.store(make(), vram=8, host=8) as store:
        fill_store(adapted({"red": 1}), store)
    with place.store(make(), vram=8, host=8) as store:
        assert hits(adapted({"red": 2}), store) == 0
        assert hits(adapted({"other-name": 1}), store) == PROMPTS


def test_sharing_would_change_the_output(place: Place) -> None:
    """The tests above could not fail if adapters made no difference."""
    model = adapted({"red": 1, "blue": 2})
    given = prompt(1, 25)
    changed = 0
    for other in STATES[1:]:
        switch(model, "red")
        want = generate(model, dynamic(model), given)
        stolen = dynamic(model)
        switch(model, *other)
        forward(model, stolen, given["input_ids"][:, :24])
        switch(model, "red")
        got = generate(model, stolen, given)
        changed += not torch.equal(got.logits[0], want.logits[0])
    assert changed == len(STATES) - 1


def test_a_forward_loop_over_a_peft_model_is_watched(place: Place) -> None:
    model = adapted({"red": 1})
    ids = ids_of(0)
    with place.store(model, vram=8) as store:
        with TieredCache(model, store) as cache:
            other = dynamic(model)
            for part in (ids[:, :17], ids[:, 17:]):
                assert torch.equal(forward(model, cache, part), forward(model, other, part))
            cache.flush()
        with TieredCache(model, store) as cache:
            assert cache.load_prefix(ids) == 24
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            reference = dynamic(model)
            forward(model, reference, ids[:, :17])
            forward(model, reference, ids[:, 17:])
            reference.crop(-1)
            assert_same(generate(model, cache, given), generate(model, reference, given))


def test_adapters_that_change_under_a_cache(place: Place) -> None:
    model = adapted({"red": 1, "blue": 2})
    ids = ids_of(0)
    with place.store(model, vram=8) as store, TieredCache(model, store) as cache:
        forward(model, cache, ids)
        for state in (("blue", 1.0), ("red", 0.5), (None, 1.0)):
            switch(model, *state)
            with pytest.raises(IdentityError, match="adapters"):
                forward(model, cache, ids[:, :1])
            with pytest.raises(IdentityError, match="adapters"):
                cache.fork()
        switch(model, "red")
        forward(model, cache, ids[:, :1])
        assert cache.get_seq_length() == 26


def test_an_identity_of_other_adapters(place: Place) -> None:
    model = adapted({"red": 1, "blue": 2})
    with place.store(model, vram=8) as store:
        identity = identity_of(model, layout=store.layout)
        switch(model, "blue")
        with pytest.raises(IdentityError, match="adapters"):
            TieredCache(model, store, identity=identity)
        switch(model, "red")
        TieredCache(model, store, identity=identity).close()


def test_a_batch_of_several_adapters(place: Place) -> None:
    model = adapted({"red": 1, "blue": 2})
    ids = prompt(2, 20)["input_ids"]
    with place.store(model, vram=8) as store, TieredCache(model, store) as cache:
        with pytest.raises(UnsupportedModelError, match="adapter_names"):
            forward(model, cache, ids, adapter_names=["red", "blue"])
        with pytest.raises(UnsupportedModelError, match="adapter_names"):
            model.generate(
                input_ids=ids,
                adapter_names=["red", "blue"],
                max_new_tokens=2,
                **{tiny.KEYWORD: cache},
            )
    # PEFT leaves its hooks behind after an error; take them off for whoever comes next.
    for module in model.modules():
        module._forward_pre_hooks.clear()
