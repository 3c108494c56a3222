"""How fast a device exchanges memory with the host: what states in host memory are bound by (``offload=True``)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusedadam.tensors import host_memory

MEBIBYTES = 128  # each way: copies of this size take a few milliseconds


@dataclass(frozen=True)
class Bus:
    """In GB/s. ``both``: each way, while the other goes on, too."""

    to_device: float
    from_device: float
    both: float


def bandwidth(device: torch.device, mebibytes: int = MEBIBYTES) -> Bus:
    """By copies of page-locked memory, on two streams."""
    nbytes = mebibytes << 20
    hosts = [host_memory.allocate(nbytes) for _ in range(2)]
    here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def to_device() -> None:
        with torch.cuda.stream(streams[0]):
            here[0].copy_(hosts[0], non_blocking=True)

    def from_device() -> None:
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(here[1], non_blocking=True)

    return Bus(*(_rate(device, nbytes, *ways) for ways in ((to_device,), (from_device,), (to_device, from_device))))


def _rate(device: torch.device, nbytes: int, *copies: Callable[[], None]) -> float:
    seconds = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for copy in copies:
            copy()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return nbytes / statistics.median(seconds[2:]) / 1e9
