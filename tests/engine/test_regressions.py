"""Bugs that were here once, each with the reason why nothing saw it before."""

from __future__ import annotations

import threading

import pytest
import torch

import fusedadam
from fusedadam.backends.numba.threading import run_in_pool
from fusedadam.rules.ops import where
from fusedadam.rules.rule import Value, Values, rule
from tests.support import PLACES, Case, apply, assert_same_bits, draw


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


def test_an_interrupted_step_waits_for_its_threads():
    """They write to memory that the caller may free once control is back."""
    finished, started = threading.Event(), threading.Event()

    def work():
        if threading.current_thread() is threading.main_thread():
            started.wait()
            raise KeyboardInterrupt
        started.set()
        threading.Event().wait(0.3)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        run_in_pool(work, 2)
    assert finished.is_set()


def no_scalars(step):
    return {}


@rule(scalars=no_scalars)
def literals(param: Value, grad: Value) -> Values:
    param = where(grad > 0, 0.1, 0.2) + (0.7 - 0.1) * grad / 3
    return param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_among_themselves_are_calculated_in_the_compute_dtype(dtype):
    """Eagerly they were Python's own, in float64 or in the default dtype."""
    case = Case(literals, {}, {})
    roles = draw(case, [(100,)], [dtype])
    first, *others = [apply(case, roles, p.values[0]) for p in PLACES[:2]]
    for other in others:
        assert_same_bits(first, other)
