"""What a forward pass adds to each row of a cache, read from its inputs; and what is refused.

A page may be shared only if its KV is a function of the model and the ids: ordinary positions, counted from
the row's first token, and a mask that hides padding on the left and nothing else. Rows for which that does not hold
are served, but not shared; inputs that contradict what the cache holds are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.integrations.transformers.hook import ForwardInputs


@dataclass(slots=True)
class Feed:
    """One forward pass, row by row.

    Attributes:
        columns: columns after the pass, padding included.
        count: columns of the pass.
        pads: padding columns before each row's first token; ``columns`` for a row that has not begun.
        news: tokens that each row gets.
        tokens: their ids, or ``None`` for rows of which the ids do not tell all.
    """

    columns: int
    count: int
    pads: list[int]
    news: list[int]
    tokens: list[list[int] | None]


def read_feed(
    inputs: ForwardInputs, *, before: int, count: int, pads: Sequence[int], lengths: Sequence[int]
) -> Feed:
    """Interpret the inputs of a pass.

    Args:
        inputs: what the model is fed.
        before: columns that the cache holds.
        count: columns of the pass.
        pads, lengths: padding columns and tokens of each row so far.

    Raises:
        UnsupportedModelError: right padding or holes in the mask; a mask for another number of columns.
        ConfigError: padding that differs from that of the cached tokens.
    """
    rows, columns = len(pads), before + count
    pads = _pads_now(inputs, before, columns, pads, lengths)
    news = [columns - max(pad, before) for pad in pads]
    ids = inputs.input_ids
    if inputs.opaque or ids is None or tuple(ids.shape) != (rows, count):
        return Feed(columns, count, pads, news, [None] * rows)
    usual = _usual_positions(inputs.position_ids, before, columns, pads)
    tokens = [
        row[count - new :] if ok else None
        for row, new, ok in zip(ids.tolist(), news, usual, strict=True)
    ]
    return Feed(columns, count, pads, news, tokens)


def left_padding(mask: torch.Tensor | None, rows: int) -> list[int]:
    """Padding columns of each row of a two-dimensional mask; all of them for a row that has not begun.

    Raises:
        UnsupportedModelError: the mask has holes, or zeros at its end (right padding).
    """
    if mask is None:
        return [0] * rows
    seen = mask != 0
    columns = mask.shape[1]
    # One transfer: (first column seen, columns seen) of each row.
    facts = torch.stack([seen.int().argmax(dim=1), seen.sum(dim=1)]).T.tolist()
    pads = []
    for row, (first, total) in enumerate(facts):
        if total and first + total != columns or total and not bool(mask[row, -1]):
            raise UnsupportedModelError(
                f"row {row} of the attention mask is not left-padded (zeros, then ones); "
                "set tokenizer.padding_side = 'left'"
            )
        pads.append(first if total else columns)
    return pads


def _pads_now(
    inputs: ForwardInputs, before: int, columns: int, pads: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    mask = inputs.attention_mask
    if mask is None:
        if not before:
            return [0] * len(pads)
        if any(pads) and not inputs.opaque:
            raise ConfigError(
                f"the cached rows are padded by {list(pads)}, but no attention mask is given; pass it in every "
                "forward pass"
            )
        return [min(pad, before) for pad in pads]
    if tuple(mask.shape) != (len(pads), columns):
        raise UnsupportedModelError(
            f"the attention mask has the shape {tuple(mask.shape)}, but the cache holds {before} columns and the "
            f"model is fed {columns - before} more in {len(pads)} row(s). Either the cache is left over from "
            "another prompt: use reset() or a new TieredCache. Or the model is fed again what the cache holds, as "
            "assisted and prompt-lookup decoding do: call generate() on an empty cache for them"
        )
    given = left_padding(mask, len(pads))
    begun = [length > 0 for length in lengths]
    if any(a != b for a, b, known in zip(given, pads, begun, strict=True) if known):
        raise ConfigError(
            f"the attention mask says that the rows are padded by {given}, the cached tokens by {list(pads)}; "
            "pass the mask of the same prompt, or reset() the cache"
        )
    return given


def _usual_positions(
    positions: torch.Tensor | None, before: int, columns: int, pads: Sequence[int]
) -> list[bool]:
    """Whether each row's new tokens are at the positions that they have in a sequence of its own."""
    if positions is None:
        # Models then count columns, padding too.
        return [pad == 0 or pad >= columns for pad in pads]
    given = positions.tolist()
    if len(given) == 1:
        given = given * len(pads)
    return [
        row[len(row) - (columns - max(pad, before)) :]
        == list(range(max(pad, before) - pad, columns - pad))
        for row, pad in zip(given, pads, strict=True)
    ]
