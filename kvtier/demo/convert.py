"""A Llama-family GGUF file as a folder that transformers loads: weights, config, tokenizer.

transformers can read the file too, but walks its vocabulary in Python once for the tokenizer and
again for the model, at every load, and leaves out the rule that splits numbers into digits. Here
the file is read once. File format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np

_CONTROL_TOKEN = 3  # GGUF's llama_token_type of tokens such as <|im_end|>

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write the model in ``source`` to the existing folder ``target``, weights as float32.

    Raises:
        UnsupportedModelError: not the ``llama`` architecture, scaled rope, or a vocabulary that is
            not byte-level BPE with SmolLM's splitting rule.
    """
    from gguf import GGUFReader

    progress(f"reading {source.name}")
    reader = GGUFReader(str(source))
    values = {name: _Value(field) for name, field in reader.fields.items()}
    architecture = values["general.architecture"].text
    if architecture != "llama" or any("rope.scaling" in name for name in values):
        raise UnsupportedModelError(
            f"{source.name} holds a {architecture!r} model; only plain llama is converted. "
            "Give a transformers folder with --model instead"
        )
    progress("converting the tokenizer")
    _write_tokenizer(values, target)
    progress("dequantising the weights to float32")
    _write_model(reader, values, target)


class _Value:
    """One metadata field of a GGUF file."""

    def __init__(self, field: Any) -> None:
        self._field = field

    @property
    def number(self) -> Any:
        return self._field.parts[self._field.data[0]][0].item()

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        return [bytes(self._field.parts[i]).decode() for i in self._field.data]

    @property
    def numbers(self) -> list[int]:
        return [int(self._field.parts[i][0]) for i in self._field.data]


def _write_tokenizer(values: dict[str, _Value], target: Path) -> None:
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (values["tokenizer.ggml.model"].text, values["tokenizer.ggml.pre"].text)
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModelError(
            f"the vocabulary is of kind {kind}; only ('gpt2', 'smollm') is converted"
        )
    tokens = values["tokenizer.ggml.tokens"].texts
    merges = [
        (left, right)
        for left, _, right in (m.partition(" ") for m in values["tokenizer.ggml.merges"].texts)
    ]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"].numbers
    bpe.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind_of_token in zip(tokens, kinds, strict=True)
            if kind_of_token == _CONTROL_TOKEN
        ]
    )
    named = {
        f"{name}_token": tokens[values[f"tokenizer.ggml.{field}_token_id"].number]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    make: Any = transformers.PreTrainedTokenizerFast
    make(
        tokenizer_object=bpe,
        chat_template=values["tokenizer.chat_template"].text,
        model_max_length=values["llama.context_length"].number,
        clean_up_tokenization_spaces=False,
        **named,
    ).save_pretrained(target)


def _write_model(reader: Any, values: dict[str, _Value], target: Path) -> None:
    import numpy as np
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    def number(name: str) -> Any:
        return values[f"llama.{name}"].number

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    special = {
        f"{n}_token_id": values[f"tokenizer.ggml.{f}_token_id"].number
        for n, f in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weights = _half_split_rows(weights, heads if ".attn_q." in tensor.name else kv_heads)
        state[_name(tensor.name)] = torch.from_numpy(np.array(weights, order="C"))
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=number("rope.dimension_count"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings="lm_head.weight" not in state,
        dtype="float32",
        **special,
    )
    config.save_pretrained(target)
    generation: Any = GenerationConfig
    generation(**special).save_pretrained(target)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})


def _name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in _MODEL_TENSORS:
        return _MODEL_TENSORS[gguf_name]
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    part, _, suffix = rest.partition(".")
    if not gguf_name.startswith("blk.") or part not in _LAYER_TENSORS:
        raise UnsupportedModelError(f"tensor {gguf_name!r} is none of a plain llama model")
    return f"model.layers.{block}.{_LAYER_TENSORS[part]}.{suffix}"


def _half_split_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of Q or K in transformers' order.

    llama.cpp rotates neighbouring elements, transformers element ``i`` with ``i + head_dim/2``; its
    converter reorders the rows of each head accordingly (``permute`` in llama.cpp's
    convert_hf_to_gguf.py), undone here.
    """
    dim = weights.shape[0] // heads
    return (
        weights.reshape(heads, dim // 2, 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )
