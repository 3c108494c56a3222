"""The formula of AdEMAMix, against the paper's written out by hand."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import parameters, train, trained_beside
from tests.meaning.by_hand import AdEMAMixByHand
from tests.support import BF16, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95, 0.99), "weight_decay": 0.1}
FLAGS = [{}, {"alpha": 5.0, "alpha_warmup": 7}, {"alpha_warmup": 100, "maximize": True}]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_the_formula_by_hand(flags, place):
    optimizer, by_hand = trained_beside(fusedadam.AdEMAMix, AdEMAMixByHand, place, {**OPTIONS, **flags})
    for p, expected in by_hand.items():
        state = optimizer.state[p]
        found = {"p": p, "m": state["exp_avg_fast"], "s": state["exp_avg_slow"], "v": state["exp_avg_sq"]}
        for name, value in found.items():
            torch.testing.assert_close(value.detach().cpu(), getattr(expected, name), rtol=1e-11, atol=1e-13)


def test_without_the_slow_average_it_is_adamw():
    a, b = parameters(), parameters()
    train(fusedadam.AdEMAMix(a, lr=1e-2, weight_decay=0.1, alpha=0.0))
    train(torch.optim.AdamW(b, lr=1e-2, weight_decay=0.1))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)


def test_the_slow_average_is_never_kept_in_8_bits():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    param.grad = torch.ones_like(param)
    optimizer = fusedadam.AdEMAMix([param], storage="8bit")
    optimizer.step()
    assert optimizer.state[param]["exp_avg_slow"].dtype == BF16
    assert "exp_avg_fast_codes" in optimizer.state[param]
    with pytest.raises(ValueError, match=r"beta3 above 0\.99"):
        fusedadam.AdEMAMix([param], storage={"exp_avg_slow": "slice8"})


@pytest.mark.parametrize("steps", [0, -1, float("nan")])
def test_a_warmup_has_steps(steps):
    with pytest.raises(ValueError, match="or None for no warmup"):
        fusedadam.AdEMAMix([torch.nn.Parameter(torch.ones(3))], alpha_warmup=steps)


def test_a_state_dict_with_the_schedule_that_is_missing_here_is_refused():
    given = train(fusedadam.AdEMAMix(parameters()), 1).state_dict()
    given["param_groups"][0]["beta3_warmup"] = None
    fusedadam.AdEMAMix(parameters()).load_state_dict(given)
    given["param_groups"][0]["beta3_warmup"] = 1000
    with pytest.raises(ValueError, match="beta3_warmup=1000, which AdEMAMix does not support"):
        fusedadam.AdEMAMix(parameters()).load_state_dict(given)
