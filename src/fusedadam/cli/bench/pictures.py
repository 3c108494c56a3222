"""Charts of what was measured: bars against the roofline, and how time grows. As one PNG, and as SVG for the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusedadam.cli import charts
from fusedadam.cli.bench.report import Curve, Report, Result, number, ratio
from fusedadam.cli.contestants import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, WIDTH, NARROW, ROW, HEAD, GROWTH = 2, 13.0, 5.2, 0.27, 1.5, 4.0  # inches, except the first
PAGE_COLORS = {charts.OURS: "var(--s0)", charts.PEER: "var(--peer)", charts.FAILED: "var(--bad)"}
PAGE_COLORS |= {charts.INK: "var(--ink)", charts.GRID: "var(--line)", charts.PAPER: "var(--card)"}
PAGE_COLORS |= {color: f"var(--s{k})" for k, color in enumerate(charts.SERIES, start=1)}


def png(report: Report) -> bytes:
    panels = list(report.panels())
    beside = [panels[k : k + COLUMNS] for k in range(0, len(panels), COLUMNS)]
    heights = [HEAD + ROW * max(_lines(rows) for *_, rows in own) for own in beside]
    growth = grown(report)
    heights += [GROWTH] if growth else []
    title = f"A step of each optimizer on {report.machine['name']}\n{report.busy_sentence() or ''}"
    made = charts.empty(WIDTH, sum(heights) + 0.6, title)
    grid = made.add_gridspec(len(heights), COLUMNS, height_ratios=heights)
    for k, (one, dtype, rows) in enumerate(panels):
        where = grid[0, :] if len(panels) == 1 else grid[k // COLUMNS, k % COLUMNS]
        _bars(made.add_subplot(where), rows, f"{one.described}, {dtype}")
    for k, (title, own) in enumerate(growth.items()):
        _curves(made.add_subplot(grid[-1, k]), own, title)
    return charts.png(made)


def bars_svg(rows: list[Result], title: str) -> str:
    made = charts.empty(NARROW, 0.6 + ROW * _lines(rows))
    _bars(made.subplots(), rows, "")
    return charts.svg(made, title, PAGE_COLORS)


def curves_svg(curves: list[Curve], title: str) -> str:
    made = charts.empty(NARROW, GROWTH)
    _curves(made.subplots(), curves, "")
    return charts.svg(made, title, PAGE_COLORS)


def grown(report: Report) -> dict[str, list[Curve]]:
    """The curves of each chart, by its title."""
    found = {}
    for over in ("elements", "tensors"):
        if own := [c for c in report.growth if c.over == over and c.points]:
            found[f"How {own[0].optimizer}'s time grows with the number of {over}, {own[0].dtype}"] = own
    return found


def _lines(rows: list[Result]) -> int:
    """Bars, and a heading for each optimizer."""
    return len(rows) + len({r.optimizer for r in rows})


def _bars(axes: Axes, rows: list[Result], title: str) -> None:
    widest = max([100.0, *(r.percent_of_copy or 0.0 for r in rows)])
    y, previous, ticks = 0, None, {}
    for r in rows:
        if r.optimizer != previous:
            axes.text(widest * 0.006, y, r.optimizer, va="center", fontsize=10, fontweight="bold", color=charts.INK)
            previous, y = r.optimizer, y + 1
        percent = r.percent_of_copy or 0.0
        axes.barh(y, percent, height=0.72, color=charts.OURS if r.is_ours else charts.PEER)
        against = f", {ratio(r.against_ours.median)} x our time" if r.against_ours else ""
        text = "failed" if r.ms is None else f"{number(r.ms.median)} ms{against}"
        charts.label(axes, percent + widest * 0.01, y, text, charts.FAILED if r.failed else charts.INK)
        ticks[y] = r.by
        y += 1
    axes.axvline(100, color=charts.INK, linewidth=1.2, linestyle=charts.DASHED)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_xlim(0, widest * (1.45 if title else 1.75))  # labels need more of a narrow chart
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("% of the bandwidth of a large copy (dashed: 100 %, the roofline)", fontsize=9)
    charts.titled(axes, title)
    axes.tick_params(axis="y", length=0)


def _curves(axes: Axes, curves: list[Curve], title: str) -> None:
    colors = iter(charts.SERIES * 2)
    for curve in curves:
        ours = curve.by == OURS
        color, points = charts.OURS if ours else next(colors), curve.points
        x = [p.x for p in points]
        axes.plot(
            x, [p.ms.median for p in points], marker="o", markersize=4, linewidth=2.4 if ours else 1.4, color=color,
            label=curve.by, zorder=3 if ours else 2,
        )  # fmt: skip
        axes.fill_between(x, [p.ms.low for p in points], [p.ms.high for p in points], color=color, alpha=0.15)
        if ours:
            copy = [p.roofline_ms or math.nan for p in points]
            axes.plot(x, copy, color=charts.INK, linewidth=1.2, linestyle=charts.DASHED, label="a large copy")
    axes.set_xscale("log")
    axes.set_yscale("log")
    over = curves[0].over
    axes.set_xlabel("elements in one tensor" if over == "elements" else "tensors of 1,024 elements", fontsize=9)
    axes.set_ylabel("ms per step", fontsize=9)
    axes.grid(True, which="major", linewidth=0.5, color=charts.GRID)
    axes.legend(fontsize=8.5, frameon=False, labelcolor=charts.INK)
    charts.titled(axes, title)
