"""The trainings that take turns."""

from __future__ import annotations

import pytest
import torch

from fusedadam.cli.demo import training


def test_training_ends_before_a_step_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    class Slow:
        name = "slow"

        def step(self, _: torch.Tensor) -> float:
            nonlocal clock
            clock += 20.0
            return 1.0

    monkeypatch.setattr(training.time, "perf_counter", lambda: clock)
    batches = [torch.zeros(1)] * 100
    assert training.train([Slow()], batches, 100, seconds=75) == 3  # type: ignore[list-item]
    assert training.train([Slow()], batches, 100, seconds=5) == 2, "one to compile, one to measure"
    assert training.train([Slow()], batches, 100, seconds=float("inf")) == 100
