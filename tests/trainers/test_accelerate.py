"""accelerate: prepare() with gradient accumulation equals a loop by hand; save_state() and load_state() keep all."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.trainers.training import assert_same_bits, everything, loader, loss_of, network, ours, schedule, torchs

CLASSES = pytest.mark.parametrize("make", [fusedadam.AdamW, fusedadam.EmaAdamW])


@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate")


class Accelerated:
    def __init__(self, accelerate, make):
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        self.raw = ours(model.parameters(), make)
        self.model, self.optimizer, self.scheduler, self.batches = self.accelerator.prepare(
            model, self.raw, schedule(self.raw), loader()
        )

    def train(self, epochs):
        for _ in range(epochs):
            for batch in self.batches:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss_of(self.model, batch))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return everything(self.model, self.raw), self.scheduler.get_last_lr()


def by_hand(make, epochs):
    model = network()
    optimizer = ours(model.parameters(), make)
    scheduler = schedule(optimizer)
    for _ in range(epochs):
        for k, batch in enumerate(loader()):
            (loss_of(model, batch) / 2).backward()
            if k % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return everything(model, optimizer), scheduler.get_last_lr()


@CLASSES
def test_a_prepared_run_with_accumulation_is_one_by_hand(accelerate, make):
    run = Accelerated(accelerate, make)
    assert isinstance(run.optimizer, torch.optim.Optimizer)
    assert run.optimizer.optimizer is run.raw
    assert isinstance(run.optimizer.optimizer, torch.optim.Optimizer)
    assert_same_bits(run.train(3), by_hand(make, 3))


@CLASSES
def test_a_run_from_a_saved_state_is_the_uninterrupted_one(accelerate, make, tmp_path):
    first = Accelerated(accelerate, make)
    first.train(1)
    first.accelerator.save_state(str(tmp_path))
    second = Accelerated(accelerate, make)
    second.train(1)  # what is loaded replaces a state that is there
    second.train(1)
    second.accelerator.load_state(str(tmp_path))
    assert_same_bits(second.train(2), by_hand(make, 3))


@pytest.mark.parametrize("make", [ours, torchs], ids=["ours", "torch, fused"])
def test_a_step_that_overflows_changes_nothing_though_accelerate_is_not_told(accelerate, make):
    """accelerate takes a step for skipped if step() was not called; fused ones are called, and decide by themselves."""
    accelerate.Accelerator(cpu=True)
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(make(model.parameters(), fused=True), scaler=scaler)
    steps = []
    for factor in (1.0, float("inf"), 1.0):
        before, _ = everything(model, optimizer)
        scaler.scale(loss_of(model, next(iter(loader()))) * factor).backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
        same = all(torch.equal(p, q) for p, q in zip(before, everything(model, optimizer)[0], strict=True))
        assert same == (factor != 1)
        steps.append(float(optimizer.state[model[0].weight]["step"]))
        optimizer.zero_grad()
    assert steps == [1, 1, 2]
    assert scaler.get_scale() == 4
