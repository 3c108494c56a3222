"""A row of the table of speeds, what is asked of it, and how it is timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Shape
from peers import Missing

Step = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Milliseconds a step; None for what was not measured."""

    ours: float
    peer: float | None
    copied_per_ms: float | None  # bytes that a large copy reads and writes
    parameters: int


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


@dataclass(frozen=True)
class OfCopy(Goal):
    """How much of a large copy's bandwidth, if each parameter moves just the bytes that it must."""

    bytes_each: int = 28
    unit = "% of copy"
    upwards = True

    def figure(self, timed: Timed) -> float | None:
        return timed.copied_per_ms and 100 * self.bytes_each * timed.parameters / timed.ours / timed.copied_per_ms


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


@dataclass(frozen=True)
class Pace:
    """How many turns, and how many seconds each."""

    turns: int
    seconds: float


FULL, QUICK = Pace(11, 0.1), Pace(3, 0.05)


def measure(row: Row, device: str, pace: Pace) -> tuple[Timed, str]:
    """The times, and what to call the peer, or why there is none."""
    peer = row.peer.__name__.strip("_").replace("_", " ")
    steps, copied = {"ours": make_step(row.ours, row, device)}, 0
    try:
        steps["peer"] = make_step(row.peer, row, device)
    except Missing as missing:
        peer = str(missing)
    if any(isinstance(goal, OfCopy) for goal in row.goals):
        steps["copy"], copied = copy_step(device)
    ms = compare(steps, device, pace)
    del steps
    gc.collect()  # an optimizer and what it refers to may form a circle
    if device == "cuda":
        torch.cuda.empty_cache()
    parameters = sum(torch.Size(shape).numel() for shape in row.shapes)
    return Timed(ms["ours"], ms.get("peer"), copied / ms["copy"] if copied else None, parameters), peer


def make_step(make: Callable[..., Any], row: Row, device: str) -> Step:
    """Gradients are independent of the parameters, and stay the same from step to step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device=device).to(row.dtype)) for shape in row.shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    step: Step = make(params, **row.options).step
    return step


def copy_step(device: str) -> tuple[Step, int]:
    source = torch.randn(2**28 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel() * source.element_size()


def compare(steps: dict[str, Step], device: str, pace: Pace) -> dict[str, float]:
    """Milliseconds a call of each, taking turns; a turn is as many calls as take its seconds, but at most 100."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def seconds(step: Step, repeat: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(repeat):
            step()
        wait()
        return (time.perf_counter() - begin) / repeat

    for step in steps.values():  # compile, allocate
        seconds(step, 2)
    repeat = {name: max(1, min(100, round(pace.seconds / seconds(step, 3)))) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(pace.turns):
        for name, step in steps.items():
            times[name].append(seconds(step, repeat[name]))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}
