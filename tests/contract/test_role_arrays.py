"""The arrays of a role: made, read as float32, and converted."""

from __future__ import annotations

import pytest
import torch

from fusedadam import AdamW
from fusedadam.contract import role_arrays
from fusedadam.formats import FORMATS

STATES = AdamW.states


@pytest.mark.parametrize("name", ["f32", "bf16_stochastic", "slice8_signed"])
def test_a_state_comes_back_as_it_was_stored(name):
    param, values = torch.zeros(8, 64), torch.randn(8, 64)
    arrays = role_arrays.encoded("exp_avg", param, FORMATS[name], values)
    assert role_arrays.kept_as("exp_avg", arrays, STATES).arrays == FORMATS[name].arrays
    back = role_arrays.value_of("exp_avg", arrays, STATES).float()
    assert torch.allclose(back, values, rtol=0.07, atol=1e-4)
    again = role_arrays.encoded("exp_avg", param, FORMATS[name], back)
    assert all(torch.equal(arrays[k], again[k]) for k in arrays)


def test_a_state_that_is_not_there_has_no_format():
    assert role_arrays.kept_as("exp_avg", {"exp_avg_codes": torch.zeros(1)}, STATES) is None
    assert role_arrays.value_of("exp_avg", {}, STATES) is None


@pytest.mark.parametrize(("wide", "narrow"), [(0x7FFF, 127), (0x80, 1), (0x7F, 0), (-0x8000, -128), (-0x80, 0)])
def test_low_bits_are_rounded_without_touching_the_weight(wide, narrow):
    param = torch.ones(2, 64, dtype=torch.bfloat16)
    low = torch.full((2, 64), wide, dtype=torch.int16)
    made = role_arrays.new_arrays("param", param, {}, "bf16_8", STATES, {"param_low": low})["param_low"]
    assert made.dtype == torch.int8
    assert made.eq(narrow).all()
    back = role_arrays.new_arrays("param", param, {}, "bf16_16", STATES, {"param_low": made})["param_low"]
    assert back.eq(narrow << 8).all()
