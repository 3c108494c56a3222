"""What was measured, for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusedadam.cli import display
from fusedadam.cli.bench.results import Report, Result

GIGA, MEGA = 1e9, 1e6
BUSY = 20.0  # percent of spread that a quiet machine does not have


def line(results: Sequence[Result]) -> str:
    """One optimizer and its peers, as soon as they are measured."""
    ours, *peers = results
    told = [f"ours {_ms(ours)}", *(f"{peer.by} {_against(peer)}" for peer in peers)]
    return f"{ours.optimizer} on {ours.set}, {ours.dtype}: {', '.join(told)}"


def show(report: Report) -> None:
    for one in report.sets:
        for dtype in report.dtypes:
            rows = report.of(one, dtype)
            if rows:
                print(f"\n{one.described}, {dtype}")
                shown = columns(rows)
                display.table(list(shown), [[say(r) for say in shown.values()] for r in rows])
    for result in report.results:
        if result.failed:
            print(f"failed: {result.optimizer} by {result.by} on {result.set}, {result.dtype}: {result.failed}")
    for why, names in absent(report).items():
        print(f"{', '.join(names)}: {why}")


def columns(rows: Sequence[Result]) -> dict[str, Callable[[Result], str]]:
    """What the columns are called and what they say; on a CPU there is none for the host, which does everything."""
    host = {"host ms": lambda r: _optional(r.host_ms, 1, 3)} if any(r.host_ms is not None for r in rows) else {}
    return {
        "optimizer": lambda r: f"{r.optimizer if r.is_ours else '':9} {r.by}",
        "ms": lambda r: "failed" if r.ms is None else number(r.ms.median),
        "spread": lambda r: "" if r.ms is None else f"± {r.ms.percent:.0f} %",
        "GB moved": lambda r: _optional(r.bytes_moved, GIGA, 3),
        "of copy": lambda r: "" if r.percent_of_copy is None else f"{r.percent_of_copy:.0f} %",
        **host,
        "state MB": lambda r: _optional(r.state_bytes, MEGA, 1),
        "extra MB": lambda r: _optional(r.extra_bytes, MEGA, 1),
        "time against ours": lambda r: "" if r.against_ours is None else _against(r),
    }


def absent(report: Report) -> dict[str, list[str]]:
    """Those who were not measured, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for one in report.absent:
        names = by_reason.setdefault(one.why, [])
        if one.by not in names:
            names.append(one.by)
    return by_reason


def spread_sentence(report: Report) -> str:
    """How far to trust the figures."""
    worst = report.largest_spread
    if worst is None or worst.ms is None:
        return "Nothing was measured."
    where = f"{worst.optimizer} by {worst.by} on {worst.set}, {worst.dtype}"
    return (
        "Times are medians; ± is half the distance between the quartiles of the turns. "
        f"The largest was ± {worst.ms.percent:.0f} % ({where})."
    )


def cache_sentence(report: Report) -> str | None:
    if all((result.percent_of_copy or 0.0) <= 100 for result in report.results):
        return None
    return "Above 100 % of copy: parameters that fit into a cache can be faster than a large copy, which does not."


def busy_sentence(report: Report) -> str | None:
    worst = report.largest_spread
    if worst is None or worst.ms is None or worst.ms.percent <= BUSY:
        return None
    return (
        f"Times went up and down by ± {worst.ms.percent:.0f} %: something else was using the machine. "
        "Measure again before you trust a ratio."
    )


def number(value: float) -> str:
    """Three digits or four, whatever the size."""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def ratio(value: float) -> str:
    """Three digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def _ms(r: Result) -> str:
    return "failed" if r.ms is None else f"{number(r.ms.median)} ms"


def _against(r: Result) -> str:
    return _ms(r) if r.against_ours is None else f"{ratio(r.against_ours.median)} x"


def _optional(value: float | None, unit: float, digits: int) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"
