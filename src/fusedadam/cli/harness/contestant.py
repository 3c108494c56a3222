"""One implementation of an optimizer that steps over a set of parameters, and a large copy to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedadam.cli.harness import traffic
from fusedadam.cli.harness.shapes import Shape
from fusedadam.cli.harness.timing import Timer, large_copy, parameters_with_gradients
from fusedadam.optimizers.base import FusedOptimizer

Make = Callable[[list[torch.nn.Parameter]], Any]  # returns an object with step()


class Contestant:
    """The commands that :func:`measure.measure` sends; ``prepare`` comes first."""

    def __init__(self, make: Make, shapes: Sequence[Shape], dtype: str, device: str, seconds: float) -> None:
        """``seconds``: of a turn."""
        self.make, self.shapes, self.dtype, self.device, self.seconds = make, shapes, dtype, device, seconds

    def prepare(self) -> tuple[int | None, int]:
        """Takes the first steps; returns the bytes that a step must move, if the optimizer is ours, and its states'."""
        params = parameters_with_gradients(self.shapes, self.device, getattr(torch, self.dtype))
        self.optimizer = self.make(params)
        self.step = Timer(self.optimizer.step, self.device, self.seconds)
        copy, self.copied = large_copy(self.device)
        self.copy = Timer(copy, self.device, self.seconds / 4)
        moved = traffic.bytes_moved(self.optimizer) if isinstance(self.optimizer, FusedOptimizer) else None
        return moved, traffic.state_bytes(self.optimizer, params)

    def turn(self) -> tuple[float, float]:
        """Milliseconds per step, and bytes that a copy moves per millisecond."""
        self.optimizer.step()  # refills the caches, which other contestants have used
        return self.step.turn(), self.copied / self.copy.turn()
