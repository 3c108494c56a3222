"""How long until the first step: in processes of their own, since a process has only one first step."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from measure import Seconds

GOALS = {
    "import fusedadam, beyond torch": Seconds(0.1),
    "first step, compiled code cached": Seconds(0.7),
    "first step, nothing cached": Seconds(5),
}
FIRST_STEP = """
import time, torch
begin = time.perf_counter()
import fusedadam
imported = time.perf_counter() - begin
param = torch.nn.Parameter(torch.randn(1000))
param.grad = torch.randn(1000)
optimizer = fusedadam.AdamW([param])
begin = time.perf_counter()
optimizer.step()
print(imported, time.perf_counter() - begin)
"""


def seconds(starts: int) -> dict[str, float]:
    """The figures, by the names that ``GOALS`` has for them; all but the last are medians of so many starts."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FUSEDADAM_CACHE_DIR": folder}

        def start() -> list[float]:
            out = subprocess.run(
                [sys.executable, "-c", FIRST_STEP], env=environment, capture_output=True, text=True, check=True
            )
            return [float(x) for x in out.stdout.split()]

        fresh = start()[1]
        imported, cached = (statistics.median(values) for values in zip(*(start() for _ in range(starts)), strict=True))
    return dict(zip(GOALS, (imported, cached, fresh), strict=True))
