"""What an engine takes of a GPU besides weights and KV: named numbers, each with its source.

Resident memory is more than weights and KV, and a plan that leaves out the rest is wrong by a
gigabyte. None of these numbers is the same everywhere, so each can be given instead:
``RuntimeBuffers(graphs=0)`` or ``parse_buffers("graphs=0,cuda_context=400MiB")``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvtier.cost.shape import ModelShape
from kvtier.errors import ConfigError
from kvtier.units import parse_size

MiB = 2**20
GiB = 2**30

#: Tokens of a prefill step where none are given.
DEFAULT_CHUNK = 2048

SOURCES = {
    "driver": "share of a card that the driver keeps: vLLM sees 23.58 of 24 GiB (PR 14447), 31.37 of "
    "32 (issue 14452), 79.22 of 80 (PR 10511)",
    "cuda_context": "616 MiB on an H100 (LMCache issue 4019); vLLM logs 0.33 GiB outside torch on an "
    "RTX 5090 (issue 14452)",
    "graphs": "CUDA graphs up to batch 16: 0.36 GiB (vLLM log in gpustack/runner PR 251)",
    "workspace": "cuBLAS: 32 MiB recommended on Hopper and later, 4 MiB before (cuBLAS reference, "
    "cublasSetWorkspace; PyTorch PR 120925)",
    "slack": "blocks of the caching allocator that are held and not used, share of activations and "
    "logits; assumed, not measured",
    "activations": "chunk x (3 ffn + 4 hidden) x 2 bytes: gate, up and their product, and four "
    "vectors of the residual stream; with the logits 1.27 GiB for Llama-3-8B at 8,192 tokens and 256 "
    "sequences, vLLM logs 1.26 (PR 10511)",
    "logits": "sequences x vocabulary x 4 bytes x 3: logits, probabilities and a sorted copy in fp32",
}


@dataclass(frozen=True)
class RuntimeBuffers:
    """Memory of a GPU that neither weights nor KV get. Bytes, but where said.

    Attributes:
        driver: share of the card's nominal memory that no process gets; only where a card is named.
        cuda_context: context and loaded kernels of the process.
        graphs: captured CUDA graphs; 0 for eager execution.
        workspace: matrix library.
        slack: share of activations and logits that the allocator holds and does not use.
        other: anything else, such as a display or another process.
    """

    driver: float = 0.0175
    cuda_context: int = 616 * MiB
    graphs: int = round(0.36 * GiB)
    workspace: int = 32 * MiB
    slack: float = 0.1
    other: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            share = field.name in ("driver", "slack")
            if not 0 <= value <= (1 if share else float("inf")):
                limit = "a share between 0 and 1" if share else "bytes >= 0"
                raise ConfigError(f"buffer {field.name} is {value}; give {limit}")


#: For arithmetic on weights and KV alone.
NO_BUFFERS = RuntimeBuffers(driver=0.0, cuda_context=0, graphs=0, workspace=0, slack=0.0)


def parse_buffers(text: str, base: RuntimeBuffers | None = None) -> RuntimeBuffers:
    """``"graphs=0,cuda_context=400MiB,slack=0.2"`` over ``base``, or ``"none"``.

    Raises:
        ConfigError: an unknown name, or no size or share.
    """
    base = base or RuntimeBuffers()
    if text.strip() == "none":
        return NO_BUFFERS
    names = [field.name for field in fields(RuntimeBuffers)]
    changes: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in names:
            raise ConfigError(f"buffer {name!r} is unknown; use {', '.join(names)}")
        if name in ("driver", "slack"):
            try:
                changes[name] = float(value)
            except ValueError:
                raise ConfigError(f"buffer {name} is {value!r}; give a share such as 0.1") from None
        else:
            changes[name] = parse_size(value, f"buffer {name}")
    return replace(base, **changes)  # type: ignore[arg-type]


def activation_bytes(model: ModelShape, chunk: int, gpus: int = 1) -> float:
    """Peak of a layer's activations in a prefill step of ``chunk`` tokens, in 16 bits, a GPU.

    The MLP is split over GPUs, the residual stream is not. 0 where the model's widths are unknown.
    """
    return chunk * (3 * model.intermediate / gpus + 4 * model.hidden) * 2


def logits_bytes(model: ModelShape, sequences: int) -> float:
    """Logits of the last token of each sequence, with what sampling makes of them, in fp32."""
    return sequences * model.vocab * 4 * 3
