"""The identity of live transformers models: what changes KV changes it, and nothing else does."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from kvtier.errors import IdentityError, UnsupportedModelError  # noqa: E402
from kvtier.integrations.transformers import weights as weights_module  # noqa: E402
from kvtier.integrations.transformers.adapters import active_adapters, adapter_state  # noqa: E402
from kvtier.integrations.transformers.identity import identity_of  # noqa: E402
from kvtier.integrations.transformers.layout import layout_of  # noqa: E402
from kvtier.integrations.transformers.weights import WeightsDigest, named_weights  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(SMALL | {"tie_word_embeddings": True} | changes))
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def lora(**changes: Any) -> Any:
    options = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
    }
    return peft.LoraConfig(**(options | changes))


def fill(model: Any, name: str, seed: int) -> None:
    """Random weights for an adapter, whose B is zero at first."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        if ".lora_" in path and f".{name}" in path:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05


def adapted(*names: str, **changes: Any) -> Any:
    """A model with adapters of different content; the first one is active."""
    model = peft.get_peft_model(make(), lora(**changes), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora(**changes))
    for seed, name in enumerate(names):
        fill(model, name, seed)
    model.set_adapter(names[0])
    return model.eval()


def lora_layers(model: Any) -> Iterator[Any]:
    from peft.tuners.lora.layer import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


def set_scale(model: Any, name: str, scale: float) -> None:
    for layer in lora_layers(model):
        layer.set_scale(name, scale)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


def digest(model: Any) -> bytes:
    return identity_of(model).digest


# The layout.


def test_layout_of_full_attention() -> None:
    layout = layout_of(make(), 16)
    assert layout.page_tokens == 16
    assert [layer.kind for layer in layout.layers] == ["full"] * 3
    assert (layout.layers[0].k_heads, layout.layers[0].k_dim, layout.layers[0].k_dtype) == (
        2,
        16,
        "float32",
    )
    assert layout_of(make().config, 16, torch.bfloat16).layers[0].v_dtype == "bfloat16"
    assert layout_of(make(head_dim=24)).layers[0].k_dim == 24
    assert layout_of(adapted("a"), 16) == layout


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=48),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen2 sliding": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=48, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=32, sliding_window=48),
    "gemma3 text": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=48),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=3,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_is_what_the_model_stores(name: str) -> None:
    """Against the shapes, dtypes and windows in transformers' own cache after a forward pass."""
    config = CONFIGS[name]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    layout = layout_of(model)
    cache = transformers.DynamicCache(config=config)
    seen: list[tuple[int, int, str, int, int, str]] = []
    for layer in cache.layers:

        def update(k: Any, v: Any, *args: Any, real: Any = layer.update, **kwargs: Any) -> Any:
            shapes = [(t.shape[1], t.shape[3], str(t.dtype).removeprefix("torch.")) for t in (k, v)]
            seen.append((*shapes[0], *shapes[1]))
            return real(k, v, *args, **kwargs)

        layer.update = update
    with torch.no_grad():
        model(torch.arange(9)[None], cache=cache)
    assert seen == [
        (x.k_heads, x.k_dim, x.k_dtype, x.v_heads, x.v_dim, x.v_dtype) for x in layout.layers
    ]
    assert [getattr(layer, "sliding_window", None) for layer in cache.layers] == [
        x.window for x in layout.layers
    ]


