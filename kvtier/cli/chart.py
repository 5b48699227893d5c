"""A chart of rates over contexts: SVG and HTML of our own, PNG by matplotlib if it is there.

The contexts are on a logarithmic axis. An SVG stands for itself: no script, no font, no link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from kvtier.errors import ConfigError

SUFFIXES = (".svg", ".html", ".png")

#: A number's place on an axis, in pixels.
Place = Callable[[float], float]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 48, 52
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#57606a")


@dataclass(frozen=True)
class Series:
    """A named line (``points`` in order of x), or dots, with a band around it if there is one.

    Attributes:
        points: (tokens, rate). band: (tokens, low, high).
        style: ``line``, ``dashes`` or ``dots``.
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    style: str = "line"


@dataclass(frozen=True)
class Mark:
    """A vertical line at a context, such as where the cliff begins."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """What to draw. ``notes`` are lines below it."""

    title: str
    series: Sequence[Series]
    y: str = "tokens/s"
    x: str = "tokens of context"
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def check_chart_path(path: Path, option: str = "--plot") -> None:
    """Raises ConfigError for a file that cannot be drawn: before the work, not after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option} is {path}; give a file that ends in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(
            f"{option} is {path}, but there is no folder {path.parent}; make it first"
        )
    if path.is_dir():
        raise ConfigError(f"{option} is {path}, which is a folder; give a file")
    if path.suffix.lower() == ".png":
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise ConfigError(
                f"{option} is {path}, and a .png needs matplotlib, which is not installed; pip install "
                "'kvtier[plot]', or give an .svg or .html"
            )


def write_chart(chart: Chart, path: Path) -> None:
    """Draw into a file whose suffix says how.

    Raises:
        ConfigError: another suffix, or a file that cannot be written.
    """
    check_chart_path(path)
    try:
        if path.suffix.lower() == ".png":
            _png(chart, path)
        elif path.suffix.lower() == ".svg":
            path.write_text(svg(chart), encoding="utf-8")
        else:
            path.write_text(html(chart), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; give another file") from error


def svg(chart: Chart) -> str:
    """The chart as one SVG document."""
    xs = [x for one in chart.series for x, _ in one.points] or [1.0, 2.0]
    tops = [y for one in chart.series for _, y in one.points]
    tops += [high for one in chart.series for _, _, high in one.band]
    low, high = math.log2(max(1.0, min(xs))), math.log2(max(2.0, *xs))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    step = _nice(max([*tops, 1e-9]) / 6)
    top = step * math.ceil(max([*tops, 1e-9]) / step * 1.02)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def px(tokens: float) -> float:
        return _LEFT + width * (math.log2(max(1.0, tokens)) - low) / (high - low)

    def py(rate: float) -> float:
        return _TOP + height * (1 - rate / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{_HEIGHT + 16 * len(chart.notes)}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT + 16 * len(chart.notes)}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f"<title>{escape(chart.title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(chart.title)}</text>',
    ]
    for n in range(round(top / step) + 1):
        y = py(n * step)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d8dee4"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{n * step:g}</text>')
    for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
        x = px(2**power)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}" stroke="#eef1f4"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP + height + 16}" text-anchor="middle">{tokens_label(2**power)}</text>'
        )
    for number, one in enumerate(chart.series):
        parts += _drawn(one, _COLOURS[number % len(_COLOURS)], px, py)
        x = _LEFT + 8 + 190 * (number % 3)
        y = _TOP - 14 + 14 * (number // 3)
        parts.append(
            f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x + 14}" y="{y + 1}">{escape(one.name)}</text>')
    inside = [mark for mark in chart.marks if low <= math.log2(max(1.0, mark.at)) <= high]
    for number, mark in enumerate(inside):
        x, y = px(mark.at), _TOP + 14 + 15 * number
        left = x > _WIDTH * 0.7
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}" stroke="#cf222e" '
            'stroke-dasharray="5 3"/>'
        )
        parts.append(
            f'<text x="{x + (-4 if left else 4):.1f}" y="{y}" fill="#cf222e" '
            f'text-anchor="{"end" if left else "start"}">{escape(mark.text)}</text>'
        )
    middle = _LEFT + width / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(chart.x)}</text>'
    )
    parts.append(
        f'<text transform="translate(16 {_TOP + height / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y)}</text>"
    )
    for number, note in enumerate(chart.notes):
        parts.append(
            f'<text x="{_LEFT}" y="{_HEIGHT + 16 * number}" font-size="11">{escape(note)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def html(chart: Chart) -> str:
    """One page: the chart, and its numbers as tables."""
    tables = []
    for one in chart.series:
        bands = {x: (low, high) for x, low, high in one.band}
        rows = "".join(
            f"<tr><td>{x:,.0f}</td><td>{y:.4g}</td>"
            + "".join(f"<td>{value:.4g}</td>" for value in bands.get(x, ()))
            + "</tr>"
            for x, y in one.points
        )
        head = "<th>low</th><th>high</th>" if bands else ""
        tables.append(
            f"<table><caption>{escape(one.name)}</caption><tr><th>{escape(chart.x)}</th>"
            f"<th>{escape(chart.y)}</th>{head}</tr>{rows}</table>"
        )
    style = (
        "body{font-family:sans-serif;margin:2em}table{display:inline-table;margin:1em 2em 1em 0;"
        "border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(chart.title)}</title><style>{style}</style></head><body>\n"
        f"{svg(chart)}<div>{''.join(tables)}</div></body></html>\n"
    )


def tokens_label(tokens: int) -> str:
    """``512``, ``8k``, ``1M``."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:g}"


def _drawn(one: Series, colour: str, px: Place, py: Place) -> list[str]:
    parts = []
    if len(one.band) > 1:
        upper = [f"{px(x):.1f},{py(high):.1f}" for x, _, high in one.band]
        lower = [f"{px(x):.1f},{py(low):.1f}" for x, low, _ in reversed(one.band)]
        parts.append(
            f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity="0.15"/>'
        )
    at = [(px(x), py(y)) for x, y in one.points]
    if one.style == "dots" or len(at) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in at]
    else:
        dashes = ' stroke-dasharray="6 4"' if one.style == "dashes" else ""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
    return parts


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(step))
    return next(size * n for n in (1, 2, 5, 10) if size * n >= step * 0.999)


def _png(chart: Chart, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    styles = {"line": "-", "dashes": "--", "dots": "o"}
    for number, one in enumerate(chart.series):
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            [x for x, _ in one.points], [y for _, y in one.points], styles[one.style],
            color=colour, label=one.name,
        )  # fmt: skip
        if one.band:
            axes.fill_between(
                [x for x, _, _ in one.band], [low for _, low, _ in one.band],
                [high for _, _, high in one.band], color=colour, alpha=0.15,
            )  # fmt: skip
    for mark in chart.marks:
        axes.axvline(mark.at, color="#cf222e", linestyle="--")
        axes.annotate(
            mark.text, (mark.at, axes.get_ylim()[1]), color="#cf222e", rotation=90, va="top"
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.set_title(chart.title)
    axes.legend()
    figure.savefig(path)
