"""Norms that a step takes, and ``clip_grad_norm_``: what is kept, and what a failure leaves behind."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from fusedadam.engine import launch
from fusedadam.tensors import layout
from tests.contract.common import assert_same, leaves, params_of, train
from tests.support import F32


def test_norms_that_are_kept_do_not_change_later():
    optimizer = fusedadam.AdamW(leaves(), max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    norms = []
    for step in range(3):
        train(optimizer, 1, start=step)
        norms.append(optimizer.grad_norm)
    assert len({norm.item() for norm in norms}) == 3
    assert all(norm.dim() == 0 and norm.dtype == F32 for norm in norms)
    assert fusedadam.AdamW(leaves()).grad_norm is None


def test_infinity_takes_the_norm_and_clips_nothing():
    clipped, plain = fusedadam.AdamW(leaves(), max_grad_norm=float("inf")), fusedadam.AdamW(leaves())
    assert_same(train(clipped, 2), train(plain, 2))
    grads = [p.grad.clone() for p in params_of(clipped)]
    norm = fusedadam.clip_grad_norm_(params_of(clipped), float("inf"), foreach=True)
    assert torch.equal(norm, clipped.grad_norm)
    assert_same([p.grad for p in params_of(clipped)], grads)


def test_a_call_that_failed_leaves_nothing_that_a_later_one_writes_back(monkeypatch):
    """Copies of odd layouts are written back at the end: after a failure, not by the next call."""

    def gradients(value):
        params = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
        for p in params:
            p.grad = torch.full((4, 8), value)[:, ::2]
        return params

    fusedadam.clip_grad_norm_(gradients(1.0), 1.0)
    failing, calls = gradients(5.0), []

    def copy_once(tensor, strides):
        calls.append(tensor)
        if len(calls) == 2:
            raise MemoryError
        return layout.copy_with(tensor, strides)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "copy_with", copy_once)
        with pytest.raises(MemoryError):
            fusedadam.clip_grad_norm_(failing, 1.0)
    for p in failing:
        p.grad.zero_()
    fusedadam.clip_grad_norm_(gradients(1.0), 1.0)
    assert all(p.grad.eq(0).all() for p in failing)


def test_a_step_that_failed_before_it_wrote_does_not_count(monkeypatch):
    param = torch.nn.Parameter(torch.zeros(4, 4))
    param.grad = torch.ones(4, 8)[:, ::2]
    optimizer = fusedadam.AdamW([param], max_grad_norm=1.0)
    optimizer.step()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(launch, "copy_with", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert optimizer.state[param]["step"] == 1
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("norm_type", [0, -1, float("nan"), float("-inf")])
def test_clip_grad_norm_refuses_what_is_no_norm(norm_type):
    with pytest.raises(ValueError, match="norm_type"):
        fusedadam.clip_grad_norm_(leaves(), 1.0, norm_type=norm_type)


def test_clip_grad_norm_notices_gradients_that_moved_or_changed_their_shape():
    for size in (3, 5, 3, 4, 6, 7, 3):
        param = torch.nn.Parameter(torch.zeros(size))
        param.grad = torch.full((size,), 2.0)
        assert fusedadam.clip_grad_norm_([param], 1.0).item() == pytest.approx(2 * size**0.5)
        assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
