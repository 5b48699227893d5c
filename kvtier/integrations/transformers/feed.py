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

_MISFIT = (
    "the cache holds {before} columns and the model is fed {count} more in {rows} row(s), at positions that it holds "
    "already. Either the cache is left over from another prompt: use reset() or a new TieredCache. Or the model is "
    "fed again what the cache holds, as assisted and prompt-lookup decoding do: call generate() on an empty "
    "cache for them (no load_prefix, or reset())"
)


@dataclass(slots=True)
class Feed:
    """One forward pass, row by row.

    Attributes:
        columns: columns after the pass, padding included.
        count: columns of the pass.
        pads: padding columns before each row's first token; ``columns`` for a row that has not begun.
        news: tokens that each row gets.
        tokens: their ids, or ``None`` for rows of which the ids do not tell all.
        usual: whether all rows are at the positions that they have in a sequence of their own.
    """

    columns: int
    count: int
    pads: list[int]
    news: list[int]
    tokens: list[list[int] | None]
    usual: bool = True


def read_feed(
    inputs: ForwardInputs,
    *,
    before: int,
    count: int,
    pads: Sequence[int],
    lengths: Sequence[int],
    usual: bool = True,
) -> Feed:
    """Interpret the inputs of a pass.

    Args:
        inputs: what the model is fed.
        before: columns that the cache holds.
        count: columns of the pass.
        pads, lengths: padding columns and tokens of each row so far.
        usual: whether all cached tokens are at their usual positions.

    Raises:
        UnsupportedModelError: right padding or holes in the mask; a mask or positions that say that the cache holds
            another number of tokens than it does.
        ConfigError: padding that differs from that of the cached tokens.
    """
    rows, columns = len(pads), before + count
    pads = _pads_now(inputs, before, columns, pads, lengths)
    news = [columns - max(pad, before) for pad in pads]
    places = _places(inputs.position_ids, before, columns, pads)
    if usual and any(place is not None and place < 0 for place in places):
        raise UnsupportedModelError(_MISFIT.format(before=before, count=count, rows=rows))
    at_home = [place == 0 for place in places]
    feed = Feed(columns, count, pads, news, [None] * rows, usual and all(at_home))
    ids = inputs.input_ids
    if not inputs.opaque and ids is not None and tuple(ids.shape) == (rows, count):
        for row, tokens in enumerate(ids.tolist()):
            if at_home[row]:
                feed.tokens[row] = tokens[count - news[row] :]
    return feed


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
        if total and first + total != columns:
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
            f"the attention mask has the shape {tuple(mask.shape)}, but "
            + _MISFIT.format(before=before, count=columns - before, rows=len(pads))
        )
    given = left_padding(mask, len(pads))
    begun = [length > 0 for length in lengths]
    if any(a != b for a, b, known in zip(given, pads, begun, strict=True) if known):
        raise ConfigError(
            f"the attention mask says that the rows are padded by {given}, the cached tokens by {list(pads)}; "
            "pass the mask of the same prompt, or reset() the cache"
        )
    return given


def _places(
    positions: torch.Tensor | None, before: int, columns: int, pads: Sequence[int]
) -> list[int | None]:
    """How far the new tokens of each row are from the positions that they have in a sequence of its own: 0 for
    usual ones, ``None`` if they do not follow each other."""
    if positions is None:
        # Models then count columns, padding too.
        return [pad if pad < columns else 0 for pad in pads]
    given = positions.tolist()
    if len(given) == 1:
        given = given * len(pads)
    places: list[int | None] = []
    for row, pad in zip(given, pads, strict=True):
        new = columns - max(pad, before)
        mine = row[len(row) - new :] if new else []
        first = mine[0] if mine else 0
        steady = mine == list(range(first, first + new))
        places.append((first - (columns - pad - new) if mine else 0) if steady else None)
    return places
