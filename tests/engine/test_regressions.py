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


def test_step_counts_follow_a_storage_that_moves():
    """share_memory_() moves the storage of all counts at once: every one was still a view, of freed memory."""
    _, optimizer = trained()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].share_memory_()
    for _ in range(3):
        optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [5, 5]


def test_parameters_that_share_memory_are_refused():
    """Two threads would write to it at once, and the result would depend on them."""
    base = torch.ones(10)
    params = [base[:6].requires_grad_(), base[4:].requires_grad_()]
    for p in params:
        p.grad = torch.ones(6)
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.AdamW(params).step()
    assert base.eq(1).all()


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
