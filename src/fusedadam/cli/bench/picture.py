"""What was measured, as one PNG: bars against the roofline, and how time grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusedadam.cli import figure
from fusedadam.cli.bench.results import Curve, Report, Result, Set
from fusedadam.cli.bench.tables import busy_sentence, number, ratio
from fusedadam.cli.contestants import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, WIDTH, ROW, HEAD, GROWTH = 2, 13.0, 0.27, 1.5, 4.0  # inches, but for the first
DASHED = (0, (4, 3))


def png(report: Report) -> bytes:
    panels = [(one, dtype, report.of(one, dtype)) for one in report.sets for dtype in report.dtypes]
    panels = [panel for panel in panels if panel[2]]
    beside = [panels[k : k + COLUMNS] for k in range(0, len(panels), COLUMNS)]
    heights = [HEAD + ROW * max(_lines(rows) for *_, rows in own) for own in beside]
    curves = [own for over in ("elements", "tensors") if (own := [c for c in report.growth if c.over == over])]
    heights += [GROWTH] if curves else []
    title = f"A step of each optimizer on {report.machine['name']}\n{busy_sentence(report) or ''}"
    made = figure.empty(WIDTH, sum(heights) + 0.6, title)
    grid = made.add_gridspec(len(heights), COLUMNS, height_ratios=heights)
    for k, panel in enumerate(panels):
        where = grid[0, :] if len(panels) == 1 else grid[k // COLUMNS, k % COLUMNS]
        _bars(made.add_subplot(where), *panel)
    for k, own in enumerate(curves):
        _curves(made.add_subplot(grid[-1, k]), own)
    return figure.png(made)


def _lines(rows: list[Result]) -> int:
    """Bars, and a heading for each optimizer."""
    return len(rows) + len({r.optimizer for r in rows})


def _bars(axes: Axes, one: Set, dtype: str, rows: list[Result]) -> None:
    widest = max([100.0, *(r.percent_of_copy or 0.0 for r in rows)])
    y, previous, ticks = 0, None, {}
    for r in rows:
        if r.optimizer != previous:
            axes.text(widest * 0.006, y, r.optimizer, va="center", fontsize=10, fontweight="bold", color=figure.INK)
            previous, y = r.optimizer, y + 1
        percent = r.percent_of_copy or 0.0
        axes.barh(y, percent, height=0.72, color=figure.OURS if r.is_ours else figure.PEER)
        figure.label(axes, percent + widest * 0.01, y, _told(r), figure.FAILED if r.failed else figure.INK)
        ticks[y] = r.by
        y += 1
    axes.axvline(100, color=figure.INK, linewidth=1.2, linestyle=DASHED)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_xlim(0, widest * 1.45)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("% of the bandwidth of a large copy (dashed: 100 %, the roofline)", fontsize=9)
    axes.tick_params(axis="y", length=0)
    figure.titled(axes, f"{one.described}, {dtype}")


def _told(r: Result) -> str:
    if r.ms is None:
        return "failed"
    against = f", {ratio(r.against_ours.median)} x our time" if r.against_ours else ""
    return f"{number(r.ms.median)} ms{against}"


def _curves(axes: Axes, curves: list[Curve]) -> None:
    colors = iter(figure.SERIES * 2)
    for curve in curves:
        ours = curve.by == OURS
        color, points = figure.OURS if ours else next(colors), curve.points
        x = [p.x for p in points]
        axes.plot(
            x, [p.ms.median for p in points], marker="o", markersize=4, linewidth=2.4 if ours else 1.4, color=color,
            label=curve.by, zorder=3 if ours else 2,
        )  # fmt: skip
        axes.fill_between(x, [p.ms.low for p in points], [p.ms.high for p in points], color=color, alpha=0.15)
        if ours:
            copy = [p.roofline_ms or math.nan for p in points]
            axes.plot(x, copy, color=figure.INK, linewidth=1.2, linestyle=DASHED, label="a large copy")
    over, optimizer = curves[0].over, curves[0].optimizer
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("elements in one tensor" if over == "elements" else "tensors of 1,024 elements", fontsize=9)
    axes.set_ylabel("ms a step", fontsize=9)
    axes.grid(True, which="major", linewidth=0.5, alpha=0.5)
    axes.legend(fontsize=8.5, frameon=False)
    figure.titled(axes, f"How {optimizer}'s time grows with the number of {over}, {curves[0].dtype}")
