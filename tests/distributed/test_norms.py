"""The norms of sharded parameters are of the whole, on every process."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from fusedadam.in_backward import step_in_backward
from tests.distributed.parts import S0, S1, R, divided_like, mesh_of, parameter
from tests.distributed.reference import make
from tests.distributed.world import on

SHAPES = [(7, 5), (300,), (), (4, 6, 2)]


@on("two")
@pytest.mark.parametrize("name", ["AdamW", "AdamP clipped", "Muon", "Muon clipped"])
def test_norms_of_sharded_parameters_on_two(name):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    mesh, placements = mesh_of(2), [[S0], [S0], [R], [S1]]
    alone = [torch.nn.Parameter(value.clone()) for value in values]
    mine = [parameter(value, mesh, *own) for value, own in zip(values, placements, strict=True)]
    optimizers = [make(name, params) for params in (mine, alone)]
    for _ in range(2):
        for whole, sharded in zip(alone, mine, strict=True):
            whole.grad = torch.randn(whole.shape, generator=generator)
            sharded.grad = divided_like(whole.grad, sharded)
        for optimizer in optimizers:
            optimizer.watch_norms = True
            optimizer.step()
    found, expected = (optimizer.norms().values for optimizer in optimizers)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    return found.tolist()


@on("two")
def test_stepping_in_backward_refuses_to_wait_for_others():
    model = torch.nn.Linear(4, 4)
    model.weight = parameter(model.weight.detach(), mesh_of(2), S0)
    optimizer = step_in_backward(model, fusedadam.AdamW)
    optimizer.watch_norms = True
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(ValueError, match=r"watch_norms=True.*other processes") as refused:
        optimizer._in_backward.step(optimizer, model.weight)
    return str(refused.value)
