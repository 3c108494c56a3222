"""How long until the first step: `python benchmarks/startup.py` starts several processes, since each has only one."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from fusedadam.cli import display

STARTS = 5
GOALS = {
    "import fusedadam, beyond torch": 0.1,
    "first step, compiled code cached": 0.5,
    "first step, nothing cached": 5.0,
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


def start(cache: str) -> list[float]:
    environment = {**os.environ, "FUSEDADAM_CACHE_DIR": cache}
    command = [sys.executable, "-c", FIRST_STEP]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [float(x) for x in out.split()]


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        _, fresh = start(cache)
        imported, cached = (statistics.median(own) for own in zip(*(start(cache) for _ in range(STARTS)), strict=True))
    rows = zip(GOALS, (imported, cached, fresh), strict=True)
    cells = [(what, f"{found:.3g}", f"{GOALS[what]:g}") for what, found in rows]
    print(display.table(("", "seconds", "goal"), cells))


if __name__ == "__main__":
    main()
