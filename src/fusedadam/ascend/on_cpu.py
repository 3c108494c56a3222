"""torch.npu where "npu" means the CPU: every call is synchronous, and memory figures are those of the process."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fusedadam.ascend import device as devices
from fusedadam.machine import processor

FRESH_PEAK = "5"  # written to clear_refs, it resets the peak memory (VmHWM) of a process


def device_count() -> int:
    return devices.count_on_cpu()


def current_device() -> int:
    """LOCAL_RANK, or 0: launched scripts use the NPU with that index. Every index is the CPU."""
    return devices.from_launcher("LOCAL_RANK", 0)


def set_device(device: Any) -> None:
    _require_cpu(device)


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    _require_cpu(device)
    yield


def init() -> None: ...


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """The properties that a CPU has: ``name``, and ``total_memory`` in bytes."""
    return types.SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])


def get_device_name(device: Any = None) -> str:
    _require_cpu(device)
    return processor()


def synchronize(device: Any = None) -> None:
    _require_cpu(device)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.initial_seed()


def seed() -> None:
    torch.default_generator.seed()


seed_all = seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    _require_cpu(device)
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _require_cpu(device)
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        torch.set_rng_state(state)


def empty_cache() -> None:
    """Does nothing: torch does not cache CPU memory."""


ipc_collect = empty_cache


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The available and the total memory of this machine, in bytes."""
    _require_cpu(device)
    return _kilobytes("/proc/meminfo", "MemAvailable") * 1024, _kilobytes("/proc/meminfo", "MemTotal") * 1024


def memory_allocated(device: Any = None) -> int:
    """The resident memory of this process in bytes, tensors and all else: torch does not count CPU tensors."""
    _require_cpu(device)
    return _kilobytes("/proc/self/status", "VmRSS") * 1024


def max_memory_allocated(device: Any = None) -> int:
    """The peak of :func:`memory_allocated` since the process started or :func:`reset_peak_memory_stats`."""
    _require_cpu(device)
    return _kilobytes("/proc/self/status", "VmHWM") * 1024


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated  # there is no cache


def memory_stats(device: Any = None) -> dict[str, int]:
    """The subset of an NPU allocator's statistics that a process has."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    kinds = ("allocated_bytes", "reserved_bytes")
    return {f"{kind}.all.{when}": size for kind in kinds for when, size in (("current", now), ("peak", peak))}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    now, peak = (size / 2**20 for size in (memory_allocated(device), max_memory_allocated(device)))
    return f"npu is the CPU here; this process uses {now:.0f} MiB of memory (peak: {peak:.0f} MiB)"


def reset_peak_memory_stats(device: Any = None) -> None:
    _require_cpu(device)
    max_memory_allocated()  # raises where memory figures are unavailable
    Path("/proc/self/clear_refs").write_text(FRESH_PEAK)


reset_max_memory_allocated = reset_peak_memory_stats


class Event(torch.Event):
    """A point in time. Calls on a CPU are synchronous, so there is never anything to wait for."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="cpu")

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timing, self._time = enable_timing, None if enable_timing else 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from this event to ``end_event``."""
        if not (self._timing and end_event._timing) or self._time is None or end_event._time is None:
            raise ValueError("both events must be created with enable_timing=True and recorded before elapsed_time()")
        return float(end_event._time - self._time) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream(torch.Stream):
    """The only stream of a CPU, whose calls are synchronous."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        _require_cpu(device)
        return super().__new__(cls, device="cpu")

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


@functools.cache
def _the_stream() -> Stream:
    return Stream()


def current_stream(device: Any = None) -> Stream:
    _require_cpu(device)
    return _the_stream()


default_stream = current_stream


def set_stream(stream: Stream) -> None: ...


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


def _require_cpu(device: Any) -> None:
    """Raises unless this device is the CPU."""
    if device is None or (type(device) is int and device == -1):  # the current device
        return
    if type(device) is int:
        devices.require_on_cpu(device, f"npu:{device}")
    elif torch.device(devices.translated(device)).type != "cpu":
        devices.require_on_cpu("", str(device))


def _kilobytes(file: str, field: str) -> int:
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    except OSError:
        pass
    raise NotImplementedError(
        f"torch.npu's memory figures are read from /proc where npu means the CPU, and {os.uname().sysname} has none; "
        "use psutil.Process().memory_info().rss"
    )
