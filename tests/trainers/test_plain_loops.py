"""A loop written by hand, under torch.compile."""

from __future__ import annotations

import torch

from tests.trainers.training import loader, loss_of, network, ours, schedule


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
