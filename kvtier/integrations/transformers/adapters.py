"""Which PEFT adapters act in a model at this moment, read from its live modules.

The configuration does not tell: ``set_scale`` and ``rescale_adapter_scale`` change the modules
alone. An adapter acts in a LoRA layer if it is active there, the layer is not disabled and nothing
is merged into it; what is merged acts through the weights, and the weights' digest sees it.

An adapter's digest covers where it acts (module paths of the model without PEFT), its tensors and
the ratios of its scalings between modules, not its name; its scale is the scaling (lora_alpha / r
times the factor that was set) of the first module in which it is not 0. So the scale alone changes
when all modules are scaled alike, and scale 0 everywhere is the same as no adapter. DoRA normalises
even at scale 0, so there the scalings are part of the digest and the scale is 1.

Not seen here: ``adapter_names`` of a mixed batch, an argument of a single call. The caller refuses
it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from kvtier.errors import IdentityError, UnsupportedModelError
from kvtier.identity import AdapterIdentity
from kvtier.integrations.transformers.weights import base_model

_ATTRIBUTE = "_kvtier_adapters"

#: LoRA layers and variants whose effect is a function of what is hashed here.
_LAYERS = frozenset({"Linear", "Embedding", "ParamWrapper"})
_VARIANTS = frozenset({"DoraLinearVariant", "DoraEmbeddingVariant"})
_CONTAINERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def active_adapters(model: nn.Module) -> tuple[AdapterIdentity, ...]:
    """The adapters that act now, in no particular order. Reads every weight of an active adapter.

    Raises:
        UnsupportedModelError: an adapter that is no plain LoRA or DoRA (prompt learning, another
            tuner, modules trained in full, an unknown LoRA variant), or adapters that are merged
            and disabled at once.
        IdentityError: a scaling that is not finite, or an adapter on the meta device.
    """
    _refuse_unknown(model)
    scalings: dict[str, dict[str, float]] = {}
    contents: dict[str, dict[str, bytes]] = {}
    special: set[str] = set()
    for path, layer in _lora_layers(model):
        for name in _acting(path, layer):
            variant = layer.lora_variant.get(name)
            scaling = float(layer.scaling[name])
            if not math.isfinite(scaling):
                raise IdentityError(
                    f"adapter {name!r} has the scaling {scaling} in {path}; set a finite one"
                )
            if variant is not None:
                special.add(name)
            scalings.setdefault(name, {})[path] = scaling
            contents.setdefault(name, {})[path] = _content(path, layer, name, variant)
    return tuple(
        _identity(scalings[name], contents[name], name in special) for name in sorted(scalings)
    )


def adapter_state(model: nn.Module) -> tuple[Any, ...]:
    """A hashable value that changes when an adapter is switched, scaled, merged, disabled, loaded
    or trained.

    Takes well under a millisecond for some hundred LoRA layers: it looks at flags, scalings,
        addresses and version
    counters, not at the weights. So edits through ``.data`` escape it; ``active_adapters`` sees
    those. The list of layers is kept on the model and looked up anew when its adapters have other
    names.
    """
    watch = model.__dict__.get(_ATTRIBUTE)
    names = _names(model)
    if watch is None or watch.names != names:
        watch = _Watch(model, names)
        model.__dict__[_ATTRIBUTE] = watch
    return watch.state()


class _Watch:
    """The LoRA layers of a model and the slots of their weights."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.names = names
        self.layers = [layer for _, layer in _tuner_layers(model)]
        # The dicts in which modules keep their parameters: a slot shows a replaced parameter too.
        self.slots: list[tuple[dict[str, Any], str]] = []
        for layer in self.layers:
            for container in _CONTAINERS:
                inner = layer._modules.get(container)
                for module in inner.modules() if inner is not None else ():
                    self.slots += [
                        (module._parameters, key)
                        for key, value in module._parameters.items()
                        if value is not None
                    ]

    def state(self) -> tuple[Any, ...]:
        layers = tuple(
            (
                layer._disable_adapters,
                active if isinstance(active := layer._active_adapter, str) else tuple(active),
                tuple(layer.merged_adapters),
                tuple(getattr(layer, "scaling", {}).items()),
            )
            for layer in self.layers
        )
        weights = tuple([_slot(slot.get(key)) for slot, key in self.slots])
        return (self.names, layers, weights)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied or stored with a model, it looks the layers up anew.
        return (_empty_watch, ())


def _empty_watch() -> None:
    return None


