"""How a call is timed: in turns of many calls, so that contestants can alternate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusedadam.cli.harness.disturbance import MOST_WAITING, Watch
from fusedadam.cli.harness.shapes import Shape

Step = Callable[[], object]
MOST_CALLS = 100
FEWEST_QUIET = 5  # one of so many calls must be undisturbed for a turn to count


@dataclass(frozen=True)
class Pace:
    """How many turns, and how many seconds each."""

    turns: int
    seconds: float


class Timed(NamedTuple):
    """Milliseconds per call, and how long threads waited for a core meanwhile, per second."""

    ms: float
    waited: float


def waiting_for(device: str) -> Callable[[], None]:
    """Returns a function that waits for queued work: calls on an accelerator return before the work is done."""
    return (lambda: None) if device == "cpu" else (lambda: torch.accelerator.synchronize(device))


class Timer:
    """Times calls of one function. The constructor warms it up: kernels are compiled, memory is allocated.

    ``before``: what each call needs beforehand, which is not timed; then each call is timed alone on any device.
    """

    def __init__(self, step: Step, device: str, seconds: float, before: Step | None = None) -> None:
        self.step, self.wait, self.queued, self.before = step, waiting_for(device), device != "cpu", before
        self._ms(2)
        self.calls = max(1, min(MOST_CALLS, round(1e3 * seconds / self._ms(3))))

    def turn(self) -> Timed:
        """As many calls as fill a turn. On a CPU, calls that had to wait for a core do not count, if others did not."""
        watch = Watch()
        if self.queued:
            return Timed(self._ms(self.calls), watch.waited())
        calls = [self._watched() for _ in range(self.calls)]
        quiet = [call for call in calls if call.waited <= MOST_WAITING]
        if len(quiet) < max(1, len(calls) // FEWEST_QUIET):
            return Timed(statistics.median(call.ms for call in calls), watch.waited())
        return Timed(statistics.median(call.ms for call in quiet), statistics.median(call.waited for call in quiet))

    def _watched(self) -> Timed:
        if self.before is not None:
            self.before()
        self.wait()
        watch, begin = Watch(), time.perf_counter()
        self.step()
        self.wait()
        ms = 1e3 * (time.perf_counter() - begin)
        return Timed(ms, watch.waited())

    def _ms(self, calls: int) -> float:
        """Per call. Where every call has a time of its own, as on a CPU, the median counts."""
        if not self.queued or self.before is not None:
            return statistics.median(self._watched().ms for _ in range(calls))
        self.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            self.step()
        self.wait()
        return 1e3 * (time.perf_counter() - begin) / calls


def parameters_with_gradients(shapes: Sequence[Shape], device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Gradients are independent of the parameters, and the same in every step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def large_copy(device: str) -> tuple[Step, int]:
    """A copy that exceeds every cache, and the bytes that it reads and writes.

    On a CPU it negates in place: before writing elsewhere, a processor first reads the target, which an update in
    place has read anyway.
    """
    source = torch.ones(2**25 if device == "cpu" else 2**28, device=device)
    moved = 2 * source.numel() * source.element_size()
    if device == "cpu":
        return source.neg_, moved
    target = torch.empty_like(source)
    return lambda: target.copy_(source), moved
