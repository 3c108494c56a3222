"""The formula of NAdam, against torch.optim."""

from __future__ import annotations

import copy

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import assert_as_close_to_float64, assert_equals_torch, params_of, train
from tests.support import BF16, F16, F32, F64, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
OTHER = {"lr": 3e-3, "betas": (0.8, 0.6), "weight_decay": 0.3, "eps": 1e-4, "momentum_decay": 0.5}
DECOUPLED, MAXIMIZE = {"decoupled_weight_decay": True}, {"maximize": True}
FLAGS = [{}, DECOUPLED, MAXIMIZE, {**DECOUPLED, **MAXIMIZE}]


@pytest.fixture(autouse=True)
def _float64():
    """torch keeps the product of the momenta in float64 only if that is the default dtype."""
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(F32)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_torch_in_float64(flags, place):
    assert_equals_torch("NAdam", place, {**OPTIONS, **flags}, OTHER)


@pytest.mark.parametrize("options", [{"momentum_decay": 0.0}, {"betas": (0.0, 0.9)}, {"betas": (0.9, 0.0)}, {"eps": 0}])
def test_equals_torch_with_numbers_at_their_limits(options):
    assert_equals_torch("NAdam", ("cpu", "eager"), {**OPTIONS, **options}, {})


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_is_as_close_to_float64_as_torch_is(dtype, place):
    assert_as_close_to_float64("NAdam", place, {**OPTIONS, "eps": 1e-4}, dtype)


def test_the_product_of_the_momenta_is_one_number_for_each_parameter():
    optimizer = train(fusedadam.NAdam([torch.nn.Parameter(torch.ones(4, 3, dtype=BF16))]), 3, start=1)
    (param,) = params_of(optimizer)
    product = optimizer.state[param]["mu_product"]
    mus = [0.9 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in (1, 2, 3)]
    assert (product.shape, product.dtype) == ((), F32)
    assert product.item() == pytest.approx(mus[0] * mus[1] * mus[2], rel=1e-6)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_state_dicts_go_both_ways(dtype, foreach):
    """torch rounds the product to the parameter's dtype when it loads it."""
    torch.set_default_dtype(F32)
    start = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == F32 else {"rtol": 2e-2, "atol": 1e-2}
    for first, second in ((torch.optim.NAdam, fusedadam.NAdam), (fusedadam.NAdam, torch.optim.NAdam)):
        saving = train(first([start.clone().requires_grad_()], foreach=foreach), 3, start=1)
        loading = second([params_of(saving)[0].detach().clone().requires_grad_()], foreach=foreach)
        loading.load_state_dict(copy.deepcopy(saving.state_dict()))
        states = [optimizer.state[params_of(optimizer)[0]] for optimizer in (saving, loading)]
        assert states[1]["exp_avg"].dtype == dtype
        if second is fusedadam.NAdam:
            assert states[1]["mu_product"].dtype == F32
            assert torch.equal(states[1]["mu_product"], states[0]["mu_product"])
        train(saving, 3, start=6)
        train(loading, 3, start=6)
        torch.testing.assert_close(params_of(loading), params_of(saving), **close)
