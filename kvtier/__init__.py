"""kvtier: a language model's KV cache in three tiers: VRAM, pinned host RAM, LMDB on disk."""
