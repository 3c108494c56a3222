"""The name of this machine's processor, and the cores that this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def processor() -> str:
    with contextlib.suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
