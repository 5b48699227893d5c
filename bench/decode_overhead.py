#!/usr/bin/env python3
"""What a tiered cache costs while nothing is offloaded: decoding with all pages in VRAM against
DynamicCache.

    python bench/decode_overhead.py --context 2048 --rounds 12 --block 8

Both caches hold the same prompt of the demo's model and are fed the same tokens behind it in
alternating blocks of steps, so that a busy machine slows both down. The first step of a block is
not counted: it pays for caches that the other side has emptied. The result is the median over the
rounds of the ratio of the two blocks' median step times; above 1.0 the tiered cache is slower.

Without a GPU the device is the emulated one, with its race detection off: that proves something
about a program and is no part of what a cache costs. --check-races turns it on.

--mode takes another way of reading pages than exact-stream; --against one to compare it with
instead of DynamicCache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import kvtier
from kvtier.cli.generate import Driver, chunk_calls
from kvtier.demo.model import demo_text, load_demo
from kvtier.devices.emulated import EmulatedDevice
from kvtier.integrations.transformers import TieredCache, layout_of

CHUNK = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of blocks (default: 12)")
    parser.add_argument("--block", type=int, default=8, help="decode steps in a block (default: 8)")
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--device", default="auto", help="as of 'kvtier run' (default: auto)")
    parser.add_argument("--mode", default="exact-stream", help="as of 'kvtier run'")
    parser.add_argument("--against", metavar="MODE", help="default: transformers' DynamicCache")
    parser.add_argument("--check-races", action="store_true", help="emulated device: as in tests")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.block < 2:
        parser.error(f"--block is {options.block}; it must be at least 2, one step is not counted")
    if options.threads:
        torch.set_num_threads(options.threads)
    result = measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"context {result['context']}, {result['threads']} threads, {result['device']}\n"
            f"{options.against or 'DynamicCache'}: {result['dynamic_ms']:8.2f} ms a token (median)\n"
            f"TieredCache, {options.mode}: {result['tiered_ms']:8.2f} ms a token (median)\n"
            f"median ratio {result['ratio']:8.4f}  (quartiles {result['ratio_q1']:.4f} to "
            f"{result['ratio_q3']:.4f} over {options.rounds} rounds)\n"
            f"CPU seconds  {result['cpu_ratio']:8.4f}  (ratio of all counted steps)"
        )
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds; times in milliseconds."""
    from transformers import DynamicCache

    model, tokenizer = load_demo()
    device = kvtier.open_device(options.device)
    if isinstance(device, EmulatedDevice) and not options.check_races:
        device.close()
        device = EmulatedDevice(device.card, check_races=False)
    model.to(device.torch_device)
    steps = options.rounds * options.block
    text = tokenizer(demo_text(), return_tensors="pt").input_ids.to(device.torch_device)
    if text.shape[1] < options.context + steps:
        raise SystemExit(f"the text has {text.shape[1]} tokens; lower --context")
    ids, following = text[:, : options.context], text[0, options.context :].tolist()
    modes = [options.mode, options.against or ""]
    selects = any(mode.startswith("select:") for mode in modes)
    layout = layout_of(model, page_tokens=options.page_tokens, summaries=selects)
    # room for everything, twice: nothing may be evicted
    vram = 3 * layout.pages(ids.shape[1] + steps) * layout.page_bytes
    store = kvtier.TieredStore(layout, device=device, vram=vram)
    tiered = TieredCache(model, store, mode=options.mode)
    other = TieredCache(model, store, mode=options.against) if options.against else None
    sides = {
        "dynamic": _Side(model, other or DynamicCache(config=model.config), ids, following),
        "tiered": _Side(model, tiered, ids, following),
    }
    blocks: dict[str, list[list[float]]] = {name: [] for name in sides}
    cpu = dict.fromkeys(sides, 0.0)
    for number in range(options.rounds):
        # who goes first alternates too
        for name in sorted(sides, reverse=number % 2 == 1):
            times, cpu_s = sides[name].block(options.block)
            blocks[name].append(times)
            cpu[name] += cpu_s
    if not selects and sides["dynamic"].tokens != sides["tiered"].tokens:
        raise SystemExit("the two caches gave different tokens; the times mean nothing")
    moved = sum(link.bytes for link in store.stats().links.values())
    if moved:
        raise SystemExit(
            f"{moved} bytes moved between tiers; this is to measure a store that need not"
        )
    tiered.close()
    if other is not None:
        other.close()
    store.close()
    device.close()
    medians = {name: [statistics.median(times) for times in rows] for name, rows in blocks.items()}
    ratios = [t / d for t, d in zip(medians["tiered"], medians["dynamic"], strict=True)]
    q1, _, q3 = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "context": ids.shape[1],
        "threads": torch.get_num_threads(),
        "device": device.name,
        "rounds": options.rounds,
        "block": options.block,
        "dynamic_ms": 1e3 * statistics.median(medians["dynamic"]),
        "tiered_ms": 1e3 * statistics.median(medians["tiered"]),
        "ratio": statistics.median(ratios),
        "ratio_q1": q1,
        "ratio_q3": q3,
        "cpu_ratio": cpu["tiered"] / cpu["dynamic"],
    }


class _Side:
    """One cache, filled with the prompt and fed the text behind it. ``tokens``: what it would have said."""

    def __init__(self, model: Any, cache: Any, ids: torch.Tensor, following: list[int]) -> None:
        self._following = iter(following)
        self._driver = Driver(model, cache)
        self._logits = self._driver.prefill(
            ids, chunk_calls(0, ids.shape[1], CHUNK), lambda _: None
        )
        self.tokens: list[int] = []

    def block(self, steps: int) -> tuple[list[float], float]:
        """Decode ``steps`` tokens: seconds of each but the first, and CPU seconds of those."""
        times = []
        cpu = 0.0
        for step in range(steps):
            self.tokens.append(int(self._logits.argmax()))
            ids = torch.tensor([[next(self._following)]], device=self._logits.device)
            wall, process = time.perf_counter(), time.process_time()
            self._logits = self._driver.forward(ids)
            self._logits[0].item()  # waits for a GPU
            if step:
                times.append(time.perf_counter() - wall)
                cpu += time.process_time() - process
        return times, cpu


if __name__ == "__main__":
    sys.exit(main())
