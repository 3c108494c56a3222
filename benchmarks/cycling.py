"""What a scheduler that changes beta1 in every step (OneCycleLR) costs: `python benchmarks/cycling.py`.

soak.py watches whether it leaves memory behind.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from peers import Make, Params, scaled
from rows import OfTheTime, Row, main

from fusedadam import AdamW

BETAS = [(0.85 + 0.1 * abs(1 - k / 5000), 0.999) for k in range(10_000)]
SHAPES = [(64, 64)] * 6


class Cycling:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.betas = optimizer, itertools.cycle(BETAS)

    def step(self) -> None:
        self.optimizer.param_groups[0]["betas"] = next(self.betas)
        self.optimizer.step()


def cycling(make: Make) -> Make:
    def made(params: Params, **options: Any) -> Cycling:
        return Cycling(make(params, **options))

    made.__name__ = f"{make.__name__}, betas cycle"
    return made


def row(way: str, make: Make, **options: Any) -> Row:
    return Row(f"AdamW{way}, 6 tensors, betas cycle", cycling(make), make, SHAPES, "float32", [OfTheTime()], options)


PLAIN = row("", AdamW)
ON_GPU = [PLAIN, row(" scaled", scaled(AdamW)), row(" capturable", AdamW, capturable=True)]

if __name__ == "__main__":
    sys.exit(main(__doc__, {"cpu": [PLAIN], "cuda": ON_GPU}))