def _slot(tensor: torch.Tensor | None) -> tuple[int, int] | None:
    if tensor is None:
        return None
    return (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)


def _names(model: nn.Module) -> tuple[str, ...]:
    configs = getattr(model, "peft_config", None)
    return tuple(configs) if isinstance(configs, dict) else ()


def _tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every PEFT layer with its path in the model without PEFT."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return
    for path, module in base_model(model).named_modules():
        if isinstance(module, BaseTunerLayer):
            yield (
                ".".join(
                    part
                    for part in path.split(".")
                    if part not in ("base_layer", "original_module")
                ),
                module,
            )


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, layer in _tuner_layers(model):
        from peft.tuners.lora.layer import LoraLayer

        kind = type(layer).__name__
        if not isinstance(layer, LoraLayer) or kind not in _LAYERS:
            raise UnsupportedModelError(
                f"{path} has an adapter layer of type {type(layer).__module__}.{kind}; there is no "
                "rule for its identity. "
                "Use plain LoRA or DoRA, or merge_and_unload() it into the weights"
            )
        yield path, layer


def _acting(path: str, layer: Any) -> list[str]:
    """Names of the adapters that contribute to the layer's output, as LoRA's ``forward`` decides
    it."""
    if layer.disable_adapters:
        if layer.merged:
            raise UnsupportedModelError(
                f"adapters are merged into {path} and disabled, so the next call unmerges them and "
                "changes the weights; "
                "call unmerge_adapter() first"
            )
        return []
    if layer.merged:
        return []
    names = [
        name
        for name in layer.active_adapters
        if name in layer.lora_A or name in layer.lora_embedding_A
    ]
    for name in names:
        variant = type(layer.lora_variant.get(name)).__name__
        if name in layer.lora_variant and variant not in _VARIANTS:
            raise UnsupportedModelError(
                f"adapter {name!r} is a LoRA variant ({variant}) without a rule for its identity; "
                "use plain LoRA or DoRA, "
                "or merge_and_unload() it into the weights"
            )
    return names


def _refuse_unknown(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {name!r} is prompt learning ({config.peft_type}): its virtual tokens are "
                "not among the token ids; "
                "use LoRA"
            )
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            raise UnsupportedModelError(
                f"adapter {name!r} is of type {kind}; there is no rule for its identity. Use LoRA, "
                "or "
                "merge_and_unload() it into the weights"
            )
    try:
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        return
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise UnsupportedModelError(
                f"{path} is trained in full or in part with the adapter (modules_to_save, "
                "trainable_token_indices); there is "
                "no rule for its identity. merge_and_unload() the adapter into the weights"
            )


def _content(path: str, layer: Any, name: str, variant: object) -> bytes:
    """Digest of an adapter's tensors in one layer."""
    h = hashlib.sha256()
    what = (type(layer).__name__, getattr(layer, "parameter_name", ""), type(variant).__name__)
    _feed(h, repr(what).encode())
    for container in _CONTAINERS:
        held = getattr(layer, container, None)
        if held is None or name not in held:
            continue
        value = held[name]
        named = (
            [("", value)]
            if isinstance(value, torch.Tensor)
            else [*value.named_parameters(), *value.named_buffers()]
        )
        for inner, tensor in named:
            if tensor.device.type == "meta":
                raise IdentityError(
                    f"adapter {name!r} in {path} is on the meta device; load it into memory"
                )
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                raise UnsupportedModelError(
                    f"adapter {name!r} in {path} is a {type(tensor).__name__}; there is no rule "
                    "how to hash it"
                )
            _feed(h, f"{container}|{inner}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
            _feed(
                h,
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes(),
            )
    return h.digest()


def _identity(
    scalings: dict[str, float], contents: dict[str, bytes], special: bool
) -> AdapterIdentity:
    h = hashlib.sha256()
    nonzero = [path for path in sorted(scalings) if scalings[path] != 0.0]
    scale = 1.0 if special else (scalings[nonzero[0]] if nonzero else 0.0)
    for path in sorted(scalings) if special else nonzero:
        # An exact ratio: two scalings that differ in the last bit must not become equal by
        # rounding.
        ratio = Fraction(scalings[path]) / Fraction(scale)
        _feed(h, path.encode())
        _feed(h, f"{ratio.numerator}/{ratio.denominator}".encode())
        _feed(h, contents[path])
    return AdapterIdentity(h.digest(), scale)


def _feed(h: Any, data: bytes) -> None:
    h.update(len(data).to_bytes(8, "little"))
    h.update(data)
