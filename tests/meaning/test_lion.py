"""The formula of Lion, against the paper's written out by hand."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import parameters, params_of, train, trained_beside
from tests.meaning.by_hand import LionByHand
from tests.support import BF16, F32, F64, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_the_formula_by_hand(maximize, place):
    optimizer, by_hand = trained_beside(fusedadam.Lion, LionByHand, place, {**OPTIONS, "maximize": maximize})
    for p, expected in by_hand.items():
        torch.testing.assert_close(p.detach().cpu(), expected.p, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].cpu(), expected.m, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_every_weight_moves_by_lr_and_one_without_a_gradient_not_at_all(dtype):
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = fusedadam.Lion([param], lr=0.125)
    param.grad = torch.tensor([1e-20, -1e20, 0.0, -0.0], dtype=dtype)
    optimizer.step()
    assert param.tolist() == [-0.125, 0.125, 0.0, 0.0]


def test_a_state_dict_without_counts_goes_on():
    """As other packages save it."""
    ours = train(fusedadam.Lion(parameters(), **OPTIONS), 7)
    given = ours.state_dict()
    for state in given["state"].values():
        del state["step"]
    other = fusedadam.Lion([torch.nn.Parameter(p.detach().clone()) for p in params_of(ours)])
    other.load_state_dict(given)
    for p, q in zip(params_of(train(ours, 3, start=7)), params_of(train(other, 3, start=7)), strict=True):
        assert torch.equal(p, q)
