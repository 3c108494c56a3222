"""The formula of Adan, against the paper's written out by hand, with the authors' weight decay."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import parameters, params_of, train, trained_beside
from tests.meaning.by_hand import AdanByHand
from tests.support import F32, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.7, 0.95), "weight_decay": 0.1}
FLAGS = [{}, {"no_prox": True}, {"maximize": True}, {"no_prox": True, "maximize": True}]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_the_formula_by_hand(flags, place):
    optimizer, by_hand = trained_beside(fusedadam.Adan, AdanByHand, place, {**OPTIONS, **flags})
    for p, expected in by_hand.items():
        state = optimizer.state[p]
        found = {"p": p, "m": state["exp_avg"], "d": state["exp_avg_diff"], "n": state["exp_avg_sq"]}
        found["previous"] = -state["neg_pre_grad"]
        for name, value in found.items():
            torch.testing.assert_close(value.detach().cpu(), getattr(expected, name), rtol=1e-11, atol=1e-13)


def test_a_state_dict_with_counts_by_group_goes_on():
    """As the authors' package saves it."""
    ours = fusedadam.Adan(parameters(F32), **OPTIONS)
    for p in params_of(ours):
        p.grad = torch.ones_like(p)
    ours.step()
    given = ours.state_dict()
    for state in given["state"].values():
        del state["step"]
    given["param_groups"][0]["step"] = 1
    other = fusedadam.Adan([torch.nn.Parameter(p.detach().clone()) for p in params_of(ours)])
    other.load_state_dict(given)
    for p, q in zip(params_of(train(ours, 3)), params_of(train(other, 3)), strict=True):
        assert torch.equal(p, q)
