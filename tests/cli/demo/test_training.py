"""The trainings that take turns."""

from __future__ import annotations

import pytest
import torch

from fusedadam.cli.demo import training
from fusedadam.cli.demo.transformer import Size, TinyTransformer


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


def test_a_stored_training_starts_from_the_float32_weights_of_the_model() -> None:
    model = TinyTransformer(Size(width=32, heads=2, layers=1, context=8, batch=2))
    stored = training.Training(*training.STORED, model, torch.device("cpu"), steps=3)
    assert {p.dtype for p in stored.params} == {torch.bfloat16}
    kept = stored.optimizer.float32_state_dict(stored.model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(kept[name], weight, rtol=2**-16, atol=0)
    windows = torch.randint(0, 256, (2, 9))
    assert stored.step(windows) == pytest.approx(model.loss(windows).item(), rel=0.01)
