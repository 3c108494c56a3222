"""The formula of RAdam, against torch.optim."""

from __future__ import annotations

import pytest

from tests.meaning.against_torch import assert_as_close_to_float64, assert_equals_torch
from tests.support import QUICK_PLACES

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
# rho exceeds 5 in the sixth step of the first group, and never in the second
OTHER = {"lr": 3e-3, "betas": (0.8, 0.6), "weight_decay": 0.3, "eps": 1e-4}
DECOUPLED, MAXIMIZE = {"decoupled_weight_decay": True}, {"maximize": True}
FLAGS = [{}, DECOUPLED, MAXIMIZE, {**DECOUPLED, **MAXIMIZE}]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_torch_in_float64(flags, place):
    assert_equals_torch("RAdam", place, {**OPTIONS, **flags}, OTHER)


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_is_as_close_to_float64_as_torch_is_in_float32(place):
    assert_as_close_to_float64("RAdam", place, OPTIONS)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 2 / 3, 0.7, 0.9, 0.9999])
def test_every_beta2_is_rectified_where_torch_does(beta2):
    for steps in (1, 4, 5, 6, 12):
        assert_equals_torch("RAdam", ("cpu", "eager"), {**OPTIONS, "betas": (0.9, beta2)}, {}, steps)
