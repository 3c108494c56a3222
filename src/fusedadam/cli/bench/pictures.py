"""A chart of what was measured: bars against the roofline, for each set and dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedadam.cli import charts
from fusedadam.cli.bench.report import Report, Result, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, ROW, HEAD = 7.0, 0.27, 0.8  # inches


def png(report: Report) -> bytes:
    panels = report.panels()
    # bars, and a heading for each optimizer
    heights = [HEAD + ROW * (len(rows) + len({r.optimizer for r in rows})) for rows in panels.values()]
    made = charts.empty(WIDTH, sum(heights) + 0.6, f"A step of each optimizer on {report.machine['name']}\n")
    every = made.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, rows) in zip(every, panels.items(), strict=True):
        _bars(axes, rows, title)
    return charts.png(made)


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
    axes.set_xlim(0, widest * 1.6)  # room for labels
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("% of the bandwidth of a large copy (dashed: 100 %, the roofline)", fontsize=9)
    charts.titled(axes, title)
    axes.tick_params(axis="y", length=0)
