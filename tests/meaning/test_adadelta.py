"""The formula of Adadelta, against torch.optim."""

from __future__ import annotations

import pytest

from tests.meaning.against_torch import assert_as_close_to_float64, assert_equals_torch
from tests.support import QUICK_PLACES

OPTIONS = {"lr": 0.5, "weight_decay": 0.1}
FLAGS = [{}, {"maximize": True}, {"rho": 0.5, "eps": 1e-3}, {"rho": 0.0}, {"rho": 1.0}]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_torch_in_float64(flags, place):
    other = {"lr": 1.0, "rho": 0.8, "weight_decay": 0.3}
    assert_equals_torch("Adadelta", place, {**OPTIONS, **flags}, other)


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_is_as_close_to_float64_as_torch_is_in_float32(place):
    assert_as_close_to_float64("Adadelta", place, OPTIONS)
