"""What was measured, as a chart, and as one HTML page that needs no other file, for phones and large screens."""

from __future__ import annotations

import base64
import functools
import importlib.resources
import string
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING

from fusedadam.cli import charts
from fusedadam.cli.bench.report import COLUMNS, DISTURBED, Report, Result, number, ratio
from fusedadam.cli.contestants import OURS, PRESETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, ROW, HEAD, SQUARE = 7.0, 0.27, 0.8, 3.6  # inches


def png(report: Report) -> bytes:
    panels = report.panels()
    drawn: list[tuple[float, Callable[[Axes], None]]] = []  # height and how
    for title, rows in panels.items():
        # bars, and a heading for each optimizer
        height = HEAD + ROW * (len(rows) + len({r.optimizer for r in rows}))
        drawn.append((height, functools.partial(_bars, rows=rows, title=title)))
        for own in _with_storage(rows):
            drawn.append((SQUARE, functools.partial(_bytes_against_time, rows=own, title=title)))
    heights = [height for height, _ in drawn]
    made = charts.empty(WIDTH, sum(heights) + 0.6, f"{title_of(report)}\n")
    every = made.subplots(len(drawn), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (_, draw) in zip(every, drawn, strict=True):
        draw(axes)
    return charts.png(made)


def _with_storage(rows: list[Result]) -> Iterator[list[Result]]:
    """The measured rows of each optimizer that was measured with a preset of ``storage=``, too."""
    measured = [r for r in rows if r.ms is not None]
    for optimizer in dict.fromkeys(r.optimizer for r in measured if r.is_ours and not r.is_reference):
        yield [r for r in measured if r.optimizer == optimizer]


def _bytes_against_time(axes: Axes, rows: list[Result], title: str) -> None:
    for r in rows:
        assert r.ms is not None
        assert r.bytes_a_parameter is not None
        color = charts.OURS if r.is_ours else charts.PEER
        axes.plot(r.ms.median, r.bytes_a_parameter, "o", markersize=7, color=color)
        above = -1 if r.is_ours else 1  # a peer may have about the same bytes and time, and seldom fewer
        axes.annotate(
            r.label, (r.ms.median, r.bytes_a_parameter), (0, 8 * above), textcoords="offset points", fontsize=8.5,
            ha="center", va="bottom" if above > 0 else "top", color=charts.INK,
        )  # fmt: skip
    axes.set_xlim(0, 1.25 * max(r.ms.median for r in rows if r.ms))
    axes.set_ylim(0, 1.3 * max(r.bytes_a_parameter or 0.0 for r in rows))
    axes.set_xlabel("ms per step (nearer to the corner is better)", fontsize=9)
    axes.set_ylabel("bytes a parameter,\nweights and states", fontsize=9)
    axes.grid(True, linewidth=0.5, alpha=0.5)
    charts.titled(axes, title)


def _bars(axes: Axes, rows: list[Result], title: str) -> None:
    widest = max([100.0, *(r.percent_of_copy or 0.0 for r in rows)])
    y, previous, ticks = 0, None, {}
    for r in rows:
        if r.optimizer != previous:
            axes.text(widest * 0.006, y, r.optimizer, va="center", fontsize=10, fontweight="bold", color=charts.INK)
            previous, y = r.optimizer, y + 1
        percent = r.percent_of_copy or 0.0
        axes.barh(y, percent, height=0.72, color=charts.OURS if r.is_ours else charts.PEER)
        stored = "" if r.beside == OURS else f" with {PRESETS[r.beside]}"
        against = f", {ratio(r.against_ours.median)} x our time{stored}" if r.against_ours else ""
        against = f", {DISTURBED}" if r.disturbed else against
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
        chart=f'<img alt="Bars and points" src="data:image/png;base64,{encoded}"/>' if picture else charts.MISSING,
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
    kind = ' class="ours"' if r.is_reference else ""
    return f"<tr{kind}><td>{escape(r.optimizer)}, {escape(r.by)}</td>{cells}</tr>"
