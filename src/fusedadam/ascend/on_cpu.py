"""torch.npu where "npu" means the CPU: all work is done when a call returns, and memory is that of the process."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fusedadam.ascend import device as devices
from fusedadam.machine import processor

FRESH_PEAK = "5"  # written to clear_refs, it makes Linux forget the largest size of a process so far


def device_count() -> int:
    return devices.count_on_cpu()


def current_device() -> int:
    """What a script sets at its start: 0, or its rank in a launch of several processes. All of them are the CPU."""
    return devices.launched("LOCAL_RANK", 0)


def set_device(device: Any) -> None:
    _only(device)


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    _only(device)
    yield


def init() -> None: ...


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Its ``name`` and its ``total_memory`` in bytes."""
    return types.SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])


def get_device_name(device: Any = None) -> str:
    _only(device)
    return processor()


def synchronize(device: Any = None) -> None:
    _only(device)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.initial_seed()


def seed() -> None:
    torch.default_generator.seed()


seed_all = seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    _only(device)
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _only(device)
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        torch.set_rng_state(state)


def empty_cache() -> None:
    """Nothing is kept back: torch returns memory of the CPU at once."""


ipc_collect = empty_cache


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The bytes of this machine's memory that are available, and all of them."""
    _only(device)
    return _kilobytes("/proc/meminfo", "MemAvailable") * 1024, _kilobytes("/proc/meminfo", "MemTotal") * 1024


def memory_allocated(device: Any = None) -> int:
    """The bytes that this process has in memory, of which tensors are a part: torch does not count them on a CPU."""
    _only(device)
    return _kilobytes("/proc/self/status", "VmRSS") * 1024


def max_memory_allocated(device: Any = None) -> int:
    """The most that :func:`memory_allocated` has been since the start or :func:`reset_peak_memory_stats`."""
    _only(device)
    return _kilobytes("/proc/self/status", "VmHWM") * 1024


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated  # no more than what is used is kept


def memory_stats(device: Any = None) -> dict[str, int]:
    """Of the many figures of an NPU's allocator, those that a process has."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    kinds = ("allocated_bytes", "reserved_bytes")
    return {f"{kind}.all.{when}": size for kind in kinds for when, size in (("current", now), ("peak", peak))}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    now, peak = (size / 2**20 for size in (memory_allocated(device), max_memory_allocated(device)))
    return f"npu is the CPU here; this process has {now:.0f} MiB of memory, and had {peak:.0f} MiB at most"


def reset_peak_memory_stats(device: Any = None) -> None:
    _only(device)
    max_memory_allocated()  # says so where this cannot be known
    Path("/proc/self/clear_refs").write_text(FRESH_PEAK)


reset_max_memory_allocated = reset_peak_memory_stats


class Event(torch.Event):
    """A moment. Work on a CPU is done when its call returns, so there is never anything to wait for."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="cpu")

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timing, self._moment = enable_timing, None if enable_timing else 0.0

    def record(self, stream: Any = None) -> None:
        self._moment = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to that one."""
        if not (self._timing and end_event._timing) or self._moment is None or end_event._moment is None:
            raise ValueError("both events must have been made with enable_timing=True, and recorded")
        return float(end_event._moment - self._moment) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream(torch.Stream):
    """The one order in which a CPU does what it is told."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        _only(device)
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


_the_stream = None


def current_stream(device: Any = None) -> Stream:
    global _the_stream
    _only(device)
    _the_stream = _the_stream or Stream()
    return _the_stream


default_stream = current_stream


def set_stream(stream: Stream) -> None: ...


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


def _only(device: Any) -> None:
    """Raises unless this device is the CPU."""
    if device is None or (type(device) is int and device == -1):  # the current one
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
        f"torch.npu's memory figures mean the process where npu is the CPU, and {os.uname().sysname} does not tell "
        "them in /proc; use psutil.Process().memory_info().rss"
    )
