"""Curves as SVG that follows the page: its colours are the page's, and so are light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fusedadam.cli.bench.results import Curve
from fusedadam.cli.contestants import OURS

# As wide as a phone: there text has the size that is written here, and on a large screen it is only larger.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 270, 48, 12, 10, 44


class _Axis:
    """Logarithmic, from a little before the smallest value to a little after the largest."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = 0.05 * max(high - low, 0.1)
        self.low, self.high, self.first, self.last = low - margin, high + margin, first, last

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.first + share * (self.last - self.first), 1)

    def ticks(self) -> list[float]:
        decades = range(math.ceil(self.low), math.floor(self.high) + 1)
        if len(decades) >= 2:
            return [10.0**k for k in decades]
        near = [m * 10.0**k for k in range(math.floor(self.low), math.ceil(self.high) + 1) for m in (1, 2, 5)]
        return [value for value in near if self.low <= math.log10(value) <= self.high]


def curves_svg(curves: Sequence[Curve], x_label: str, title: str) -> str:
    """Ours is drawn last, on top; the dashed line is the time in which a large copy moves the same bytes."""
    drawn = [curve for curve in curves if curve.points]
    roofline = next(([(p.x, p.roofline_ms) for p in c.points if p.roofline_ms] for c in drawn if c.by == OURS), [])
    times = [p.ms.median for c in drawn for p in c.points] + [ms for _, ms in roofline]
    x = _Axis([p.x for c in drawn for p in c.points], LEFT, WIDTH - RIGHT)
    y = _Axis(times, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for value in x.ticks():
        parts.append(f'<line class="grid" x1="{x(value)}" x2="{x(value)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x(value)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(value)}</text>')
    for value in y.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{_short(value)}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">ms a step</text>')
    if roofline:
        parts.append(f'<polyline class="roofline" points="{_points((x(a), y(b)) for a, b in roofline)}"/>')
    for k, curve in reversed(list(enumerate(drawn))):
        at = [(x(p.x), y(p.ms.median)) for p in curve.points]
        parts.append(f'<g class="s{series(k)}"><polyline points="{_points(at)}"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3"/>' for a, b in at]
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def series(k: int) -> int:
    """Which of the page's colours; 0 is ours."""
    return 0 if k == 0 else 1 + (k - 1) % 8


def _points(at: object) -> str:
    return " ".join(f"{a},{b}" for a, b in at)  # type: ignore[attr-defined]


def _short(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
