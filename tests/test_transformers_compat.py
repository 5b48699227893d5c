"""What ``TieredCache`` needs from the installed transformers, and what it hides of the differences between versions."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from tiny_models import Place, dynamic, make, prompt, tiered  # noqa: E402
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: E402

from kvtier.devices.emulated import EmulatedDevice  # noqa: E402
from kvtier.integrations.transformers.layer import TieredLayer  # noqa: E402


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    device = EmulatedDevice(vram_bytes=64 << 20)
    yield Place(tmp_path / "kv", device)
    device.close()


def test_the_package_is_imported_without_transformers() -> None:
    code = (
        "import sys, kvtier.integrations, kvtier.integrations.transformers as t\n"
        "assert {'torch', 'transformers'}.isdisjoint(sys.modules), 'loaded too early'\n"
        "assert set(t.__all__) >= {'TieredCache', 'layout_of', 'identity_of'}\n"
        "try: t.nothing\n"
        "except AttributeError: pass\n"
        "for name in t.__all__: getattr(t, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_method_of_a_layer_is_there() -> None:
    assert not inspect.isabstract(TieredLayer)
    # Registering a layer type would replace transformers' own layers for everybody.
    assert TieredLayer._layer_type is None
    assert issubclass(TieredLayer, CacheLayerMixin)


def test_methods_of_the_cache_that_would_touch_layers_one_by_one_are_replaced() -> None:
    def changes_layers(name: str, value: object) -> bool:
        return (
            inspect.isfunction(value)
            and not name.startswith(("_", "get_"))
            and re.search(r"for [\w, ]*layer[\w, ]* in", inspect.getsource(value)) is not None
        )

    found = {name for name, value in vars(Cache).items() if changes_layers(name, value)}
    assert {"reset", "crop", "reorder_cache", "batch_select_indices"} <= found
    # Layers say themselves that they need no early initialization and have no indexer.
    assert found - {"early_initialization", "update_indexer"} <= set(vars(tiny.TieredCache))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_lengths_and_masks_are_those_of_a_dynamic_cache(place: Place, kind: str) -> None:
    model = make(kind)
    other = dynamic(model)
    with tiered(place, model) as cache:
        for count in (1, 18, 1, 1, 1, 14):
            for each in (cache, other):
                tiny.forward(model, each, prompt(1, count)["input_ids"])
            assert cache.get_seq_length() == other.get_seq_length()
            assert cache.get_max_length() == other.get_max_length()
            assert cache.is_croppable == other.is_croppable
            assert cache.is_compileable == other.is_compileable
            assert cache.is_sliding == other.is_sliding
            for layer in range(3):
                assert cache.get_seq_length(layer) == other.get_seq_length(layer)
                for query in (1, 5):
                    assert cache.get_mask_sizes(query, layer) == other.get_mask_sizes(query, layer)


def test_update_works_with_and_without_the_attention_arguments(place: Place) -> None:
    """5.24 passes ``kwargs=``, versions before pass nothing."""
    model = make()
    seen = []
    with tiered(place, model) as cache:
        plain = cache.update

        def update(k: torch.Tensor, v: torch.Tensor, layer: int, **kwargs: object) -> object:
            seen.append(layer)
            return plain(k, v, layer, **kwargs) if layer else plain(k, v, layer)

        cache.update = update
        ids = prompt(1, 9)["input_ids"]
        assert torch.equal(
            tiny.forward(model, cache, ids), tiny.forward(model, dynamic(model), ids)
        )
        del cache.update
    assert seen == [0, 1, 2]


def test_the_old_keyword_is_understood(place: Place) -> None:
    model = make()
    ids = prompt(1, 9)["input_ids"]
    with tiered(place, model) as cache, torch.no_grad():
        try:
            got = model(ids, past_key_values=cache).logits
        except TypeError:
            pytest.skip("this transformers has no past_key_values any more")
        assert torch.equal(got, tiny.forward(model, dynamic(model), ids))
        assert cache.get_seq_length() == 9
        assert cache.sessions[0].chain is not None  # its ids were seen
