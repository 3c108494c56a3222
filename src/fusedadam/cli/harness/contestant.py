"""One implementation of an optimizer that steps over sets of parameters, and a large copy to compare it with."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedadam.cli.harness import traffic
from fusedadam.cli.harness.shapes import Shape
from fusedadam.cli.harness.timing import Timer, large_copy, parameters_with_gradients
from fusedadam.machine import processor
from fusedadam.optimizers.base import FusedOptimizer

HOST_CALLS = 5
Params = list[torch.nn.Parameter]


@dataclass(frozen=True)
class Job:
    make: Callable[[Params], Any]  # returns an object with step()
    sets: Sequence[Sequence[Shape]]
    dtype: str
    device: str
    seconds: float  # of a turn


class Contestant:
    """The commands that :class:`measure._Turns` sends; ``prepare`` comes first."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.params: Params = []
        self.optimizer: Any = None
        self.step: Timer | None = None
        self.copy: Timer | None = None

    def prepare(self, which: int) -> int | None:
        """Gets ready to be timed on a set; returns the bytes that a step must move, if the optimizer is ours."""
        job = self.job
        self.params, self.optimizer, self.step = [], None, None  # frees the memory of the previous set
        self.params = parameters_with_gradients(job.sets[which], job.device, getattr(torch, job.dtype))
        self.optimizer = job.make(self.params)
        self.step = Timer(self.optimizer.step, job.device, job.seconds)
        if self.copy is None:
            copy, self.copied = large_copy(job.device)
            self.copy = Timer(copy, job.device, job.seconds / 4)
        return traffic.bytes_moved(self.optimizer) if isinstance(self.optimizer, FusedOptimizer) else None

    def turn(self) -> tuple[float, float]:
        """Milliseconds per step, and bytes that a copy moves per millisecond."""
        assert self.step is not None
        assert self.copy is not None
        self.optimizer.step()  # refills the caches, which other contestants have used
        return self.step.turn(), self.copied / self.copy.turn()

    def account(self) -> dict[str, Any]:
        """What is asked once for each set: bytes kept, bytes needed temporarily, and time on the host."""
        assert self.step is not None
        timer, on_host = self.step, self.job.device == "cpu"
        return {
            "state_bytes": traffic.state_bytes(self.optimizer, self.params),
            "extra_bytes": traffic.extra_bytes(self.optimizer.step, self.job.device),
            "host_ms": None if on_host else statistics.median(timer.host() for _ in range(HOST_CALLS)),
        }


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
    if sys.platform == "linux":
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf"):  # other systems do not say what is free: half of all memory is a guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * 2**30
