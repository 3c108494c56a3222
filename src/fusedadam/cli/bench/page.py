"""What was measured, as one HTML page that needs no other file, for phones and large screens, light and dark."""

from __future__ import annotations

import base64
import importlib.resources
from html import escape

from fusedadam.cli import charts
from fusedadam.cli.bench import pictures
from fusedadam.cli.bench.report import COLUMNS, Report, Result


def page(report: Report) -> str:
    machine = report.machine
    threads = f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    stopped = "" if report.complete else '<p class="warning">Stopped before everything was measured.</p>'
    picture = base64.b64encode(pictures.png(report)).decode() if charts.possible() else None
    chart = charts.MISSING if picture is None else f'<img alt="Bars" src="data:image/png;base64,{picture}"/>'
    style = importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    title = f"A step of each optimizer on {machine['name']}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
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
    return f"<section><h2>{escape(title)}</h2>{table}</section>"


def _row(r: Result) -> str:
    cells = "".join(f'<td data-name="{name}">{escape(cell(r))}</td>' for name, cell in COLUMNS.items())
    if r.failed:
        cells = f'<td class="reason" colspan="{len(COLUMNS)}">failed: {escape(r.failed)}</td>'
    kind = ' class="ours"' if r.is_ours else ""
    return f"<tr{kind}><td>{escape(r.optimizer)}, {escape(r.by)}</td>{cells}</tr>"
