"""How many bytes of KV and of recurrent state a sequence has, layer by layer.

Per token and layer, MHA, GQA and MQA store K and V of ``kv_heads * head_dim`` elements each; MLA
stores one latent and one rope key for all heads (DeepSeek-V2, arXiv 2405.04434), so both count. A
sliding layer grows to its window and stops. A recurrent layer (Mamba, gated delta rule) has a state
of fixed size. A layer that shares another's KV stores nothing, but attention reads what it shares.
A compressed layer (DeepSeek V4) keeps a window of tokens and one entry for each ``rate`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvtier.cost.kv_dtype import KVDtype, kv_dtype
from kvtier.errors import ConfigError

Kind = Literal["full", "sliding", "latent", "compressed", "state", "shared", "none"]


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a sequence.

    Attributes:
        kind: ``full`` and ``sliding`` attention, ``latent`` (MLA), ``compressed`` (a window and an
            entry per ``rate`` tokens), ``state`` (recurrent only), ``shared`` (reads another layer's
            KV) or ``none``.
        k, v: elements of a token or entry; of MLA the latent and the rope key.
        window: tokens that are kept of a ``sliding`` or ``compressed`` layer, 0 otherwise.
        rate: tokens that an entry of a ``compressed`` layer stands for, 0 otherwise.
        extra_bytes: bytes that a token adds whatever the KV dtype, such as a sparse indexer's keys.
        state_bytes: recurrent state, whatever the length; attention beside it is allowed.
        source: of a ``shared`` layer, the index of the one whose KV it reads.
    """

    kind: Kind
    k: int = 0
    v: int = 0
    window: int = 0
    rate: int = 0
    extra_bytes: float = 0.0
    state_bytes: int = 0
    source: int | None = None

    def __post_init__(self) -> None:
        for name in ("k", "v", "window", "rate", "extra_bytes", "state_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} of a layer is {getattr(self, name)}; give a number >= 0")
        if self.kind == "sliding" and not self.window:
            raise ConfigError("a sliding layer has window 0; give its tokens, or kind full")
        if (self.kind == "compressed") != (self.rate > 0):
            raise ConfigError(
                f"rate of a {self.kind} layer is {self.rate}; only compressed ones have one"
            )
        if self.kind in ("state", "shared", "none") and (self.k or self.v or self.extra_bytes):
            raise ConfigError(f"a {self.kind} layer adds no bytes per token; set k and v to 0")

    @property
    def grows(self) -> bool:
        """Whether each token adds bytes, however long the sequence is."""
        return (self.rate > 0 or not self.window) and self.k + self.v + self.extra_bytes > 0

    def token_bytes(self, dtype: KVDtype) -> float:
        """Bytes that a token takes while it is kept."""
        return (self.k + self.v) * dtype.element_bits / 8 + self.extra_bytes

    def growth_bytes(self, dtype: KVDtype) -> float:
        """Bytes that one more token adds once the window is full, on average."""
        if not self.grows:
            return 0.0
        return self.token_bytes(dtype) / max(1, self.rate)

    def window_bytes(self, tokens: float, dtype: KVDtype) -> float:
        """Bytes that the window holds of ``tokens`` tokens."""
        # Only the entries of a compressed layer have an indexer.
        extra = 0.0 if self.rate else self.extra_bytes
        return min(tokens, self.window) * ((self.k + self.v) * dtype.element_bits / 8 + extra)

    def kv_bytes(self, tokens: float, dtype: KVDtype) -> float:
        """Bytes of KV of ``tokens`` tokens, state not included."""
        entries = tokens // self.rate if self.rate else tokens if self.grows else 0.0
        return entries * self.token_bytes(dtype) + self.window_bytes(tokens, dtype)


def layers_bytes(layers: Sequence[LayerShape], tokens: float, dtype: str | KVDtype) -> float:
    """KV and state of a sequence of ``tokens`` tokens; ConfigError for negative ``tokens``."""
    if tokens < 0:
        raise ConfigError(f"tokens is {tokens}; give a number >= 0")
    fmt = kv_dtype(dtype)
    return sum(layer.kv_bytes(tokens, fmt) + layer.state_bytes for layer in layers)


