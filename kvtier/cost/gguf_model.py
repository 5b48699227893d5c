"""A model's geometry and the true size of its weights from a GGUF file.

Keys as llama.cpp reads them (``llama-arch.cpp``, ``llama-model.cpp``). Where a file does not say which
layers have a window, llama.cpp knows by architecture; so does ``_PATTERNS``.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvtier.cost.geometry import LayerShape
from kvtier.cost.gguf_file import GGUFFile, GGUFTensor, Skipped, layer_numbers, read_gguf
from kvtier.cost.shape import ModelShape, StoredWeights
from kvtier.errors import ConfigError

#: Architecture -> n: every n-th layer is full, the others have the window (``set_swa_pattern``).
#: A window of an architecture that is not here is ignored, as llama.cpp does for phi3.
_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "cohere2": 4,
    "llama4": 4,
    "exaone4": 4,
    "olmo2": 4,
    "olmo3": 4,
}

#: Architectures in which every n-th layer has attention, the others a recurrent state.
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}

#: Chunk of llama4's local attention, which files do not carry (llama.cpp: n_swa = 8192).
_LLAMA4_CHUNK = 8192


def read_gguf_model(path: Path) -> ModelShape:
    """Geometry, weights by group, and bits per weight of a file.

    Raises:
        ConfigError: the file cannot be read, or lacks a key that the geometry needs.
    """
    return _Model(read_gguf(path)).shape()


class _Model:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ConfigError(
                f"{str(file.path)!r} has no general.architecture; give the GGUF of a language model"
            )
        self.arch = arch
        self.block_count = self.need("block_count")
        self.layers = self.block_count - self.get("nextn_predict_layers", 0)
        if not 1 <= self.layers <= 4096:
            raise ConfigError(f"{str(file.path)!r}: {arch}.block_count is {self.block_count}")

    def raw(self, key: str) -> object:
        return self.file.metadata.get(f"{self.arch}.{key}")

    def get(self, key: str, default: int) -> int:
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            value = max(value) if isinstance(value, list) and value else default
        return int(value)

    def need(self, key: str) -> int:
        if self.raw(key) is None:
            raise ConfigError(
                f"{str(self.file.path)!r} lacks the field {self.arch}.{key}; give the GGUF of a "
                "language model, or its numbers (layers=...,kv_heads=...,head_dim=...,params=...)"
            )
        return self.get(key, 0)

    def per_layer(self, key: str, default: int) -> list[int]:
        value = self.raw(key)
        return list(layer_numbers(default if value is None else value, self.layers, key))

    # what a sequence keeps

    def state(self) -> int:
        """Recurrent state of a layer in fp32: llama.cpp's n_embd_r and n_embd_s."""
        hidden = self.need("embedding_length")
        if cache := self.get("shortconv.l_cache", 0):
            return hidden * (cache - 1) * 4
        if head := self.get("kda.head_dim", 0):
            width = self.need("attention.head_count") * head
            return (3 * width * (self.get("ssm.conv_kernel", 4) - 1) + width * head) * 4
        inner, size = self.get("ssm.inner_size", 0), self.get("ssm.state_size", 0)
        channels = inner + 2 * self.get("ssm.group_count", 0) * size
        return (channels * max(0, self.get("ssm.conv_kernel", 0) - 1) + inner * size) * 4

    def windowed(self) -> list[int]:
        """Window of each layer, 0 for full attention."""
        window = self.get("attention.sliding_window", 0)
        if self.arch == "llama4":
            window = self.get("attention.chunk_size", window or _LLAMA4_CHUNK)
        pattern = self.raw("attention.sliding_window_pattern")
        if not window:
            return [0] * self.layers
        if isinstance(pattern, list):
            return [window if one else 0 for one in pattern[: self.layers]]
        every = pattern if isinstance(pattern, int) else _PATTERNS.get(self.arch, 0)
        if not every:
            return [0] * self.layers
        return [window if n % every < every - 1 else 0 for n in range(self.layers)]

    def recurrent(self, kv_heads: list[int], feeds: list[int]) -> list[bool]:
        if not (self.state() and any(k.startswith(f"{self.arch}.") for k in self.file.metadata)):
            return [False] * self.layers
        if self.arch in ("mamba", "mamba2"):
            return [True] * self.layers
        if self.arch == "falcon-h1":
            return [True] * self.layers
        if self.arch in _INTERVALS:
            every = self.get("full_attention_interval", _INTERVALS[self.arch])
            return [(n + 1) % every != 0 for n in range(self.layers)]
        # Layers of nemotron_h with neither KV heads nor a recurrence are plain MLPs.
        mlp = self.arch.startswith("nemotron_h")
        return [
            not heads and not (mlp and feed) for heads, feed in zip(kv_heads, feeds, strict=True)
        ]

    def layer_shapes(self) -> list[LayerShape]:
        heads = self.get("attention.head_count", 0)
        kv_heads = self.per_layer("attention.head_count_kv", heads)
        feeds = self.per_layer("feed_forward_length", 0)
        latent = self.get("attention.kv_lora_rank", 0)
        rope = self.get("rope.dimension_count", 0)
        windows, states = self.windowed(), self.recurrent(kv_heads, feeds)
        state = self.state() if any(states) else 0
        if any(kv_heads) and not latent:
            k_dim = self.get("attention.key_length", 0)
            k_dim = k_dim or self.need("embedding_length") // (heads or 1)
            v_dim = self.get("attention.value_length", k_dim)
            short = (
                self.get("attention.key_length_swa", k_dim),
                self.get("attention.value_length_swa", v_dim),
            )
        sharing = self.get("attention.shared_kv_layers", 0)
        owners = self.layers - sharing
        shapes: list[LayerShape] = []
        for n in range(self.layers):
            kept = state if states[n] else 0
            both = kept and self.arch == "falcon-h1"
            if n >= owners:
                alike = [m for m in range(owners) if bool(windows[m]) == bool(windows[n])]
                shapes.append(LayerShape("shared", source=alike[-1] if alike else owners - 1))
            elif kept and not both:
                shapes.append(LayerShape("state", state_bytes=kept))
            elif not kv_heads[n]:
                shapes.append(LayerShape("none"))
            elif latent:
                shapes.append(LayerShape("latent", latent, rope))
            else:
                wide = short if windows[n] else (k_dim, v_dim)
                k, v = (kv_heads[n] * dim for dim in wide)
                kind = "sliding" if windows[n] else "full"
                shapes.append(LayerShape(kind, k, v, windows[n], state_bytes=kept))  # type: ignore[arg-type]
        return shapes

    # which weights there are

    def group(self, tensor: GGUFTensor, untied: bool) -> str:
        name = tensor.name
        block = re.match(r"blk\.(\d+)\.", name)
        if (block and int(block[1]) >= self.layers) or ".nextn." in name:
            return "idle"
        if "_exps." in name:
            return "experts"
        if name.startswith("per_layer_token_embd") or (untied and name.startswith("token_embd")):
            return "gathered"
        return "shared"

    def shape(self) -> ModelShape:
        file = self.file
        names = {tensor.name for tensor in file.tensors}
        untied = "output.weight" in names
        values = dict.fromkeys(("shared", "experts", "gathered", "idle"), 0)
        sizes = dict(values)
        for tensor in file.tensors:
            group = self.group(tensor, untied)
            values[group] += tensor.values
            sizes[group] += tensor.nbytes
        if not file.tensors:
            raise ConfigError(f"{str(file.path)!r} has no tensors; give the file with the weights")
        experts, used = self.get("expert_count", 0), self.get("expert_used_count", 0)
        if values["experts"] and not 0 < used <= experts:
            raise ConfigError(
                f"{str(file.path)!r} has expert tensors, but {self.arch}.expert_count is {experts} and "
                f"expert_used_count {used}; the file is damaged"
            )
        heads = self.get("attention.head_count", 0)
        hidden = self.need("embedding_length")
        latent = self.get("attention.kv_lora_rank", 0)
        k_dim = self.get("attention.key_length_mla", self.get("attention.key_length", 0))
        v_dim = self.get("attention.value_length_mla", self.get("attention.value_length", 0))
        feed = self.get("feed_forward_length", 0)
        if experts:
            feed = max(feed, used * self.get("expert_feed_forward_length", 0))
        name = file.metadata.get("general.name")
        bits = file.tensor_bytes * 8 / sum(values.values())
        return ModelShape(
            name=str(name) if name else file.path.stem,
            layers=tuple(self.layer_shapes()),
            shared_params=values["shared"],
            expert_params=values["experts"],
            gathered_params=values["gathered"],
            idle_params=values["idle"],
            experts=experts if values["experts"] else 0,
            experts_per_token=used if values["experts"] else 0,
            stored=StoredWeights(
                **sizes,
                source=f"tensors of {file.path.name}, {bits:.3f} bits a weight with their scales",
            ),
            hidden=hidden,
            intermediate=feed,
            vocab=self.vocab(),
            query_width=heads * ((k_dim + v_dim) // 2) or hidden,
            kv_heads=0 if latent else self.get("attention.head_count_kv", heads),
            context=self.get("context_length", 0),
            source=f"GGUF metadata of {file.path.name} ({self.arch})",
        )

    def vocab(self) -> int:
        words = self.file.metadata.get("tokenizer.ggml.tokens")
        return self.get("vocab_size", words.length if isinstance(words, Skipped) else 0)
