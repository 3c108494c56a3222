"""Loops written by hand: stepping in backward under a scheduler, a GradScaler's gradients, torch.compile."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.trainers.training import assert_same_bits, everything, loader, loss_of, network, ours, schedule, torchs


def test_stepping_in_backward_is_a_plain_loop_under_a_scheduler():
    results = []
    for in_backward in (False, True):
        model = network()
        optimizer = fusedadam.step_in_backward(model, ours) if in_backward else ours(model.parameters())
        scheduler = schedule(optimizer)
        for _ in range(3):
            for batch in loader():
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                assert all((p.grad is None) == in_backward for p in model.parameters())
                optimizer.step()
                scheduler.step()
        results.append((everything(model, optimizer), scheduler.get_last_lr()))
    assert_same_bits(*results)


@pytest.mark.parametrize("make", [ours, torchs], ids=["ours", "torch"])
def test_gradients_are_unscaled_after_a_scalers_step_as_torch_fused_leaves_them(make):
    model = network()
    optimizer, scaler = make(model.parameters(), fused=True), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, next(iter(loader())))).backward()
    before = [p.grad.clone() for p in model.parameters()]
    scaler.step(optimizer)
    assert_same_bits([p.grad for p in model.parameters()], [g / 64 for g in before])


def test_a_compiled_loop_breaks_once_at_the_step_and_is_not_compiled_again():
    """torch's own recompiles with the step count or the learning rate, unless both are tensors."""
    model = network()
    optimizer = ours(model.parameters())
    scheduler = schedule(optimizer)
    loss_of(model, next(iter(loader()))).backward()

    def around(x):
        doubled = 2 * x
        optimizer.step()
        return doubled + 1

    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    graphs = CompileCounter()
    compiled = torch.compile(around, backend=graphs)
    for k in range(5):
        assert torch.equal(compiled(torch.full((2,), float(k))), torch.full((2,), 2.0 * k + 1))
        scheduler.step()
    assert graphs.frame_count == 2  # before the step and after it
    assert optimizer.state[model[0].weight]["step"] == 5
    torch.compiler.reset()
