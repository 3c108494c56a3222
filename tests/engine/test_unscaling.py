"""What a step with a GradScaler has to know besides its kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedadam.engine.launch import Amp
from fusedadam.engine.unscaling import Unscaling, _divide, _in_order, _overlap_each_other, _overlap_others


def arrays(spans):
    return np.array(spans, dtype=np.int64).reshape(-1, 2).T


@pytest.mark.parametrize(
    ("spans", "answer"),
    [
        ([(0, 8), (8, 8), (16, 4)], False),
        ([(16, 4), (0, 8), (8, 8)], False),
        ([(0, 8), (7, 1)], True),
        ([(0, 100), (10, 1), (50, 1)], True),  # both inside the first
        ([(0, 100), (100, 1), (50, 1)], True),
        ([], False),
    ],
)
def test_gradients_that_overlap(spans, answer):
    assert _overlap_each_other(*arrays(spans)) is answer


@pytest.mark.parametrize(
    ("grads", "others", "answer"),
    [
        ([(8, 8), (24, 8)], [(0, 8), (16, 8), (32, 8)], False),
        ([(8, 8), (24, 9)], [(0, 8), (16, 8), (32, 8)], True),
        ([(8, 8), (23, 8)], [(32, 8), (0, 8), (16, 8)], True),
        ([(40, 4)], [(0, 100), (8, 8)], True),  # far inside one that begins long before
        ([(0, 4)], [(4, 4)], False),
        ([(8, 4)], [(4, 4)], False),
        ([(8, 4)], [], False),
        ([], [(4, 4)], False),
    ],
)
def test_gradients_that_overlap_something_else(grads, others, answer):
    begins, extents = arrays(grads)
    assert _overlap_others(begins, begins + extents, _in_order(*arrays(others))) is answer


def test_gradients_are_looked_at_again_only_if_something_moved():
    param, first, second = tensors = [torch.ones(4) for _ in range(3)]
    addresses = np.array([t.data_ptr() for t in tensors])
    unscaling = Unscaling({0: "param", 1: "grad", 2: "grad"}, [])
    unscaling.check(tensors, addresses)
    unscaling.check([None] * 3, addresses)  # not looked at
    for _ in range(2):
        with pytest.raises(RuntimeError, match="two parameters share memory"):
            unscaling.check([param, first, first], addresses[[0, 1, 1]])
        with pytest.raises(RuntimeError, match="share memory; each needs a tensor"):
            unscaling.check([param, param, second], addresses[[0, 0, 2]])
        with pytest.raises(RuntimeError, match="share memory; each needs a tensor"):
            unscaling.check([first, first, second], addresses[[1, 1, 2]])  # it is the parameter that has moved


def test_interleaved_gradients_are_compared_once(monkeypatch):
    compared = []
    monkeypatch.setattr("fusedadam.checks.tensors.sharing", lambda grads: compared.append(list(grads)) or [])
    unscaling = Unscaling({0: "grad", 1: "grad"}, [])
    for buffer in (torch.ones(4, 2) for _ in range(4)):
        grads = [buffer[:, 0], buffer[:, 1]]
        unscaling.check(grads, np.array([grad.data_ptr() for grad in grads]))
    assert len(compared) == 2, "by the first check, and once more when they had moved"


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_gradient_that_kernels_do_not_store(dtype, found_inf, shape):
    """One that is sharded differently from its parameter: they see a copy."""
    amp = Amp(torch.full(shape, 4.0), None if found_inf is None else torch.full(shape, found_inf))
    for grad in (torch.arange(5, dtype=dtype), torch.ones((), dtype=dtype)):
        expected = grad / (1 if found_inf else 4)
        _divide(grad, amp)
        assert torch.equal(grad, expected)
    _divide(torch._efficientzerotensor((2,)), amp)  # has nothing to divide
