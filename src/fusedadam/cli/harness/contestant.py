"""One implementation of an optimizer that steps over a set of parameters, and a large copy to compare it with."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedadam.cli.harness import traffic
from fusedadam.cli.harness.shapes import Shape
from fusedadam.cli.harness.timing import Timer, large_copy, parameters_with_gradients
from fusedadam.machine import processor
from fusedadam.optimizers.base import FusedOptimizer

Params = list[torch.nn.Parameter]


@dataclass(frozen=True)
class Job:
    make: Callable[[Params], Any]  # returns an object with step()
    shapes: Sequence[Shape]
    dtype: str
    device: str
    seconds: float  # of a turn


class Contestant:
    """The commands that :func:`measure.measure` sends; ``prepare`` comes first."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def prepare(self) -> tuple[int | None, int]:
        """Takes the first steps; returns the bytes that a step must move, if the optimizer is ours, and its states'."""
        job = self.job
        params = parameters_with_gradients(job.shapes, job.device, getattr(torch, job.dtype))
        self.optimizer = job.make(params)
        self.step = Timer(self.optimizer.step, job.device, job.seconds)
        copy, self.copied = large_copy(job.device)
        self.copy = Timer(copy, job.device, job.seconds / 4)
        moved = traffic.bytes_moved(self.optimizer) if isinstance(self.optimizer, FusedOptimizer) else None
        return moved, traffic.state_bytes(self.optimizer, params)

    def turn(self) -> tuple[float, float]:
        """Milliseconds per step, and bytes that a copy moves per millisecond."""
        self.optimizer.step()  # refills the caches, which other contestants have used
        return self.step.turn(), self.copied / self.copy.turn()


class Probe:
    """Looks at the machine."""

    def __init__(self, device: str) -> None:
        self.device = device

    def look(self) -> dict[str, Any]:
        copy, copied = large_copy(self.device)
        timer = Timer(copy, self.device, 0.1)
        cuda = self.device.partition(":")[0] == "cuda"
        return {
            "device": self.device,
            "name": torch.cuda.get_device_name(self.device) if cuda else processor(),
            "threads": torch.get_num_threads(),
            "copy_gb_s": copied / min(timer.turn() for _ in range(3)) / 1e6,
            "free_bytes": torch.cuda.mem_get_info(self.device)[0] if cuda else _free_memory(),
        }


def _free_memory() -> int:
    found = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text()) if sys.platform == "linux" else None
    return 4 * 2**30 if found is None else 1024 * int(found[1])
