"""What this machine is called."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path


def processor() -> str:
    with contextlib.suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
