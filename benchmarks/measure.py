"""A row of the table of speeds, what is asked of it, and how it is timed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peers import Missing

from fusedadam.cli.bench.shapes import Shape
from fusedadam.cli.bench.timing import Pace, compare, large_copy, parameters_with_gradients
from fusedadam.cli.bench.traffic import bytes_moved

FULL, QUICK = Pace(11, 0.1), Pace(3, 0.05)


@dataclass(frozen=True)
class Timed:
    """Milliseconds a step; None for what was not measured."""

    ours: float
    peer: float | None
    copied_per_ms: float | None = None  # bytes that a large copy reads and writes
    moved: int | None = None  # bytes that a step of ours must


@dataclass(frozen=True)
class Goal:
    """A figure to be made of times. If ``goal`` is None it is printed, and nothing is asked of it."""

    goal: float | None = None
    unit = "s"
    upwards = False  # whether more is better

    def met(self, figure: float | None) -> bool | None:
        if self.goal is None or figure is None:
            return None
        return figure >= self.goal if self.upwards else figure <= self.goal

    def figure(self, timed: Timed) -> float | None:
        raise NotImplementedError


class Seconds(Goal):
    """A time itself."""


class Faster(Goal):
    unit = "times as fast"
    upwards = True

    def figure(self, timed: Timed) -> float | None:
        return timed.peer and timed.peer / timed.ours


class OfTheTime(Goal):
    unit = "of the time"

    def figure(self, timed: Timed) -> float | None:
        return timed.peer and timed.ours / timed.peer


class OfCopy(Goal):
    """How much of a large copy's bandwidth, if a step moves just the bytes that it must."""

    unit = "% of copy"
    upwards = True

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
    dtype: torch.dtype
    goals: Sequence[Goal]
    options: Mapping[str, Any] = field(default_factory=dict)


def measure(row: Row, device: str, pace: Pace) -> tuple[Timed, str]:
    """The times, and what to call the peer, or why there is none."""
    peer = row.peer.__name__.strip("_").replace("_", " ")
    optimizer = row.ours(parameters_with_gradients(row.shapes, device, row.dtype), **row.options)
    steps, copied = {"ours": optimizer.step}, None
    try:
        steps["peer"] = row.peer(parameters_with_gradients(row.shapes, device, row.dtype), **row.options).step
    except Missing as missing:
        peer = str(missing)
    if any(isinstance(goal, OfCopy) for goal in row.goals):
        steps["copy"], copied = large_copy(device)
    ms = {name: statistics.median(times) for name, times in compare(steps, device, pace).items()}
    moved = bytes_moved(optimizer) if copied else None
    del steps, optimizer
    gc.collect()  # an optimizer and what it refers to may form a circle
    if device == "cuda":
        torch.cuda.empty_cache()
    return Timed(ms["ours"], ms.get("peer"), copied / ms["copy"] if copied else None, moved), peer
