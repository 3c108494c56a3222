"""The formulas of RMSprop, against torch.optim, and of TensorFlow's, against the formula written out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import assert_as_close_to_float64, assert_equals_torch, trained_beside
from tests.meaning.by_hand import RMSpropTFByHand
from tests.support import F32, F64, QUICK_PLACES, pairwise, ulp

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
QUICK = [(0, False, False), (0.9, True, True), (0.9, False, True), (0, True, False)]  # every pair
FLAGS = [
    pytest.param(
        dict(zip(("momentum", "centered", "maximize"), row, strict=True)),
        marks=[pytest.mark.exhaustive] * (row not in QUICK),
    )
    for row in itertools.product((0, 0.9), *[(False, True)] * 2)
]
TF_FLAGS = [
    dict(zip(("momentum", "centered", "decoupled_decay", "lr_in_momentum", "maximize"), row, strict=True))
    for row in [*pairwise((0, 0.9), *[(False, True)] * 4), (0.9, False, False, True, False)]
]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_torch_in_float64(flags, place):
    other = {"lr": 3e-3, "alpha": 0.9, "weight_decay": 0.3, "eps": 1e-4}
    assert_equals_torch("RMSprop", place, {**OPTIONS, **flags}, other)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", [{}, {"momentum": 0.9}], ids=str)
def test_is_as_close_to_float64_as_torch_is_in_float32(flags, place):
    assert_as_close_to_float64("RMSprop", place, {**OPTIONS, **flags})


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", TF_FLAGS, ids=str)
def test_tensorflows_equals_the_formula_by_hand(flags, place):
    optimizer, by_hand = trained_beside(fusedadam.RMSpropTF, RMSpropTFByHand, place, {**OPTIONS, **flags})
    for p, expected in by_hand.items():
        state = optimizer.state[p]
        found = {"p": p, "v": state["square_avg"], "a": state.get("grad_avg"), "b": state.get("momentum_buffer")}
        assert (found["a"] is not None, found["b"] is not None) == (flags["centered"], flags["momentum"] > 0)
        for name, value in found.items():
            if value is not None:
                torch.testing.assert_close(value.detach().cpu(), getattr(expected, name), rtol=1e-11, atol=1e-13)


def test_the_version_by_hand_is_torchs_where_the_two_agree():
    """Without eps, without momentum and from the same start, both are the same formula."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=F64))
    theirs = torch.optim.RMSprop([param], lr=1e-2, alpha=0.9, eps=0.0, weight_decay=0.1)
    by_hand = RMSpropTFByHand(param.detach().clone(), lr=1e-2, alpha=0.9, eps=0.0, weight_decay=0.1)
    by_hand.v = torch.zeros_like(by_hand.v)
    for step in range(10):
        param.grad = torch.sin(torch.arange(1, 51, dtype=F64) * (step + 1))
        by_hand.step(param.grad)
        theirs.step()
    torch.testing.assert_close(by_hand.p, param.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32, F64])
def test_tensorflows_average_begins_at_one(dtype):
    """So the first steps are about lr times the gradient, not lr times its sign."""
    param = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
    param.grad = torch.full((8,), 0.5, dtype=dtype)
    optimizer = fusedadam.RMSpropTF([param], lr=0.125, alpha=0.75)
    optimizer.step()
    expected = torch.full((8,), -0.125 * 0.5 / (0.75 + 0.25 * 0.25 + 1e-10) ** 0.5, dtype=F64)
    assert ((param.detach().double() - expected).abs() <= 2 * ulp(expected, dtype)).all()
    assert optimizer.state[param]["square_avg"].dtype == dtype
