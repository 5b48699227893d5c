#!/usr/bin/env python3
"""``model.generate`` with a tiered cache; run it twice and the prompt is not computed again.

python examples/generate.py MODEL_FOLDER PROMPT_FILE [STORE_FOLDER]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier
from kvtier.integrations.transformers import TieredCache, layout_of


def main(folder: str, prompt_file: str, store_folder: str = "kvtier-store") -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    device = kvtier.open_device("auto")
    model.to(device.torch_device)
    inputs = tokenizer(Path(prompt_file).read_text(encoding="utf-8"), return_tensors="pt")
    inputs = inputs.to(device.torch_device)

    with kvtier.TieredStore(
        layout_of(model, page_tokens=32),
        device=device,
        vram="512MiB",
        host="2GiB",
        disk="20GiB",
        path=store_folder,
    ) as store:
        with TieredCache(model, store) as cache:
            started = time.perf_counter()
            restored = cache.load_prefix(inputs.input_ids)
            out = model.generate(
                **inputs,
                cache=cache,
                do_sample=False,
                max_new_tokens=64,
                prefill_chunk_size=512,  # a chunk's new pages stay in VRAM until it is done
            )
            seconds = time.perf_counter() - started
            cache.flush()  # everything sealed is on disk when this returns
        length = inputs.input_ids.shape[1]
        print(tokenizer.decode(out[0, length:], skip_special_tokens=True))
        print(f"{restored} of {length} prompt tokens restored, {seconds:.2f} s in all")
        for name, tier in store.stats().tiers.items():
            print(f"{name:5} {tier.pages:5} pages, {tier.pages_in} in, {tier.pages_out} out")
    device.close()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
