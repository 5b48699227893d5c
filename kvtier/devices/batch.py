"""Many copies in one driver call: ``cudaMemcpyBatchAsync`` through cuda-bindings, where both have it.

The call came with CUDA 12.8. It costs about 0.5 us of CPU a copy (6.33 ms for 12,288, vLLM PR 48434) where a call each
costs 5-7 us (DualPath, arXiv 2602.21548). Copies of a batch are unordered among themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

#: ``(destinations, sources, sizes, stream handle) -> done``; addresses and bytes. False: the driver
#: cannot do it, and nothing was submitted.
BatchCopy = Callable[[Sequence[int], Sequence[int], Sequence[int], int], bool]


def find_batch_copy(runtime: Any = None) -> BatchCopy | None:
    """The batch copy of this installation; None without cuda-bindings, or with one too old for it.

    Args:
        runtime: the module ``cuda.bindings.runtime``; imported if not given.
    """
    if runtime is None:
        try:
            runtime = importlib.import_module("cuda.bindings.runtime")
        except ImportError:
            return None
    call = getattr(runtime, "cudaMemcpyBatchAsync", None)
    if call is None:
        return None
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = (
        runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream  # read in stream order
    )

    def copy(
        destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> bool:
        count = len(sizes)
        try:
            # CUDA 12 also returns the index of the copy that failed.
            error, *_ = call(
                list(destinations), list(sources), list(sizes), count, [attributes], [0], 1, stream
            )
        except TypeError:  # a version of the bindings with other arguments
            return False
        return int(error) == 0

    return copy
