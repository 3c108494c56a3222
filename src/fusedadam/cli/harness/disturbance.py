"""Whether other programs disturbed a measurement: how long its threads waited for a core.

Taking turns does not help against other programs: a step of many parallel regions waits at each of them for its slowest
thread, so that load which costs one contestant a tenth of its speed can slow another a hundredfold.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

THREADS = Path("/proc/self/task")  # Linux keeps for each thread how long it was ready to run and did not
NANOSECONDS = 1e-9
MOST_WAITING = 0.1  # seconds per second; on a quiet machine it is 0.00


class Watch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._queued = seconds_queued()
        self._began, self._computed = time.perf_counter(), time.thread_time()

    def waited(self) -> float:
        """Seconds that threads of this process have waited for a core since then, per second.

        Linux says so for every thread. Elsewhere it is the part of the time in which the calling thread did not run.
        """
        elapsed, computed = time.perf_counter() - self._began, time.thread_time() - self._computed
        queued = seconds_queued()
        if queued is None or self._queued is None:
            return max(0.0, 1 - computed / elapsed) if elapsed > 0 else 0.0
        return max(0.0, queued - self._queued) / elapsed if elapsed > 0 else 0.0


def seconds_queued() -> float | None:
    """How long all threads of this process have waited for a core so far; None where the system does not say."""
    found = None
    with contextlib.suppress(OSError):
        for thread in THREADS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found = (found or 0.0) + NANOSECONDS * int((thread / "schedstat").read_text().split()[1])
    return found
