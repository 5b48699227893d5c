"""The digest of a model's weights: all bits of all parameters and buffers, cheap to check again.

Two levels, both over every bit:

* The digest proper: SHA-256 of each tensor's bytes, then of (name, dtype, shape, that) of all
  tensors in the order of names. Equal digests mean equal weights, on any machine. About 1.4 GB/s on
  one CPU core with SHA instructions.
* The check that decides whether a tensor's SHA-256 may be reused: each row of 2**16 words of 64
  bits goes through the multilinear hash sum(a[i] * x[i] + b[i] * (x[i] >> 32)) mod 2**64 with
  secret odd random a, b (Carter and Wegman, "Universal classes of hash functions", 1979), the row
  sums through BLAKE2b. One pass of integer arithmetic where the weights lie. A change within one
  32-bit half of a word is always seen, because the factors are odd. Any other change made without
  knowledge of the secret is missed in a row with a probability of at most 2**-32. The shifted term
  is what makes that true: without it, flips of the top bits of two words would cancel for certain.

So an edit of one element, in place, by ``.data``, by a merge or by an optimiser step changes the
digest at the next call. ``Tensor._version`` is no help: it does not count edits through ``.data``.

Names are those of the model without adapters: PEFT's wrappers are undone, their own weights left
out. Not seen: tensors that a module keeps without registering them as parameter or buffer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from kvtier.errors import IdentityError, UnsupportedModelError

#: 64-bit words in a row of the check.
ROW = 2**16

#: Rows worked on at once: CPU rows stay in the cache, a GPU wants few large launches.
_ROWS_AT_ONCE = {"cpu": 1}
_ROWS_ELSEWHERE = 64

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@runtime_checkable
class _HasBase(Protocol):
    def get_base_model(self) -> nn.Module: ...


class _Known(NamedTuple):
    check: bytes
    digest: bytes


class WeightsDigest:
    """The digest of one model's weights, with what was learned at the last call.

    Holds two secret vectors a device (2 x 512 KiB) and 64 bytes a tensor, and no reference to the
    model.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._factors: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Tensors whose bytes were hashed in full, over all calls.
        self.hashed = 0

    def digest(self, model: nn.Module) -> bytes:
        """32 bytes: the digest of all parameters and buffers as they are now. Waits for their
        device.

        Raises:
            IdentityError: a weight is on the meta device (offloaded to disk, or never loaded).
            UnsupportedModelError: a weight is of a tensor type without a rule, for instance
                quantised.
        """
        tensors = dict(named_weights(model))
        checks = self._checks(tensors)
        total = hashlib.sha256()
        known: dict[str, _Known] = {}
        for name in sorted(tensors):
            entry = self._known.get(name)
            if entry is None or entry.check != checks[name]:
                entry = _Known(checks[name], _sha256(tensors[name]))
                self.hashed += 1
            known[name] = entry
            head = _head(name, tensors[name])
            total.update(len(head).to_bytes(8, "little") + head + entry.digest)
        self._known = known
        return total.digest()

    def __reduce__(self) -> tuple[type[WeightsDigest], tuple[()]]:
        # A copy of the model starts anew; the secret is not for files.
        return (WeightsDigest, ())

    def _checks(self, tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
        """Per tensor the bytes that change when the tensor does."""
        sums: dict[torch.device, list[torch.Tensor]] = {}
        tails: dict[str, bytes] = {}
        counts: list[tuple[str, torch.device, int]] = []
        for name, tensor in tensors.items():
            words, tails[name] = _words(tensor)
            parts = self._row_sums(words)
            sums.setdefault(tensor.device, []).extend(parts)
            counts.append((name, tensor.device, sum(part.numel() for part in parts)))
        # One transfer a device, not one a tensor.
        values = {
            device: torch.cat(parts).cpu().numpy() if parts else None
            for device, parts in sums.items()
        }
        at = dict.fromkeys(values, 0)
        checks: dict[str, bytes] = {}
        for name, device, count in counts:
            h = hashlib.blake2b(_head(name, tensors[name]) + b"\0" + tails[name], digest_size=32)
            all_sums = values[device]
            if all_sums is not None and count:
                h.update(all_sums[at[device] : at[device] + count].tobytes())
                at[device] += count
            checks[name] = h.digest()
        return checks

    def _row_sums(self, words: torch.Tensor) -> list[torch.Tensor]:
        a, b = self._secret(words.device)
        step = _ROWS_AT_ONCE.get(words.device.type, _ROWS_ELSEWHERE) * ROW
        whole = words.numel() // ROW * ROW
        pieces = [words[at : min(at + step, whole)].view(-1, ROW) for at in range(0, whole, step)]
        if whole < words.numel():
            pieces.append(words[whole:].view(1, -1))
        out = []
        for piece in pieces:
            width = piece.shape[1]
            out.append((piece * a[:width]).add_((piece >> 32).mul_(b[:width])).sum(1))
        return out

    def _secret(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._factors:
            if not self._factors:
                generator = torch.Generator().manual_seed(secrets.randbits(63))
                first = (
                    torch.randint(
                        -(2**63), 2**63 - 1, (2, ROW), generator=generator, dtype=torch.int64
                    )
                    | 1
                )
            else:
                first = torch.stack(next(iter(self._factors.values()))).cpu()
            a, b = first.to(device)
            self._factors[device] = (a, b)
        return self._factors[device]


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of the model without adapters, each storage once, under the
    model's own names.

    Raises:
        IdentityError: a weight is on the meta device.
        UnsupportedModelError: a weight is of a tensor type without a rule.
    """
    seen: set[tuple[object, ...]] = set()
    for path, module in base_modules(model):
        own = [*module._parameters.items(), *module._buffers.items()]
        for short, tensor in own:
            if tensor is None:
                continue
            name = f"{path}.{short}" if path else short
            _refuse(name, tensor)
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and place in seen:
                continue
            seen.add(place)
            yield name, tensor.detach()


def base_model(model: nn.Module) -> Any:
    """The transformers model inside a ``PeftModel``, or ``model`` itself."""
    return model.get_base_model() if isinstance(model, _HasBase) else model


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the model without adapters with their paths, PEFT's wrappers undone."""
    base = base_model(model)
    stack: list[tuple[str, nn.Module]] = [("", base)]
    seen: set[int] = set()
    while stack:
        path, module = stack.pop()
        # Both kinds of wrapper keep what they wrap under these names and nothing else of the base
        # model.
        while (inner := wrapped(module)) is not None:
            module = inner
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in module._modules.items()
            if child is not None
        ]
        stack.extend(reversed(children))


def wrapped(module: nn.Module) -> nn.Module | None:
    """What a PEFT layer wraps; ``None`` for any other module."""
    for attribute in ("base_layer", "original_module"):
        inner = module._modules.get(attribute)
        if inner is not None and any(
            cls.__module__.startswith("peft.") for cls in type(module).__mro__
        ):
            return inner
    return None


def _refuse(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type == "meta":
        raise IdentityError(
            f"weight {name} is on the meta device (offloaded to disk, or not loaded), so its "
            "content cannot be determined; "
            "load the model into memory. Without it pages are not shared."
        )
    plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_quantized
    if not plain:
        raise UnsupportedModelError(
            f"weight {name} is a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}); there "
            "is no rule how to hash its "
            "quantisation or sharding state. Use unquantised, unsharded weights"
        )


def _head(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, bytes]:
    """The tensor as 64-bit words, and the up to 7 bytes left over."""
    data = _flat_bytes(tensor)
    whole = data.numel() // 8 * 8
    tail = data[whole:].cpu().numpy().tobytes() if whole < data.numel() else b""
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data[:whole].view(torch.int64), tail


def _sha256(tensor: torch.Tensor) -> bytes:
    data = _flat_bytes(tensor)
    h = hashlib.sha256()
    step = 2**26
    for at in range(0, data.numel(), step):
        h.update(data[at : at + step].cpu().numpy().data)
    return h.digest()


def weights_read(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but the rows of an untied input embedding."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    rows, head = model.get_input_embeddings(), model.get_output_embeddings()
    if rows is not None and head is not None and rows.weight is not head.weight:
        total -= rows.weight.numel() * rows.weight.element_size()
    return int(total)
