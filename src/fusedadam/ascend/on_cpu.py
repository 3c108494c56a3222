"""torch.npu where "npu" means the CPU: all work is done when a call returns, and memory is that of the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fusedadam.ascend import device as devices
from fusedadam.machine import processor

FRESH_PEAK = "5"  # written to clear_refs, it makes Linux forget the largest size of a process so far


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    _only(device)


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    _only(device)
    yield


def get_device_name(device: Any = None) -> str:
    _only(device)
    return processor()


def synchronize(device: Any = None) -> None:
    _only(device)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def empty_cache() -> None:
    """Nothing is kept back: torch returns memory of the CPU at once."""


def memory_allocated(device: Any = None) -> int:
    """The bytes that this process has in memory, of which tensors are a part: torch does not count them on a CPU."""
    _only(device)
    return _status("VmRSS")


def max_memory_allocated(device: Any = None) -> int:
    """The most that :func:`memory_allocated` has been since the start or :func:`reset_peak_memory_stats`."""
    _only(device)
    return _status("VmHWM")


def reset_peak_memory_stats(device: Any = None) -> None:
    _only(device)
    _status("VmHWM")  # says so where this cannot be known
    Path("/proc/self/clear_refs").write_text(FRESH_PEAK)


class Event:
    """A moment. Work on a CPU is done when its call returns, so there is never anything to wait for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timing, self._moment = enable_timing, None if enable_timing else 0.0

    def record(self, stream: Any = None) -> None:
        self._moment = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to that one."""
        if not (self._timing and end_event._timing) or self._moment is None or end_event._moment is None:
            raise ValueError("both events must have been made with enable_timing=True, and recorded")
        return (end_event._moment - self._moment) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """The one order in which a CPU does what it is told."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        _only(device)
        self.device, self.priority = torch.device("cpu"), priority

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


_the_stream = None


def current_stream(device: Any = None) -> Stream:
    global _the_stream
    _only(device)
    _the_stream = _the_stream or Stream()
    return _the_stream


default_stream = current_stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


def _only(device: Any) -> None:
    if isinstance(device, int):
        there = device in (-1, 0)
    else:
        there = device is None or torch.device(devices.translated(device)).type == "cpu"
    if not there:
        raise RuntimeError(f"device={device!r} does not exist: there is one device here, the CPU, and it is 'npu:0'")


def _status(field: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise NotImplementedError(
        f"torch.npu's memory figures mean the process where npu is the CPU, and {os.uname().sysname} does not tell "
        "them in /proc; use psutil.Process().memory_info().rss"
    )