@dataclass(frozen=True)
class KVBytes:
    """KV of a sequence.

    Attributes:
        per_token: bytes that one more token adds once all windows are full.
        window_bytes: what the sliding layers hold at this length.
        state_bytes: recurrent state.
        total: all of it, in bytes.
    """

    per_token: float
    window_bytes: float
    state_bytes: float
    total: float

    @property
    def growth_per_token(self) -> float:
        return self.per_token

    @property
    def fixed(self) -> float:
        """Bytes that do not grow with the sequence any more."""
        return self.window_bytes + self.state_bytes

    @property
    def fixed_mib(self) -> float:
        return self.fixed / 2**20

    @property
    def total_mib(self) -> float:
        return self.total / 2**20

    @property
    def total_gib(self) -> float:
        return self.total / 2**30

    @property
    def total_gb(self) -> float:
        return self.total / 1e9


def measure(layers: Sequence[LayerShape], tokens: float, dtype: str | KVDtype) -> KVBytes:
    """``KVBytes`` of these layers."""
    fmt = kv_dtype(dtype)
    growth = sum(layer.growth_bytes(fmt) for layer in layers)
    windows = sum(layer.window_bytes(tokens, fmt) for layer in layers)
    state = float(sum(layer.state_bytes for layer in layers))
    return KVBytes(growth, windows, state, layers_bytes(layers, tokens, fmt))


