"""Bugs that were here once, each with the reason why nothing saw it before."""

from __future__ import annotations

import pytest
import torch

import fusedadam


def trained(optimizer_class=fusedadam.AdamW, count=2, **options):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
    optimizer = optimizer_class(params, **options)
    for p in params:
        p.grad = torch.ones(4)
    optimizer.step()
    return params, optimizer


def test_a_tensor_without_memory_of_its_own_is_refused():
    """Sharded and other wrapped tensors have address 0."""
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(RuntimeError, match="TwoTensor without memory"):
        fusedadam.AdamW([torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))])


def test_a_state_with_moments_but_no_step_is_refused():
    params, optimizer = trained()
    del optimizer.state[params[0]]["step"]
    with pytest.raises(RuntimeError, match="no 'step'"):
        optimizer.step()
