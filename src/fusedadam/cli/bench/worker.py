"""What runs in a process of its own: one implementation, one set of parameters, and a large copy beside it."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fusedadam.cli import contestants
from fusedadam.cli.bench import traffic
from fusedadam.cli.bench.shapes import Shape
from fusedadam.cli.bench.timing import Timer, large_copy, parameters_with_gradients
from fusedadam.cli.children import stay_deaf
from fusedadam.machine import processor
from fusedadam.optimizers.base import FusedOptimizer

HOST_CALLS = 5


@dataclass(frozen=True)
class Job:
    """One implementation of an optimizer, and the sets of parameters that it steps over, one after the other."""

    optimizer: str
    by: str
    sets: Sequence[Sequence[Shape]]
    dtype: str
    device: str
    seconds: float  # of a turn


class Measured:
    """The commands that a process answers; ``prepare`` is the first."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.params: list[torch.nn.Parameter] = []
        self.optimizer: Any = None
        self.step: Timer | None = None
        self.copy: Timer | None = None

    def prepare(self, which: int) -> int | None:
        """Gets ready to be timed on a set; returns the bytes that a step must move, if it is one of ours."""
        job = self.job
        self.params, self.optimizer, self.step = [], None, None  # what was before makes room
        self.params = parameters_with_gradients(job.sets[which], job.device, getattr(torch, job.dtype))
        self.optimizer = contestants.make(job.optimizer, job.by, self.params)
        self.step = Timer(self.optimizer.step, job.device, job.seconds)
        if self.copy is None:
            copy, self.copied = large_copy(job.device)
            self.copy = Timer(copy, job.device, job.seconds / 4)
        return traffic.bytes_moved(self.optimizer) if isinstance(self.optimizer, FusedOptimizer) else None

    def turn(self) -> tuple[float, float]:
        """Milliseconds of a step, and bytes that a copy moves in a millisecond."""
        assert self.step is not None
        assert self.copy is not None
        self.optimizer.step()  # others had the caches in between
        return self.step.turn(), self.copied / self.copy.turn()

    def account(self) -> dict[str, Any]:
        """What is asked once: bytes kept, bytes needed in between, and the host's part of the time."""
        assert self.step is not None
        timer, on_host = self.step, self.job.device == "cpu"  # where everything is
        return {
            "state_bytes": traffic.state_bytes(self.optimizer, self.params),
            "extra_bytes": traffic.extra_bytes(self.optimizer.step, self.job.device),
            "host_ms": None if on_host else statistics.median(timer.host() for _ in range(HOST_CALLS)),
        }


class Probe:
    """What the machine is, and what it can do."""

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
    if hasattr(os, "sysconf"):
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        )  # what is free is not said; half is a guess
    return 4 * 2**30


def serve(connection: Connection, log: str, made: Callable[[Any], Any], given: Any) -> None:
    """Answers commands until the other side is gone. Whatever goes wrong is an answer, too."""
    stay_deaf()
    if hasattr(os, "setsid"):
        os.setsid()  # so that it can be ended with everything that it starts
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    answering = made(given)
    connection.send("ready")
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(answering, command)(*arguments)
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
            return
        connection.send((True, answer))
