"""Where does training with bfloat16 weights stop? `python benchmarks/bfloat16.py` trains a small language model at a
small, constant learning rate, with each way of keeping the weights, and draws docs/pictures/bfloat16.svg.

A step of lr is lost if it is less than half of the gap between a bfloat16 weight and the next one: 0.2 % of the weight.
All runs have the same initial weights and batches. torch.optim.AdamW trains with float32 weights, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from training_model import SMALL, Training

import fusedadam
from fusedadam.cli import charts

PICTURE = Path(__file__).parents[1] / "docs/pictures/bfloat16.svg"
LR, STEPS, EVERY = 1e-5, 4000, 200
F32, BF16 = torch.float32, torch.bfloat16
RUNS: dict[str, tuple[torch.dtype, Any]] = {
    "float32 weights": (F32, torch.optim.AdamW),
    "bfloat16, torch.optim.AdamW": (BF16, torch.optim.AdamW),
    'bfloat16, storage="exact"': (BF16, lambda params, **o: fusedadam.AdamW(params, storage="exact", **o)),
    'bfloat16, storage="8bit"': (BF16, lambda params, **o: fusedadam.AdamW(params, storage="8bit", **o)),
}


def losses(dtype: torch.dtype, make: Any, steps: int, lr: float) -> list[float]:
    """Of text that was not trained on, in nats per byte, every EVERY steps."""
    training = Training(SMALL, "cpu")
    training.model.initialize(0)
    training.model.to(dtype)
    optimizer = make(training.model.parameters(), lr=lr)
    batches = training.batches("training", steps, 0)
    found = [training.validate()]
    for part in batches.split(EVERY):
        training.train(optimizer, part, lambda _: lr)
        found.append(training.validate())
    return found


def drawn(found: dict[str, list[float]], lr: float) -> None:
    figure = charts.empty(7.5, 3.6, "")
    axes = figure.subplots()
    charts.titled(axes, f"Loss at a constant learning rate of {lr:g}, nats per byte")
    for (name, curve), style in zip(found.items(), ("-", "-", "--", ":"), strict=True):
        axes.plot([EVERY * k for k in range(len(curve))], curve, style, label=name, linewidth=2)
    axes.set_xlabel("steps")
    axes.legend(frameon=False)
    figure.savefig(PICTURE)
    print(f"drawn: {PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LR)
    given = parser.parse_args()
    found = {}
    for name, (dtype, make) in RUNS.items():
        found[name] = losses(dtype, make, given.steps, given.lr)
        print(f"{name}: {found[name][0]:.3f} -> {found[name][-1]:.3f}", flush=True)
    if given.steps == STEPS:
        drawn(found, given.lr)


if __name__ == "__main__":
    main()
