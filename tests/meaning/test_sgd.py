"""The formula of SGD, against torch.optim."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import (
    assert_as_close_to_float64,
    assert_equal,
    assert_equals_torch,
    both,
    params_of,
    train,
)
from tests.support import QUICK_PLACES

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
OTHER = {"lr": 3e-3, "weight_decay": 0.3}
FLAGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    {"momentum": 0.9, "dampening": -0.5},
    {"momentum": 1.5, "dampening": 1.0},
    {"momentum": 0.9, "nesterov": True},
    pytest.param({"maximize": True}, marks=pytest.mark.exhaustive),
    pytest.param({"momentum": 0.8, "nesterov": True, "maximize": True}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_torch_in_float64(flags, place):
    assert_equals_torch("SGD", place, {**OPTIONS, **flags}, OTHER)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", [{}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_is_as_close_to_float64_as_torch_is_in_float32(flags, place):
    assert_as_close_to_float64("SGD", place, {**OPTIONS, **flags})


def test_groups_with_and_without_momentum():
    ours, theirs = both("SGD", ("cpu", "numba"), {**OPTIONS, "momentum": 0.9}, {"momentum": 0.0})
    train(ours)
    train(theirs)
    assert_equal(ours, theirs)
    assert [*ours.state[params_of(ours)[-1]]] == ["step"]


@pytest.mark.parametrize("momenta", [(0.9, 0.0, 0.8), (0.9, 0.9, 0.8), (0.9, 0.5, 0.8), (0.0, 0.9)], ids=str)
def test_momentum_that_changes_is_as_in_torch_without_dampening(momenta):
    """A schedule may take it to 0 and back: the buffer waits, as torch's does. It may be switched on later."""
    ours, theirs = both("SGD", ("cpu", "numba"), {**OPTIONS, "momentum": momenta[0]}, {})
    for optimizer in (ours, theirs):
        for k, momentum in enumerate(momenta):
            optimizer.param_groups[0]["momentum"] = momentum
            train(optimizer, 5, start=5 * k)
    assert_equal(ours, theirs)


def test_with_dampening_a_later_buffer_begins_dampened():
    """torch's begins as the whole gradient: documented, since the number of the step is all that the rule knows."""
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = fusedadam.SGD([param], lr=0.1, dampening=0.25)
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], torch.full((3,), 0.75))


@pytest.mark.parametrize("given", [{}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}], ids=str)
def test_nesterov_needs_a_momentum_and_no_dampening(given):
    for cls in (fusedadam.SGD, torch.optim.SGD):
        with pytest.raises(ValueError, match=r"(?i)nesterov"):
            cls([torch.nn.Parameter(torch.zeros(3))], nesterov=True, **given)
