"""The identity of a live transformers model: everything its KV depends on besides the tokens.

Read from the model as it is at the call: weights and buffers (all bits, see ``weights``), active
adapters (see ``adapters``), the configuration without names and token ids, and the classes and
numeric settings of all modules. Left out on purpose are the attention implementation, the device
and library versions: they change how sums are rounded, not what is computed.

What cannot be determined is refused: foreign hooks and replaced forward methods, which may change
anything, active dropout, and whatever the parts refuse. Not seen: code changed in place
(monkey-patched classes), autocast, and arguments of a single call.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from kvtier.errors import IdentityError, UnsupportedModelError
from kvtier.identity import ModelIdentity
from kvtier.integrations.transformers.adapters import active_adapters
from kvtier.integrations.transformers.layout import layout_of, text_config
from kvtier.integrations.transformers.weights import WeightsDigest, base_model, base_modules
from kvtier.layout import PageLayout

_ATTRIBUTE = "_kvtier_weights"

# : Configuration entries that do not change KV: names, versions, labels, token ids, what a call
# returns.
VOLATILE = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "transformers_version",
        "architectures", "auto_map", "use_cache", "torch_dtype", "dtype", "output_attentions",
        "output_hidden_states", "return_dict", "id2label", "label2id", "num_labels",
        "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "sep_token_id", "decoder_start_token_id", "is_decoder", "tie_word_embeddings",
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
        "_attn_implementation_autoset", "_experts_implementation",
        "_experts_implementation_internal", "chunk_size_feed_forward",
    }
)  # fmt: skip

#: Module settings that are counters or switches of training.
_VOLATILE_SETTINGS = frozenset({"training", "max_seq_len_cached", "gradient_checkpointing"})

#: Whose hooks and replaced forwards leave the numbers alone.
_TRUSTED = ("kvtier", "transformers", "accelerate", "torch", "peft")

#: Quantisation methods whose weights are plain tensors after loading.
_DEQUANTISED = frozenset({"gguf"})


def identity_of(
    model: nn.Module,
    *,
    layout: PageLayout | None = None,
    page_tokens: int = 32,
    tenant: str = "",
    revision: str | None = None,
    kv_quantisation: str = "",
) -> ModelIdentity:
    """The identity of ``model`` as it is now.

    The first call hashes all weights (about 1.4 GB/s on a CPU core); later ones check every bit in
    one pass of integer arithmetic and hash only what changed. What was learned is kept on the
    model.

    Args:
        model: a decoder-only transformers model in memory, with or without PEFT LoRA adapters.
        layout: the pages' layout; by default ``layout_of(model, page_tokens)``.
        page_tokens: tokens in a page, if no layout is given.
        tenant: salt; pages of different tenants are never exchanged.
        revision: something that distinguishes models which this function cannot tell apart, for
            instance a version of your own modelling code.
        kv_quantisation: that of the store (``TieredStore.kv_quantisation``), which codes pages in its lower tiers.

    Raises:
        IdentityError: something the KV depends on cannot be determined.
        UnsupportedModelError: the model, a weight or an adapter is of a kind without a rule.
    """
    config = text_config(model)
    expected = layout_of(model, layout.page_tokens if layout else page_tokens)
    layout = layout or expected
    base = base_model(model)
    quantisation = _quantisation(base)
    _refuse_active_dropout(model, base, config)
    _refuse_foreign_code(model)
    adapters = active_adapters(model)
    digest = base.__dict__.get(_ATTRIBUTE)
    if not isinstance(digest, WeightsDigest):
        digest = WeightsDigest()
        base.__dict__[_ATTRIBUTE] = digest
    return ModelIdentity(
        model=f"{type(base).__module__}.{type(base).__qualname__} {_structure(base)}",
        revision=revision or "",
        weights_digest=digest.digest(model),
        weights_quantisation=quantisation,
        kv_dtype=_kv_dtype(layout),
        kv_quantisation=kv_quantisation,
        rope=_rope(config),
        attention=_attention(layout),
        layout_digest=layout.digest,
        page_tokens=layout.page_tokens,
        adapters=adapters,
        tenant=tenant,
    )


def _structure(base: nn.Module) -> str:
    """Digest of the configuration and of every module's class and numeric settings."""
    config: Any = base.config
    lines = [json.dumps(_canonical(config.to_dict()), sort_keys=True)]
    for path, module in base_modules(base):
        kind = type(module)
        settings = {
            name: _canonical(value)
            for name, value in module.__dict__.items()
            if isinstance(value, bool | int | float)
            and name[0] != "_"
            and name not in _VOLATILE_SETTINGS
        }
        lines.append(
            json.dumps([path, kind.__module__, kind.__qualname__, settings], sort_keys=True)
        )
    return hashlib.blake2b(
        "\n".join(lines).encode(), digest_size=16, person=b"kvtier.struct"
    ).hexdigest()


