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
    "first step of Adafactor, nothing cached": 8.0,
    "first step of AdamP with clipping, nothing cached": 8.0,
}
FIRST_STEP = """
import sys, time, torch
begin = time.perf_counter()
import fusedadam
imported = time.perf_counter() - begin
params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((48, 64), (48,))]
for param in params:
    param.grad = torch.randn_like(param)
optimizer = eval("fusedadam." + sys.argv[1])
begin = time.perf_counter()
optimizer.step()
print(imported, time.perf_counter() - begin)
"""


def start(cache: str, optimizer: str = "AdamW(params)") -> list[float]:
    environment = {**os.environ, "FUSEDADAM_CACHE_DIR": cache}
    command = [sys.executable, "-c", FIRST_STEP, optimizer]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [float(x) for x in out.split()]


def fresh(optimizer: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        return start(cache, optimizer)[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        first = start(cache)[1]
        imported, cached = (statistics.median(own) for own in zip(*(start(cache) for _ in range(STARTS)), strict=True))
    others = map(fresh, ("Adafactor(params)", "AdamP(params, max_grad_norm=1.0)"))
    rows = zip(GOALS, (imported, cached, first, *others), strict=True)
    cells = [(what, f"{found:.3g}", f"{GOALS[what]:g}") for what, found in rows]
    print(display.table(("", "seconds", "goal"), cells))


if __name__ == "__main__":
    main()
