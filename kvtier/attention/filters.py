"""Which layers may choose pages for those behind them: measured for a model, and stored.

For a filter layer f and a layer l behind it, ``recall[f, l]`` is the attention mass of l that falls on the pages that f
would choose, over that on the pages l would choose itself. Filters are placed so that the worst served layer is served as
well as can be (dynamic programming over the layers).

Origin: OmniKV (ICLR 2025) needs such a list for every model and gives some; how to place them by recall is ours.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvtier.errors import ConfigError
from kvtier.folders import cache_folder
from kvtier.identity import ModelIdentity

FORMAT = 1


@dataclass(frozen=True)
class Filters:
    """A calibration.

    Attributes:
        model: name of the model, for people.
        layers: the filter layers, ascending.
        wait: layers behind each filter that read every page too.
        worst: the least recall of any layer that goes by a filter.
        mean: its mean over those layers.
        share: of the pages that was chosen when this was measured.
        pages, steps: pages of the sequence, and steps of decoding, at the most.
        date: of the measurement, ISO 8601.
    """

    model: str
    layers: tuple[int, ...]
    wait: int
    worst: float
    mean: float
    share: float
    pages: int
    steps: int
    date: str

    @property
    def text(self) -> str:
        """As the selector's parameter."""
        return "+".join(map(str, self.layers))


class RecallMeter:
    """Adds up how well each layer would choose for each layer behind it.

    Args:
        layers: of the model.
        share: of the pages that a choice may have.
    """

    def __init__(self, layers: int, share: float) -> None:
        if not 0.0 < share < 1.0:
            raise ConfigError(f"share is {share}; it must be above 0 and below 1")
        self.share = share
        self.steps = 0
        self.pages = 0
        self._sum = torch.zeros(layers, layers, dtype=torch.float64)

    def step(self, shares: Sequence[torch.Tensor]) -> None:
        """One step of decoding: of each layer float32 ``[heads, pages]``, the share of attention of each page."""
        pages = shares[0].shape[1]
        count = max(1, round(self.share * pages))
        # As the selector ranks: by the largest share of any head. As it is felt: by the mean.
        choices = torch.stack([x.amax(0).topk(count).indices for x in shares])
        means = torch.stack([x.mean(0) for x in shares]).double()
        own = means.topk(count, dim=1).values.sum(1).clamp_min(1e-12)
        for row, choice in enumerate(choices):
            self._sum[row] += means[:, choice].sum(1) / own
        self.steps += 1
        self.pages = max(self.pages, pages)

    def recall(self) -> torch.Tensor:
        """float64 ``[filter, layer]``, 0..1."""
        return self._sum / max(1, self.steps)


def choose_filters(
    recall: torch.Tensor, count: int, *, wait: int = 1, first: int = 1
) -> tuple[tuple[int, ...], float, float]:
    """At most ``count`` filter layers for which the least recall of a layer that goes by one is largest; of such choices
    the one with the largest mean over all layers, those that read everything counting 1.

    Args:
        recall: ``[filter, layer]`` from ``RecallMeter``.
        wait: layers behind each filter that read everything.
        first: no filter before this layer; the layers before the first filter read everything, so that it has to be
            in the first quarter of the model, or here.

    Returns:
        The layers, the least recall and the mean one of the layers that go by a filter (1.0 if none does).

    Raises:
        ConfigError: ``count`` or ``first`` is out of range.
    """
    layers = recall.shape[0]
    if not 1 <= count <= layers:
        raise ConfigError(f"count is {count}; give 1 to {layers} filters")
    if not 0 <= first < layers:
        raise ConfigError(f"first is {first}; the model has layers 0 to {layers - 1}")
    served = {
        (at, stop): recall[at, at + wait + 1 : stop].tolist()
        for at in range(first, layers)
        for stop in range(at + 1, layers + 1)
    }
    starts = range(first, max(first, layers // 4) + 1)
    found = _best(served, layers, count, wait, starts, -1.0)
    # The largest least recall is known now: among the choices that have it, the largest sum.
    least = min((x for pair in _spans(found, layers) for x in served[pair]), default=1.0)
    chosen = _best(served, layers, count, wait, starts, least)
    values = [x for pair in _spans(chosen, layers) for x in served[pair]]
    return chosen, min(values, default=1.0), sum(values) / len(values) if values else 1.0


def _spans(chosen: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """(filter, the next one or the end) of each filter."""
    return list(zip(chosen, (*chosen[1:], layers), strict=True))


def _best(
    served: dict[tuple[int, int], list[float]],
    layers: int,
    count: int,
    wait: int,
    starts: Sequence[int],
    least: float,
) -> tuple[int, ...]:
    """Filters by dynamic programming from the last layer on: with ``least`` below 0 those of the largest least recall,
    otherwise, of those that reach ``least``, those of the largest sum of recalls, 1 for each layer that reads everything.
    """

    def worth(at: int, stop: int, rest: float) -> float:
        values = served[at, stop]
        if least < 0.0:
            return min([*values, rest])
        if min(values, default=1.0) < least:
            return -math.inf
        return sum(values) + (stop - at - len(values)) + rest

    end = 1.0 if least < 0.0 else 0.0
    #: at -> (worth of the layers from there on, the filters), with one more filter allowed in each round.
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    for _ in range(count):
        now: dict[int, tuple[float, tuple[int, ...]]] = {}
        for at in range(layers - 1, starts[0] - 1, -1):
            options: list[tuple[float, tuple[int, ...]]] = [(worth(at, layers, end), (at,))]
            options += [
                (worth(at, following, rest), (at, *others))
                for following, (rest, others) in best.items()
                if following > at + wait
            ]
            now[at] = max(options, key=lambda x: x[0])
        best = now
    before = 0.0 if least < 0.0 else 1.0
    return max(
        ((value + before * at, chosen) for at, (value, chosen) in best.items() if at in starts),
        key=lambda x: x[0],
    )[1]


def with_filters(mode: str, identity: ModelIdentity) -> str:
    """A mode's text, with the stored filters of the model where it is ``select:omnikv`` without any.

    Raises:
        ConfigError: the stored calibration cannot be read.
    """
    head, *items = mode.split(",")
    given = {item.partition("=")[0].strip() for item in items}
    if head.strip() != "select:omnikv" or "filters" in given:
        return mode
    found = load_filters(filters_path(cache_folder(), identity.weights_digest))
    if found is None:
        return mode
    wait = "" if "wait" in given else f",wait={found.wait}"
    return f"{mode},filters={found.text}{wait}"


def filters_path(folder: Path, weights: bytes) -> Path:
    """Where the calibration of a model is stored, by the digest of its weights."""
    return folder / "filters" / f"{weights.hex()[:32]}.json"


def save_filters(path: Path, filters: Filters) -> None:
    """Write a calibration, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(f".{os.getpid()}.tmp")
    work.write_text(json.dumps({"format": FORMAT, **asdict(filters)}, indent=1), encoding="utf-8")
    os.replace(work, path)


def load_filters(path: Path) -> Filters | None:
    """A stored calibration; ``None`` if there is none.

    Raises:
        ConfigError: the file cannot be read, or is of another format.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); delete it and calibrate again"
        ) from None
    try:
        if values.pop("format") != FORMAT:
            raise KeyError("format")
        found = Filters(**{**values, "layers": tuple(values["layers"])})
        if not found.layers or not all(
            type(x) is int and x >= 0 for x in (*found.layers, found.wait)
        ):
            raise TypeError("layers")
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no calibration of format {FORMAT} ({error}); delete it and calibrate again"
        ) from None
