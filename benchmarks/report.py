"""What was measured: a line as soon as it is known, a table at the end, and plain data for a file."""

from __future__ import annotations

from typing import Any

from measure import Goal, Row, Timed


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def times(self, row: Row, timed: Timed, peer: str) -> None:
        for goal in row.goals:
            self.add(row.what, timed.ours, peer, timed.peer, goal.figure(timed), goal)

    def add(self, what: str, ours: float, peer: str, theirs: float | None, figure: float | None, goal: Goal) -> None:
        row = {"what": what, "ours": ours, "peer": peer, "theirs": theirs, "figure": figure, "unit": goal.unit}
        self.rows.append(row | {"goal": goal.goal, "met": goal.met(figure)})
        asked = "no goal" if goal.goal is None else f"goal {goal.goal:g}"
        print(f"  {what}: {_figure(row) or peer} ({asked}) {_verdict(self.rows[-1])}".rstrip(), flush=True)

    def table(self) -> str:
        rows = [("what", "ours", "peer", "theirs", "figure", "goal", ""), *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs, goal = (_number(row[name]) for name in ("ours", "theirs", "goal"))
    return row["what"], ours, row["peer"], theirs, _figure(row), goal, _verdict(row)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _figure(row: dict[str, Any]) -> str:
    return "" if row["figure"] is None else f"{row['figure']:.3g} {row['unit']}"


def _verdict(row: dict[str, Any]) -> str:
    if row["figure"] is None:
        return "NOT MEASURED"
    return "MISSED" if row["met"] is False else ""