def longrope() -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    return transformers.LlamaConfig(
        **SMALL, rope_parameters=rope, original_max_position_embeddings=128
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: transformers.Qwen3NextConfig(**SMALL), "layer 0 .*'linear_attention'"),
        (
            lambda: transformers.Gemma3nTextConfig(**SMALL, num_kv_shared_layers=2),
            "shares KV between layers",
        ),
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.PaliGemmaConfig(), "attends in both directions"),
        (
            lambda: transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True),
            "bidirectional attention",
        ),
        (lambda: transformers.Llama4TextConfig(**SMALL), "'chunked_attention'"),
        (longrope, "rope of type 'longrope'"),
        (
            lambda: transformers.LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope of type 'dynamic'",
        ),
        (lambda: nn.Linear(2, 2), "has no transformers configuration"),
    ],
)
def test_models_that_cannot_be_served_exactly_are_refused(
    config: Callable[[], Any], says: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        layout_of(config(), dtype="float16")


def test_a_configuration_without_dtype_needs_one() -> None:
    with pytest.raises(UnsupportedModelError, match="give dtype="):
        layout_of(transformers.LlamaConfig(**SMALL))


# The weights.


def test_equal_models_have_equal_identities() -> None:
    model = make()
    assert (
        identity_of(model)
        == identity_of(model)
        == identity_of(make())
        == identity_of(copy.deepcopy(model))
    )
    assert digest(model) != digest(make(seed=1))
    assert identity_of(model, tenant="a").digest != digest(model)
    assert identity_of(model, revision="a").digest != digest(model)
    assert identity_of(model, page_tokens=16).digest != digest(model)
    assert identity_of(model, layout=layout_of(model, 16)) == identity_of(model, page_tokens=16)


def test_names_are_no_identity(tmp_path: Any) -> None:
    model = make()
    before = digest(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._name_or_path != model.config._name_or_path
    assert digest(again) == before
    again.config.eos_token_id = 7
    again.set_attn_implementation("eager")
    assert digest(again) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_changed_element_is_seen_wherever_it_is(dtype: torch.dtype) -> None:
    model = make(dtype=dtype)
    digests = {before := digest(model)}
    tensors = dict(named_weights(model))
    for count, tensor in enumerate(tensors.values(), start=1):
        flat = tensor.data.reshape(-1)
        index = count * 7919 % flat.numel()
        old = flat[index].clone()
        flat[index] = old + 1
        digests.add(digest(model))
        assert len(digests) == count + 1
        flat[index] = old
        assert digest(model) == before


def test_only_changed_tensors_are_hashed_again() -> None:
    model = make()
    state = WeightsDigest()
    first = state.digest(model)
    hashed = state.hashed
    assert hashed == len(dict(named_weights(model)))
    assert state.digest(model) == first
    assert state.hashed == hashed
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1
    assert state.digest(model) != first
    assert state.hashed == hashed + 1


def test_the_check_sees_what_sums_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that keep plain, position-weighted or 64-bit sums, over many rows of the check."""
    monkeypatch.setattr(weights_module, "ROW", 16)
    state = WeightsDigest()
    module: Any = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)))
    seen = {state.digest(module)}
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 400):
        flat = module.w.data.view(torch.int16)
        if count % 3 == 0:  # sign bits of two elements that are the top ones of their words
            at = torch.randint(0, 249, (2,), generator=generator) * 4 + 3
            flat[at] ^= -(2**15)
        elif count % 3 == 1:  # +a and -a
            a, b = torch.randperm(1000, generator=generator)[:2]
            flat[a] += 3
            flat[b] -= 3
        else:  # +1 -2 +1 in a row: keeps the position-weighted sum too
            a = int(torch.randint(0, 998, (1,), generator=generator))
            flat[a : a + 3] += torch.tensor([1, -2, 1], dtype=torch.int16)
        made = state.digest(module)
        assert made == WeightsDigest().digest(module)
        seen.add(made)
    assert len(seen) > 390


def test_two_changes_of_a_top_bit_do_not_cancel() -> None:
    """With odd factors alone, two flips of bit 63 would cancel for certain."""
    module: Any = nn.Module()
    module.register_buffer("w", torch.zeros(4096, dtype=torch.int64))
    state = WeightsDigest()
    before = state.digest(module)
    module.w[5] ^= -(2**63)
    module.w[77] ^= -(2**63)
    assert state.digest(module) != before


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2**16 + 3,), (8, 2**16 + 1)])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32]
)
def test_tensors_of_every_size_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module: Any = nn.Module()
    module.register_buffer("w", torch.zeros(shape, dtype=torch.uint8).to(dtype))
    state = WeightsDigest()
    before = state.digest(module)
    if module.w.numel():
        flat = module.w.view(-1).view(torch.uint8)
        flat[-1] = 1
        last = state.digest(module)
        flat[-1] = 0
        flat[0] = 1
        assert len({before, last, state.digest(module)}) == (3 if flat.numel() > 1 else 2)
        flat[0] = 0
    assert state.digest(module) == before


def test_views_and_transposed_weights_are_read_in_their_own_order() -> None:
    storage = torch.arange(64, dtype=torch.bfloat16)
    odd, transposed, plain = (nn.Module() for _ in range(3))
    odd.register_buffer("w", storage[1:25].view(4, 6))
    plain.register_buffer("w", storage[1:25].view(4, 6).clone())
    transposed.register_buffer("w", storage[1:25].view(4, 6).t().contiguous().t())
    assert (
        WeightsDigest().digest(odd)
        == WeightsDigest().digest(plain)
        == WeightsDigest().digest(transposed)
    )


def test_shape_dtype_and_name_count() -> None:
    def one(name: str, tensor: torch.Tensor) -> bytes:
        module: Any = nn.Module()
        module.register_buffer(name, tensor)
        return WeightsDigest().digest(module)

    zeros = torch.zeros(4, 6, dtype=torch.float16)
    made = [
        one("w", zeros),
        one("v", zeros),
        one("w", zeros.view(6, 4)),
        one("w", zeros.view(torch.bfloat16)),
    ]
    assert len(set(made)) == 4


def test_tied_weights_are_read_once() -> None:
    names = set(dict(named_weights(make())))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in dict(named_weights(make(tie_word_embeddings=False)))


def test_rope_dtype_and_settings_count() -> None:
    base = digest(make())
    theta = make(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert (
        len(
            {
                base,
                digest(theta),
                digest(make(dtype=torch.bfloat16)),
                digest(make(rms_norm_eps=1e-3)),
            }
        )
        == 4
    )
    model = make()
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(0.5)
    assert digest(model) != base
    frequencies.mul_(2)
    assert digest(model) == base
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 2e4}
    assert digest(model) != base
    model = make()
    model.model.layers[0].self_attn.scaling *= 0.5
    assert digest(model) != base


def test_running_the_model_does_not_change_its_identity() -> None:
    model = make()
    before = digest(model)
    model.generate(torch.arange(9)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    logits(model)
    assert digest(model) == before


def test_weights_without_known_content_are_refused() -> None:
    model = make()
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.empty(96, 64, device="meta"))
    with pytest.raises(
        IdentityError, match=r"layers\.1\.mlp\.up_proj\.weight is on the meta device"
    ):
        identity_of(model)


def test_quantised_weights_are_refused() -> None:
    class Packed(torch.Tensor):
        pass

    model = make()
    up = model.model.layers[1].mlp.up_proj
    up._parameters["weight"] = torch.zeros(96, 64).as_subclass(Packed)
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight is a Packed"):
        identity_of(model)
    model = make()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UnsupportedModelError, match="quantised by 'bitsandbytes'"):
        identity_of(model)


def test_weights_that_were_dequantised_at_load_are_plain() -> None:
    model = make()
    before = digest(model)
    model.config.quantization_config = {"quant_method": "gguf"}
    assert digest(model) == before


def test_dropout_in_training_mode_is_refused() -> None:
    model = make(attention_dropout=0.1)
    before = digest(model)
    model.train()
    with pytest.raises(IdentityError, match=r"model\.eval\(\)"):
        identity_of(model)
    model.eval()
    assert digest(model) == before


def test_foreign_hooks_and_forwards_are_refused() -> None:
    model = make()
    before = digest(model)
    attention = model.model.layers[1].self_attn
    for register in (attention.register_forward_hook, attention.register_forward_pre_hook):
        handle = register(lambda *args: None)
        with pytest.raises(
            IdentityError,
            match=r"layers\.1\.self_attn has a forward.*from test_transformers_identity",
        ):
            identity_of(model)
        handle.remove()
    attention.forward = lambda *args, **kwargs: None
    with pytest.raises(IdentityError, match="replaced forward"):
        identity_of(model)
    del attention.forward
    model.register_forward_hook(lambda *args: None)
    assert digest(model) == before


def test_what_is_kept_on_the_model_is_not_stored_with_it() -> None:
    model = adapted("a")
    digest(model)
    adapter_state(model)
    copied = pickle.loads(pickle.dumps(model))
    assert digest(copied) == digest(model)
    assert adapter_state(copied)[:2] == adapter_state(model)[:2]


# The adapters.


def test_scale_adapter_and_absence_are_different_identities() -> None:
    model = adapted("a", "b")
    made = {"a": digest(model)}
    set_scale(model, "a", 0.5)
    made["a half"] = digest(model)
    assert identity_of(model).adapters[0].scale == 1.0  # lora_alpha / r = 2, halved
    set_scale(model, "a", 1.0)
    assert digest(model) == made["a"]
    model.set_adapter("b")
    made["b"] = digest(model)
    model.base_model.set_adapter(["a", "b"])
    made["both"] = digest(model)
    model.base_model.set_adapter(["b", "a"])
    assert digest(model) == made["both"]
    model.set_adapter("a")
    assert digest(model) == made["a"]
    made["plain"] = digest(make())
    assert len(set(made.values())) == 5


def test_scale_zero_and_disabled_share_with_the_base_model() -> None:
    base = digest(make())
    model = adapted("a")
    assert digest(model) != base
    set_scale(model, "a", 0.0)
    assert digest(model) == base
    assert torch.equal(logits(model), logits(make()))
    set_scale(model, "a", 1.0)
    with model.disable_adapter():
        assert digest(model) == base
    assert digest(model) != base
    from peft.helpers import rescale_adapter_scale

    before = digest(model)
    with rescale_adapter_scale(model, 0.7):
        assert digest(model) not in (before, base)
    assert digest(model) == before


def test_an_adapter_is_its_content_and_not_its_name() -> None:
    one, other = adapted("first"), adapted("second")
    fill(other, "second", 0)
    assert digest(one) == digest(other)
    fill(other, "second", 1)
    assert digest(one) != digest(other)
    before = digest(one)
    parameter = next(p for n, p in one.named_parameters() if "lora_B" in n)
    parameter.data[0, 0] += 1e-6
    assert digest(one) != before


def test_modules_and_their_own_scales_count() -> None:
    model = adapted("a")
    before = identity_of(model)
    layers = list(lora_layers(model))
    layers[2].set_scale("a", 0.5)
    one = identity_of(model)
    layers[2].set_scale("a", 1.0)
    layers[3].set_scale("a", 0.5)
    other = identity_of(model)
    assert len({before.digest, one.digest, other.digest}) == 3
    # The last bit of a scaling counts, also where it is lost in the ratio to the first one.
    set_scale(model, "a", 1.5)
    first, bit = layers[0].scaling["a"], 1.5
    while bit / first != math.nextafter(bit, 2) / first:
        bit = math.nextafter(bit, 2)
    layers[5].scaling["a"] = bit
    near = identity_of(model)
    layers[5].scaling["a"] = math.nextafter(bit, 2)
    assert len({near.digest, identity_of(model).digest}) == 2
    # All alike: the scale alone.
    set_scale(model, "a", 0.25)
    scaled = identity_of(model)
    assert scaled.adapters[0].digest == before.adapters[0].digest
    assert scaled.adapters[0].scale == before.adapters[0].scale / 4


def test_merged_adapters_act_through_the_weights() -> None:
    model = adapted("a")
    live = identity_of(model)
    model.base_model.merge_adapter()
    merged = identity_of(model)
    assert merged.adapters == ()
    assert merged.weights_digest != live.weights_digest
    state = adapter_state(model)
    model.base_model.disable_adapter_layers()
    with pytest.raises(UnsupportedModelError, match=r"merged into .* and disabled"):
        identity_of(model)
    assert adapter_state(model) != state
    model.base_model.enable_adapter_layers()
    unloaded = model.merge_and_unload()
    assert identity_of(unloaded) == merged


def test_dora_acts_even_at_scale_zero() -> None:
    model = adapted("a", use_dora=True)
    for path, parameter in model.named_parameters():
        if "magnitude" in path:
            parameter.data.abs_().add_(1.0)
    made = {digest(model), digest(make())}
    set_scale(model, "a", 0.0)
    assert not torch.equal(logits(model), logits(make()))
    made.add(digest(model))
    magnitude = next(p for n, p in model.named_parameters() if "magnitude" in n)
    magnitude.data[0] += 0.5
    made.add(digest(model))
    assert len(made) == 4


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "prompt learning",
        ),
        (
            lambda: peft.IA3Config(
                target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
            ),
            "type IA3",
        ),
        (lambda: lora(modules_to_save=["lm_head"]), "modules_to_save"),
        (
            lambda: lora(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
            "LoRA variant .ALora",
        ),
    ],
)
def test_adapters_without_a_rule_are_refused(config: Callable[[], Any], says: str) -> None:
    model = peft.get_peft_model(make(tie_word_embeddings=False), config()).eval()
    with pytest.raises(UnsupportedModelError, match=says):
        identity_of(model)


def test_a_scale_that_is_no_number_is_refused() -> None:
    model = adapted("a")
    set_scale(model, "a", float("nan"))
    with pytest.raises(IdentityError, match="scaling nan"):
        active_adapters(model)


def test_adapters_loaded_into_the_model_itself_count() -> None:
    model = make()
    base, state = digest(model), adapter_state(model)
    model = peft.inject_adapter_in_model(lora(), model, adapter_name="x")
    fill(model, "x", 3)
    model.eval()
    assert adapter_state(model) != state
    with_adapter = digest(model)
    assert with_adapter != base
    for layer in lora_layers(model):
        layer.enable_adapters(False)
    assert digest(model) == base
    wrapped = adapted("x")
    fill(wrapped, "x", 3)
    assert digest(wrapped) == with_adapter


# The cheap look before each forward pass.


def test_adapter_state_sees_every_switch() -> None:
    model = adapted("a", "b")
    states = [adapter_state(model)]
    assert adapter_state(model) == states[0]

    def step(change: Callable[[], object]) -> None:
        change()
        state = adapter_state(model)
        hash(state)
        assert state not in states, change
        states.append(state)

    step(lambda: model.set_adapter("b"))
    step(lambda: set_scale(model, "b", 0.5))
    step(lambda: model.base_model.disable_adapter_layers())
    model.base_model.enable_adapter_layers()
    step(lambda: set_scale(model, "b", 0.25))
    step(lambda: model.base_model.set_adapter(["b", "a"]))
    step(lambda: model.base_model.merge_adapter(["b"]))
    step(lambda: model.add_adapter("c", lora()))
    weight = next(lora_layers(model)).lora_A["b"].weight
    with torch.no_grad():
        step(lambda: weight.add_(1))
    step(lambda: setattr(weight, "data", weight.data.clone()))
    step(
        lambda: setattr(
            next(lora_layers(model)).lora_B["b"], "weight", nn.Parameter(torch.ones(64, 4))
        )
    )
    step(lambda: model.delete_adapter("c"))


def test_adapter_state_of_a_model_without_adapters_is_constant() -> None:
    model = make()
    assert adapter_state(model) == adapter_state(model)
    logits(model)
    assert adapter_state(model) == adapter_state(model)
