"""What was measured, as a chart, and as one HTML page that needs no other file, for phones and large screens."""

from __future__ import annotations

import base64
import importlib.resources
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
    machine = report.machine
    threads = f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    stopped = "" if report.complete else '<p class="warning">Stopped before everything was measured.</p>'
    encoded = base64.b64encode(picture or b"").decode()
    chart = f'<img alt="Bars" src="data:image/png;base64,{encoded}"/>' if picture else charts.MISSING
    style = importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    title = escape(title_of(report))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="muted">{escape(machine["device"])}{threads}, a large copy moves {machine["copy_gb_s"]:.0f} GB/s.
{escape(", ".join(f"{name} {version}" for name, version in report.versions.items()))}. {escape(report.began)}</p>
{stopped}</header>
<section>{chart}</section>
{"".join(_panel(*panel) for panel in report.panels().items())}
<section><h2>How to read it</h2>
<p>Each implementation runs in its own process, and they take turns, so that other programs slow all of them alike.
Read the ratios: "time against ours" is above 1 where ours is faster. "ms" is the median of a whole optimizer.step(),
"of copy" the bandwidth of the bytes that a step must move, in percent of a large copy's.</p>
{"".join(f"<p>{escape(note)}</p>" for note in report.notes())}
</section>
<p class="muted"><code>{escape(report.command)}</code> took {report.seconds:.0f} seconds.</p>
</body>
</html>
"""


def _panel(title: str, rows: list[Result]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("optimizer", *COLUMNS))
    body = "".join(map(_row, rows))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<section><h2>{title}</h2>{table}</section>"


def _row(r: Result) -> str:
    cells = "".join(f'<td data-name="{name}">{escape(cell(r))}</td>' for name, cell in COLUMNS.items())
    if r.failed:
        cells = f'<td class="reason" colspan="{len(COLUMNS)}">failed: {escape(r.failed)}</td>'
    kind = ' class="ours"' if r.is_ours else ""
    return f"<tr{kind}><td>{escape(r.optimizer)}, {escape(r.by)}</td>{cells}</tr>"
