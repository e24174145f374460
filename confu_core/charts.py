"""A line chart as SVG text: pictures for the documents without a plotting package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 170, 40, 52
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")  # Okabe and Ito
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 4", "1 3")  # a second cue beside the colour


@dataclass(frozen=True)
class Series:
    """A named line through points (x, y), left to right."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    series: Sequence[Series], *, title: str, x: str, y: str, diagonal: bool = False
) -> str:
    """Draw lines with round ticks and their names at the right.

    Args:
        x, y: what the axes show, with units.
        diagonal: also draw y = x, for a calibration.

    Raises:
        ValueError: there is no point.
    """
    xs = [point[0] for line in series for point in line.points]
    ys = [point[1] for line in series for point in line.points]
    if not xs:
        raise ValueError("a chart needs at least one point")
    if diagonal:
        xs, ys = [*xs, 0.0, 1.0], [*ys, 0.0, 1.0]
    across, up = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def place(px: float, py: float) -> tuple[float, float]:
        inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return (
            LEFT + inner_width * (px - across[0]) / (across[-1] - across[0]),
            HEIGHT - BOTTOM - inner_height * (py - up[0]) / (up[-1] - up[0]),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in across:
        px, _ = place(value, up[0])
        parts.append(f'<path d="M{px:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="middle">{value:,g}</text>')
    for value in up:
        _, py = place(across[0], value)
        parts.append(f'<path d="M{LEFT} {py:.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x)}</text>')
    parts.append(
        f'<text transform="translate(16 {(TOP + bottom) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y)}</text>'
    )
    if diagonal:
        (x1, y1), (x2, y2) = place(0, 0), place(1, 1)
        parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#999"/>')
    for number, line in enumerate(series):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        corners = [place(*point) for point in line.points]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in corners)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<path d="M{path}" {style}/>')
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in corners
        ]
        key = TOP + 8 + 20 * number
        parts.append(f'<path d="M{right + 12} {key}h26" {style}/>')
        parts.append(f'<text x="{right + 44}" y="{key + 4}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers that enclose low..high."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (m * step) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]