def _canonical(value: Any) -> Any:
    """JSON with exact floats and without what does not change KV."""
    if isinstance(value, Mapping):
        return {
            str(key): _canonical(item)
            for key, item in value.items()
            if str(key) not in VOLATILE and not _is_dequantised(str(key), item)
        }
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    return value if isinstance(value, int | str | None) else str(value)


def _is_dequantised(key: str, value: Any) -> bool:
    return (
        key == "quantization_config"
        and isinstance(value, Mapping)
        and _method(value) in _DEQUANTISED
    )


def _method(config: Any) -> str:
    method = (
        config.get("quant_method")
        if isinstance(config, Mapping)
        else getattr(config, "quant_method", None)
    )
    return str(getattr(method, "value", method))


def _quantisation(base: nn.Module) -> str:
    """Empty for unquantised weights; there is no other rule yet, so anything else is refused."""
    config = getattr(base.config, "quantization_config", None)
    method = _method(config) if config else ""
    if getattr(base, "hf_quantizer", None) is not None and not method:
        method = type(base.hf_quantizer).__name__
    if method and method not in _DEQUANTISED:
        raise UnsupportedModelError(
            f"the weights are quantised by {method!r}; its state is not all in parameters and "
            "buffers, so their identity "
            "cannot be determined. Use unquantised weights, or without sharing"
        )
    return ""


def _rope(config: PreTrainedConfig) -> str:
    names = (
        "rope_parameters",
        "rope_theta",
        "partial_rotary_factor",
        "max_position_embeddings",
        "rope_interleave",
    )
    found = {
        name: _canonical(value)
        for name in names
        if (value := getattr(config, name, None)) is not None
    }
    return json.dumps(found, sort_keys=True)


def _attention(layout: PageLayout) -> str:
    kinds = [
        layer.kind if layer.window is None else f"{layer.kind} {layer.window}"
        for layer in layout.layers
    ]
    runs: list[list[Any]] = []
    for kind in kinds:
        if runs and runs[-1][1] == kind:
            runs[-1][0] += 1
        else:
            runs.append([1, kind])
    return ", ".join(f"{count} x {kind}" for count, kind in runs)


def _kv_dtype(layout: PageLayout) -> str:
    return "+".join(
        sorted(
            {d for layer in layout.layers if layer.paged for d in (layer.k_dtype, layer.v_dtype)}
        )
    )


def _refuse_active_dropout(model: nn.Module, base: nn.Module, config: PreTrainedConfig) -> None:
    if not base.training:
        return
    active = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]
    active += [
        name
        for name, value in config.to_dict().items()
        if "dropout" in name and isinstance(value, float) and value > 0
    ]
    if active:
        raise IdentityError(
            f"the model is in training mode with dropout ({active[0]}), so its KV is random; call "
            "model.eval(). "
            "Without it pages are not shared."
        )


def _refuse_foreign_code(model: nn.Module) -> None:
    top = {id(model), id(base_model(model))}
    for path, module in model.named_modules():
        for what, function in _attached(module, outputs=id(module) not in top):
            home = _home(function)
            if home.split(".")[0] not in _TRUSTED:
                raise IdentityError(
                    f"module {path or '(the model)'} has a {what} from {home}, which may change "
                    "its numbers; remove it while "
                    "pages are shared. Without it pages are not shared."
                )


def _attached(module: nn.Module, *, outputs: bool) -> Iterator[tuple[str, Any]]:
    """Code that was hung on one module. The output of the whole model feeds no KV."""
    for hook in module._forward_pre_hooks.values():
        yield "forward pre-hook", hook
    for hook in module._forward_hooks.values() if outputs else ():
        yield "forward hook", hook
    if "forward" in module.__dict__:
        yield "replaced forward", module.__dict__["forward"]


def _home(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"
