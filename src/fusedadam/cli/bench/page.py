"""What was measured, as one HTML page that needs nothing else: for a phone and a large screen, light and dark."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from html import escape

from fusedadam.cli.bench import tables
from fusedadam.cli.bench.chart import curves_svg, series
from fusedadam.cli.bench.results import Curve, Report, Result, Set

COLUMNS = {
    "ms": "milliseconds of a whole optimizer.step(), the median of the turns",
    "spread": "half the distance between the quartiles of the turns, in percent of the median",
    "GB moved": "what a step must read and write, from the roles of its rule and their dtypes; for a peer the same, "
    "but for states that it keeps smaller or larger",
    "of copy": "the bandwidth of those bytes in percent of a large copy's, measured in the same turns (on a CPU: in "
    "place). Parameters that fit into a cache can be faster than a copy that does not",
    "host ms": "until a single step() returns, with nothing queued before it; on a CPU all of it is the host's",
    "state MB": "what the optimizer keeps beside parameters and gradients",
    "extra MB": "what a step needs at its peak beyond all that",
    "time against ours": "its time in a turn over ours in the same turn, the median: above 1 we are faster",
}

READING_BARS = (
    "Time of a step; its bandwidth in percent of a large copy's, the dashed line; and a peer's time against ours."
)


def page(report: Report) -> str:
    machine = report.machine
    threads = f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    stopped = None if report.complete else "Stopped before everything was measured."
    warned = "".join(f'<p class="warning">{escape(s)}</p>' for s in (stopped, tables.busy_sentence(report)) if s)
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
<div class="columns">{"".join(_bars(report))}</div>
<div class="columns">{"".join(_growth(report))}</div>
<section><h2>All figures</h2>{"".join(_tables(report))}</section>
<section><h2>How to read them</h2>
<p>Everyone runs in a process of their own, and they take turns: what else the machine does slows all of them alike.
Read the ratios. {escape(tables.spread_sentence(report))}</p>
<dl>{"".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in COLUMNS.items())}</dl>
</section>
{_absent(report)}
<p class="muted"><code>{escape(report.command)}</code> took {report.seconds:.0f} seconds.</p>
</body>
</html>
"""


def _cards(report: Report) -> Iterable[str]:
    """For each optimizer, how it compares with the first peer on the first set."""
    seen = set()
    for r in report.results:
        if r.against_ours is not None and r.optimizer not in seen:
            seen.add(r.optimizer)
            yield (
                f"<div>{escape(r.optimizer)}<b>{tables.ratio(r.against_ours.median)}&#215;</b>"
                f"<small>as fast as {escape(r.by)} on {escape(r.set)}, {r.dtype}</small></div>"
            )


def _bars(report: Report) -> Iterable[str]:
    widest = max([100.0, *(r.percent_of_copy or 0.0 for r in report.results)])
    for one in report.sets:
        for dtype in report.dtypes:
            rows = report.of(one, dtype)
            if rows:
                yield f"<section><h2>{escape(one.name)}</h2><small>{_about(one, dtype)}</small>"
                previous = None
                for r in rows:
                    if r.optimizer != previous:
                        previous = r.optimizer
                        yield f"<h3>{escape(r.optimizer)}</h3>"
                    yield _bar(r, widest)
                yield f"<p><small>{READING_BARS}</small></p></section>"


def _about(one: Set, dtype: str) -> str:
    return escape(f"{one.described.partition(': ')[2]}, {dtype}")


def _bar(r: Result, widest: float) -> str:
    percent = r.percent_of_copy or 0.0
    kind = "bar ours" if r.is_ours else "bar failed" if r.failed else "bar"
    figures = "failed" if r.ms is None else f"<b>{tables.number(r.ms.median)} ms</b> · {percent:.0f} %"
    if r.against_ours is not None:
        figures += f" · {tables.ratio(r.against_ours.median)}&#215;"
    return (
        f'<div class="{kind}"><span class="name">{escape(r.by)}</span><span class="figures">{figures}</span>'
        f'<div class="track"><i style="width:{100 * percent / widest:.1f}%"></i>'
        f'<u style="left:{100 * 100 / widest:.1f}%"></u></div></div>'
    )


def _growth(report: Report) -> Iterable[str]:
    for over, x_label in (("elements", "elements in one tensor"), ("tensors", "tensors of 1,024 elements")):
        curves = [c for c in report.growth if c.over == over]
        if any(c.points for c in curves):
            title = f"How {curves[0].optimizer}'s time grows with the number of {over}"
            yield f"<section><h2>{escape(title)}</h2><small>{escape(curves[0].dtype)}</small>"
            yield curves_svg(curves, x_label, title)
            yield f"{_legend(curves)}</section>"


def _legend(curves: Sequence[Curve]) -> str:
    drawn = [c for c in curves if c.points]
    entries = [f'<li style="color:var(--s{series(k)})"><span>{escape(c.by)}</span></li>' for k, c in enumerate(drawn)]
    return f'<ul class="legend">{"".join(entries)}<li class="copy"><span>a large copy</span></li></ul>'


def _tables(report: Report) -> Iterable[str]:
    for one in report.sets:
        for dtype in report.dtypes:
            rows = report.of(one, dtype)
            if rows:
                shown = tables.columns(rows) | {"optimizer": lambda r: f"{r.optimizer}, {r.by}"}
                head = "".join(f"<th>{name}</th>" for name in shown)
                body = "".join(_row(r, {name: say(r) for name, say in shown.items()}) for r in rows)
                caption = f"<caption>{escape(one.described)}, {dtype}</caption>"
                yield f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(r: Result, texts: dict[str, str]) -> str:
    cells = [f'<td data-name="{name}">{escape(text)}</td>' for name, text in texts.items()]
    if r.failed:
        cells[1:] = [f'<td class="reason" colspan="{len(texts) - 1}">failed: {escape(r.failed)}</td>']
    kind = ' class="ours"' if r.is_ours else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _absent(report: Report) -> str:
    entries = "".join(f"<dt>{escape(', '.join(n))}</dt><dd>{escape(w)}</dd>" for w, n in tables.absent(report).items())
    return f"<section><h2>Not measured</h2><dl>{entries}</dl></section>" if entries else ""
