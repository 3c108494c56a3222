"""Does anything grow, or go wrong, in a long run? `python benchmarks/soak.py` (on the GPU if there is one).

Small models are trained in turns with autocast and a GradScaler, by AdamW, EmaAdamW, AdamP and BertAdam. lr and betas
change in every step; gradients are clipped, missing or infinite; groups are added, states saved and loaded, averages
evaluated (soak_training.py). Two things are asked:

- Are the losses those of the reference implementations, which go through the same? Early on, where rounding has had no
  time to add up, step by step; later, as means over stretches of the run.
- Does any memory, number of file handles, threads or Python objects grow (soak_watch.py)?

If losses differ or anything grows, the exit status is 1, and a sentence says what happened. The tables come last.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from soak_training import TASKS, Training
from soak_watch import OBJECTS, SLACK, Watch, readable

from fusedadam.cli import display

EARLY_STEPS, EARLY = 200, 0.01  # of each training; how far a loss may be off, relative to the mean of these losses
STRETCHES, LATE = 20, 0.03  # how far the mean loss of each stretch may be off
SAMPLES = 32


def train(steps: int, device: str, is_ours: bool, after: Callable[[int], None] = lambda _: None) -> list[Training]:
    """``steps`` in all, which the trainings take in turns; ``after`` is called with the number of each."""
    trainings = [Training(task, -(-steps // len(TASKS)), device, is_ours) for task in TASKS]
    # without oneDNN: some virtual machines announce matrix instructions (AMX) for bfloat16, but do not have them
    with torch.backends.mkldnn.flags(enabled=False):
        for step in range(steps):
            trainings[step % len(trainings)].step()
            after(step)
    return trainings


def differences(ours: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """The largest difference of a loss early on, and the largest of a stretch's mean: both relative."""
    there = torch.isfinite(reference)
    if not torch.equal(there, torch.isfinite(ours)):
        return float("inf"), float("inf")
    a, b = (losses[there].double().cpu().numpy() for losses in (ours, reference))
    early = np.abs(a[:EARLY_STEPS] - b[:EARLY_STEPS]).max() / b[:EARLY_STEPS].mean()
    stretches = zip(np.array_split(a, STRETCHES), np.array_split(b, STRETCHES), strict=True)
    return float(early), max(float(abs(x.mean() / y.mean() - 1)) for x, y in stretches if len(x))


def compare(ours: Training, reference: Training) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with the losses, in sentences, and a row of the table."""
    wrong = []
    found = {"losses": differences(ours.losses, reference.losses)}
    if torch.isfinite(reference.averaged).any():
        found["losses of the average"] = differences(ours.averaged, reference.averaged)
    for what, (early, late) in found.items():
        if not early <= EARLY:
            wrong.append(f"{ours.task.name}: {what} differ by {early:.1%} in the first {EARLY_STEPS} steps")
        if not late <= LATE:
            wrong.append(f"{ours.task.name}: {what} differ by {late:.1%} in a stretch of the run")
    end = slice(-max(1, ours.steps // STRETCHES), None)
    row = {
        "training": ours.task.name,
        "first loss": float(ours.losses[0]),
        "last losses": float(ours.losses[end].nanmean()),
        "reference's": float(reference.losses[end].nanmean()),
        "off early": max(early for early, _ in found.values()),
        "off later": max(late for _, late in found.values()),
        "ms per step": 1e3 * float(np.median(ours.seconds)),
        "mean": 1e3 * float(ours.seconds.mean()),
        "reference's ms": 1e3 * float(np.median(reference.seconds)),
    }
    return wrong, row


def formatted(row: dict[str, Any]) -> list[str]:
    percent = ("off early", "off later")
    return [v if isinstance(v, str) else f"{v:.2%}" if k in percent else f"{v:.3g}" for k, v in row.items()]


def report(rows: list[dict[str, Any]], watch: Watch) -> str:
    compared = {one.what: one for one in watch.compared()}
    objects = [one for name, one in compared.items() if name.startswith(OBJECTS)]
    used = []
    for name in (name for name in SLACK if name in compared):
        used.append([name, readable(name, compared[name].before), readable(name, compared[name].after)])
    used.append(["objects since the start", *(f"{sum(x):,.0f}" for x in zip(*(o[1:] for o in objects), strict=True))])
    losses = display.table(list(rows[0]), [formatted(row) for row in rows])
    headers = ["in use", "most in the second quarter", "least in the last"]
    return f"{losses}\n\n{display.table(headers, used)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20_000, help="in all, shared by the trainings")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 20 * len(TASKS):
        parser.error(f"--steps must be at least {20 * len(TASKS)}, or there is nothing to compare")

    warnings.filterwarnings("ignore", "TF32 acceleration")  # of no concern where oneDNN is switched off
    reference = train(chosen.steps, chosen.device, is_ours=False)
    watch, every = Watch(chosen.device, SAMPLES), chosen.steps // SAMPLES

    def after(step: int) -> None:
        if step % every == every - 1 and step < every * SAMPLES:
            watch.sample()

    with watch:
        ours = train(chosen.steps, chosen.device, is_ours=True, after=after)
    verdicts, rows = zip(*map(compare, ours, reference), strict=True)
    wrong = [sentence for own in verdicts for sentence in own] + [str(growth) for growth in watch.growing()]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "device": chosen.device}
    if chosen.json:
        data = {**versions, "steps": chosen.steps, "wrong": wrong, "rows": rows, "samples": watch.samples()}
        chosen.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    for sentence in wrong:
        print(f"FAILED: {sentence}")
    print(f"{chosen.steps:,} steps on {chosen.device}, torch {torch.__version__}\n")
    print(report(list(rows), watch))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
