"""What was measured, as a chart, and as one HTML page that needs no other file, for phones and large screens."""

from __future__ import annotations

import base64
import importlib.resources
import string
from html import escape
from typing import TYPE_CHECKING

from fusedadam.cli import charts
from fusedadam.cli.bench.report import COLUMNS, Report, Result, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, ROW, HEAD = 7.0, 0.27, 0.8  # inches


def png(report: Report) -> bytes:
    panels = report.panels()
    # bars, and a heading for each optimizer
    heights = [HEAD + ROW * (len(rows) + len({r.optimizer for r in rows})) for rows in panels.values()]
    made = charts.empty(WIDTH, sum(heights) + 0.6, f"{title_of(report)}\n")
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


def title_of(report: Report) -> str:
    return f"A step of each optimizer on {report.machine['name']}"


def page(report: Report, picture: bytes | None) -> str:
    """``page.html`` with what was measured."""
    machine = report.machine
    threads = f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    encoded = base64.b64encode(picture or b"").decode()
    template = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=escape(title_of(report)),
        device=escape(machine["device"] + threads),
        speed=f"{machine['copy_gb_s']:.0f}",
        versions=escape(", ".join(f"{name} {version}" for name, version in report.versions.items())),
        began=escape(report.began),
        stopped="" if report.complete else '<p class="warning">Stopped before everything was measured.</p>',
        chart=f'<img alt="Bars" src="data:image/png;base64,{encoded}"/>' if picture else charts.MISSING,
        panels="".join(_panel(*panel) for panel in report.panels().items()),
        notes="".join(f"<p>{escape(note)}</p>" for note in report.notes()),
        command=escape(report.command),
        seconds=f"{report.seconds:.0f}",
    )


def _panel(title: str, rows: list[Result]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("optimizer", *COLUMNS))
    body = "".join(map(_row, rows))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<section><h2>{escape(title)}</h2>{table}</section>"


def _row(r: Result) -> str:
    cells = "".join(f'<td data-name="{name}">{escape(cell(r))}</td>' for name, cell in COLUMNS.items())
    if r.failed:
        cells = f'<td class="reason" colspan="{len(COLUMNS)}">failed: {escape(r.failed)}</td>'
    kind = ' class="ours"' if r.is_ours else ""
    return f"<tr{kind}><td>{escape(r.optimizer)}, {escape(r.by)}</td>{cells}</tr>"
