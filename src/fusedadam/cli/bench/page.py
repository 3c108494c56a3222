"""What was measured, as one HTML page that needs no other file, for phones and large screens, light and dark."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from html import escape

from fusedadam.cli import charts
from fusedadam.cli.bench.pictures import bars_svg, curves_svg, grown
from fusedadam.cli.bench.report import Report, Result, columns, ratio

COLUMNS = {
    "ms": "milliseconds of a whole optimizer.step(), the median of the turns",
    "spread": "half the distance between the quartiles of the turns, in percent of the median",
    "GB moved": "what a step must read and write, from the roles of its rule and their dtypes; the same for a peer, "
    "except for states that it keeps smaller or larger",
    "of copy": "the bandwidth of those bytes in percent of a large copy's, measured in the same turns (on a CPU: in "
    "place). Parameters that fit into a cache can be faster than a copy that does not",
    "host ms": "until a single step() returns, with nothing queued before it; on a CPU all time is the host's",
    "state MB": "what the optimizer keeps beside parameters and gradients",
    "extra MB": "what a step needs at its peak in addition",
    "time against ours": "its time over ours in the same turn, the median: above 1 we are faster",
}


def page(report: Report) -> str:
    machine = report.machine
    threads = f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    stopped = None if report.complete else "Stopped before everything was measured."
    missing = None if charts.possible() else charts.MISSING
    warned = "".join(f'<p class="warning">{escape(s)}</p>' for s in (stopped, missing, report.busy_sentence()) if s)
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
{warned}</header>
<div class="cards">{"".join(_cards(report))}</div>
<div class="columns">{"".join(_charts(report)) if charts.possible() else ""}</div>
<section><h2>All figures</h2>{"".join(_tables(report))}</section>
<section><h2>How to read them</h2>
<p>Each implementation runs in its own process, and they take turns, so that other programs slow all of them alike.
Read the ratios. {escape(report.spread_sentence())}</p>
<dl>{"".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in COLUMNS.items())}</dl>
</section>
{_absent(report)}
<p class="muted"><code>{escape(report.command)}</code> took {report.seconds:.0f} seconds.</p>
</body>
</html>
"""


def _cards(report: Report) -> Iterator[str]:
    """For each optimizer, how it compares with the first peer on the first set."""
    seen: set[str] = set()
    for r in report.results:
        if r.against_ours is not None and r.optimizer not in seen:
            seen.add(r.optimizer)
            yield (
                f"<div>{escape(r.optimizer)}<b>{ratio(r.against_ours.median)}&#215;</b>"
                f"<small>as fast as {escape(r.by)} on {escape(r.set)}, {r.dtype}</small></div>"
            )


def _charts(report: Report) -> Iterator[str]:
    drawn = {f"{one.described}, {dtype}": bars_svg(rows, one.described) for one, dtype, rows in report.panels()}
    drawn |= {title: curves_svg(curves, title) for title, curves in grown(report).items()}
    yield from (f"<section><h2>{escape(title)}</h2>{chart}</section>" for title, chart in drawn.items())


def _tables(report: Report) -> Iterator[str]:
    for one, dtype, rows in report.panels():
        shown = columns(rows) | {"optimizer": lambda r: f"{r.optimizer}, {r.by}"}
        head = "".join(f"<th>{name}</th>" for name in shown)
        body = "".join(_row(r, {name: cell(r) for name, cell in shown.items()}) for r in rows)
        caption = f"<caption>{escape(one.described)}, {dtype}</caption>"
        yield f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(r: Result, texts: dict[str, str]) -> str:
    cells = [f'<td data-name="{name}">{escape(text)}</td>' for name, text in texts.items()]
    if r.failed:
        cells[1:] = [f'<td class="reason" colspan="{len(texts) - 1}">failed: {escape(r.failed)}</td>']
    kind = ' class="ours"' if r.is_ours else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _absent(report: Report) -> str:
    entries = "".join(f"<dt>{escape(n)}</dt><dd>{escape(w)}</dd>" for w, n in report.absent_by_reason.items())
    return f"<section><h2>Not measured</h2><dl>{entries}</dl></section>" if entries else ""
