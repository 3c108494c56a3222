"""Rows of a table of speeds, ours beside a peer, for speed.py; fusedadam.cli.harness measures them."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedadam.cli import display
from fusedadam.cli.harness.measure import Conditions, copied_per_ms
from fusedadam.cli.harness.measure import measure as take_turns
from fusedadam.cli.harness.shapes import Shape
from fusedadam.cli.harness.timing import Pace
from fusedadam.machine import processor

FULL, QUICK = Pace(11, 0.1), Pace(3, 0.05)


@dataclass(frozen=True)
class Timed:
    """Milliseconds per step; None where nothing was measured."""

    ours: float
    peer: float | None
    copied_per_ms: float | None = None  # bytes that a large copy reads and writes
    moved: int | None = None  # bytes that a step of ours must move
    disturbed: bool = False  # by other programs, in too many turns


@dataclass(frozen=True)
class Goal:
    """A figure made of times. If ``goal`` is None it is printed without a verdict."""

    goal: float | None = None
    unit = ""
    upwards = True  # whether more is better

    def met(self, figure: float | None) -> bool | None:
        if self.goal is None or figure is None:
            return None
        return figure >= self.goal if self.upwards else figure <= self.goal

    def figure(self, timed: Timed) -> float | None:
        raise NotImplementedError


class Faster(Goal):
    unit = "times as fast"

    def figure(self, timed: Timed) -> float | None:
        return timed.peer and timed.peer / timed.ours


class OfTheTime(Goal):
    unit = "of the time"
    upwards = False

    def figure(self, timed: Timed) -> float | None:
        return timed.peer and timed.ours / timed.peer


class OfCopy(Goal):
    """The bandwidth of the bytes that a step must move, relative to a large copy's."""

    unit = "% of copy"

    def figure(self, timed: Timed) -> float | None:
        if timed.copied_per_ms is None or timed.moved is None:
            return None
        return 100 * timed.moved / timed.ours / timed.copied_per_ms


@dataclass(frozen=True)
class Row:
    """One line of the table. Ours and the peer get the same shapes, values and options."""

    what: str
    ours: Callable[..., Any]
    peer: Callable[..., Any]
    shapes: Sequence[Shape]
    dtype: str
    goals: Sequence[Goal]
    options: Mapping[str, Any] = field(default_factory=dict)


def measure(row: Row, device: str, pace: Pace) -> tuple[Timed, str]:
    """The times, and the name of the peer or why it is missing."""
    makes = {name: functools.partial(make, **row.options) for name, make in (("ours", row.ours), ("peer", row.peer))}
    found = take_turns(makes, row.shapes, row.dtype, Conditions(device, pace))
    gc.collect()  # optimizers may be part of reference cycles
    if device == "cuda":
        torch.cuda.empty_cache()
    ours, peer = found["ours"], found["peer"]
    theirs, copied = peer.median_ms if peer.ms else None, copied_per_ms(found.values())
    timed = Timed(ours.median_ms, theirs, copied, ours.bytes_moved, ours.disturbed or peer.disturbed)
    return timed, peer.failed or row.peer.__name__.strip("_").replace("_", " ")


def lines(row: Row, timed: Timed, peer: str) -> list[dict[str, Any]]:
    """One for each goal."""
    found = [(goal, None if timed.disturbed else goal.figure(timed)) for goal in row.goals]
    return [
        {"what": row.what, "ours": timed.ours, "peer": peer, "theirs": timed.peer, "figure": figure, "unit": goal.unit,
         "goal": goal.goal, "met": goal.met(figure), "disturbed": timed.disturbed}
        for goal, figure in found
    ]  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    rows = [
        (row["what"], number(row["ours"]), row["peer"], number(row["theirs"]), figure(row), number(row["goal"]))
        for row in found
    ]
    return display.table(("milliseconds, medians", "ours", "peer", "theirs", "figure", "goal"), rows)


def figure(row: dict[str, Any]) -> str:
    if row["figure"] is None:
        return "DISTURBED by other programs" if row["disturbed"] else "NOT MEASURED"
    return f"{row['figure']:.3g} {row['unit']}{' MISSED' if row['met'] is False else ''}"


def main(doc: str | None, rows: Mapping[str, Sequence[Row]], arguments: Sequence[str] | None = None) -> int:
    """``rows``: those to measure, by the type of device."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="TEXT", nargs="+", default=[""], help="only rows whose name contains a TEXT")
    parser.add_argument("--quick", action="store_true", help="fewer turns: to try something, not to publish")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args(arguments)
    device, pace = chosen.device, QUICK if chosen.quick else FULL
    selected = [row for row in rows[device] if any(text.lower() in row.what.lower() for text in chosen.only)]
    if not selected:
        parser.error(f"--only {chosen.only} is in the name of no row on {device}")
    name = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}, Python {platform.python_version()}")
    found: list[dict[str, Any]] = []
    with display.progress(len(selected), lines=len(selected)) as progress:
        for row in selected:
            more = lines(row, *measure(row, device, pace))
            progress.done(f"{row.what}: {', '.join(figure(line) for line in more)} ({more[0]['peer']})")
            found += more
    print(f"\n{table(found)}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2))
    return 0
