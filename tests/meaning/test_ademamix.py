"""The formula of AdEMAMix, against the paper's written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import parameters, train, trained_beside
from tests.meaning.by_hand import AdEMAMixByHand
from tests.support import BF16, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95, 0.99), "weight_decay": 0.1}
FLAGS = [{}, {"alpha": 5.0, "alpha_warmup": 7}, {"alpha_warmup": 100, "maximize": True}]
FLAGS += [{"beta3_warmup": 5}, {"beta3_warmup": 100, "betas": (0.0, 0.9, 0.99)}]


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


@pytest.mark.parametrize("option", ["alpha_warmup", "beta3_warmup"])
@pytest.mark.parametrize("steps", [0, -1, float("nan")])
def test_a_warmup_has_steps(steps, option):
    with pytest.raises(ValueError, match="or None for no warmup"):
        fusedadam.AdEMAMix([torch.nn.Parameter(torch.ones(3))], **{option: steps})


@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 1e-12), (1e-8, 5e-6)])
def test_the_warmup_of_beta3_is_that_of_the_authors_code(offset, tolerance):
    """There, half-lives are interpolated, and their logarithms have an offset of 1e-8, which the paper has not."""

    def half_life(beta):
        return math.log(0.5) / math.log(beta + offset) - 1

    for step in range(1, 1000, 37):
        scalars = fusedadam.AdEMAMix.rule.scalars(**SCALARS, step=step, beta3_warmup=1000.0)
        a = step / 1000
        expected = 0.5 ** (1 / ((1 - a) * half_life(0.9) + a * half_life(0.9999) + 1))
        assert 1 - scalars["beta3c"] == pytest.approx(expected, abs=tolerance)
    for step in (1000, 2000):
        assert fusedadam.AdEMAMix.rule.scalars(**SCALARS, step=step, beta3_warmup=1000.0)["beta3c"] == 1 - 0.9999


SCALARS = {
    "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "beta3": 0.9999, "log_beta1": math.log(0.9), "log_beta3": math.log(0.9999),
    "schedule": "warmup",
    "alpha": 2.0, "alpha_warmup": 1.0, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": math.inf,
}  # fmt: skip


@pytest.mark.parametrize("betas", [(0.0, 0.999, 0.0), (0.9, 0.999, 0.0), (0.0, 0.999, 0.99)], ids=str)
def test_betas_of_zero_warm_up_without_a_warning(betas, recwarn):
    optimizer = train(fusedadam.AdEMAMix(parameters(), betas=betas, beta3_warmup=4), 6)
    assert all(p.isfinite().all() for group in optimizer.param_groups for p in group["params"])
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_betas_may_be_tensors():
    by_number, by_tensor = parameters(), parameters()
    for params, betas in ((by_number, (0.5, 0.75, 0.875)), (by_tensor, tuple(map(torch.tensor, (0.5, 0.75, 0.875))))):
        train(fusedadam.AdEMAMix(params, betas=betas, beta3_warmup=4), 3)
    assert all(torch.equal(p, q) for p, q in zip(by_number, by_tensor, strict=True))


def test_a_state_dict_of_the_authors_optimizer_brings_its_warmup():
    given = train(fusedadam.AdEMAMix(parameters()), 1).state_dict()
    given["param_groups"][0]["beta3_warmup"] = 1000
    optimizer = fusedadam.AdEMAMix(parameters())
    optimizer.load_state_dict(given)
    assert optimizer.param_groups[0]["beta3_warmup"] == 1000
