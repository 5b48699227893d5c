"""Which of the two exact modes decodes faster, and why: the cost model's answer to ``mode="auto"``.

``exact-stream`` brings cold KV over the link, beside the kernels of other layers, and gathers what is in VRAM first;
``exact-split`` leaves it where it is and has the processor attend to it, beside the kernels of the same layer. So a slow
link speaks for the one, a slow processor for the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvtier.cost.constants import DEFAULTS, Constant, Constants
from kvtier.cost.modes import DecodeEstimate, decode_estimate
from kvtier.cost.warning import rate
from kvtier.cost.workload import Workload

ExactMode = Literal["exact-stream", "exact-split"]

#: Times that ``exact-stream`` moves KV that is in VRAM: read and written on its way together, read by attention.
GATHERED = 3.0


@dataclass(frozen=True)
class Choice:
    """A mode and the reason for it.

    Attributes:
        text: one sentence.
        stream_tps, split_tps: tokens/s of all sequences, predicted; None where there was nothing to compare.
    """

    mode: ExactMode
    text: str
    stream_tps: float | None = None
    split_tps: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "text": self.text,
            "stream_tps": self.stream_tps,
            "split_tps": self.split_tps,
        }


def choose_mode(
    work: Workload | None, *, constants: Constants = DEFAULTS, split: str = ""
) -> Choice:
    """Choose.

    Args:
        work: what is decoded, and the share of its KV that is not in VRAM; None if it cannot be told, as where the card
            is not known.
        split: why ``exact-split`` cannot be used; empty if it can.
    """
    if split:
        return _stream(split)
    if work is None:
        return _stream("the card or the tokens to come are not known, so nothing can be compared")
    if not work.kv_off:
        return _stream(f"all KV of {work.context:,} tokens is in VRAM")
    stream = decode_estimate(replace(work, hot_passes=GATHERED), "kv-stream", constants=constants)
    processor = decode_estimate(replace(work, hot_passes=1.0), "kv-cpu", constants=constants)
    mode: ExactMode = "exact-split" if processor.tps > stream.tps else "exact-stream"
    return Choice(mode, _words(mode, work, stream, processor), stream.tps, processor.tps)


def _stream(why: str) -> Choice:
    return Choice("exact-stream", f"exact-stream: {why}")


def _words(mode: str, work: Workload, stream: DecodeEstimate, processor: DecodeEstimate) -> str:
    link = _known(stream.basis.constants, f"{work.kv_link}_bw", "disk_bw")
    cpu = _known(processor.basis.constants, "server_cpu_attention_bw", "cpu_attention_bw")
    return (
        f"{mode}: with {work.kv_off:.0%} of the KV of {work.context:,} tokens outside VRAM, {rate(stream.tps)} tokens/s "
        f"are predicted for exact-stream over a {work.kv_link} link of {link}, {rate(processor.tps)} for exact-split with "
        f"attention by the processor at {cpu}"
    )


def _known(constants: Iterable[Constant], *names: str) -> str:
    found = next(one for one in constants if one.name in names)
    return f"{found.value / 1e9:.3g} GB/s ({'measured' if found.measured else 'assumed'})"
