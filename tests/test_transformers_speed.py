"""A transformers cache says that it will be slow, and when it is slower than it should be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import forward, make, prompt  # noqa: E402

from kvtier.cost.monitor import RateMonitor  # noqa: E402
from kvtier.devices.emulated import EmulatedDevice  # noqa: E402
from kvtier.errors import OffloadWarning  # noqa: E402
from kvtier.integrations.transformers import TieredCache, layout_of  # noqa: E402
from kvtier.integrations.transformers.weights import weights_read  # noqa: E402
from kvtier.store.store import TieredStore  # noqa: E402

PAGE = 8


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama")


@pytest.fixture
def store(model: Any) -> Iterator[TieredStore]:
    """Sixteen pages of VRAM, and a link so slow that a tiny model's KV is felt."""
    layout = layout_of(model, page_tokens=PAGE)
    device = EmulatedDevice("vram=16GB,bandwidth=288GB/s,rate=1MB/s")
    sizes = {"vram": 16 * layout.page_bytes, "host": 80 * layout.page_bytes}
    store = TieredStore(layout, device=device, **sizes)
    yield store
    store.close()
    device.close()


def said(action: Callable[[], Any]) -> list[dict[str, Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        action()
    return [dict(w.message.record) for w in caught if isinstance(w.message, OffloadWarning)]


def test_a_prompt_that_outgrows_vram_is_said_before_it_is_computed(
    model: Any, store: TieredStore
) -> None:
    with TieredCache(model, store) as cache:
        (slow,) = said(lambda: cache.load_prefix(prompt(1, 300)["input_ids"]))
        assert slow["kind"] == "slowdown"
        assert slow["before_tps"] > 1.3 * slow["after_tps"]
        assert "300 tokens" in slow["cause"]
        assert slow["remedies"]
        # once
        cache.reset()
        assert said(lambda: cache.load_prefix(prompt(1, 300)["input_ids"])) == []


def test_one_that_fits_is_not(model: Any, store: TieredStore) -> None:
    with TieredCache(model, store, columns=100) as cache:
        assert said(lambda: cache.load_prefix(prompt(1, 100)["input_ids"])) == []


def test_columns_are_enough_to_say_it(model: Any, store: TieredStore) -> None:
    caches: list[TieredCache] = []
    found = said(lambda: caches.append(TieredCache(model, store, columns=600)))
    assert [one["kind"] for one in found] == ["slowdown"]
    caches[0].close()


def test_a_loop_that_outgrows_vram_is_told_when_it_does(model: Any, store: TieredStore) -> None:
    ids = prompt(1, 200)["input_ids"]
    with TieredCache(model, store) as cache:
        told = [
            said(lambda at=at: forward(model, cache, ids[:, at : at + 25]))
            for at in range(0, 200, 25)
        ]
    counts = [len(one) for one in told]
    assert sum(counts) >= 1
    assert counts[:5] == [0] * 5  # 125 of 128 tokens


def test_a_monitor_watches_decoding(model: Any, store: TieredStore) -> None:
    """Against a baseline that this machine cannot reach; a prefill is no sample."""
    ids = prompt(1, 40)["input_ids"]
    monitor = RateMonitor(baseline_tps=1e9, warm_up=0)
    with TieredCache(model, store, monitor=monitor) as cache:
        assert said(lambda: forward(model, cache, ids[:, :20])) == []
        assert monitor.measured_tps is None

        def decode() -> None:
            for at in range(20, 40):
                forward(model, cache, ids[:, at : at + 1])

        found = said(decode)
    assert [one["kind"] for one in found] == ["measured"]
    assert found[0]["level"] == "severe"
    assert monitor.measured_tps is not None


def test_an_emulated_card_has_no_monitor_of_its_own(model: Any, store: TieredStore) -> None:
    """Its time is virtual, this machine's is not."""
    ids = prompt(1, 60)["input_ids"]
    with TieredCache(model, store) as cache:
        forward(model, cache, ids[:, :30])
        assert said(lambda: [forward(model, cache, ids[:, n : n + 1]) for n in range(30, 60)]) == []


def test_weights_that_a_step_reads() -> None:
    free, tied = make("llama"), make("llama", tie_word_embeddings=True)
    table = free.get_input_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in free.parameters())
    assert weights_read(free) == total - table.numel() * table.element_size()
    assert weights_read(tied) == sum(p.numel() * p.element_size() for p in tied.parameters())
