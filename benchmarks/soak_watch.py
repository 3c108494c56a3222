"""What a long run must not use more and more of: memory, file handles, threads, Python objects.

A quantity grows if its smallest sample in the last quarter of the run exceeds its largest sample in the second quarter
by more than its slack. The first quarter is left out, since that is where everything is set up; comparing the smallest
with the largest makes single outliers harmless, and a real leak of any steady rate passes the test all the same.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

MB = 2**20
# How much more is noise. Allocators round and fragment; everything else is exact up to a handful of objects.
SLACK = {
    "resident memory": 8 * MB,
    "bytes in use by malloc": 1 * MB,
    "blocks in use by Python": 1000,
    "open file handles": 0,
    "threads": 0,
    "CUDA memory allocated": MB // 4,
    "CUDA memory reserved": 4 * MB,
    "pinned host memory": MB // 4,
}
SLACK_OF_OBJECTS = 10
OBJECTS = "objects of type "
MOST_NAMES = 10_000


class Growth(NamedTuple):
    what: str
    before: float  # the largest in the second quarter
    after: float  # the smallest in the last quarter

    def __str__(self) -> str:
        return f"{self.what} grew from {readable(self.what, self.before)} to {readable(self.what, self.after)}"


class Watch:
    """Takes so many samples of one run. Their memory is allocated beforehand, or it would grow itself.

    Objects that exist already are not counted: they are many, and looking at them all takes most of the time.
    """

    def __init__(self, device: str, samples: int) -> None:
        self._device = device
        self._values = np.full((samples, MOST_NAMES), -1.0)
        self._columns: dict[str, int] = {}
        self._taken = 0

    def __enter__(self) -> Watch:
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()

    def sample(self) -> None:
        gc.collect()
        for name, value in _usage(self._device).items():
            self._values[self._taken, self._columns.setdefault(name, len(self._columns))] = value
        self._taken += 1

    def samples(self) -> list[dict[str, float]]:
        taken = self._values[: self._taken].tolist()
        return [{name: row[k] for name, k in self._columns.items() if row[k] >= 0} for row in taken]

    def compared(self) -> list[Growth]:
        """For every quantity its largest sample in the second quarter, and its smallest in the last."""
        samples = self.samples()
        quarter = len(samples) // 4
        second, last = samples[quarter : 2 * quarter], samples[-quarter:]
        names = dict.fromkeys(name for one in second + last for name in one)
        return [Growth(name, max(s.get(name, 0) for s in second), min(s.get(name, 0) for s in last)) for name in names]

    def growing(self) -> list[Growth]:
        return [one for one in self.compared() if one.after > one.before + SLACK.get(one.what, SLACK_OF_OBJECTS)]


def _usage(device: str) -> dict[str, float]:
    usage: dict[str, float] = {"blocks in use by Python": sys.getallocatedblocks()}
    if os.path.isdir("/proc/self"):
        with open("/proc/self/statm", encoding="ascii") as file:
            usage["resident memory"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        usage["open file handles"] = len(os.listdir("/proc/self/fd"))
        usage["threads"] = len(os.listdir("/proc/self/task"))
    if (in_use := _malloc_in_use()) is not None:
        usage["bytes in use by malloc"] = in_use
    if device == "cuda":
        torch.cuda.synchronize()
        usage["CUDA memory allocated"] = torch.cuda.memory_allocated()
        usage["CUDA memory reserved"] = torch.cuda.memory_reserved()
        if hasattr(torch.cuda, "host_memory_stats"):
            usage["pinned host memory"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    types = Counter(type(one) for one in gc.get_objects())
    return usage | {f"{OBJECTS}{kind.__module__}.{kind.__qualname__}": count for kind, count in types.items()}


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    ]


def _malloc_in_use() -> int | None:
    """Bytes that malloc has handed out, or None where the C library does not say."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def readable(what: str, value: float) -> str:
    return f"{value / MB:.1f} MB" if "memory" in what or "bytes" in what else f"{value:,.0f}"
