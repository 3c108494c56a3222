"""Sharded complex parameters: the same results as on one process."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.distributed.parts import S0, S1, R, divided_like, expected_here, here, mesh_of, parameter
from tests.distributed.world import on
from tests.meaning.test_complex import C64, numbers

SHAPES = [(7, 5), (3,), (), (4, 2, 2)]


@on("two")
@pytest.mark.parametrize("conjugated", [False, True])
@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("AdamW", {"max_grad_norm": 1.0}), ("SGD", {})])
def test_sharded_complex_parameters_on_two(name, options, conjugated):
    mesh, placements = mesh_of(2), [[S0], [S0], [R], [S1]]
    values = [numbers(shape, C64, k) for k, shape in enumerate(SHAPES)]
    alone = [torch.nn.Parameter(value.clone()) for value in values]
    mine = [parameter(value, mesh, *own) for value, own in zip(values, placements, strict=True)]
    optimizers = [getattr(fusedadam, name)(params, lr=0.1, **options) for params in (alone, mine)]
    for step in range(3):
        for k, (whole, sharded) in enumerate(zip(alone, mine, strict=True)):
            grad = numbers(whole.shape, C64, 50 + 10 * step + k)
            whole.grad = grad
            sharded.grad = divided_like(
                grad, sharded, (lambda part: part.conj().resolve_conj().conj()) if conjugated else torch.clone
            )
        for optimizer in optimizers:
            optimizer.step()
    norms = [optimizer.grad_norm for optimizer in optimizers]
    if options:
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    for whole, sharded in zip(alone, mine, strict=True):
        torch.testing.assert_close(here(sharded), expected_here(whole.detach(), sharded), rtol=1e-5, atol=1e-6)
        state = optimizers[1].state[sharded]
        assert all(type(value) is type(sharded.data) for name, value in state.items() if name != "step")
