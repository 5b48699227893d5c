"""Miss-ratio curves as SVG, or as one HTML page with the numbers below; needs nothing but a browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.replay.tier import Cell

_WIDTH, _HEIGHT = 820, 500
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 50, 60
#: Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999",
)  # fmt: skip
_DASHES = ("", "6 3", "2 3")


def write_plot(path: Path, cells: Sequence[Cell], title: str, floor: float) -> None:
    """Curves of all policies to ``path``: SVG, or HTML if it ends in ``.html``.

    Args:
        cells: of one trace. floor: the miss ratio with room for everything.

    Raises:
        ConfigError: another ending, or the file cannot be written.
    """
    kind = plot_kind(path)
    svg = curves(cells, title, floor)
    text = svg if kind == "svg" else _page(svg, cells, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}") from error


def plot_kind(path: Path) -> str:
    """``svg`` or ``html``, by the ending of the file's name."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "html"):
        raise ConfigError(f"--plot is {path}; give a file that ends in .svg or .html")
    return kind


def curves(cells: Sequence[Cell], title: str, floor: float) -> str:
    """The SVG: miss ratio over pages, the pages on a logarithmic scale."""
    sizes = sorted({cell.pages for cell in cells})
    low, high = math.log10(sizes[0]), math.log10(sizes[-1])
    if high - low < 0.3:
        low, high = low - 0.15, high + 0.15

    def x(pages: float) -> float:
        return _LEFT + (math.log10(pages) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(ratio: float) -> float:
        return _TOP + (1 - ratio) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for step in range(11):
        at = y(step / 10)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10 * step} %</text>'
        )
    for pages in sizes:
        at = x(pages)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{pages:,}</text>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 18}" text-anchor="middle">pages in the tier</text>'
    )
    parts.append(
        f'<text transform="translate(18 {(_TOP + bottom) / 2:.0f}) rotate(-90)" '
        'text-anchor="middle">miss ratio (prefix rule)</text>'
    )
    parts.append(
        f'<path d="M{_LEFT} {y(floor):.1f}H{right}" stroke="#444" stroke-dasharray="1 4"/>'
        f'<text x="{right + 6}" y="{y(floor) + 4:.1f}">room for all</text>'
    )
    names = list(dict.fromkeys(cell.policy for cell in cells))
    for at, name in enumerate(names):
        line = sorted((cell.pages, 1 - cell.prefix_ratio) for cell in cells if cell.policy == name)
        colour, dash = _COLOURS[at % len(_COLOURS)], _DASHES[at // len(_COLOURS) % len(_DASHES)]
        path = "L".join(f"{x(pages):.1f} {y(miss):.1f}" for pages, miss in line)
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        parts += [
            f'<circle cx="{x(pages):.1f}" cy="{y(miss):.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(name)}, {pages:,} pages: {100 * miss:.2f} % missed</title></circle>"
            for pages, miss in line
        ]
        row = _TOP + 40 + 18 * at
        parts.append(
            f'<path d="M{right + 12} {row - 4}h22" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/><text x="{right + 40}" y="{row}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _page(svg: str, cells: Sequence[Cell], title: str) -> str:
    rows = "\n".join(
        f"<tr><td>{escape(c.policy)}</td><td>{c.pages:,}</td><td>{100 * c.prefix_ratio:.2f} %</td>"
        f"<td>{100 * c.raw_ratio:.2f} %</td><td>{100 * c.token_ratio:.2f} %</td></tr>"
        for c in cells
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body{font-family:sans-serif;max-width:60em;margin:1em auto}"
        "td,th{text-align:right;padding:.1em .8em}td:first-child{text-align:left}</style>\n"
        f"{svg}<table><tr><th>policy</th><th>pages</th><th>prefix hits</th><th>raw hits</th>"
        f"<th>tokens</th></tr>\n{rows}\n</table></html>\n"
    )