def kv_bytes(
    tokens: float,
    *,
    full_layers: int = 0,
    sliding_layers: int = 0,
    window: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    v_head_dim: int | None = None,
    mla_layers: int = 0,
    latent: int = 0,
    rope: int = 0,
    state_bytes: int = 0,
    dtype: str | KVDtype | None = None,
    bytes: float | None = None,
    sequences: int = 1,
    shards: int = 1,
) -> KVBytes:
    """KV of ``sequences`` sequences of ``tokens`` tokens each, by numbers.

    Args:
        full_layers, sliding_layers: attention layers; ``window`` tokens in each sliding one.
        kv_heads, head_dim: of K, and of V unless ``v_head_dim`` says otherwise.
        mla_layers, latent, rope: MLA; with ``latent`` and no ``mla_layers``, ``full_layers`` are MLA.
        state_bytes: recurrent state of a sequence.
        dtype: format, ``bf16`` if neither it nor ``bytes`` is given. bytes: of an element.
        shards: GPUs of a tensor-parallel group: KV heads are split, at most into single heads; an
            MLA latent is on each.

    Raises:
        ConfigError: a number is negative, or there is no layer that keeps anything.
    """
    counts = {
        "tokens": tokens, "full_layers": full_layers, "sliding_layers": sliding_layers,
        "window": window, "kv_heads": kv_heads, "head_dim": head_dim, "mla_layers": mla_layers,
        "latent": latent, "rope": rope, "state_bytes": state_bytes, "bytes": bytes or 0,
    }  # fmt: skip
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; give a number >= 0")
    if dtype is not None and bytes is not None:
        raise ConfigError(f"dtype is {dtype!r} and bytes {bytes}; give one of them")
    for name, least in (("sequences", sequences), ("shards", shards)):
        if least < 1:
            raise ConfigError(f"{name} is {least}; give 1 or more")
    fmt = KVDtype("given", bytes * 8) if bytes is not None else kv_dtype(dtype or "bf16")
    heads = -(-kv_heads // shards)
    k, v = heads * head_dim, heads * (head_dim if v_head_dim is None else v_head_dim)
    if latent and not mla_layers:
        full_layers, mla_layers = 0, full_layers
    layers = [LayerShape("full", k, v)] * full_layers
    if sliding_layers:
        layers += [LayerShape("sliding", k, v, window)] * sliding_layers
    layers += [LayerShape("latent", latent, rope)] * mla_layers
    if state_bytes:
        layers.append(LayerShape("state", state_bytes=state_bytes))
    one = measure(layers, tokens, fmt)
    if not (one.per_token or one.fixed or tokens == 0):
        raise ConfigError("nothing is kept; give full_layers, kv_heads and head_dim, or mla_layers")
    n = sequences
    return KVBytes(one.per_token, one.window_bytes * n, one.state_bytes * n, one.total * n)


def fixed_state_bytes(
    *,
    linear_layers: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    conv_channels: int = 0,
    conv_kernel: int = 0,
    bytes: float = 4,
    conv_bytes: float | None = None,
    snapshots: int = 1,
) -> float:
    """Recurrent state of a sequence in linear-attention or Mamba layers, in bytes.

    A layer keeps a matrix of ``k_dim x v_dim`` for each value head, and the last
    ``conv_kernel - 1`` inputs of its convolution (llama.cpp's ``n_embd_r``; a kernel of 4 looks back
    3 tokens). For Mamba, ``k_dim`` is the state size, ``v_heads * v_dim`` the inner size.

    Args:
        bytes: of an element; both parts are fp32 in llama.cpp. conv_bytes: of the convolution's
            inputs, if they differ.
        snapshots: copies that are kept to go back to.
    """
    numbers = {
        "linear_layers": linear_layers, "v_heads": v_heads, "k_dim": k_dim, "v_dim": v_dim,
        "conv_channels": conv_channels, "conv_kernel": conv_kernel, "bytes": bytes, "snapshots": snapshots,
    }  # fmt: skip
    for name, value in numbers.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; give a number >= 0")
    matrix = v_heads * k_dim * v_dim * bytes
    conv = conv_channels * max(0, conv_kernel - 1) * (bytes if conv_bytes is None else conv_bytes)
    return linear_layers * (matrix + conv) * snapshots


def tokens_in_pool(pool_bytes: float, bytes_per_token: float, *, page_tokens: int = 1) -> int:
    """Tokens that a pool of KV pages holds, in whole pages."""
    _positive("bytes_per_token", bytes_per_token)
    _positive("page_tokens", page_tokens)
    if pool_bytes < 0:
        raise ConfigError(f"pool_bytes is {pool_bytes}; give a number >= 0")
    return int(pool_bytes // (bytes_per_token * page_tokens)) * page_tokens


def max_context(
    *,
    vram: float,
    weights: float,
    bytes_per_token: float,
    overhead: float = 0.0,
    fixed_bytes: float = 0.0,
    sequences: int = 1,
) -> int:
    """Longest context, in tokens, of each of ``sequences`` sequences; 0 if the weights do not fit.

    Args:
        vram, weights, overhead: bytes.
        bytes_per_token: that a sequence grows by. fixed_bytes: of a sequence whatever its length.
    """
    _positive("bytes_per_token", bytes_per_token)
    _positive("sequences", sequences)
    numbers = {"vram": vram, "weights": weights, "overhead": overhead, "fixed_bytes": fixed_bytes}
    for name, value in numbers.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; give bytes >= 0")
    free = (vram - weights - overhead) / sequences - fixed_bytes
    return max(0, int(free // bytes_per_token))


def max_sequences(
    *,
    pool_bytes: float,
    tokens: float,
    bytes_per_token: float,
    fixed_bytes: float = 0.0,
    page_tokens: int = 1,
    state_slots: int | None = None,
) -> int:
    """Sequences of ``tokens`` tokens that a pool holds.

    Args:
        fixed_bytes: of a sequence whatever its length (windows, recurrent state).
        page_tokens: the last page of a sequence is taken whole.
        state_slots: recurrent states that there is room for, where the engine sets a number.
    """
    _positive("page_tokens", page_tokens)
    numbers = {
        "pool_bytes": pool_bytes, "tokens": tokens, "bytes_per_token": bytes_per_token,
        "fixed_bytes": fixed_bytes,
    }  # fmt: skip
    for name, value in numbers.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; give a number >= 0")
    one = -(-tokens // page_tokens) * page_tokens * bytes_per_token + fixed_bytes
    if not one > 0:
        raise ConfigError("a sequence takes 0 bytes; give tokens and bytes_per_token > 0")
    fits = int(pool_bytes // one)
    return fits if state_slots is None else min(fits, state_slots)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}; give a number > 0")
