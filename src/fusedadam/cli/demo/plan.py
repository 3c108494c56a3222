"""How much fits into the demo's time: the size of the model, the optimizers and their steps.

Steps are timed on copies of the model that are not used again. The first step of each compiles, and does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from fusedadam.cli.demo.training import FEWEST, STORED, Named, Training
from fusedadam.cli.demo.transformer import Size, TinyTransformer
from fusedadam.cli.harness.disturbance import MOST_WAITING, Watch

STEPS, SECONDS = 150, 40
TIMED = 3  # steps
ON_CPU = Size(width=192, heads=4, layers=4, context=32, batch=4)
ON_GPU = Size(width=512, heads=8, layers=8, context=128, batch=8)
SMALL = Size(width=96, heads=4, layers=2, context=32, batch=4)


def fitting(every: Sequence[Named], device: torch.device, steps: int | None) -> tuple[Size, list[Named], int, float]:
    """A model, which optimizers of ``every``, each of ours after its peer, their steps and seconds. If ``steps`` are
    not given, what fits into ``SECONDS``: rather a smaller model than fewer optimizers, and rather these than less than
    ``FEWEST`` steps. Where other programs use the cores, one thread is left."""
    seconds = SECONDS if steps is None else math.inf
    first, others = every[:2], every[2:]
    for size in (ON_CPU, SMALL) if device.type == "cpu" else (ON_GPU, ON_CPU):
        watch = Watch()
        seconds_a_step(first[:1], size, device)
        if device.type == "cpu" and watch.waited() > MOST_WAITING:  # threads would wait for each other, for very long
            torch.set_num_threads(1)
        pair, stored = seconds_a_step(first, size, device), seconds_a_step([STORED], size, device)
        if FEWEST * (pair * len(every) / 2 + stored) <= seconds:
            break
    chosen, a_step = list(first), pair + stored
    while others and FEWEST * (a_step + pair) <= seconds:
        a_step += seconds_a_step(others[:2], size, device)
        chosen += others[:2]
        others = others[2:]
    if steps is None:
        steps = max(FEWEST, min(STEPS, int(seconds / a_step)))
    return size, chosen, steps, seconds


def seconds_a_step(optimizers: Sequence[Named], size: Size, device: torch.device) -> float:
    """Of all these together."""
    model, windows = TinyTransformer(size), torch.zeros(size.batch, size.context + 1, dtype=torch.long, device=device)
    spent = 0.0
    for optimizer, by in optimizers:
        training = Training(optimizer, by, model, device, STEPS)
        training.step(windows)  # compiles
        began = time.perf_counter()
        for _ in range(TIMED):
            training.step(windows)
        spent += (time.perf_counter() - began) / TIMED
    return spent
